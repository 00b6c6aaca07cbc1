"""Decides whether the gradients of a step may be applied.

A step is skipped if its loss or gradient norm is not finite, or so large that it cannot come from training (a flipped
bit of an exponent multiplies a number by up to 1e38), if it is a spike and --on-spike is skip, or if weights that
several ranks hold were found to differ. All ranks decide together, before any of them changes a weight. A skipped step
consumes its samples and its place in the learning rate schedule; the optimizer's state stays. Too many skipped steps in
a window end the run: a later start resumes from the last checkpoint, whose state is finite. A master weight that cannot
come from training ends it at once. The weights must be checked themselves, because normalisation hides an activation of
1e36: loss and norm can look ordinary although the model is ruined.
"""

import math
import statistics

import torch

FINE, SPIKE, OUT_OF_RANGE, DIVERGENCE, GRADIENT, LOSS = range(6)  # if ranks report different codes, the highest counts
REASONS = (
    "",
    "spike",
    "too large to come from training",
    "weights differ between ranks",
    "gradient not finite",
    "loss not finite",
)


def largest(tensor):
    """Return the largest magnitude in ``tensor``, []; NaN if an element is NaN. The tensor is not copied."""
    return torch.stack(tensor.detach().aminmax()).abs().max()


class BadNumbers(Exception):
    """The run cannot continue: too many steps were skipped, copies of a weight differ for good, or a master weight is
    not finite or too large to come from training."""


class Guard:
    """The losses and gradient norms of the last good steps, the skipped steps, and the rule for skipping a step."""

    def __init__(self, settings):
        self.settings = settings
        self.history = {"loss": [], "gradient norm": []}
        self.skipped = []

    def classify(self, loss, grad_norm):
        """Return the code of ``REASONS`` for the mean ``loss`` and the gradient norm of a step."""
        if not math.isfinite(loss):
            return LOSS
        if not math.isfinite(grad_norm):
            return GRADIENT
        if self.out_of_range(loss, grad_norm):
            return OUT_OF_RANGE
        return SPIKE if self.spikes(loss, grad_norm) else FINE

    def skips(self, code):
        """Return whether a step with this code is skipped."""
        return code > SPIKE or (code == SPIKE and self.settings.on_spike == "skip")

    def out_of_range(self, loss, grad_norm):
        """Return sentences for finite values above ``absurd_factor`` times the median of the last good steps.

        A median below 1 counts as 1, because a run that has memorised its data has medians near 0.
        """
        factor, found = self.settings.absurd_factor, []
        for (name, window), value in zip(self.history.items(), (loss, grad_norm), strict=True):
            usual = max(1.0, statistics.median(window)) if window else 1.0
            if factor and factor * usual < value < math.inf:
                found.append(f"{name} {value:.4g} is above --absurd-factor {factor:g} times {usual:.4g}")
        return found

    def is_finite_and_bounded(self, weight):
        """Return whether the largest magnitude of a master weight can come from training."""
        return math.isfinite(weight) and weight <= (self.settings.absurd_factor or math.inf)

    def out_of_range_weights(self, weights, where):
        """Return sentences for those of ``weights``, {name: tensor}, that cannot come from training."""
        sizes = {name: largest(weight).item() for name, weight in weights.items()}
        return [
            f"{name} holds {size:.4g} {where}, which cannot come from training (--absurd-factor)"
            for name, size in sizes.items()
            if not self.is_finite_and_bounded(size)
        ]

    def spikes(self, loss, grad_norm):
        """Return sentences for values that are ``spike_sigmas`` deviations above the mean of a full window."""
        found = []
        for (name, window), value in zip(self.history.items(), (loss, grad_norm), strict=True):
            if self.settings.spike_sigmas and len(window) == self.settings.spike_window:
                mean, deviation = statistics.fmean(window), statistics.pstdev(window)
                if value > mean + self.settings.spike_sigmas * deviation:
                    found.append(f"{name} {value:.4g} after a mean of {mean:.4g} +- {deviation:.2g}")
        return found

    def record(self, step, loss, grad_norm, skipped):
        """Record step number ``step``. Raises BadNumbers."""
        settings = self.settings
        if not skipped:
            for window, value in zip(self.history.values(), (loss, grad_norm), strict=True):
                window.append(value)
                del window[: -settings.spike_window]
            return
        self.skipped = [earlier for earlier in self.skipped if earlier > step - settings.spike_window] + [step]
        if len(self.skipped) > settings.max_skipped_steps:
            raise BadNumbers(
                f"{len(self.skipped)} of the last {settings.spike_window} steps were skipped, and "
                f"--max-skipped-steps is {settings.max_skipped_steps}"
            )

    def forget(self):
        """Forget the last losses and norms, because later ones cannot be compared with them."""
        self.history = {name: [] for name in self.history}

    def state(self):
        """Return the memory as a JSON-able object; ``restore`` reads it."""
        return {"history": self.history, "skipped": self.skipped}

    def restore(self, state):
        window = self.settings.spike_window
        self.history = {name: values[-window:] for name, values in state["history"].items()}
        self.skipped = list(state["skipped"])
