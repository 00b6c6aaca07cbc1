"""tools/checkpoint.py list and verify: they show all that lies there, and find any damage without a traceback."""

import errno
import pickle
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from moh_lm.checkpoint.manifest import BLOCK_BYTES, read_entries, verify
from tests.checkpoint.damage import (
    Canary,
    add_a_rank,
    lengthen,
    remove,
    replace_by_directory,
    swap_ranks,
    truncate,
)
from tests.tools.checkpoints.saved import KINDS, NAME, agree, contents, flip, forge, shown, step_of
from tools import checkpoint as program
from tools.checkpoints import describe as lines
from tools.checkpoints import read

# --- list ---


def test_help_explains_every_argument(capsys):
    for name in program.COMMANDS:
        with pytest.raises(SystemExit):
            program.main([name, "--help"])
        arguments = capsys.readouterr().out.partition("positional arguments:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  [A-Z_]+ +\w", arguments, re.M) and not re.findall(r"^  [A-Z_]+$", arguments, re.M)


def test_list_shows_everything_that_lies_there(checkpoint, copied):
    steps = copied / "checkpoints"
    step_of(copied, 1).rename(steps / "damaged-step-1")
    truncate(None, step_of(copied, 2) / "rank-1.safetensors")
    (steps / "step-9.tmp").mkdir()
    (steps / "step-9.tmp" / "rank-0.safetensors").write_bytes(b"12345")
    shutil.copytree(step_of(copied, 3), step_of(copied, 10))
    remove(None, step_of(copied, 10) / "manifest.json")
    found = shown(checkpoint, "list", copied)
    assert found["latest"] == "step-3"
    rows = {row["name"]: row for row in found["checkpoints"]}
    assert list(rows) == ["step-2", "step-3", "step-10", "step-9.tmp", "damaged-step-1"]
    for name, row in rows.items():
        assert row["bytes"] == sum(path.stat().st_size for path in (steps / name).iterdir())
        assert row["latest"] == (name == "step-3")
    assert list(rows["step-3"]["layout"].values()) == [1, 1, 1, 2, 1]
    assert {name: row["state"].split(" (")[0] for name, row in rows.items()} == {
        "step-2": "wrong size, missing or foreign: rank-1.safetensors",
        "step-3": "sizes are right, latest",
        "step-10": "manifest.json: cannot be read",
        "step-9.tmp": "left over from an interrupted save or removal",
        "damaged-step-1": "set aside; sizes are right",
    }
    code, text, _ = checkpoint("list", copied)
    assert code == 0 and all(name in text for name in rows)
    assert "  tp 1 x pp 1 x dp 2, ZeRO-1  sizes are right, latest\n" in text
    assert text.endswith("latest names step-3; a run resumes from step-10 if it is sound\n")


def test_list_shows_what_cannot_be_entered(checkpoint, copied, monkeypatch):
    exists, closed = Path.exists, step_of(copied, 2)
    (copied / "checkpoints" / "step-4").symlink_to(copied / "not mounted")

    def refuse(path):
        if closed in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    monkeypatch.setattr(lines, "read_entries", lambda entry: refuse(entry / "manifest.json") and read_entries(entry))
    rows = {row["name"]: row["state"] for row in shown(checkpoint, "list", copied)["checkpoints"]}
    assert rows == {
        "step-1": "sizes are right", "step-2": "cannot be read (Permission denied)",
        "step-3": "sizes are right, latest", "step-4": "a link whose target does not exist",
    }  # fmt: skip


@pytest.mark.parametrize("function", ["when", "layout_of", "describe_state", "read_entries"])
def test_a_step_that_vanishes_meanwhile_is_left_out(checkpoint, copied, monkeypatch, function):
    original = getattr(lines, function)

    def vanish(entry, *rest):
        if entry in (step_of(copied, 1), step_of(copied, 1) / "manifest.json"):
            shutil.rmtree(step_of(copied, 1))
        return original(entry, *rest)

    monkeypatch.setattr(lines, function, vanish)
    assert [row["name"] for row in shown(checkpoint, "list", copied)["checkpoints"]] == ["step-2", "step-3"]


def test_every_degree_of_a_layout_stands_under_its_name():
    found = dict(tensor_parallel_size=2, pipeline_parallel_size=3, context_parallel_size=4)
    found |= dict(data_parallel_size=5, zero_stage=1)
    assert lines.words(found) == "tp 2 x pp 3 x cp 4 x dp 5, ZeRO-1"
    assert lines.words(found | {"context_parallel_size": 1}) == "tp 2 x pp 3 x dp 5, ZeRO-1"


# --- verify ---


def test_a_run_without_damage_is_sound(checkpoint, source):
    code, text, _ = checkpoint("verify", source, "--all")
    assert code == 0 and text.count("sound ") == 3
    assert checkpoint("verify", step_of(source, 2))[0] == 0


@pytest.mark.parametrize("harm", [truncate, lengthen, remove, replace_by_directory, swap_ranks, add_a_rank])
def test_verify_finds_what_the_trainer_finds(checkpoint, copied, harm):
    step = step_of(copied, 3)
    harm(step, step / "rank-1.safetensors")
    code, text, _ = checkpoint("verify", copied)
    assert code == 1 and text.splitlines() == [f"DAMAGED {problem}" for problem in verify(step)]


def test_verify_finds_every_flipped_bit(checkpoint, copied):
    step, generator = step_of(copied, 3), random.Random(0)
    for path in sorted(step.iterdir()):
        content = path.read_bytes()
        flip(path, generator.randrange(len(content)))
        code, text, _ = checkpoint("verify", step)
        assert code == 1 and str(path) in text
        assert "block 0" in text or path.name == "manifest.json"
        path.write_bytes(content)
    assert checkpoint("verify", step)[0] == 0


def test_the_damaged_block_of_a_large_file_is_named(checkpoint, tmp_path):
    find_damage, path = read.find_damage, tmp_path / "rank-0.safetensors"
    content = random.Random(0).randbytes(3 * BLOCK_BYTES)
    path.write_bytes(content)
    agree(tmp_path)
    assert find_damage(tmp_path) == []
    flip(path, 2 * BLOCK_BYTES)
    assert find_damage(tmp_path) == [f"{path}: is damaged in block 2 (bytes 8,388,608 to 12,582,912)"]
    path.write_bytes(content + b"0")
    assert find_damage(tmp_path) == [f"{path}: has 12,582,913 bytes instead of 12,582,912"]


def lose_a_moment(tensors, fragments):
    del tensors[f"exp_avg/{NAME}"]


def lose_an_element(tensors, fragments):
    fragments[NAME]["length"] -= 1
    for kind in KINDS:
        tensors[f"{kind}/{NAME}"] = tensors[f"{kind}/{NAME}"][:-1]


def shift_a_range(tensors, fragments):
    fragments[NAME]["start"] += 1  # a gap and an overlap, of as many elements in all


def lose_a_parameter(tensors, fragments):
    del fragments[NAME]


def change_a_shape(tensors, fragments):
    fragments[NAME]["whole_shape"].reverse()


def spoil_a_moment(tensors, fragments):
    tensors[f"exp_avg_sq/{NAME}"][-1] = np.nan


def add_a_parameter(tensors, fragments):
    fragments["model.bias"] = fragments[NAME]


@pytest.mark.parametrize(
    "change, named",
    [
        (lose_a_moment, f"exp_avg of {NAME} cannot be read"),
        (lose_an_element, f"{NAME}: its ranges"),
        (shift_a_range, f"{NAME}: its ranges"),
        (lose_a_parameter, f"{NAME}: is in none of the files"),
        (change_a_shape, f"{NAME}: has shape [32, 64], but [64, 32] in the model"),
        (spoil_a_moment, f"{NAME}: exp_avg_sq is not finite"),
        (add_a_parameter, "model.bias is not a parameter of the model"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_files_with_the_right_hashes_must_hold_the_model_too(checkpoint, copied, change, named):
    files = [path.name for path in step_of(copied, 3).glob("rank-*") if f"master/{NAME}" in load_file(path)]
    for name in files:  # it lies in one rank's file, or in both
        forge(step_of(copied, 3), name, change)
    assert verify(step_of(copied, 3)) == []
    code, text, _ = checkpoint("verify", copied)
    assert code == 1 and named in text


def test_a_step_under_the_name_of_another_is_noticed(checkpoint, copied):
    step_of(copied, 3).rename(step_of(copied, 4))
    code, text, _ = checkpoint("verify", copied)
    assert code == 1 and "state.json: belongs to step 3" in text


def test_a_step_that_the_run_removes_meanwhile_is_not_damaged(checkpoint, copied, monkeypatch):
    find_damage = read.find_damage

    def removing(path):
        shutil.rmtree(step_of(copied, 2), ignore_errors=True)
        return find_damage(path)

    monkeypatch.setattr(read, "find_damage", removing)
    code, text, _ = checkpoint("verify", "--all", copied)
    assert code == 0 and "DAMAGED" not in text and "step-2" not in text


# --- Any input ---


@pytest.mark.parametrize("command", ["verify", "show", "diff", "copy", "consolidate"])
def test_a_newest_step_on_a_disk_that_is_not_mounted_is_not_passed_over(checkpoint, copied, tmp_path, command):
    step_of(copied, 9).symlink_to(tmp_path / "unmounted" / "step-9")
    more = {"diff": [step_of(copied, 2)], "copy": [tmp_path / "place"], "consolidate": [tmp_path / "a.safetensors"]}
    code, text, problem = checkpoint(command, copied, *more.get(command, []))
    assert code == 2 and "step-9: is a link whose target does not exist; mount its disk" in problem and text == ""


def test_nothing_is_unpickled_and_no_damage_ends_in_a_traceback(checkpoint, copied, tmp_path):
    canary, step, out = tmp_path / "canary", step_of(copied, 3), tmp_path / "out"
    out.mkdir()
    originals = contents(step)
    one_file = "consolidate", step, out / "x.safetensors"
    for payload, commands in (
        (pickle.dumps(Canary(canary)), (("show", step), ("diff", step, step), one_file)),
        (b"", (one_file,)),
        (b"[5]", (one_file,)),
        (b'{"step": 3}', (one_file,)),
    ):
        for path in originals:
            (step / path).write_bytes(payload)
            if path.name != "manifest.json":
                agree(step)
            assert checkpoint("verify", copied)[0] == 1, (path, payload)
            for command in commands:
                code, _, problem = checkpoint(*command)
                assert code == 2 and str(step) in problem, (command, path, payload)
            assert checkpoint("list", copied)[0] == 0
            assert not canary.exists() and not list(out.iterdir())
            (step / path).write_bytes(originals[path])
            (step / "manifest.json").write_bytes(originals[Path("manifest.json")])
    assert verify(step) == []
