"""tools/plan.py: its layouts are legal and ranked by their times, with the estimates that a dry run gives."""

import json

import pytest

from moh_lm.checks import config_problems
from moh_lm.checks.model import model_problems
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.cost.devices import known_device
from moh_lm.cost.memory import parameter_counts
from moh_lm.cost.summary import describe_time
from moh_lm.cost.time import assumptions, step_seconds
from tests.cost.models import LLAMA3_8B, LLM_B, parse
from tests.distributed import run_ranks
from tests.tools.exporting import write_checkpoint
from tools import plan as planner

FEWER_HEADS_ABOVE = """--num-layers 2 --hidden-size 256 --intermediate-size 640 --num-attention-heads 16 8 --head-dim 32
    --num-key-value-heads 4 2 --num-shared-heads 4 --num-active-routed-heads 2 --vocab-size 512 --batch-tokens 64K
    --train-tokens 1B"""
BLOCKS_AND_BUDGET = """--num-layers 8 --hidden-size 512 --num-attention-heads 16 --num-key-value-heads 4
    --optimizer muon --muon-split group --head-budget 0.75 --head-budget-slope 0.4 --batch-tokens 64K --train-tokens 1B
    --vocab-size 512"""


@pytest.mark.parametrize(
    "text, gpus, tensor",
    [
        (f"{LLAMA3_8B} --num-layers 8", 16, {1, 2, 4, 16}),
        (FEWER_HEADS_ABOVE, 4, {1}),
        (BLOCKS_AND_BUDGET, 8, {1, 2, 4}),
        ("--preset 30M --fused-projections", 4, {1, 2}),
    ],
)  # fmt: skip
def test_the_tool_ranks_legal_layouts_that_fit(text, gpus, tensor, capsys):
    assert planner.main(["--gpus", str(gpus), "--json", *text.split()]) == 0
    plans = json.loads(capsys.readouterr().out)["layouts"]
    assert {plan["tensor_parallel_size"] for plan in plans} == tensor
    fitting = [plan for plan in plans if plan["fits"]]
    assert fitting and plans[: len(fitting)] == fitting
    times = [plan["seconds_per_step"] for plan in fitting]
    assert times == sorted(times)
    for plan in plans:
        assert plan["gpu_hours"] == pytest.approx(24 * plan["days"] * gpus)
        degrees = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        keys = (*degrees, "zero_stage", "micro_batch_size", "recompute")
        assert config_problems(parse(text, *flags_of(plan, keys)), gpus) == []
        assert plan["memory_gib"] == pytest.approx(sum(plan["memory_gib_by_part"].values()))


def test_the_heads_of_a_run_that_has_begun_stay_in_every_layout(tmp_path):
    heads = HeadsConfig(head_budget=0.75)
    config = ModelConfig(num_layers=2, hidden_size=48, intermediate_size=64, num_attention_heads=12, heads=heads)
    run_ranks(write_checkpoint, 1, tmp_path, config, None, False)
    assert config.heads.num_shared_heads == (6, 6)  # which four ranks cannot share; a new run gets other numbers
    flags = "--gpus 4 --seq-length 128 --batch-tokens 4K --train-iters 9 --checkpoint-dir".split()
    degrees = []
    for directory in (tmp_path, tmp_path / "new"):
        model = [] if directory == tmp_path else "--num-attention-heads 12 --head-budget 0.75 --hidden-size 48".split()
        machine = planner.parse_arguments([*flags, str(directory), *model])
        degrees.append({plan["tensor_parallel_size"] for plan in planner.rank_layouts(machine.config, machine)})
    assert degrees == [{1, 2}, {1, 2, 4}]


def test_no_layout_is_ranked_that_a_graph_rules_out():
    machine = planner.parse_arguments("--gpus 4 --preset 1M --cuda-graph".split())
    plans = planner.rank_layouts(machine.config, machine)
    assert {(plan["pipeline_parallel_size"], plan["zero_stage"]) for plan in plans} == {(1, 1), (1, 2)}


FIRST_OF_LLM_B = ("--gpus", "16", *LLM_B.split(), "--num-shared-heads", "8")


@pytest.mark.parametrize("more", [("--compile",), ("--optimizer", "muon", "--recompute")])
def test_plan_and_dry_run_give_one_estimate(more):
    """For the first layout, and for the slowest."""
    machine = planner.parse_arguments([*FIRST_OF_LLM_B, *more])
    plans = planner.rank_layouts(machine.config, machine)
    for found in (plans[0], plans[-1]):
        keys = (*planner.DEGREES, "zero_stage", "micro_batch_size", "recompute")
        config = parse(" ".join(FIRST_OF_LLM_B[2:]), *more, *flags_of(found, keys))
        said = describe_time(config, 16, known_device("H100"))
        hours = f"{found['gpu_hours']:,.1f} GPU-hours"
        assert hours in said and assumptions(machine) in said


def flags_of(found, keys):
    return [word for key in keys for word in ("--" + key.replace("_", "-"), str(found[key]))]


def test_a_plan_knows_that_small_micro_batches_are_slow():
    machine = planner.parse_arguments(list(FIRST_OF_LLM_B))
    first, *_ = planner.rank_layouts(machine.config, machine)
    assert (first["pipeline_parallel_size"], first["tensor_parallel_size"]) == (1, 1)
    assert first["micro_batch_size"] >= 8
    slow = parse(" ".join(FIRST_OF_LLM_B[2:]), "--micro-batch-size", "1")
    seconds = step_seconds(slow, machine)["compute"]
    assert seconds == pytest.approx(2048 / 16 * 24 * 7e-3)  # micro-batches, layers, the host's time for each


@pytest.mark.parametrize("more", ["", "--zero-stage 2", "--zero-stage 3", "--optimizer muon"])
def test_a_run_of_routers_exchanges_no_other_gradients(more):
    config = parse(LLM_B, "--train-only", "router", "--micro-batch-size", "16", *more.split())
    machine = planner.parse_arguments(list(FIRST_OF_LLM_B))
    seconds, routers = step_seconds(config, machine), 24 * 1536 * (16 + 2)  # two rows weigh the kinds of heads
    reads = 2 * 8 * parameter_counts(config.model)["total"]  # by ZeRO-3, forward and backward, of 8 micro-batches
    bytes_sent = {"--zero-stage 3": 2 * reads + 8 * 4 * routers, "--zero-stage 2": (8 * 2 * 4 + 2) * routers}
    sent = bytes_sent.get(more, (2 * 4 + 2) * routers)
    assert seconds["data"] == pytest.approx(sent * 15 / 16 / (1e9 * machine.inter_node)) and seconds["muon"] == 0


def test_a_plan_is_for_the_peak_and_the_precision_of_the_run():
    peaks = [planner.parse_arguments([*FIRST_OF_LLM_B, *more.split()]).gpu_tflops for more in (
        "", "--peak-tflops 312", "--gpu-tflops 500 --peak-tflops 312", "--precision fp32 --gpu-tflops 67",
    )]  # fmt: skip
    assert peaks == [989, 312, 500, 67]
    assert planner.parse_arguments("--gpus 8 --preset 100M".split()).config.run.compile  # as it does on those GPUs


def test_a_dry_run_in_fp32_asks_for_the_peak_only():
    said = describe_time(parse(LLM_B, "--precision", "fp32"), 8, known_device("H100"))
    assert said == "unknown; peaks are known in bf16 only; give --peak-tflops"


def test_layouts_of_continued_training_are_accepted_at_full_size():
    stage_1 = parse(LLAMA3_8B, "--head-selection", "all", "--tensor-parallel-size", "2")
    stage_2 = parse(LLAMA3_8B, "--pipeline-parallel-size", "8")
    for config, world_size in ((stage_1, 2), (stage_1, 256), (stage_2, 8), (stage_2, 64)):
        assert config_problems(config, world_size) == []


@pytest.mark.parametrize(
    "flags", ["--batch-warmup 8M:1B", "--fused-router true --head-selection all", "--seq-length-warmup 4096:10"]
)
def test_what_no_layout_makes_legal_is_refused(flags, capsys):
    assert planner.main(["--gpus", "8", *LLM_B.split(), *flags.split()]) == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_a_plan_holds_no_heads_that_the_trainer_refuses():
    flags = "--gpus 8 --preset 30M --head-selection static --head-budget 0.5"
    machine = planner.parse_arguments(flags.split())
    variants = list(planner.legal_variants(machine.config, machine))
    assert variants and not any(model_problems(variant.model) for variant in variants)
