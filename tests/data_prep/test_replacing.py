"""Shards that a later command replaces: whenever it fails or dies, the manifest names the shards that are there."""

import gzip
import shutil
from pathlib import Path

import pytest

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
