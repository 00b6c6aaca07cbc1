"""tools/checkpoint.py: what it says of checkpoints, compared with the files read by hand, and what it writes."""

import errno
import hashlib
import json
import pickle
import random
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file

from moh_lm.build import build_model
from moh_lm.checkpoint.manifest import BLOCK_BYTES, HashedFile, describe, verify, write_manifest
from moh_lm.config import Config
from moh_lm.supervise import run_directory
from tests.checkpoint.damage import (
    Canary,
    add_a_rank,
    lengthen,
    remove,
    replace_by_directory,
    swap_ranks,
    truncate,
)
from tests.distributed import run_ranks
from tests.training.test_layouts import copy_checkpoint, flags_of, train
from tools import checkpoint as program
from tools.checkpoints import describe as lines
from tools.checkpoints import read, write

TOOLS = Path(__file__).resolve().parents[2] / "tools"
KINDS = ("master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def source(data_dir, tmp_path_factory):
    """The run directory of three steps on two ranks, all of them kept."""
    return train((1, 1, 2, 1, 4, False, "paper"), data_dir, tmp_path_factory.mktemp("source"))


@pytest.fixture
def copied(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def checkpoint(tool, monkeypatch):
    """``tool`` for checkpoint, which reads parameters in many pieces."""
    monkeypatch.setattr(read, "CHUNK", 997)
    return partial(tool, "checkpoint")


def shown(checkpoint, *arguments):
    """The JSON that a command prints."""
    return json.loads(checkpoint(*arguments, "--json")[1])


def step_of(run, number):
    return run / "checkpoints" / f"step-{number}"


def gather(step):
    """{(kind, name): whole array}, put together by hand."""
    shards, whole = {}, {}
    for path in sorted(step.glob("rank-*.safetensors")):
        tensors = load_file(path)
        for name, address in json.loads(safe_open(path, "np").metadata()["fragments"]).items():
            shape, cut = address["whole_shape"], address["partition"]
            if cut:
                local = [*shape]
                local[cut["dim"]] = sum(b - a for a, b in cut["ranges"]) + cut["padding"]
            for kind in KINDS:
                key = kind, name, json.dumps(cut), tuple(local if cut else shape), tuple(shape)
                flat = shards.setdefault(key, np.full(int(np.prod(key[3])), np.nan, np.float32))
                flat[address["start"] : address["start"] + address["length"]] = tensors[f"{kind}/{name}"]
    for (kind, name, cut, local, shape), flat in shards.items():
        array = whole.setdefault((kind, name), np.full(shape, np.nan, np.float32))
        cut, part, position = json.loads(cut), flat.reshape(local), 0
        if not cut:
            array[...] = part
            continue
        for first, last in cut["ranges"]:
            rows = part.take(range(position, position + last - first), cut["dim"])
            array[(slice(None),) * cut["dim"] + (slice(first, last),)] = rows
            position += last - first
    return whole


def forge(step, name, change):
    """Let ``change(tensors, fragments)`` edit the file ``name`` of ``step``, with a manifest that agrees."""
    path = step / name
    tensors, fragments = load_file(path), json.loads(safe_open(path, "np").metadata()["fragments"])
    change(tensors, fragments)
    save_file(tensors, path, {"fragments": json.dumps(fragments)})
    agree(step)


def agree(step):
    """Write a manifest of the files as they are."""
    write_manifest(step, {path.name: describe(path) for path in step.iterdir() if path.name != "manifest.json"})


def flip(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 4
    path.write_bytes(content)


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


NAME = "model.layers.1.mlp.up_proj.weight"


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


# --- show ---


def hash_by_hand(step):
    arrays, digest = gather(step), hashlib.sha256()
    with torch.device("meta"):
        names = [name for name, _ in build_model(Config.load(step / "config.json").model).named_parameters()]
    for name in names:
        for kind in KINDS:
            array = arrays.pop((kind, name))
            digest.update(json.dumps([kind, name, list(array.shape)]).encode() + b"\n")
            digest.update(array.astype("<f4").tobytes())
    assert not arrays
    return digest.hexdigest()


def test_show_tells_what_the_files_say(checkpoint, source):
    step = step_of(source, 2)
    found = shown(checkpoint, "show", step, "--parameters")
    state = json.loads((step / "state.json").read_text())
    assert found["state_sha256"] == hash_by_hand(step)
    assert found["config"] == json.loads((step / "config.json").read_text())
    assert found["files"] == {path.name: path.stat().st_size for path in step.iterdir() if path.name != "manifest.json"}
    assert found["data"] == state["data"]
    assert (found["step"], found["optimizer_steps"], found["skipped_steps"]) == (2, 2, 0)
    assert (found["consumed_samples"], found["tokens"]) == (32, 512)
    for (kind, name), array in gather(step).items():
        assert found["parameters"][name]["shape"] == list(array.shape)
        assert found["parameters"][name][kind] == pytest.approx(np.linalg.norm(array.astype(np.float64)), rel=1e-12)
    text, weights = checkpoint("show", step)[1], state["data"]["segments"][0]["weights"]
    assert f"from sample 0: even {100 * weights['even'] / sum(weights.values()):.2f}%" in text
    assert found["state_sha256"] in text and "head_selection mixture, " in text


def test_a_quick_look_does_not_read_the_large_files(checkpoint, copied):
    flip(step_of(copied, 3) / "rank-0.safetensors")
    code, text, _ = checkpoint("show", copied, "--quick")
    assert code == 0 and "step              3 of 3" in text and "state hash" not in text
    assert checkpoint("show", copied)[0] == 2


def test_skipped_steps_are_counted_and_named(checkpoint, copied):
    path = step_of(copied, 3) / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "optimizer_steps": 2, "guard": {**state["guard"], "skipped": [2]}}))
    agree(step_of(copied, 3))
    assert "optimizer steps   2; 1 skipped, lately 2" in checkpoint("show", copied)[1]


def test_a_state_of_another_version_is_refused(checkpoint, copied):
    path = step_of(copied, 3) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "data": {"weights": {}}}))
    agree(step_of(copied, 3))
    code, text, problem = checkpoint("show", copied)
    assert code == 2 and text == "" and "step-3: is not a checkpoint of this version (KeyError: 'segments')" in problem


@pytest.fixture(scope="module")
def moved(source, data_dir, tmp_path_factory):
    """Runs into which other layouts have saved step 3 of ``source`` after loading it."""
    found = []
    for layout in ((2, 2, 1, 1, 4, False, "paper"), (1, 1, 3, 3, 4, False, "paper")):
        found.append(tmp_path_factory.mktemp("moved"))
        flags = [*flags_of(layout, data_dir, found[-1]), "--batch-tokens", str(16 * 12 if layout[2] == 3 else 256)]
        run_ranks(copy_checkpoint, layout[0] * layout[1] * layout[2], flags, source)
    return found


def test_the_state_hash_does_not_depend_on_the_layout(checkpoint, source, moved):
    hashes = [shown(checkpoint, "show", run)["state_sha256"] for run in (source, *moved)]
    assert hashes[0] == hashes[1] == hashes[2] == hash_by_hand(step_of(source, 3))
    assert shown(checkpoint, "show", step_of(source, 2))["state_sha256"] != hashes[0]


# --- diff ---


def test_other_layouts_differ_in_their_configuration_only(checkpoint, source, moved):
    code, text, _ = checkpoint("diff", source, moved[0])
    assert code == 0 and text.endswith("equal\n")
    assert "tensor_parallel_size: 1 -> 2" in text
    found = shown(checkpoint, "diff", source, moved[0])
    assert found["equal"] and found["position"] == {} and found["config"]["pipeline_parallel_size"] == [1, 2]
    unchanged = {"equal": True, "absolute": 0, "relative": 0}
    assert all(row[kind] == unchanged for row in found["parameters"] for kind in KINDS)
    assert checkpoint("diff", source, source)[0] == 0


def test_diff_gives_the_largest_changes_the_largest_first(checkpoint, source):
    first, second = gather(step_of(source, 1)), gather(step_of(source, 3))
    code, text, _ = checkpoint("diff", step_of(source, 1), source, "--top", "2")
    assert code == 1 and text.endswith("different\n")
    found = shown(checkpoint, "diff", step_of(source, 1), source)
    assert not found["equal"] and found["position"]["consumed_samples"] == [16, 48]
    assert {row["name"] for row in found["parameters"]} == {name for _, name in first}
    for row in found["parameters"]:
        for kind in KINDS:
            a, b = (arrays[kind, row["name"]].astype(np.float64) for arrays in (first, second))
            assert row[kind]["absolute"] == np.abs(b - a).max()
            assert row[kind]["relative"] == pytest.approx(np.abs(b - a).max() / np.abs(a).max(), rel=1e-12)
    order = [row["master"]["relative"] for row in found["parameters"]]
    assert order == sorted(order, reverse=True)
    listed = [row["name"] in text for row in found["parameters"]]
    assert listed == [True, True] + [False] * (len(order) - 2)


def test_diff_finds_the_one_bit_that_differs(checkpoint, copied):
    def change(tensors, fragments):
        tensors[f"exp_avg/{NAME}"].view(np.uint32)[5] ^= 1

    shutil.copytree(step_of(copied, 3), copied / "other" / "step-3")
    name = next(path.name for path in step_of(copied, 3).glob("rank-*") if f"master/{NAME}" in load_file(path))
    forge(copied / "other" / "step-3", name, change)
    assert checkpoint("diff", copied, copied / "other" / "step-3")[0] == 1
    found = shown(checkpoint, "diff", copied, copied / "other" / "step-3")["parameters"]
    changed = [(row["name"], kind) for row in found for kind in KINDS if not row[kind]["equal"]]
    assert changed == [(NAME, "exp_avg")]


def test_diff_calls_a_change_of_what_was_all_zero_so(checkpoint, copied):
    for number, value in ((2, 0.0), (3, 0.5)):

        def change(tensors, fragments, value=value):
            tensors[f"master/{NAME}"][:] = value

        for path in step_of(copied, number).glob("rank-*"):
            if f"master/{NAME}" in load_file(path):
                forge(step_of(copied, number), path.name, change)
    text = checkpoint("diff", step_of(copied, 2), copied, "--top", "1")[1]
    assert f"{NAME:<56}0.5 (from zero) " in text and "not finite" not in text
    back = checkpoint("diff", copied, step_of(copied, 2), "--top", "0")[1]
    assert f"{NAME:<56}0.5 (1) " in back and "zero" not in back


def test_diff_names_state_that_only_some_runs_have(checkpoint, copied):
    other = copied / "other" / "step-3"
    shutil.copytree(step_of(copied, 3), other)
    state = json.loads((other / "state.json").read_text())
    (other / "state.json").write_text(json.dumps(state | {"rested_steps": 3}))
    agree(other)
    found = shown(checkpoint, "diff", step_of(copied, 3), other)
    assert checkpoint("diff", step_of(copied, 3), other)[0] == 1 and found["position"] == {"rested_steps": [None, 3]}


def test_a_link_to_a_step_is_copied_under_its_own_name(checkpoint, copied, tmp_path):
    step_of(copied, 3).rename(tmp_path / "llmb-final")
    step_of(copied, 3).symlink_to(tmp_path / "llmb-final")
    assert checkpoint("copy", step_of(copied, 3), tmp_path / "place")[0] == 0
    assert verify(tmp_path / "place" / "step-3") == []


def test_no_copy_has_a_name_under_which_a_run_would_set_it_aside(checkpoint, copied, tmp_path):
    (tmp_path / "links").mkdir()
    for name in ("step-7", "best"):
        (tmp_path / "links" / name).symlink_to(step_of(copied, 3))
    code, _, problem = checkpoint("copy", tmp_path / "links" / "step-7", tmp_path / "place")
    assert code == 2 and "step-7/state.json: belongs to step 3; rename step-7" in problem
    code, text, _ = checkpoint("verify", tmp_path / "links" / "step-7")
    assert code == 1 and "step-7/state.json: belongs to step 3" in text
    assert checkpoint("copy", tmp_path / "links" / "best", tmp_path / "place")[0] == 0
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["step-3"]


@pytest.mark.parametrize("command", ["verify", "show", "diff", "copy", "consolidate"])
def test_a_newest_step_on_a_disk_that_is_not_mounted_is_not_passed_over(checkpoint, copied, tmp_path, command):
    step_of(copied, 9).symlink_to(tmp_path / "unmounted" / "step-9")
    more = {"diff": [step_of(copied, 2)], "copy": [tmp_path / "place"], "consolidate": [tmp_path / "a.safetensors"]}
    code, text, problem = checkpoint(command, copied, *more.get(command, []))
    assert code == 2 and "step-9: is a link whose target does not exist; mount its disk" in problem and text == ""


def test_a_step_that_the_run_removes_meanwhile_is_not_damaged(checkpoint, copied, monkeypatch):
    find_damage = read.find_damage

    def removing(path):
        shutil.rmtree(step_of(copied, 2), ignore_errors=True)
        return find_damage(path)

    monkeypatch.setattr(read, "find_damage", removing)
    code, text, _ = checkpoint("verify", "--all", copied)
    assert code == 0 and "DAMAGED" not in text and "step-2" not in text


def test_diff_of_what_cannot_be_compared_is_trouble(checkpoint, copied):
    flip(step_of(copied, 2) / "rank-0.safetensors")
    code, text, problem = checkpoint("diff", copied, step_of(copied, 2))
    assert code == 2 and text == "" and "step-2/rank-0.safetensors: is damaged in block 0" in problem
    assert checkpoint("diff", copied, copied / "nothing")[0] == 2


# --- copy ---


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_copy_has_the_same_bytes(checkpoint, source, tmp_path):
    code, text, _ = checkpoint("copy", step_of(source, 2), tmp_path / "a" / "b")
    assert code == 0 and str(tmp_path / "a" / "b" / "step-2") in text
    assert contents(tmp_path / "a" / "b" / "step-2") == contents(step_of(source, 2))
    assert checkpoint("copy", source, tmp_path / "a" / "b")[0] == 0
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["step-2", "step-3"]


def test_a_copy_into_a_run_is_named_by_latest_if_it_is_the_newest(checkpoint, source, tmp_path):
    steps = tmp_path / "run" / "checkpoints"
    steps.mkdir(parents=True)
    for number, newest in ((2, 2), (1, 2), (3, 3)):
        destination = tmp_path / "run" if number == 2 else steps
        assert checkpoint("copy", step_of(source, number), destination)[0] == 0
        assert (steps / "latest").read_text() == f"step-{newest}\n"
    assert contents(steps) == contents(source / "checkpoints")


def test_a_copy_that_cannot_be_made_leaves_everything_as_it_was(checkpoint, copied, tmp_path, monkeypatch):
    other = tmp_path / "other"
    before = contents(copied)

    def refused(named, *arguments):
        code, text, problem = checkpoint("copy", *arguments)
        assert code == 2 and text == "" and named in problem
        assert not other.exists() and contents(copied) == before

    refused("step-3: already exists", copied, copied)
    refused("give the directory in which to put step-2", step_of(copied, 2), other / "step-2")
    with monkeypatch.context() as patch:
        patch.setattr(write, "free_bytes", lambda path: 1000)
        refused("no space left on device: 1,", copied, other)
    with monkeypatch.context() as patch:
        patch.setattr(write, "HashedFile", FullDisk)
        refused("rank-1.safetensors: no space left on device", copied, other)
    with monkeypatch.context() as patch:
        patch.setattr(read, "verify", lambda *_: ["rank-0.safetensors: is damaged"])  # the disk gives other bytes
        refused("reading it back gave other bytes than were written", copied, other)
    flip(step_of(copied, 3) / "rank-1.safetensors")
    before = contents(copied)
    refused(f"{step_of(copied, 3)}/rank-1.safetensors: is damaged in block 0", copied, other)
    remove(None, step_of(copied, 3) / "state.json")
    before = contents(copied)
    refused("no such file or directory", copied, other)


class FullDisk(HashedFile):
    """Has room for the first bytes of the second rank's file, or of the one file."""

    def write(self, data):
        if self.path.name not in ("rank-1.safetensors", "one.safetensors"):
            return super().write(data)
        super().write(data[:1000])
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))


def test_a_run_that_is_training_gets_no_copy(checkpoint, source, tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0)
    with run_directory.lock_run_directory(tmp_path / "run"):
        code, _, problem = checkpoint("copy", source, tmp_path / "run")
    assert code == 2 and "another run is writing to it" in problem
    assert checkpoint("copy", source, tmp_path / "run")[0] == 0


# --- consolidate ---


@pytest.mark.parametrize("which", [0, 1])
def test_one_file_holds_the_whole_parameters_and_moments(checkpoint, source, moved, tmp_path, which):
    path = tmp_path / "one.safetensors"
    assert checkpoint("consolidate", moved[which], path, "--moments")[0] == 0
    expected = gather(step_of(source, 3))
    loaded = load_file(path)
    names = {(kind, name): name if kind == "master" else f"{kind}/{name}" for kind, name in expected}
    assert loaded.keys() == set(names.values())
    assert all(np.array_equal(loaded[names[key]], array) for key, array in expected.items())
    assert safe_open(path, "np").metadata() == {"format": "pt", "step": "3"}


def test_weights_are_rounded_and_moments_are_not(checkpoint, source, tmp_path):
    path, plain = tmp_path / "one.safetensors", tmp_path / "plain.safetensors"
    assert checkpoint("consolidate", source, path, "--moments", "--dtype", "bfloat16")[0] == 0
    assert checkpoint("consolidate", source, plain, "--dtype", "bfloat16")[0] == 0
    expected, loaded = gather(step_of(source, 3)), load_torch_file(path)
    for name, tensor in load_torch_file(plain).items():
        assert torch.equal(tensor, torch.from_numpy(expected["master", name]).bfloat16())
        assert torch.equal(tensor, loaded[name])
        assert torch.equal(loaded[f"exp_avg_sq/{name}"], torch.from_numpy(expected["exp_avg_sq", name]))


def test_a_file_is_written_in_full_or_not_at_all(checkpoint, copied, tmp_path, monkeypatch):
    path = tmp_path / "out" / "one.safetensors"
    path.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(write, "HashedFile", FullDisk)
        assert "no space left" in checkpoint("consolidate", copied, path)[2]
    with monkeypatch.context() as patch:
        patch.setattr(write, "free_bytes", lambda path: 1000)
        assert "1,000 are free" in checkpoint("consolidate", copied, path)[2]
    assert "ends in .safetensors" in checkpoint("consolidate", copied, tmp_path / "out" / "one.bin")[2]
    flip(step_of(copied, 3) / "rank-1.safetensors")
    code, text, problem = checkpoint("consolidate", copied, path)
    assert code == 2 and text == "" and "rank-1.safetensors: is damaged" in problem
    assert list(path.parent.iterdir()) == []
    path.write_text("mine")
    assert checkpoint("consolidate", step_of(copied, 2), path)[0] == 2 and path.read_text() == "mine"


# --- Any input ---


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
