"""Sums over the steps of a log interval, which become means when it ends.

The sums are part of a checkpoint, so that an interval in which a run was stopped and resumed reads like any other.
Times belong to one process: after a resume they cover only the later steps.
"""

import math
from copy import copy

import torch

from moh_lm.model.balance import row_width
from moh_lm.monitor.head_load import head_figures

PARTS = ("data", "forward_backward", "optimizer", "log", "save")  # parts of the time of a step
COUNTED = ("tokens", "skipped_steps", "skipped_sequences", "not_finite")  # stored in a checkpoint beside both sums


class MetricsAccumulator:
    """Sums of ``StepResult``s since the last line of the log; the same on every rank, except for times.

    names: names of the sources. layers: ``RoutedLayer``s.
    """

    def __init__(self, names, layers, device):
        self.names = names
        self.layers = layers
        width = sum(map(row_width, layers))
        self.losses = torch.zeros(len(names), 3, dtype=torch.float64, device=device)
        self.routers = torch.zeros(len(names), width, dtype=torch.float64, device=device)
        self.clear()

    def clear(self):
        self.losses.zero_()
        self.routers.zero_()
        self.skipped_steps = 0
        self.tokens = 0  # tokens of steps that were not skipped, with or without a label
        self.skipped_sequences = [0] * len(self.names)  # of each source in skipped steps
        self.not_finite = {}  # {source: steps that were skipped because of it}
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.own_seconds = 0.0  # this rank's own work; see moh_lm.monitor.ranks
        self.timed_steps = self.timed_tokens = 0

    def add(self, result, data_seconds, tokens, not_finite=(), forward_seconds=0.0):
        """Add a step. data_seconds: how long it waited for its batches. not_finite: sources with a loss or gradient
        that is not finite. forward_seconds: time from ``ForwardTimer``.
        """
        if result.skipped:
            self.skipped_steps += 1
            sequences = result.losses[:, 2].tolist()
            self.skipped_sequences = [a + b for a, b in zip(self.skipped_sequences, sequences, strict=True)]
        else:
            self.tokens += tokens
            self.losses += result.losses
            self.routers += result.routers
        for name in not_finite:
            self.not_finite[name] = self.not_finite.get(name, 0) + 1
        for part, seconds in {"data": data_seconds, **result.seconds}.items():
            self.spend(part, seconds)
        self.own_seconds += data_seconds + forward_seconds
        self.timed_steps += 1
        self.timed_tokens += tokens

    def spend(self, part, seconds):
        """Add to the time of one of the ``PARTS``."""
        self.seconds[part] += seconds

    def began(self, step, config):
        """Return the number of iterations before the interval that ends after ``step``, if ``config`` is the run's."""
        samples = self.tokens // config.seq_length + round(sum(self.skipped_sequences))
        return config.run.iterations(config.run.samples_after(step) - samples)

    def tokens_per_second(self):
        """Return the tokens per second of all ranks together, without the time of saves and evaluations."""
        return ratio(self.timed_tokens, sum(self.seconds.values()) - self.seconds["save"])

    def seconds_per_step(self):
        return {part: ratio(seconds, self.timed_steps) for part, seconds in self.seconds.items()}

    def own_seconds_per_step(self):
        return ratio(self.own_seconds, self.timed_steps)

    def loss(self):
        """Return the mean training loss per token."""
        return ratio(*self.losses.sum(0).tolist()[:2])

    def source_losses(self):
        """Return the mean training loss per token of every source that was seen."""
        rows = zip(self.names, self.losses.tolist(), strict=True)
        return {name: total / tokens for name, (total, tokens, _) in rows if tokens}

    def sequences(self):
        """Return {source: number of its sequences in all steps, including skipped ones}."""
        rows = zip(self.names, self.losses[:, 2].tolist(), self.skipped_sequences, strict=True)
        return {name: seen + skipped for name, seen, skipped in rows}

    def head_figures(self, high, parallel):
        """Return ``head_figures`` of moh_lm.monitor.head_load; None without routers, if all steps were skipped, or if
        some sums are unknown."""
        if not self.layers or not self.tokens or self.routers.isnan().all():
            return None
        sequences = self.losses[:, 2].tolist()
        length = self.tokens / sum(sequences)
        sums = self.routers.cpu().numpy()
        return head_figures(self.layers, sums, self.names, sequences, length, high, parallel)

    def state(self):
        """Return the sums as a JSON-able object; ``restore`` reads it."""
        sums = {"losses": self.losses.tolist(), "routers": self.routers.tolist()}
        return sums | {name: getattr(self, name) for name in COUNTED}

    def restore(self, state):
        self.losses.copy_(torch.tensor(state["losses"], dtype=torch.float64))
        if self.layers:
            routers = torch.tensor(state["routers"], dtype=torch.float64)
            if routers.shape == self.routers.shape:
                self.routers.copy_(routers)
            elif state["tokens"]:  # another version wrote it, with other sums
                self.routers.fill_(math.nan)
        for name in COUNTED:
            setattr(self, name, copy(state[name]))


def ratio(total, count):
    return total / count if count else math.nan
