"""The record of a step that was skipped or is a spike: which ranks, sources and samples were involved."""

import math

import torch

from moh_lm.parallel.consensus import from_all_ranks
from moh_lm.training.guard import REASONS
from moh_lm.units import listing, wrapped


def record_incident(engine, loader, batches, event_log, step, result):
    """Record why and where a step was skipped or is a spike, and with which samples. All ranks call it together.

    Returns the names of the sources with a loss or gradient that is not finite. batches: this rank's micro-batches.
    """
    run = engine.config.run
    consumed, end = run.samples_after(step - 1), run.samples_after(step)
    first = consumed + loader.rank * (end - consumed) // loader.size
    sources = torch.cat([batch.sources for batch in batches]).tolist()
    names = loader.dataset.source_names
    mine = {
        kind: [(first + place, names[sources[place]]) for place in places]
        for kind, places in engine.step_check.bad_sequences().items()
    }
    ranks = from_all_ranks((mine, engine.step_check.result().differences))
    found = {(rank, sample, source) for rank, (bad, _) in enumerate(ranks) for sample, source in sum(bad.values(), [])}
    details = [text for _, differences in ranks for text in differences]
    values = result.loss, result.grad_norm
    details += engine.guard.out_of_range(*values) or engine.guard.spikes(*values)
    facts = {
        "reason": REASONS[result.code],
        "details": list(dict.fromkeys(details)),
        "loss": result.loss if math.isfinite(result.loss) else str(result.loss),
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else str(result.grad_norm),
        "step_samples": [consumed, end - 1],
        "ranks": sorted({rank for rank, _, _ in found}),
        "samples": sorted({sample for _, sample, _ in found}),
        "sources": sorted({source for _, _, source in found}),
    }
    where = f"samples {consumed} to {end - 1}"
    if found:
        where = f"rank {listing(facts['ranks'])}; sample {listing(facts['samples'])} of {listing(facts['sources'])}"
    what = "SKIPPED" if result.skipped else "SPIKE"
    text = f"{what} step {step}: {'; '.join([facts['reason'], *facts['details']])} ({where})"
    event_log.add("skipped" if result.skipped else "spike", step, wrapped(text, 2), **facts)
    return facts["sources"]
