"""Every layout trains the same model: degrees of parallelism, ZeRO stages, micro-batches, accumulation, recomputation.

Each layout of the table runs two steps of the training program and is compared with one process: losses, balance
losses, gradient norm, every parameter's gradient in the first step (AdamW's first moment is a tenth of it), and every
parameter and moment after the last. The table holds every pair of degrees, stages and sizes that may be combined, and
every model under each of those that cut or repeat its layers, with degrees of at most two; a few have four ranks of a
kind.
"""

import itertools
from pathlib import Path

import pytest
import torch

from moh_lm.checkpoint.fragments import load_fragments
from moh_lm.checkpoint.saver import Saver, find_step
from moh_lm.data.files import read_json
from moh_lm.data.loader import MicroBatch
from moh_lm.flags import parse_config
from moh_lm.training.text_engine import PipelineEngine
from tests.distributed import run_ranks
from tests.training.runs import distance, engine_of, equal, losses, rows, run, state

SIZES = """
    --num-layers 4 --hidden-size 32 --intermediate-size 64 --num-attention-heads 8 --head-dim 8 --vocab-size 67
    --seq-length 16 --batch-tokens 256 --train-iters 3 --warmup-iters 0 --precision fp32
    --learning-rate 2e-5 --min-learning-rate 1e-5
    --validation-fraction 0.1 --log-interval 1 --save-interval 1 --eval-interval 0 --eval-samples 1
    --load-balance-coefficient 0.5 --gradient-clipping 0.5
"""
COUNTED = "--position none cope rotary cope --cope-max-position 3 --rotary-fraction 0.5"
GROUPED = "--num-attention-heads 16 --num-key-value-heads 8 --num-shared-heads 8 --num-active-routed-heads 3"
MODELS = {
    "paper, latent": "--routing paper --attention latent --kv-lora-rank 12 --q-lora-rank 20",
    "dense, tied": "--head-selection all --tie-embeddings --base-width 16 --head-dims 8 8 8 8 4 4 6 6 "
    "--position learned --learned-positions 16 --reset-at-documents",
    "paper": "--routing paper",
    "paper, step, grouped, window": "--routing paper --load-balance-scope global_batch --window 6 "
    f"--base-width 16 {GROUPED}",
    "released, step, one key": "--routing released --load-balance-scope global_batch "
    f"{GROUPED} --num-key-value-heads 1 {COUNTED} --window-strategy entropy --window-min 3 --window-max 9",
    # Another seed: 1234 draws a token whose query norms deviate by 0.4% only, and dividing by that multiplies rounding.
    "query norm": "--routing query_norm --seed 7",
    "query norm, step, grouped": f"--routing query_norm --load-balance-scope global_batch --seed 7 {GROUPED}",
    "no shared head below, windows, own keys": (
        "--routing sigmoid --num-attention-heads 8 12 16 8 --num-shared-heads 0 4 8 8 "
        "--num-active-routed-heads 4 2 4 0 --window 5 0 9 0 --routed-keys selected --routed-positions head "
        "--position rotary none rotary none --rotary-fraction 0.5 --reset-at-documents"
    ),
}
COMPARED = {"loss", "load_balance_loss", "grad_norm", "source_loss", "evaluation", "window"}  # of a row
FACTORS = ("tensor", "pipeline", "data", "zero", "micro_batch", "accumulation", "recompute", "model", "context")
SHORT = ("--train-iters", "2")  # the second step has moments, shares and windows of the first
FEW = ("--batch-tokens", "128")
PLAIN = ("paper", "query norm")  # their parts are all in other models
VALUES = ((1, 2), (1, 2), (1, 2), (1, 2, 3), (1, 2), (1, 2), (False, True), tuple(MODELS.keys() - PLAIN), (1, 2))
OF_MODELS = {("tensor", 2), ("pipeline", 2), ("context", 2), ("zero", 3), ("recompute", True)}  # they look into a model
LAYOUTS = [
    (1, 1, 1, 2, 2, 1, False, "paper, step, grouped, window", 2),
    (1, 1, 1, 3, 1, 1, False, "query norm, step, grouped", 2),
    (1, 1, 1, 3, 2, 1, False, "dense, tied", 2),
    (1, 1, 1, 3, 2, 2, True, "paper, latent", 2),
    (1, 1, 2, 2, 1, 1, True, "released, step, one key", 1),
    (1, 1, 2, 3, 2, 1, False, "no shared head below, windows, own keys", 2),
    (1, 1, 2, 3, 2, 1, True, "paper, step, grouped, window", 1),
    (1, 2, 1, 1, 1, 1, False, "released, step, one key", 1),
    (1, 2, 1, 1, 1, 1, True, "query norm, step, grouped", 1),
    (1, 2, 1, 1, 2, 1, True, "no shared head below, windows, own keys", 2),
    (1, 2, 2, 1, 2, 1, False, "dense, tied", 1),
    (2, 1, 1, 1, 2, 1, False, "no shared head below, windows, own keys", 1),
    (2, 1, 1, 1, 2, 1, True, "dense, tied", 1),
    (2, 1, 1, 3, 1, 1, False, "released, step, one key", 2),
    (2, 1, 2, 2, 1, 2, False, "query norm, step, grouped", 1),
    (2, 2, 1, 1, 2, 1, False, "paper, step, grouped, window", 1),
    (2, 2, 1, 1, 2, 2, False, "paper, latent", 1),
]
FOURS = [  # where four ranks share what two cannot: one key/value head, a layer for each stage, uneven heads
    (1, 1, 4, 2, 1, 1, False, "dense, tied", 1),
    (1, 4, 1, 1, 2, 2, True, "paper, latent", 1),
    (4, 1, 1, 1, 1, 2, True, "released, step, one key", 1),
    (4, 1, 1, 1, 2, 1, False, "no shared head below, windows, own keys", 1),
]


def flags_of(layout, data_dir, directory):
    tensor, pipeline, _, zero, micro_batch, recompute, model = layout
    return [
        *SIZES.split(),
        *MODELS[model].split(),
        *f"--tensor-parallel-size {tensor} --pipeline-parallel-size {pipeline} --zero-stage {zero}".split(),
        *f"--micro-batch-size {micro_batch} --recompute {recompute} --data-dir {data_dir}".split(),
        *f"--checkpoint-dir {directory}".split(),
    ]


def train(layout, data_dir, directory, *more, context=1):
    tensor, pipeline, data, *_ = layout
    flags = [*flags_of(layout, data_dir, directory), *more, "--context-parallel-size", str(context)]
    run_ranks(run, tensor * pipeline * data * context, flags)
    return directory


@pytest.fixture(scope="module")
def one_process(data_dir, tmp_path_factory):
    """Run directories of the models, with further flags, on one process; made when first asked for."""
    made = {}

    def of(model, *more):
        if (model, more) not in made:
            directory = tmp_path_factory.mktemp("one")
            made[model, more] = train((1, 1, 1, 1, 1, False, model), data_dir, directory, *more)
        return made[model, more]

    return of


def allowed(key, model):
    """Relative distance that fp32 rounding explains.

    Squares double it; norms over their deviation multiply it. The gradient of w_routed is what is left when the softmax
    cancels its parts: one process in fp32 is 1e-6 to 3e-6 away from float64 in it, ten times as far as in other
    matrices, so two are up to 6e-6 apart. Tensor parallelism and another attention backend round otherwise.
    """
    limit = 1e-6 * (2 if key.startswith("exp_avg_sq/") else 1) * (10 if model.startswith("query norm") else 1)
    return limit * (6 if key.endswith("router.w_routed") else 1)


def compared(keys, model):
    """Those of ``keys`` that are to agree.

    W_s of sigmoid begins at 0. Adam divides a gradient by its own size, so that the rounding of a small one is a whole
    step. The moments of W_s are compared, its values are not.
    """
    uneven = "router.w_shared" if "--routing sigmoid" in MODELS[model] else "no such key"
    return [key for key in keys if not (key.startswith("master/") and key.endswith(uneven))]


def assert_same_training(got, expected, model, *steps):
    """Assert that two run directories log the same and have the same masters and moments after ``steps``."""
    for mine, theirs in zip(rows(got), rows(expected), strict=True):
        assert mine.keys() == theirs.keys() and mine["step"] == theirs["step"]
        for key in theirs.keys() & COMPARED:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), (mine["step"], key)
    for step in steps:
        mine, theirs = state(got, step), state(expected, step)
        assert mine.keys() == theirs.keys()
        far = {key: distance(mine[key], theirs[key]) / allowed(key, model) for key in compared(theirs, model)}
        assert max(far.values()) < 1, (step, sorted(far.items(), key=lambda item: -item[1])[:5])


def test_the_table_holds_every_legal_pair_of_values():
    def pairs(layout):
        values = [factor for factor in zip(FACTORS, layout, strict=True) if factor[0] != "model"]
        return {*itertools.combinations(values, 2), *itertools.product(OF_MODELS.intersection(values), [layout[7]])}

    def legal(layout):
        # DeepSpeed shards gradients or weights only without a pipeline, and there must be ranks to share them.
        return layout[3] == 1 or (layout[1] == 1 and layout[2] * layout[8] > 1)

    wanted = set().union(*map(pairs, filter(legal, itertools.product(*VALUES))))
    assert wanted <= set().union(*map(pairs, LAYOUTS))


@pytest.mark.parametrize("layout", [*LAYOUTS, *FOURS], ids=lambda layout: "-".join(map(str, layout)))
def test_a_layout_trains_the_model_of_one_process(layout, data_dir, one_process, tmp_path):
    *degrees, micro_batch, accumulation, recompute, model, context = layout
    short = (*SHORT, "--batch-tokens", str(16 * degrees[2] * micro_batch * accumulation))
    got = train((*degrees, micro_batch, recompute, model), data_dir, tmp_path, *short, context=context)
    assert_same_training(got, one_process(model, *short), model, 1, 2)


def test_tensor_parallel_ranks_with_unequal_shards_share_a_table(data_dir, one_process, tmp_path):
    """Data-parallel ranks cut the table of positions, which has the learning rate of the projections here."""
    more = (*SHORT, "--batch-tokens", "32", "--base-width", "32", "--learned-positions", "1000")
    got = train((2, 1, 2, 1, 1, False, "dense, tied"), data_dir, tmp_path, *more)
    assert_same_training(got, one_process("dense, tied", *more), "dense, tied", 1, 2)


@pytest.mark.parametrize(
    "model, stages, precision", [("paper, step, grouped, window", (1, 2), "fp32"), ("dense, tied", (2, 4), "bf16")]
)
def test_pipeline_degrees_agree_to_the_bit(model, stages, precision, data_dir, tmp_path):
    # One stage accumulates the two gradients of a tied weight in another order than two stages can.
    runs = []
    for pipeline in stages:
        directory = tmp_path / str(pipeline)
        more = [*SHORT, "--precision", precision, "--learning-rate", "1e-3"]
        run_ranks(run, pipeline, [*flags_of((1, pipeline, 1, 1, 4, False, model), data_dir, directory), *more])
        runs.append((rows(directory), state(directory, 2)))
    first_rows, first_state = runs[0]
    for other_rows, other_state in runs[1:]:
        assert other_rows == first_rows and equal(other_state, first_state)


def test_layouts_in_bf16_differ_less_than_bf16_from_fp32(data_dir, one_process, tmp_path):
    exact = losses(one_process("paper", *FEW))

    def deviations(name, layout, expected):
        flags = [*flags_of(layout, data_dir, tmp_path / name), *FEW, "--precision", "bf16"]
        run_ranks(run, layout[0] * layout[1] * layout[2], flags)
        got = losses(tmp_path / name)
        return got, max(abs(a / b - 1) for a, b in zip(got, expected, strict=True))

    reference, rounding = deviations("one", (1, 1, 1, 1, 1, False, "paper"), exact)
    assert rounding < 1e-3
    for layout in ((1, 1, 2, 2, 1, True, "paper"), (2, 2, 1, 1, 4, False, "paper")):
        _, deviation = deviations("-".join(map(str, layout)), layout, reference)
        assert deviation <= rounding, layout


def test_a_tied_head_may_be_a_stage_of_its_own(data_dir, tmp_path):
    wide = ["--vocab-size", "4096", "--tie-embeddings", "--num-layers", "2", *FEW]
    for pipeline in (1, 2):
        layout = (1, pipeline, 1, 1, 4, False, "paper")
        run_ranks(run, pipeline, [*flags_of(layout, data_dir, tmp_path / str(pipeline)), *wide])
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-6)


def test_a_pipeline_takes_batches_that_are_on_its_device():
    engine = PipelineEngine.__new__(PipelineEngine)
    engine.device = torch.device("meta")
    ((tokens, (labels, sources)),) = engine.stage_inputs([MicroBatch(*torch.zeros(3, 4, 2, dtype=torch.int64))])
    assert {tensor.device.type for tensor in (tokens, labels, sources)} == {"meta"}


def offload_device(flags):
    """Where DeepSpeed says that the optimizer's states are."""
    return str(engine_of(parse_config(flags)[0]).engine.zero_offload_optimizer().device)


@pytest.mark.parametrize("zero", [1, 3])
def test_an_offloaded_optimizer_gives_the_same_run(zero, data_dir, one_process, tmp_path):
    layout = (1, 1, 2, zero, 2, False, "paper")
    flags = [*flags_of(layout, data_dir, tmp_path), *FEW, "--offload-optimizer"]
    assert run_ranks(offload_device, 1, flags) == ["cpu"]
    run_ranks(run, 2, flags)
    assert_same_training(tmp_path, one_process("paper", *FEW), "paper", 3)


def test_any_layout_goes_on_from_any_other(data_dir, one_process, tmp_path):
    model = "paper, step, grouped, window"
    chain = [(1, 2, 1, 1, 2, False, 1), (1, 1, 1, 3, 1, True, 2), (2, 1, 1, 2, 2, False, 1)]
    batch = ("--batch-tokens", "64")
    for last_step, (*layout, recompute, context) in enumerate(chain, start=1):
        flags = flags_of((*layout, recompute, model), data_dir, tmp_path)
        ranks = layout[0] * layout[1] * layout[2] * context
        run_ranks(run, ranks, [*flags, *batch, "--context-parallel-size", str(context)], last_step)
    assert_same_training(tmp_path, one_process(model, *batch), model, 3)


def copy_checkpoint(flags, source):
    """Load the last step of the run ``source`` and save it from the ranks of this layout."""
    config, _ = parse_config(flags)
    engine, step = engine_of(config, num_sources=2), find_step(source)
    saved = read_json(step / "state.json")
    load_fragments(step, engine.fragments())
    engine.adopt(saved["optimizer_steps"], saved["router_shares"])
    (steps := Path(config.run.checkpoint_dir) / "checkpoints").mkdir(parents=True, exist_ok=True)
    Saver(steps).save(3, engine.fragments(), config, saved, None)


def test_a_checkpoint_is_the_same_state_in_every_layout(data_dir, one_process, tmp_path):
    # A run that is resumed at its end and saved again by other ranks: the canonical tensors must not change at all.
    source = one_process("paper", *FEW)
    for name, layout in (("pipelines", (2, 2, 1, 1, 4, False, "paper")), ("shards", (1, 1, 2, 3, 4, False, "paper"))):
        directory = tmp_path / name
        run_ranks(copy_checkpoint, layout[0] * layout[1] * layout[2], flags_of(layout, data_dir, directory), source)
        assert equal(state(directory, 3), state(source, 3))
