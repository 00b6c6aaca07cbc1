"""Intervals of training that were made up, for the rules of alarms."""

from types import SimpleNamespace

import torch

from moh_lm.monitor.accumulator import MetricsAccumulator


def interval(sequences=(3, 1), loss=2.0, seconds=1.0, tokens=64, not_finite=()):
    """One step with so many sequences of the sources a and b, at 64 tokens per sequence and ``loss`` per token."""
    made = MetricsAccumulator(["a", "b"], [], torch.device("cpu"))
    losses = torch.tensor([[loss * n * tokens, n * tokens, n] for n in sequences], dtype=torch.float64)
    parts = {"forward_backward": seconds * 0.8, "optimizer": seconds * 0.1}
    result = SimpleNamespace(losses=losses, routers=made.routers, skipped=bool(not_finite), seconds=parts)
    made.add(result, seconds * 0.1, sum(sequences) * 64, not_finite)
    return made
