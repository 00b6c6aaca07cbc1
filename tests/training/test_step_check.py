"""Every update of the weights is looked at before it is made, by the engine that makes it and in its own step."""

import functools

import pytest
import torch
from deepspeed.runtime import bf16_optimizer

from moh_lm.flags import parse_config
from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.training.step_check import NotExamined
from tests.distributed import run_ranks
from tests.training.runs import SIZES, engine_of, micro_batches_of

ONE_BATCH = (*SIZES.split(), "--batch-tokens", "32")


def engines(flags, number):
    """Engines of one process, all of the same model."""
    config, _ = parse_config([*ONE_BATCH, *flags])
    return [engine_of(config) for _ in range(number)]


def batch(seed):
    tokens = torch.randint(3, 64, (2, 17), generator=torch.Generator().manual_seed(seed))
    return micro_batches_of(tokens, 2)


def norms(flags, seeds):
    """The gradient norms of engines that take a step each, the last of them first; and of each engine by itself."""
    norm_function = bf16_optimizer.get_global_norm_of_tensors
    pairs = list(zip(engines(flags, len(seeds)), seeds, strict=True))
    together = [engine.train_step(batch(seed), 1e-3).grad_norm for engine, seed in reversed(pairs)]
    assert bf16_optimizer.get_global_norm_of_tensors is norm_function
    alone = [engines(flags, 1)[0].train_step(batch(seed), 1e-3).grad_norm for seed in reversed(seeds)]
    return together, alone


def test_engines_in_one_process_examine_their_own_gradients():
    ((together, alone),) = run_ranks(norms, 1, ("--precision", "bf16"), (1, 2))
    assert together == alone and together[0] != together[1]


def never(norm):
    return torch.ones(())


def twice(norm):
    norm()
    return norm()


def said_of_a_second_step(ask):
    """What is raised by the second step of an engine in which DeepSpeed takes its norm by way of ``ask``."""
    (engine,) = engines((), 1)
    engine.train_step(batch(1), 1e-3)
    optimizer = engine.optimizer.optimizer
    optimizer.scaled_global_norm = functools.partial(ask, optimizer.scaled_global_norm)
    with pytest.raises(NotExamined) as error:
        engine.train_step(batch(2), 1e-3)
    return str(error.value)


@pytest.mark.parametrize("ask, said", [(never, "never asked for the gradient norm"), (twice, "asked twice")])
def test_an_update_that_was_not_examined_is_an_error(ask, said):
    assert said in run_ranks(said_of_a_second_step, 1, ask)[0]


def step_without_labels():
    (engine,) = engines((), 1)
    (part,) = batch(1)
    result = engine.train_step([part._replace(labels=torch.full_like(part.labels, IGNORED))], 1e-3)
    return result.loss, result.skipped


def test_a_step_without_labels_has_loss_0_and_is_not_skipped():
    assert run_ranks(step_without_labels, 1) == [(0.0, False)]
