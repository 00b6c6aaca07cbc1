"""A run in which one rank is harmed at a given step, and what it leaves: its events, and the state of a step."""

import json
import math
import os
from pathlib import Path

import torch

from moh_lm.checkpoint.fragments import FragmentReader
from moh_lm.training.engine import Engine
from moh_lm.training.guard import BadNumbers
from tests.training.test_training import run

EVERY_STEP = ("--save-interval", "1", "--log-interval", "1", "--async-save", "false")


def events(directory, kind):
    lines = (Path(directory) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def state(directory, step):
    """{kind/name: whole tensor} of a checkpoint."""
    reader = FragmentReader(Path(directory) / "checkpoints" / f"step-{step}")
    kinds = ("master", "exp_avg", "exp_avg_sq")
    return {f"{kind}/{name}": reader.read(kind, name) for name in reader.shapes for kind in kinds}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


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
    except BadNumbers as error:
        return str(error)


def nan_in_the_loss(engine):
    handle = engine.model.model.register_forward_hook(lambda module, inputs, out: out * math.nan)
    nan_in_the_loss.undo = handle.remove
