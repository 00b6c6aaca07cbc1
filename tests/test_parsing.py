"""JSON and YAML that Python does not read: every reader says so as of any other damage."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from data_prep.output import recorded_groups
from moh_lm.checkpoint.manifest import describe, read_entries
from moh_lm.config import Config, ConfigError
from moh_lm.data.files import WRITTEN, ShardError, publish_own, read_facts, read_json
from moh_lm.data.shards import check_end
from moh_lm.flags import parse_config
from moh_lm.monitor.events import complete_rows
from moh_lm.parsing import BeyondLimits, parse_json
from moh_lm.run.resume import program_of
from moh_lm.run.state import read_state
from moh_lm.supervise.run_directory import describe_holder
from moh_lm.vision.config import kind_of_run
from tests.tokenizing import ROOT
from tools.hf.convert.import_config import read_config
from tools.tasks.rows import row_problems

DEEP = {"list": "[" * 100_000, "closed": "[" * 100_000 + "]" * 100_000, "object": '{"a":' * 100_000}
LONG = {"number": "9" * 5000, "negative": f"[-{'9' * 5000}]", "in an object": '{"step": %s}' % ("1" * 5000)}


@pytest.mark.parametrize("text", [*DEEP.values(), *LONG.values()], ids=[*DEEP, *LONG])
def test_limits_of_python_are_told_from_broken_json(text):
    words = "nested too deeply" if text in DEEP.values() else "number of more than 4300 digits"
    for given in (text, text.encode()):
        with pytest.raises(BeyondLimits, match=f"^{words}$"):
            parse_json(given)
    for broken in ("{", "[1,]", b"\xff", ""):
        with pytest.raises(ValueError) as caught:
            parse_json(broken)
        assert not isinstance(caught.value, BeyondLimits)
    assert parse_json('[1e999999, 0.%s, {"a": [null]}]' % ("1" * 5000)) == [float("inf"), 1 / 9, {"a": [None]}]


READERS = {  # a reader of a directory, and the error that it raises for damage; None if it leaves the damage out
    "facts": ("facts.json", lambda place: read_facts(place / "facts.json"), ShardError),
    "json": ("a.json", lambda place: read_json(place / "a.json"), ValueError),
    "groups": ("groups.jsonl", recorded_groups, ConfigError),
    "end": ("tokenizer.json", lambda place: check_end(place / "tokenizer.json", 2), ShardError),
    "manifest": ("manifest.json", read_entries, ValueError),
    "config": ("config.json", lambda place: Config.load(place / "config.json"), ConfigError),
    "state": ("state.json", read_state, ConfigError),
    "kind": ("config.json", kind_of_run, None),
    "program": ("config.json", program_of, None),
    "holder": ("lock", lambda place: describe_holder(place / "lock"), None),
    "events": ("events.jsonl", lambda place: list(complete_rows(place / "events.jsonl")), None),
    "import": ("config.json", read_config, ConfigError),
    "rows": ("rows.jsonl", lambda place: row_problems(place / "rows.jsonl", ["a"]), None),
}


@pytest.mark.parametrize("text", [DEEP["object"], LONG["in an object"]], ids=["deep", "long"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_takes_them_for_damage(reader, text, tmp_path):
    name, read, error = READERS[reader]
    (tmp_path / name).write_text(text)
    if error is None:
        read(tmp_path)
    else:
        with pytest.raises(error, match="nested too deeply|number of more than 4300 digits"):
            read(tmp_path)


def test_no_other_module_parses_what_others_wrote():
    """Only the reader of JSON calls json.loads."""
    own = {"moh_lm/parsing.py"}
    folders = (path for folder in ("moh_lm", "data_prep", "tools") for path in (ROOT / folder).rglob("*.py"))
    found = {str(Path(path).relative_to(ROOT)) for path in folders if re.search(r"json\.loads?\b", path.read_text())}
    assert found == own


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("{a: " * 100_000, "nested too deeply"),
        ("num_layers: !!bool x", "does not fit its tag"),
        ("num_layers: !!timestamp x", "does not fit its tag"),
        ("num_shared_heads: &a [*a]", "num_shared_heads: holds a list inside of a list"),
        ("data_mix: {a: [1]}", "data_mix: holds a list inside of a list"),
        ("? [a]\n: 1", "unhashable key"),
        ('data_dir: "\\ud800"', "data_dir: contains NUL or half of a surrogate pair"),
        ('data_dir: "a\\0b"', "data_dir: contains NUL or half of a surrogate pair"),
        ("batch_tokens: 1e99999999999K", "write a whole number"),
    ],
)
def test_a_file_of_flags_that_yaml_cannot_hold_is_refused(text, words, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        parse_config(["--config", str(tmp_path / "c.yaml")])
    assert all("\n" not in problem for problem in caught.value.problems)


def test_aliases_that_stand_for_endless_lists_are_refused_at_once(tmp_path):
    lists = ["&a0 [x]", *(f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30))]
    for name in ("num_shared_heads", "num_layers"):
        (tmp_path / "c.yaml").write_text(f"{name}: [{', '.join(lists)}]")
        with pytest.raises(ConfigError, match=f"{name}: holds a list inside of a list"):
            parse_config(["--config", str(tmp_path / "c.yaml")])


def test_an_error_while_reading_names_the_file():
    """/proc/self/mem can be opened, but holds nothing at its beginning."""
    with pytest.raises(OSError, match="Input/output error") as caught:
        read_json("/proc/self/mem")
    assert caught.value.filename == "/proc/self/mem"


def test_a_pipe_is_an_empty_file(tmp_path):
    os.mkfifo(pipe := tmp_path / "config.json")
    assert list(complete_rows(pipe)) == [] and describe(pipe) == {"bytes": 0, "sha256": []}
    for read, error in ((read_json, ValueError), (read_facts, ShardError), (Config.load, ConfigError)):
        with pytest.raises(error):
            read(pipe)


DIGEST = hashlib.sha256(b"theirs").hexdigest()
LISTS = {
    "list": "[]", "number": "5", "nested": '{"page": [[["DIGEST"]]]}', "text": '{"page": "DIGEST"}', "null": "null",
    "object": '{"page": {"DIGEST": 1}}', "NaN": "NaN", "deep": DEEP["closed"], "no UTF-8": '["\xff"]',
    "climbing": '{"../page": ["DIGEST"]}', "huge": LONG["in an object"],
}  # fmt: skip


@pytest.mark.parametrize("listed", LISTS.values(), ids=LISTS)
def test_no_damaged_list_permits_to_replace_a_file(tmp_path, listed):
    (tmp_path / WRITTEN).write_text(listed.replace("DIGEST", DIGEST), encoding="latin-1")
    (tmp_path / "page").write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="page: was written or changed by someone else"):
        publish_own(tmp_path, {"page": b"ours"})
    assert (tmp_path / "page").read_bytes() == b"theirs"
    (tmp_path / "page").unlink()
    publish_own(tmp_path, {"page": b"ours"})
    publish_own(tmp_path, {"page": b"ours again"})
