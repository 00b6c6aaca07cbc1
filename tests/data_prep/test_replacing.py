"""Shards that a later command replaces: whenever it fails or dies, the manifest names the shards that are there."""

import gzip
import shutil
import time
from pathlib import Path

import pytest

from data_prep import tokenization
from data_prep import units as units_module
from data_prep.encoding import Options, Tokenizer
from data_prep.output import finished_sidecars
from data_prep.tokenize import main
from data_prep.units import plan_units
from data_prep.writing import tokenize_unit
from moh_lm.data.shards import ShardWriter, open_source, read_manifest
from tests.tokenizing import decoded, files, json_lines, tokenize


class Killed(BaseException):
    """No program catches it."""


@pytest.fixture
def grown(model, tmp_path):
    """(data directory of two sources, what their command is given): since then a file of the first has grown, and one
    of the second has another name, beside a new file."""
    texts = {"s/a.jsonl": ["old"], "t/y.jsonl": ["moved"]}
    new = {"s/a.jsonl": ["new", "newer"], "t/z.jsonl": ["moved"], "t/w.jsonl.gz": ["added"]}
    sources = [f"{name}={tmp_path}/{name}/*" for name in "st"]
    for made in (texts, new):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        for name, content in made.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            data = json_lines(content)
            (tmp_path / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith("gz") else data)
        if made is texts:
            tokenize(model, tmp_path / "out", *sources)
    return tmp_path / "out", sources


def is_as_fresh(output, sources, model):
    tokenize(model, output, *sources)
    tokenize(model, output.with_name("fresh"), *sources)
    return files(output) == files(output.with_name("fresh"))


@pytest.mark.parametrize("others", [0, 1])
def test_old_shards_and_the_old_manifest_stay_together(others, grown, model):
    """If a file of one source cannot be read, and also if a later command names the other source only."""
    output, sources = grown
    path = output.with_name("t") / "w.jsonl.gz"
    whole, manifest = path.read_bytes(), (output / "manifest.json").read_bytes()
    path.write_bytes(whole[:-4])
    _, stderr = tokenize(model, output, *sources, code=1)
    assert "manifest.json is left as it was" in stderr
    for _ in range(others):
        tokenize(model, output, sources[0], code=1)
    assert (output / "manifest.json").read_bytes() == manifest
    assert (decoded(output, "s", model), decoded(output, "t", model)) == (["old"], ["moved"])
    path.write_bytes(whole)
    assert is_as_fresh(output, sources, model)
    assert sorted(decoded(output, "s", model)) == ["new", "newer"]


def test_commands_of_single_sources_do_not_wait_for_each_other(grown, model):
    """The second source fails once, while the first one, in a command of its own, has already been replaced."""
    output, sources = grown
    path = output.with_name("t") / "w.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    tokenize(model, output, sources[1], code=1)
    tokenize(model, output, sources[0], code=1)
    path.write_bytes(whole)
    tokenize(model, output, sources[1])
    tokenize(model, output, sources[0])
    assert is_as_fresh(output, sources, model)


def test_a_command_that_dies_while_it_removes_shards_has_named_none_of_them(grown, model, monkeypatch):
    output, sources = grown
    unlink = Path.unlink

    def dying(path, *arguments, **named):
        is_sidecar = path.suffix == ".json" and path.exists()
        unlink(path, *arguments, **named)
        if is_sidecar:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "unlink", dying)
        tokenize(model, output, *sources)
    assert sorted(decoded(output, "s", model)) == ["new", "newer"]
    assert sorted(decoded(output, "t", model)) == ["added", "moved"]
    assert is_as_fresh(output, sources, model)


def test_a_command_for_other_files_settles_what_one_that_died_has_replaced(model, tmp_path, monkeypatch):
    """It died after the manifest was written, and before the old shard was removed."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(["old"]))
    (tmp_path / "c.jsonl").write_bytes(json_lines(["c"]))
    tokenize(model, tmp_path / "out", f"s={tmp_path}/in/*")
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(["new, longer"]))
    manifest = tokenization.write_manifest

    def dying(*arguments):
        manifest(*arguments)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenization, "write_manifest", dying)
        tokenize(model, tmp_path / "out", f"s={tmp_path}/in/*")
    tokenize(model, tmp_path / "out", f"s={tmp_path}/c.jsonl")
    assert sorted(decoded(tmp_path / "out", "s", model)) == ["c", "new, longer"]
    assert len(list((tmp_path / "out/s").glob("*.json"))) == 2


@pytest.mark.parametrize("recognized", [False, True])
def test_a_damaged_file_of_a_shared_shard_leaves_it_also_when_it_is_recognized(
    recognized, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(units_module, "MANY", 3)
    (tmp_path / "in").mkdir()
    for number in range(6):
        (tmp_path / f"in/{number}.jsonl").write_bytes(json_lines([f"{number}"], meta={"pile_set_name": "Github"}))

    def again(code):
        more = {"recognize": tmp_path / "in"} if recognized else {}
        return tokenize(model, tmp_path / "out", *([] if recognized else [f"pile={tmp_path}/in/*"]), code=code, **more)

    again(0)
    (tmp_path / "in/3.jsonl").write_bytes(b"%PDF-")
    _, stderr = again(1)
    assert f"{tmp_path}/in/3.jsonl: a PDF file" in stderr
    assert sorted(decoded(tmp_path / "out", "pile", model)) == [*"012345"]


def test_a_source_whose_command_was_stopped_is_not_published(model, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / f"in/{name}.jsonl").write_bytes(json_lines([name]))
    (tmp_path / "b.txt").write_text("other")
    run_units = tokenization.run_units

    def stopped(*arguments):
        for unit, event, value in run_units(*arguments):
            yield unit, event, value
            if event == "done":
                raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenization, "run_units", stopped)
        tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    _, stderr = tokenize(model, tmp_path / "out", f"b={tmp_path}/b.txt", code=1)
    assert (
        f"{tmp_path}/out/a: is not finished, because its command was stopped; run data_prep/tokenize.py for a" in stderr
    )
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    assert sorted(decoded(tmp_path / "out", "a", model)) == ["a", "b", "c"]
    assert decoded(tmp_path / "out", "b", model) == ["other"]


def test_an_input_that_changes_before_its_shard_is_published_is_read_again(model, tmp_path, monkeypatch):
    """In its middle, which no sample has, and after it was read."""

    def content(middle):
        return json_lines(["x" * 70_000, middle, "y" * 70_000])

    (tmp_path / "in.jsonl").write_bytes(content("old"))
    (unit,) = plan_units("", "a", [f"{tmp_path}/in.jsonl"], text_key="text", unit_size=10**9)
    commit = ShardWriter.commit

    def later(shard, facts):
        time.sleep(0.05)
        (tmp_path / "in.jsonl").write_bytes(content("new"))
        return commit(shard, facts)

    (tmp_path / "out/a").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "commit", later)
        tokenize_unit(unit, Tokenizer(str(model)), Options(), str(tmp_path / "out"), None, lambda *_: None)
    assert not finished_sidecars(tmp_path / "out", [unit])


def test_the_manifest_that_stays_fits_its_shards_after_a_move(grown, model, tmp_path):
    """While another source cannot be read."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(["a"]))
    output, sources = grown
    path = output.with_name("t") / "w.jsonl.gz"
    tokenize(model, output, f"a={tmp_path}/in/*")
    path.write_bytes(path.read_bytes()[:-4])
    (tmp_path / "in").rename(tmp_path / "moved away")
    before = (output / "manifest.json").read_bytes()
    tokenize(model, output, f"a={tmp_path}/moved away/*", *sources, code=1)
    assert (output / "manifest.json").read_bytes() == before
    open_source(output, "a", read_manifest(output), 0.1)


def test_only_a_source_without_all_of_its_shards_is_unfinished(model, tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    tokenize(model, tmp_path / "out", f"a={tmp_path}/a.txt")

    def stopped(*arguments):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tokenization, "run_units", stopped)
        tokenize(model, tmp_path / "out", f"a={tmp_path}/a.txt", f"mistyped={tmp_path}/b.txt")
    tokenize(model, tmp_path / "out", f"b={tmp_path}/b.txt")
    assert {*read_manifest(tmp_path / "out")["sources"]} == {"a", "b"}


@pytest.mark.parametrize("order", [["one", "two"], ["two", "one"]])
def test_a_damaged_file_below_any_directory_leaves_its_shard(order, model, tmp_path, monkeypatch):
    monkeypatch.setattr(units_module, "MANY", 3)
    for number in range(5):
        path = tmp_path / ("one" if number == 0 else "two") / f"{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(json_lines([f"{number}"], meta={"pile_set_name": "Github"}))
    found = [tmp_path / name for name in order]
    more = ["--recognize", found[1]]
    assert main([*arguments(model, tmp_path, found[0]), *map(str, more)]) == 0
    (tmp_path / "one/0.jsonl").write_bytes(b"%PDF-")
    assert main([*arguments(model, tmp_path, found[0]), *map(str, more)]) == 1
    assert sorted(decoded(tmp_path / "out", "pile", model)) == [*"01234"]


def arguments(model, place, directory):
    given = ["--tokenizer", model, "--output", place / "out", "--workers", 1, "--recognize", directory]
    return [*map(str, given)]
