"""A captured micro-batch on a device that is not there: a graph that repeats operations and no Python."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moh_lm.checks import run as checks
from moh_lm.data.loader import MicroBatch
from moh_lm.flags import parse_config
from moh_lm.model.transformer import compile_layers  # noqa: F401
from moh_lm.training import captured
from moh_lm.training.step_check import StepCheck
from tests.distributed import run_ranks
from tests.training.runs import arguments, engine_of


class Recording(TorchDispatchMode):
    """Every operation with the tensors that it read and wrote, which a replay reads and writes again."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        results = function(*arguments, **(named or {}))
        self.operations.append((function, arguments, named or {}, results))
        return results

    def replay(self):
        with torch.no_grad():
            for function, arguments, named, results in self.operations:
                for kept, new in zip(tree_leaves(results), tree_leaves(function(*arguments, **named)), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.detach().copy_(new)


def recorded(function):
    with Recording() as graph:
        outputs = function()
    return graph, outputs


def micro_batches(config, step, positions):
    """Two micro-batches of 4 sequences of three sources."""
    generator = torch.Generator().manual_seed(step)
    for number in range(2):
        tokens = torch.randint(64, (4, config.seq_length + 1), generator=generator)
        within = torch.arange(config.seq_length).repeat(4, 1) % (5 + step + number) if positions else None
        sources, samples = torch.arange(4) % 3, torch.arange(4) + 8 * step + 4 * number
        yield MicroBatch(tokens[:, :-1], tokens[:, 1:], sources, within, samples)


def steps(config, positions):
    """What 4 steps, with an evaluation between them, leave: results, and every weight, moment and router's state."""
    engine = engine_of(config, num_sources=3)
    left = [*engine.compare_kernels()]
    for step in range(4):
        engine.begin(step)
        batches = list(micro_batches(config, step, positions))
        result = engine.train_step(batches, 1e-2)
        left += [result.losses, result.routers, torch.tensor([result.loss, result.grad_norm])]
        left.append(engine.step_check.gradient_not_finite.take())
        left += [torch.tensor(engine.evaluate(batches), dtype=torch.float64)]
    left += [tensor.clone() for fragment in engine.fragments() for tensor in fragment.tensors.values()]
    return left, engine


CASES = {
    "sigmoid": "--load-balance-scope global_batch --head-selection mixture",
    "bf16 paper, recomputed": "--routing paper --precision bf16 --recompute true --zero-stage 1",
    "bias, warm-up, noise": "--load-balance-bias-rate 0.001 --dense-warmup-iters 2 --router-gumbel-noise 1",
    "relu, documents, ZeRO-2": "--routing relu --reset-at-documents true --zero-stage 2",
    "groups, bf16 ZeRO-2": "--routing-unit head_in_group --precision bf16 --zero-stage 2 --batch-warmup 64:128",
}


@pytest.mark.parametrize("case", CASES)
def test_a_captured_run_has_the_bits_of_one_that_is_not(case, tmp_path):
    run_ranks(compare_runs, 1, CASES[case], tmp_path)


def compare_runs(flags, tmp_path):
    torch.use_deterministic_algorithms(True)
    config, *_ = parse_config(arguments("data", tmp_path, "--micro-batch-size", "4", *flags.split()))
    captured.capture_on_gpu = recorded
    plain, _ = steps(config, config.data.reset_at_documents)
    (sentence, *replayed), engine = steps(replace(config, run=replace(config.run, cuda_graph=True)), config.data.reset_at_documents)
    assert "differ by 0.0e+00" in sentence and engine.captured.graph
    assert len(plain) == len(replayed)
    for mine, exact in zip(replayed, plain, strict=True):
        assert torch.equal(mine, exact)
