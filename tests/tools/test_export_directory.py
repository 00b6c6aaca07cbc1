"""tools/hf/convert/export_directory.py: what an export replaces, and what a killed one leaves."""

import os
import subprocess
import sys

import pytest

from tools.hf.convert.export_directory import LIST, output_problems, publish, workplace, write_list


def write_export(parent, text="weights"):
    """A small export under its name, as the programs write it."""
    with workplace(parent) as written:
        (written / "config.json").write_text("{}")
        (written / "transformer").mkdir()
        (written / "transformer" / "model.safetensors").write_text(text)
        write_list(written)
        publish(written, parent / "hf")
    return parent / "hf"


def test_an_export_takes_the_place_of_an_earlier_one(tmp_path):
    output = write_export(tmp_path, "old")
    assert output_problems(output, overwrite=True) == []
    assert "add --overwrite" in output_problems(output, overwrite=False)[0]
    write_export(tmp_path, "new")
    assert (output / "transformer" / "model.safetensors").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda output: (output / ".git").mkdir(), ".git"),
        (lambda output: (output / "checkpoint-500" / "global_step").mkdir(parents=True), "checkpoint-500"),
        (lambda output: (output / "notes.txt").write_text("mine"), "notes.txt"),
        (lambda output: (output / "config.json").write_text('{"mine": 1}'), "config.json"),
        (lambda output: (output / "transformer" / "model.safetensors").write_text("tuned"), "transformer"),
        (lambda output: (output / "link").symlink_to(output.parent), "link"),
        (lambda output: (output / "config.json").replace(output / "kept.json"), "kept.json"),
    ],
)
def test_what_no_export_wrote_is_named(change, named, tmp_path):
    output = write_export(tmp_path)
    change(output)
    (problem,) = output_problems(output, overwrite=True)
    assert f"has {named}, which no export wrote" in problem


@pytest.mark.parametrize("text", [None, "[]", '{"files": 3}', "{"])
def test_a_directory_without_a_list_of_ours_is_not_replaced(text, tmp_path):
    output = write_export(tmp_path)
    (output / LIST).unlink() if text is None else (output / LIST).write_text(text)
    assert output_problems(output, overwrite=True)


HOLD = """
import sys
from pathlib import Path
from tools.hf.convert.export_directory import workplace
with workplace(Path(sys.argv[1])) as written:
    (written / "part").write_text("half")
    print(written.parent.name, flush=True)
    sys.stdin.read()
"""


def test_only_what_a_kill_has_left_is_removed(tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        killed, alive = (process.stdout.readline().strip() for process in started)
        started[0].kill()
        started[0].wait()
        for name in ("export-tmp-17", "elsewhere"):  # of somebody else
            (tmp_path / name).mkdir()
        (tmp_path / "export-tmp-17" / "notes").write_text("mine")
        (tmp_path / "elsewhere" / "lock").write_bytes(b"held\n")
        (tmp_path / "export-tmp-18").symlink_to("elsewhere")
        (tmp_path / "export-tmp-19" / "former").mkdir(parents=True)  # an earlier export that a kill has left there
        (tmp_path / "export-tmp-19" / "lock").write_bytes(b"held\n")
        assert (tmp_path / killed / "export" / "part").exists()
        write_export(tmp_path)
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {alive, "export-tmp-17", "export-tmp-18", "export-tmp-19", "elsewhere", "hf"}
        assert (tmp_path / "elsewhere" / "lock").exists() and (tmp_path / alive / "export" / "part").exists()
    finally:
        for process in started:
            process.kill()
            process.communicate()
