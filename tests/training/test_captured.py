"""A captured micro-batch on a device that is not there: a graph that repeats operations and no Python."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moh_lm.checks import run as run_checks
from moh_lm.checks.run import graph_problems
from moh_lm.data.loader import MicroBatch
from moh_lm.flags import parse_config
from moh_lm.kernels.masks import apply_window
from moh_lm.model.rotary import Rotary, rotary_table
from moh_lm.training import captured
from tests.distributed import run_ranks
from tests.recording import recorded
from tests.training.runs import arguments, engine_of, equal, rows, run, state


def reduce_scatter(shard, whole, group):
    total = whole.clone()
    dist.all_reduce(total, group=group)
    shard.copy_(total.chunk(group.size())[group.rank()])


def micro_batches(config, step, count):
    """Micro-batches of 2 sequences, of two of three sources."""
    generator = torch.Generator().manual_seed(step)
    for number in range(count):
        tokens = torch.randint(64, (2, config.seq_length + 1), generator=generator)
        within = torch.arange(config.seq_length).repeat(2, 1) % (5 + step + number)
        positions = within if config.data.reset_at_documents else None
        sources, samples = torch.arange(2) + number % 2, torch.arange(2) + 8 * step + 2 * number
        yield MicroBatch(tokens[:, :-1], tokens[:, 1:], sources, positions, samples)


def four_steps(config):
    """What is said at the start, the engine, and what 4 steps leave, with an evaluation after each: their results, and
    every weight, moment and bias."""
    engine = engine_of(config, num_sources=3)
    assert not engine.captured or no_node_lives(engine.captured.weights)
    engine.begin(0)
    said, left = engine.compare_kernels(lambda: next(micro_batches(config, 0, 1))), []
    places = [weight.data_ptr() for weight in engine.model.parameters()]
    for step in range(4):
        engine.begin(step)
        batches = list(micro_batches(config, step, engine.micro_batches))
        result = engine.train_step(batches, 1e-2)
        evaluated = torch.tensor(engine.evaluate(batches), dtype=torch.float64)
        found = torch.tensor([result.loss, result.grad_norm])
        left += [result.losses, result.routers, engine.step_check.gradient_not_finite.take(), evaluated, found]
    assert places == [weight.data_ptr() for weight in engine.model.parameters()]  # where a graph reads them
    return said, engine, left + [part for fragment in engine.fragments() for part in fragment.tensors.values()]


def no_node_lives(weights):
    """Whether nothing keeps the nodes that accumulate gradients: theirs is the stream on which they were made."""

    def node(weight):
        return weight.view_as(weight).grad_fn.next_functions[0][0]

    for weight in weights:
        node(weight).metadata["seen"] = True  # goes with the node
    return not any("seen" in node(weight).metadata for weight in weights)


CASES = [  # on two ranks; DeepSpeed does not forget that there were tensor-parallel ones
    "--load-balance-scope global_batch",
    "--routing paper --precision bf16 --recompute true",
    "--routing relu --reset-at-documents true --zero-stage 2",
    "--routing-unit head_in_group --precision bf16 --zero-stage 2 --batch-warmup 64:128",
    "--load-balance-bias-rate 0.001 --dense-warmup-iters 2 --router-gumbel-noise 1 --tensor-parallel-size 2",
]


def test_a_captured_run_has_the_bits_of_one_that_is_not(tmp_path):
    run_ranks(compare_runs, 2, tmp_path)


def compare_runs(tmp_path):
    captured.capture_on_gpu = recorded
    dist.reduce_scatter_tensor = reduce_scatter  # gloo's copies from a buffer of its own, where a replay finds old sums
    for flags in CASES:
        config, *_ = parse_config(arguments("data", tmp_path, *flags.split()))
        _, _, plain = four_steps(config)
        said, engine, replayed = four_steps(replace(config, run=replace(config.run, cuda_graph=True)))
        assert "differ by 0.0e+00" in said[0] and engine.captured.graph.operations, flags
        assert all(torch.equal(*pair) for pair in zip(replayed, plain, strict=True)), flags


WARMUPS = "--seq-length-warmup 4:4 --dense-warmup-iters 2 --log-interval 1 --save-interval 2 --fused-projections"


def test_a_captured_run_resumes_through_its_warm_ups(data_dir, tmp_path):
    """Dense to step 2, parts of 4 and 8 tokens to step 4, then whole sequences: three kinds of micro-batches."""
    plain, resumed = (arguments(data_dir, tmp_path / name, *WARMUPS.split()) for name in ("plain", "resumed"))
    run_ranks(run, 1, plain)
    left = run_ranks(operations_left, 1, resumed, 2)
    assert [len(graphs) for graphs in left] == [1]
    assert run_ranks(operations_left, 1, resumed) == [[0, 0]]  # NCCL waits for graphs before it closes a group
    assert rows(tmp_path / "resumed") == rows(tmp_path / "plain")
    assert equal(state(tmp_path / "resumed", 7), state(tmp_path / "plain", 7))


def operations_left(flags, stop_after=None):
    """The number of operations that every graph of a run by the stand-in has at its end: 0, once it is closed."""
    graphs = []
    captured.capture_on_gpu = lambda *given, **named: graphs.append(recorded(*given)) or graphs[-1]
    run_checks.graph_problems = lambda config, on_gpu: []  # this machine shows no GPU
    run([*flags, "--cuda-graph"], stop_after)
    return [len(graph.operations) for graph, _ in graphs]


def test_a_graph_reads_the_tables_of_its_warm_up(monkeypatch):
    """They stay where they are, whatever other lengths are used, and these share a few tables."""

    def tables(length):
        x = torch.zeros(length, 1, 8)
        seen = apply_window(None, 2, x, True)
        return seen.starts, seen.mask, *rotary_table(length, Rotary(8, 1e4), x.dtype, x.device)

    lengths = range(33, 70)
    before = [tables(length) for length in lengths]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    after = [tables(length) for length in lengths]
    places = [[tuple(part.data_ptr() for part in found) for found in all_found] for all_found in (before, after)]
    assert places[0] == places[1] and len(set(places[0])) == 3  # 48, 64 and 96 tokens


def test_a_graph_that_keeps_its_first_tokens_is_refused(tmp_path):
    run_ranks(refuse_frozen, 1, tmp_path)


def refuse_frozen(tmp_path):
    captured.capture_on_gpu = lambda function, pool: (SimpleNamespace(replay=lambda: None), function())
    config, *_ = parse_config(arguments("data", tmp_path, "--cuda-graph", "true"))
    with pytest.raises(RuntimeError, match="--cuda-graph: a captured micro-batch differs"):
        engine_of(config).compare_kernels(lambda: next(micro_batches(config, 0, 1)))


@pytest.mark.parametrize("flags", ["--pipeline-parallel-size 2", "--zero-stage 3", "--window-strategy entropy"])
def test_a_micro_batch_that_is_no_one_graph_is_refused(flags):
    config, *_ = parse_config(["--cuda-graph", "true", *flags.split()])
    (problem,) = graph_problems(config, on_gpu=True)
    assert problem.startswith(f"--cuda-graph: {flags}")
