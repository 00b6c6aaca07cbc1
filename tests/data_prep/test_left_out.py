"""What recognition does not take: what is refused or left out is named, and costs nothing of what is taken."""

import errno
import os

import pyarrow
import pyarrow.parquet
import pytest

from data_prep.corpora import NOT_FOR_TRAINING, OTHER_LANGUAGES
from data_prep.documents import documents
from data_prep.inputs import NO_DATA, recognized_sources
from moh_lm.config import ConfigError
from moh_lm.data.shards import read_manifest
from tests.data_prep.corpora import META, WIKIPEDIA, sources_below, write, write_table
from tests.tokenizing import decoded, tokenize

# --- What is refused ---


def test_unknown_files_are_refused_with_the_flag_to_use(tmp_path):
    (tmp_path / "README.md").write_text("about")
    unknown = {
        "a/custom.jsonl": "holds records with text, label",
        "attributes/c4-0000.json.gz": "holds records with id, source, attributes",
        "novel.txt": "holds plain text",
        "table.parquet": "holds records with label, text",
        "pile.jsonl.zst.part": "has the name of an unfinished download",
        "broken.jsonl": "holds no record",
        "c4/text-only.jsonl": "holds records with text",
        "meta.jsonl": "holds records with text, meta",
        "own-id.jsonl": "holds records with text, id, meta",
        "fineweb-2.jsonl": "holds records with text, dump, url, file_path, language_score, language_script",
        "c4-with-more.jsonl": "holds records with text, timestamp, url, toxicity",
    }
    write(tmp_path / "a/custom.jsonl", {"text": "a", "label": 1})
    write(tmp_path / "attributes/c4-0000.json.gz", {"id": "1", "source": "c4", "attributes": {}})
    (tmp_path / "novel.txt").write_text("Call me Ishmael.")
    write_table(tmp_path / "table.parquet", {"label": [1], "text": ["a"]})
    write(tmp_path / "pile.jsonl.zst.part", {"text": "a", "meta": {"pile_set_name": "Github"}})
    (tmp_path / "broken.jsonl").write_text("{{{")
    write(tmp_path / "c4/text-only.jsonl", {"text": "a"})
    write(tmp_path / "meta.jsonl", {"text": "a", "meta": {"page": 1}})
    write(tmp_path / "own-id.jsonl", {"text": "a", "id": "1", "meta": WIKIPEDIA})
    keys = "dump", "url", "file_path", "language_score", "language_script"
    write(tmp_path / "fineweb-2.jsonl", {"text": "a", **dict.fromkeys(keys, "x")})
    write(tmp_path / "c4-with-more.jsonl", {"text": "a", "timestamp": "", "url": "", "toxicity": 0})
    with pytest.raises(ConfigError) as error:
        sources_below(tmp_path)
    head, *listed = error.value.problems
    assert "11 files belong to no known corpus" in head and "--source NAME=GLOB" in head
    assert sorted(listed) == sorted(f"{tmp_path}/{name}: {what}" for name, what in unknown.items())


def test_an_unknown_file_fails_by_name_and_hides_no_other(model, tmp_path):
    write(tmp_path / "in/known.jsonl", {"text": "a", "meta": {"pile_set_name": "Github"}})
    (tmp_path / "in/novel.txt").write_text("Call me Ishmael.")
    stdout, stderr = tokenize(model, tmp_path / "out", recognize=tmp_path / "in", code=1)
    assert decoded(tmp_path / "out", "pile", model) == ["a"]
    assert f"failed: {tmp_path}/in/novel.txt: holds plain text" in stderr
    assert "1 files belong to no known corpus" in stdout and "--source NAME=GLOB" in stdout


def test_a_long_list_of_unknown_files_is_shortened(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("text")
    with pytest.raises(ConfigError) as error:
        sources_below(tmp_path)
    assert len(error.value.problems) == 1 + 20 + 1
    assert error.value.problems[-1] == "and 10 more"


def test_a_damaged_file_among_recognised_ones_fails_alone(model, tmp_path):
    write(tmp_path / "in/x.jsonl", {"text": "sound", "meta": {"pile_set_name": "Github"}})
    (tmp_path / "in/page.json.gz").write_text("<html>502 Bad Gateway</html>")
    _, stderr = tokenize(model, tmp_path / "out", recognize=tmp_path / "in", code=1)
    assert f"failed: {tmp_path}/in/page.json.gz: an error page" in stderr
    assert decoded(tmp_path / "out", "pile", model) == ["sound"]


def test_a_value_that_python_cannot_hold_fails_the_file(tmp_path):
    far = pyarrow.array([300_000_000_000], pyarrow.timestamp("s"))  # the year 11476
    table = pyarrow.table({"id": ["1"], "text": ["a"], "source": ["common-crawl"], "created": far})
    (tmp_path / "dolma").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "dolma/x.parquet")
    found, unreadable, *_ = recognized_sources([str(tmp_path)], "text", set(), [])
    assert not found and len(unreadable) == 1 and "dolma/x.parquet: " in unreadable[0]

    name = b'{"redpajama_set_name": "RedPajamaC4"}'
    data = pyarrow.array([name, name.replace(b"C4", b"\xff\xfe")], pyarrow.binary()).buffers()
    table = pyarrow.table({"text": ["a", "b"], "meta": pyarrow.Array.from_buffers(pyarrow.string(), 2, data)})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "dolma/x.parquet").unlink()
    found, _, *_ = recognized_sources([str(tmp_path)], "text", set(), ["slimpajama-c4"])
    (piece,) = found["slimpajama-c4"].pieces
    assert [(document.text, document.dropped) for document in documents(piece, "text")] == [
        ("a", None), (None, "bad UTF-8"),
    ]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    for name in ("dolma", "other"):
        (tmp_path / name).mkdir()
    scandir = os.scandir

    def closed(path):  # in place of chmod, which does not stop root
        if path == str(tmp_path / "dolma"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ConfigError, match="dolma: cannot be read .permission denied.; make it readable"):
        recognized_sources([str(tmp_path)], "text", set(), [])


# --- What is left out ---


def test_named_sources_go_before_recognition_and_stand_beside_it(model, tmp_path):
    write(tmp_path / "in/x.jsonl", {"text": "named", "meta": {"pile_set_name": "Github"}})
    write(tmp_path / "in/y.jsonl", {"text": "recognised", "meta": {"pile_set_name": "Github"}})
    (tmp_path / "in/z.txt").write_text("plain")
    sources = (f"mine={tmp_path}/in/x.jsonl", f"text={tmp_path}/in/*.txt")
    tokenize(model, tmp_path / "out", *sources, recognize=tmp_path / "in")
    found = {source: decoded(tmp_path / "out", source, model) for source in read_manifest(tmp_path / "out")["sources"]}
    assert found == {"mine": ["named"], "text": ["plain"], "pile": ["recognised"]}


def test_documentation_hidden_and_empty_files_are_left_out_aloud(model, tmp_path):
    write(tmp_path / "in/x.jsonl", {"text": "a", "meta": {"pile_set_name": "Github"}})
    left_out = ["README.md", "LICENSE", "urls.txt", "urls/arxiv.txt", "SHA256SUMS.txt", "._x.jsonl", "loader.py"]
    left_out += [".cache/huggingface/y", "dataset_infos.json"]
    for name in left_out:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("no data")
    (tmp_path / "in/empty.jsonl").touch()
    stdout, _ = tokenize(model, tmp_path / "out", recognize=tmp_path / "in")
    why = "left out because they are not data"
    assert f"{why}: 10 files, such as {tmp_path}/in/._x.jsonl; {tmp_path}/out/left_out" in stdout
    expected = [f"{why}: {tmp_path}/in/{name}" for name in sorted([*left_out, "empty.jsonl"])]
    assert (tmp_path / "out/left_out.txt").read_text().splitlines() == expected
    assert decoded(tmp_path / "out", "pile", model) == ["a"]
    (tmp_path / "in/x.jsonl").unlink()
    _, stderr = tokenize(model, tmp_path / "none", recognize=tmp_path / "in", code=2)
    assert f"--recognize {tmp_path}/in: holds no file with data" in stderr and not (tmp_path / "none").exists()


def test_what_is_not_for_training_is_left_out_aloud(model, tmp_path):
    c4, pile = {"text": "a", "timestamp": "", "url": ""}, {"meta": {"pile_set_name": "Github"}}
    for name in ("train/00.jsonl", "latest.jsonl", "val.jsonl", "TEST/00.jsonl"):
        write(tmp_path / "test/pile" / name, {"text": name, **pile})
    for name in ("en/c4-train.0.json", "en/c4-validation.0.json", "multilingual/c4-de.0.json"):
        write(tmp_path / "test/c4" / name, c4)
    stdout, _ = tokenize(model, tmp_path / "out", recognize=tmp_path / "test")
    assert sorted(decoded(tmp_path / "out", "pile", model)) == ["latest.jsonl", "train/00.jsonl"]
    assert decoded(tmp_path / "out", "c4", model) == ["a"]
    held_out = ", ".join(f"{tmp_path}/test/{name}" for name in ("c4/en/c4-validation.0.json", "pile/TEST/00.jsonl"))
    assert f"{NOT_FOR_TRAINING}: {held_out}, {tmp_path}/test/pile/val.jsonl\n" in stdout
    assert f"{OTHER_LANGUAGES}: {tmp_path}/test/c4/multilingual/c4-de.0.json\n" in stdout
    write(tmp_path / "test/c4/en.noclean/c4-train.0.json", c4)
    with pytest.raises(ConfigError, match=r"holds en and en\.noclean of C4, .* move all but one away"):
        sources_below(tmp_path / "test")
    assert sources_below(tmp_path / "test", only=["pile"]).keys() == {"pile"}


def test_data_that_are_called_state_or_licence_are_data():
    for name in ("a/state/data.jsonl", "license.jsonl", "readme/x.parquet", "state.jsonl.gz"):
        assert not NO_DATA.search(name)
    for name in ("README", "a/readme.md", "LICENSE.txt", "state.json", ".cache/x.jsonl", "urls/x.txt"):
        assert NO_DATA.search(name)


def test_only_chooses_among_what_is_found_and_says_what_is_not(model, tmp_path, capsys):
    for set_name, meta in META.items():
        write(tmp_path / "in" / f"{set_name}.jsonl", {"text": set_name, "meta": meta})
    tokenize(model, tmp_path / "out", recognize=tmp_path / "in", only=["redpajama-c4", "redpajama-books"])
    assert sorted(read_manifest(tmp_path / "out")["sources"]) == ["redpajama-books", "redpajama-c4"]
    _, stderr = tokenize(model, tmp_path / "out", recognize=tmp_path / "in", only=["redpajama-c5"], code=2)
    assert "--only redpajama-c5: not found" in stderr and "redpajama-c4" in stderr
