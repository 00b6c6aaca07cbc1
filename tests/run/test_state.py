"""state.json of a checkpoint: what a run writes is accepted, and a value out of range or length is named."""

import copy
import json
import shutil

import pytest
import torch
from safetensors import safe_open

from moh_lm.checkpoint.fragments import load_fragments, write_safetensors
from moh_lm.checkpoint.manifest import describe, read_entries, write_manifest
from moh_lm.config import Config
from moh_lm.run.state import KEYS, first_state, read_state, state_problems
from tests.distributed import run_ranks
from tests.training.runs import arguments, run
from tools import checkpoint

SHARES = ("router_shares", 0, 0)


@pytest.fixture(scope="module")
def saved(data_dir, tmp_path_factory):
    """The run directory of two ranks after step 3 of 7, in the middle of an interval."""
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(run, 2, arguments(data_dir, directory), 3)
    return directory


def step_of(directory):
    return directory / "checkpoints" / "step-3"


@pytest.fixture
def state(saved):
    return read_state(step_of(saved))


@pytest.fixture
def model(saved):
    return Config.load(step_of(saved) / "config.json").model


def test_what_a_run_or_an_import_writes_is_accepted(state, model):
    assert state_problems(state, model) == []
    assert state_problems(first_state(model, {"source": "a"}), model) == []
    state["data"]["bos_id"], state["l1_steps"] = model.vocab_size - 1, -2  # which the next step clamps
    assert state_problems(state, model) == []


WRONG = [
    (("step",), [-1, True, "3", 2.5, None, 2**70]),
    (("consumed_samples",), [-8, "24", 1e3]),
    (("optimizer_steps",), [4, -1, None, 2.0]),
    (("rested_steps",), [4, -1]),
    (("frozen_steps",), [4, "1"]),
    (("l1_steps",), [4, -4, 0.5]),
    (SHARES, [-0.1, 1.5, float("nan"), "0.5", None]),
    (("router_shares", 1), [[], [0.5], 0.5, None]),
    (("router_shares",), [[], [[0.25] * 4], None, {}]),
    (("windows",), [[[16], [1.0]], [[16, 16], [1.0]], [[-1, 16], [1.0, 1.0]], [[16, 16], [float("nan"), 1.0]], 3]),
    (("guard", "history", "loss"), [[], ["3.0"] * 3, [float("inf")] * 3, [3.0, 1e308, 3.0], None]),
    (("guard", "history"), [{}, [[], []]]),
    (("guard", "skipped"), [[9], [-1], [3, 1], [1, 1], ["1"], 2]),
    (("interval", "losses"), [[], [[1.0, 2.0]] * 2, [[1.0, 2.0, 3.0]], [[1.0, 2.0, float("nan")]] * 2]),
    (("interval", "routers"), [[], [[1.0]], [[1.0], [1.0, 2.0]], [["1"]] * 2, [[None]] * 2]),
    (("interval", "tokens"), [-1, 1.5]),
    (("interval", "skipped_sequences"), [[0], [0, -1]]),
    (("interval",), [None, []]),
    (("alarms", "unseen"), [{"even": 1}, {"even": -1, "odd": 0}, []]),
    (("alarms", "streaks"), [[["collapse", 0, 1]], [["collapse", 0, 1, -1]]]),
    (("alarms", "history"), [[["throughput", None, ["fast"]]], [["throughput", None]], [[[], None, []]]]),
    (("data", "segments"), [[], {}, None, "x", [{}], [3]]),
    (("data", "segments", 0, "shards", "even"), [None, 3, []]),
    (("data", "segments", 0, "first_sample"), [5, -1, "0"]),
    (("data", "segments", 0, "seq_length"), [0, -16, "16"]),
    (("data", "segments", 0, "weights", "even"), [-1, 2.5]),
    (("data", "segments", 0, "weights"), [{}, {"even": 1}, {"even": 0, "odd": 0}]),
    (("data", "segments", 0, "consumed", "odd"), [-3, 0.5]),
    (("data", "segments", 0, "validation_fraction"), [-0.1, 1.5, "0.1"]),
    (("data", "bos_id"), [-1, 64, True, "1"]),
    (("data", "units"), [None, {}, {"even": {}, "odd": 3}, {"even": {"unit-0": 3}, "odd": {}}]),
]


@pytest.mark.parametrize("path, values", WRONG, ids=lambda value: "-".join(map(str, value))[:40])
def test_a_value_out_of_range_or_length_is_named(path, values, state, model):
    for value in values:
        changed = copy.deepcopy(state)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        found = state_problems(changed, model)
        named = {problem.split()[0] for problem in found}
        assert path[0] in named or "interval" in named, (path, value)  # whose sums are counted by the alarms' sources
        assert named <= {*KEYS, "windows", "rested_steps", "frozen_steps", "l1_steps"}
        assert all(": must be " in problem and len(problem) < 250 for problem in found)


def rewrite(directory, change):
    """Change the state.json of a step, and have the manifest say that it is so."""
    step = step_of(directory)
    state = json.loads((step / "state.json").read_text())
    change(state)
    (step / "state.json").write_text(json.dumps(state))
    write_manifest(step, read_entries(step) | {"state.json": describe(step / "state.json")})


def test_verify_and_a_resume_refuse_a_state_out_of_range(saved, data_dir, tmp_path, capsys):
    shutil.copytree(saved, tmp_path / "run")
    rewrite(tmp_path / "run", lambda state: state["router_shares"].pop())
    assert checkpoint.main(["verify", str(tmp_path / "run")]) == 1
    assert "state.json: router_shares [" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="state.json: router_shares .* of 0 to 1 .*; move the step"):
        run_ranks(run, 1, arguments(data_dir, tmp_path / "run"))


def read_file(path):
    """(metadata, tensors) of a rank file, as copies: what is mapped would change with the file."""
    with safe_open(path, "pt") as file:
        return file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118


def reshape(step, name, shape):
    """Say in every rank file that the parameter has this shape."""
    entries = read_entries(step)
    for path in step.glob("rank-*.safetensors"):
        metadata, tensors = read_file(path)
        addresses = json.loads(metadata["fragments"])
        if name in addresses:
            addresses[name]["whole_shape"] = shape
        entries[path.name] = write_safetensors(path, tensors, metadata | {"fragments": json.dumps(addresses)})
    write_manifest(step, entries)


@pytest.mark.parametrize("shape", [[32, 64], [128, 32], [2048], [64, 33]])
def test_a_parameter_of_another_shape_is_refused_on_a_resume(shape, saved, data_dir, tmp_path, capsys):
    shutil.copytree(saved, tmp_path / "run")
    name = "model.layers.0.mlp.up_proj.weight"  # [64, 32]
    reshape(step_of(tmp_path / "run"), name, shape)
    assert checkpoint.main(["verify", str(tmp_path / "run")]) == 1
    assert name in capsys.readouterr().out
    with pytest.raises(AssertionError, match=rf"{name} has shape \[.* in the files and \[64, 32\] in the model; move"):
        run_ranks(run, 2, arguments(data_dir, tmp_path / "run"))


def test_a_tensor_shorter_than_its_range_is_no_rank_file(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    path = step_of(tmp_path / "run") / "rank-0.safetensors"
    metadata, tensors = read_file(path)
    key = next(key for key in tensors if key.startswith("exp_avg/") and len(tensors[key]) > 1)
    write_safetensors(path, tensors | {key: torch.zeros(len(tensors[key]) - 1)}, metadata)
    with pytest.raises(ValueError, match=f"rank-0.*{key} has "):
        load_fragments(step_of(tmp_path / "run"), [])
