"""What tames a router: a dense warm-up, a rate and a clipping of its own, and settings that may change on a resume.

That layouts agree in these is in tests/model/test_routing_choices.py.
"""

import shutil
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from moh_lm import pretrain
from moh_lm.checkpoint.fragments import full_parameters, step_config
from moh_lm.checkpoint.saver import find_step
from moh_lm.data.files import read_json
from moh_lm.flags import parse_config
from moh_lm.run.resume import contradictions
from moh_lm.training.deepspeed.norms import norms_by_kind
from tests.distributed import run_ranks
from tests.training.runs import arguments, equal, events, left_after, parameters, rows, run, state, training_rows

EVERY_STEP = "--log-interval 1 --save-interval 1 --eval-samples 2 --warmup-iters 0 --routing released".split()
WARMUP = [*EVERY_STEP, *"--train-iters 5 --eval-interval 1 --dense-warmup-iters 3 --peak-tflops 1".split()]


@pytest.fixture(scope="module")
def warmed(data_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("warmed")
    run_ranks(run, 1, arguments(data_dir, directory, *WARMUP))
    return directory


def test_a_dense_warmup_is_dense_training_to_the_bit(data_dir, warmed, tmp_path):
    run_ranks(run, 1, arguments(data_dir, tmp_path, *WARMUP, "--head-selection", "all"))
    keys = {"step", "loss", "grad_norm", "load_balance_loss", "source_loss", "evaluation"}
    mine, dense = ([{key: row[key] for key in keys & row.keys()} for row in rows(run)] for run in (warmed, tmp_path))
    assert mine[:6] == dense[:6] and mine[6] != dense[6]  # the validation loss of the third step is the mixture's
    assert [row["load_balance_loss"] > 0 for row in training_rows(warmed)] == [False] * 3 + [True] * 2
    assert ["heads" in row for row in training_rows(warmed)] == [False] * 3 + [True] * 2
    first, last, end = (state(warmed, step) for step in (1, 3, 5))
    routers = [key for key in first if ".router." in key]
    for key in routers:
        assert torch.equal(first[key], last[key]) and not torch.equal(last[key], end[key])
        assert key.startswith("master/") or not last[key].any()
    assert [event["step"] for event in events(warmed, "dense warm-up over")] == [3]
    alarms = read_json(find_step(warmed) / "state.json")["alarms"]["history"]
    assert [len(rates) for kind, _, rates in alarms if kind == "throughput"] == [2]  # dense steps are faster


@pytest.mark.parametrize(
    "kept, more",
    [
        (5, ""),
        (2, "--zero-stage 2 --offload-optimizer"),  # goes on within the warm-up
        (2, "--zero-stage 3 --offload-optimizer"),
        (3, "--dense-warmup-iters 0 --allow-routing-change"),  # or begins the mixture
    ],
)
def test_routers_start_with_a_first_adam_step_after_a_warmup(
    data_dir, warmed, tmp_path, kept, more
):
    left_after(kept, warmed, tmp_path)
    if more:
        run_ranks(run, 2, arguments(data_dir, tmp_path, *WARMUP, *more.split()), 4)
    rate = training_rows(warmed)[3]["learning_rate"]
    assert_first_step_of_adam(state(tmp_path, 3), state(tmp_path, 4), rate, lambda key: ".router." in key)


def assert_first_step_of_adam(before, after, rate, chosen):
    """Of the parameters whose names are ``chosen``: by the sign of the gradient, and by the decay of matrices."""
    for key in [key for key in before if key.startswith("master/") and chosen(key)]:
        gradient = 10 * after[key.replace("master", "exp_avg")]
        update = (after[key] - before[key] * (1 - 0.1 * rate)) / -rate
        large = gradient.abs() > 1e-5
        assert large.any() and torch.allclose(update[large], gradient[large].sign(), atol=2e-3), key


def test_a_step_of_the_warmup_is_a_dense_model_to_all_tools(warmed):
    steps = [warmed / "checkpoints" / f"step-{number}" for number in (2, 3)]
    assert [step_config(step).model.heads.head_selection for step in steps] == ["all", "mixture"]
    assert [any(".router." in name for name, _ in full_parameters(step)) for step in steps] == [False, True]


def test_a_run_stopped_around_its_warmup_resumes_to_the_bit(data_dir, warmed, tmp_path):
    left_after(2, warmed, tmp_path)
    for last_step in (3, None):
        run_ranks(run, 1, arguments(data_dir, tmp_path, *WARMUP), last_step)
    assert rows(tmp_path) == rows(warmed)
    assert equal(parameters(tmp_path), parameters(warmed))


ONE = [*EVERY_STEP, *"--train-iters 1 --eval-interval 0 --weight-decay 0 --load-balance-coefficient 1".split()]
CLIPPED = "--router-gradient-clipping 0.01 --gradient-clipping 0.5"


@pytest.fixture(scope="module")
def unclipped(data_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("unclipped")
    run_ranks(run, 1, arguments(data_dir, directory, *ONE, "--gradient-clipping", "0"))
    return directory


@pytest.mark.parametrize(
    "world_size, layout",
    [
        (1, "--router-learning-rate-scale 0.1"),
        (2, "--tensor-parallel-size 2 --zero-stage 3 --offload-optimizer"),
        (2, "--zero-stage 2 --offload-optimizer"),
        (4, "--pipeline-parallel-size 2 --tensor-parallel-size 2"),
    ],
)
def test_routers_are_clipped_by_their_own_norm_first(
    data_dir, unclipped, tmp_path, world_size, layout
):
    run_ranks(run, world_size, arguments(data_dir, tmp_path, *ONE, *CLIPPED.split(), *layout.split()))
    before, after = state(unclipped, 1), state(tmp_path, 1)
    gradients = {key: 10 * value.double() for key, value in before.items() if key.startswith("exp_avg/")}

    def norm(keys):
        return torch.cat([gradients[key].flatten() for key in keys]).norm()

    routers = [key for key in gradients if ".router." in key]
    factor = 0.01 / norm(routers)
    assert factor < 0.5
    shared = 0.5 / torch.hypot(norm(gradients.keys() - routers), torch.tensor(0.01))
    assert shared < 1
    for key, gradient in gradients.items():
        expected = gradient * shared * (factor if key in routers else 1)
        assert (10 * after[key].double() - expected).norm() < 1e-5 * expected.norm(), key
    ((got,), (expected,)) = (training_rows(directory) for directory in (tmp_path, unclipped))
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)  # before any clipping


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_norms_of_offloaded_gradients_are_summed_on_the_device(zero_stage):
    groups = [[SimpleNamespace(tensor_model_parallel=True) for _ in range(2)] for _ in range(2)]
    norms = dict(zip(map(id, chain(*groups)), map(torch.tensor, (3.0, 4.0, 5.0, 12.0)), strict=True))
    inner = SimpleNamespace(param_groups=[{"router": True}, {"router": False}])
    optimizer = SimpleNamespace(
        optimizer=inner, params_in_partition=groups, fp16_groups=groups, sub_group_to_group_id={0: 0, 1: 1},
        cpu_offload=True, offload_optimizer=True, norm_for_param_grads=norms, get_param_id=id,
        dp_process_group=None, model_parallel_group=None, model_parallel_rank=0,
        device="meta",  # in the place of the CPU beside a GPU
    )  # fmt: skip
    assert [norm.item() for norm in norms_by_kind(optimizer, zero_stage)()] == [5, 13]


def test_the_rate_of_the_routers_is_scaled_and_no_other(data_dir, unclipped, tmp_path):
    flags = "--gradient-clipping 0 --router-learning-rate-scale 0".split()
    run_ranks(run, 1, arguments(data_dir, tmp_path, *ONE, *flags))
    before, after = state(unclipped, 1), state(tmp_path, 1)
    for key, value in after.items():
        if key.startswith("master/") and ".router." in key:
            step = before[key].double() - value.double()  # Adam's first step is the rate, whatever the gradient
            torch.testing.assert_close(step.abs().max(), torch.tensor(1e-2).double(), rtol=1e-3, atol=0)
        else:
            assert torch.equal(value, before[key]), key


CHANGES = "--load-balance-coefficient 0.5 --load-balance-scope global_batch --router-gumbel-noise 0.3"


def test_router_settings_change_on_a_resume_only_if_allowed(data_dir, warmed, tmp_path):
    flags = arguments(data_dir, tmp_path, *WARMUP)
    left_after(4, warmed, tmp_path)
    changed = [*flags, *CHANGES.split()]
    found = contradictions(parse_config(changed)[0])
    assert len(found) == 3 and all("--allow-routing-change resumes anyway" in text for text in found)
    allowed = [*changed, "--allow-routing-change"]
    assert contradictions(parse_config(allowed)[0]) == []
    assert "num_layers was 2 and is 3" in contradictions(parse_config([*allowed, "--num-layers", "3"])[0])[0]
    run_ranks(run, 1, allowed)
    mine, theirs = training_rows(tmp_path), training_rows(warmed)
    assert mine[:4] == theirs[:4] and mine[4]["loss"] != theirs[4]["loss"]
    (event,) = events(tmp_path, "routing changed")
    assert event["step"] == 4 and event["changes"]["load_balance_coefficient"] == [0.01, 0.5]


def test_an_interval_after_a_cut_warmup_counts_the_steps_since(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *"--log-interval 2 --train-iters 4 --eval-interval 0".split())
    run_ranks(run, 1, [*flags, "--dense-warmup-iters", "3"], 3)
    run_ranks(run, 1, [*flags, "--dense-warmup-iters", "1", "--allow-routing-change"])
    row = training_rows(tmp_path)[-1]
    layers = parse_config(flags)[0].model.routed_layers()
    active = pytest.approx([layer.num_active for layer in layers], abs=1e-4)  # six loads, rounded to five digits
    assert [sum(load) for load in row["heads"]["load"]] == active


def test_an_interval_that_began_in_the_warmup_has_no_heads(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *"--train-iters 5 --eval-interval 0".split())
    flags += ["--dense-warmup-iters", "1"]
    run_ranks(run, 1, [*flags, "--log-interval", "9"], 3)
    run_ranks(run, 1, [*flags, "--log-interval", "2"])
    first, second = training_rows(tmp_path)  # of steps 1 to 4, and of step 5
    assert "heads" not in first and "heads" in second
    assert first["load_balance_loss"] == 0 < second["load_balance_loss"]


def test_a_mixture_goes_on_without_its_routers(data_dir, tmp_path):
    more = [*EVERY_STEP, *"--train-iters 3 --eval-interval 0 --log-interval 3".split()]
    run_ranks(run, 2, arguments(data_dir, tmp_path / "two", *more, "--load-balance-scope", "global_batch"), 2)
    for selection in ("all", "static"):
        left_after(2, tmp_path / "two", tmp_path / selection)
        changed = arguments(data_dir, tmp_path / selection, *more, "--head-selection", selection)
        assert "--allow-routing-change" in contradictions(parse_config(changed)[0])[0]
        run_ranks(run, 1, [*changed, "--allow-routing-change"])
        (row,) = training_rows(tmp_path / selection)
        assert row["load_balance_loss"] == 0 and "heads" not in row
        assert not any(".router." in name for name in parameters(tmp_path / selection))


def test_a_run_goes_on_with_a_budget_that_a_new_run_may_not_have(data_dir, tmp_path):
    more = "--num-key-value-heads 4 --routing-unit head_in_group --head-budget 0.1 --train-iters 2"
    flags = [arguments(data_dir, tmp_path / name, *more.split()) for name in ("run", "new")]
    run_ranks(run, 1, flags[0], 1)
    too_many = ("--tensor-parallel-size", "16", "--devices", "16")  # of them 8 would have no head
    for given, code in ((flags[0], 0), (flags[1], 2), ([*flags[0], *too_many], 2)):
        with pytest.raises(SystemExit, match=str(code)):
            pretrain.main([*given, "--dry-run"])


def test_gates_far_from_one_are_refused_before_a_run(data_dir, tmp_path):
    flags = [*arguments(data_dir, tmp_path, *EVERY_STEP), "--routing", "paper", "--train-iters", "1"]
    run_ranks(run, 1, flags)
    changed = parse_config([*flags, "--head-selection", "all", "--allow-routing-change"])[0]
    (problem,) = contradictions(changed)
    assert "--routing paper are far from 1" in problem and "tools/import_hf.py --head-selection all" in problem


FROZEN = "--eval-interval 0 --train-only router --precision bf16 --train-iters 4"


def test_only_the_routers_are_trained_with_train_only(data_dir, unclipped, tmp_path):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP)
    shutil.copytree(unclipped, tmp_path, dirs_exist_ok=True)  # one step of all weights, in fp32
    layouts = ["--tensor-parallel-size 2", "--zero-stage 3 --recompute", "--zero-stage 2 --offload-optimizer"]
    for last_step, layout in enumerate(layouts, start=2):  # each goes on from the one before
        run_ranks(run, 2, [*flags, *FROZEN.split(), *layout.split()], last_step)
    before, after = state(unclipped, 1), state(tmp_path, 4)
    for key, value in before.items():
        if ".router." in key:
            assert not torch.equal(after[key], value), key
        else:
            assert torch.equal(after[key], value if key.startswith("master/") else torch.zeros_like(value)), key
    run_ranks(run, 1, [*flags, "--train-iters", "5", "--eval-interval", "0"])  # and all weights again
    rate = training_rows(tmp_path)[-1]["learning_rate"]
    matrices = ("_proj.weight", "lm_head.weight")
    assert_first_step_of_adam(after, state(tmp_path, 5), rate, lambda key: key.endswith(matrices))


def test_a_start_has_the_frozen_weights_of_its_checkpoint(data_dir, unclipped, tmp_path):
    found = []
    for zero in "13":
        shutil.copytree(unclipped, tmp_path / zero)
        flags = [*arguments(data_dir, tmp_path / zero, *EVERY_STEP), *FROZEN.split(), "--train-iters", "2"]
        run_ranks(run, 2, [*flags, "--zero-stage", zero])
        found.append(training_rows(tmp_path / zero)[-1]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
