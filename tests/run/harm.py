"""A run in which one rank is harmed at a given step."""

import math
import os

from moh_lm.checkpoint.saver import NonFiniteState
from moh_lm.compared import Differs
from moh_lm.training.engine import Engine
from moh_lm.training.guard import BadNumbers
from tests.training.runs import run

EVERY_STEP = "--save-interval 1 --log-interval 1 --async-save false --eval-interval 0 --eval-samples 1".split()
EVERY_STEP += ["--train-iters", "5"]


def run_with(flags, step, harm, rank=1, count=1):
    """``run``, in which ``harm(engine)`` is called on ``rank`` at the beginning of ``count`` steps from ``step`` on."""
    train_step = Engine.train_step
    calls = {"step": 0}

    def harmed(engine, *others, **more):
        calls["step"] += 1
        harm.undo = None
        if step <= calls["step"] < step + count and int(os.environ["RANK"]) == rank:
            harm(engine)
        try:
            return train_step(engine, *others, **more)
        finally:
            if harm.undo:
                harm.undo()

    Engine.train_step = harmed
    try:
        return run(flags)
    except (BadNumbers, Differs, NonFiniteState) as error:
        return str(error)


def nan_in_the_loss(engine):
    handle = engine.model.model.register_forward_hook(lambda module, inputs, out: out * math.nan)
    nan_in_the_loss.undo = handle.remove


def run_and_suffer(flags, step, harm, output, rank=1):
    """``run_with``, whose ``harm`` takes no engine; what a rank prints on standard error goes to a file of its own."""
    os.dup2(os.open(f"{output}-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    return run_with(flags, step, lambda engine: harm(), rank)
