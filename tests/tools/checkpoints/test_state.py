"""tools/checkpoint.py show, diff and consolidate: they give the whole state, whatever layout saved it."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file

from moh_lm.build import build_model
from moh_lm.config import Config
from tests.distributed import run_ranks
from tests.tools.checkpoints.saved import KINDS, NAME, FullDisk, agree, flip, forge, gather, shown, step_of
from tests.training.test_layouts import copy_checkpoint, flags_of
from tools.checkpoints import write


@pytest.fixture(scope="module")
def moved(source, data_dir, tmp_path_factory):
    """Runs into which other layouts have saved step 3 of ``source`` after loading it."""
    found = []
    for layout in ((2, 2, 1, 1, 4, False, "paper"), (1, 1, 3, 3, 4, False, "paper")):
        found.append(tmp_path_factory.mktemp("moved"))
        flags = [*flags_of(layout, data_dir, found[-1]), "--batch-tokens", str(16 * 12 if layout[2] == 3 else 256)]
        run_ranks(copy_checkpoint, layout[0] * layout[1] * layout[2], flags, source)
    return found


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


def test_diff_of_what_cannot_be_compared_is_trouble(checkpoint, copied):
    flip(step_of(copied, 2) / "rank-0.safetensors")
    code, text, problem = checkpoint("diff", copied, step_of(copied, 2))
    assert code == 2 and text == "" and "step-2/rank-0.safetensors: is damaged in block 0" in problem
    assert checkpoint("diff", copied, copied / "nothing")[0] == 2


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
