"""The data of a run whose mix or shards changed during training: a list of segments.

A segment describes the data between two changes. Sample n of a run is a pure function of n and of the segments. It
belongs to the last segment whose ``first_sample`` is at most n, and its place depends on that segment and on the
windows that each of its sources had ``consumed`` before.

    {"first_sample": 0, "seed": 1234, "seq_length": 2048, "validation_fraction": 0.001,
     "weights": {source: integer}, "shards": {source: hash of the contents}, "consumed": {source: windows}}

A segment has "packing" too if it is not ``PACKING``. The separate mix of a decay (--decay-mix) is also a segment,
planned from the start.

A source continues at its next unread window, and in its epoch, if its windows and their order are the same as in an
earlier segment: the same shards, seed, sequence length, validation fraction and packing. Otherwise it begins at window
0.
"""

import functools
from collections.abc import Mapping

from moh_lm.config import flag
from moh_lm.data.mixture import sample_counts
from moh_lm.units import listing

ORDER = ("seed", "seq_length", "validation_fraction", "packing")  # settings on which the windows of every source depend
PACKING = "concatenate"  # in segments without an entry
PLACE = ("first_sample", "consumed")  # what a segment has besides the fingerprint
NAMED = 3  # shards of a source that a sentence may name


def next_segments(segments: list[dict], fingerprint: dict, consumed_samples: int) -> list[dict]:
    """Return the segments of a run that resumes with the data of ``fingerprint`` after ``consumed_samples`` samples. No
    segment is added if the last one has this fingerprint."""
    segments = [segment for segment in segments if segment["first_sample"] < consumed_samples]
    if segments and {key: value for key, value in segments[-1].items() if key not in PLACE} == fingerprint:
        return segments
    consumed = {name: windows_read(segments, consumed_samples, name, fingerprint) for name in fingerprint["weights"]}
    return [*segments, {"first_sample": consumed_samples, **fingerprint, "consumed": consumed}]


def windows_read(segments, consumed_samples, name, fingerprint) -> int:
    """Count the windows of the source ``name``, as in ``fingerprint``, among the first ``consumed_samples``."""
    end = consumed_samples
    for segment in reversed(segments):
        same_order = order_of(segment) == order_of(fingerprint)
        if same_order and segment["shards"].get(name) == fingerprint["shards"][name]:
            weights = tuple(sorted(segment["weights"].items()))
            return segment["consumed"][name] + counts_of(weights, end - segment["first_sample"])[name]
        end = segment["first_sample"]
    return 0


@functools.lru_cache(64)  # every source asks the same
def counts_of(weights, samples):
    """Return {source: its samples among the first ``samples`` of a mix}. weights: (source, weight) of each."""
    names, values = zip(*weights, strict=True)
    return dict(zip(names, sample_counts(list(values), samples).tolist(), strict=True))


def order_of(segment):
    """Return the values of ``ORDER`` in a segment or a fingerprint."""
    return [segment.get(key, PACKING) if key == "packing" else segment[key] for key in ORDER]


def tokens_read(segments, samples, seq_length) -> int:
    """Return the tokens of the first ``samples`` samples. seq_length: for segments that record none."""
    firsts = [segment.get("first_sample", 0) for segment in segments]
    lengths = [segment.get("seq_length", seq_length) for segment in segments]
    parts = zip(firsts, [*firsts[1:], samples], lengths, strict=False)  # an import has none
    return sum((end - first) * length for first, end, length in parts)


def changes(before: dict, units_before: Mapping, now: dict, units_now: Mapping) -> list[str]:
    """Return a sentence for each difference between two fingerprints. units: source -> shard -> content hash."""
    orders = zip(ORDER, order_of(before), order_of(now), strict=True)
    found = [f"{flag(key)} was {was} and is {now_is}" for key, was, now_is in orders if was != now_is]
    for name in sorted(before["weights"].keys() | now["weights"].keys()):
        was, share = describe_share(before["weights"], name), describe_share(now["weights"], name)
        if share is None:
            found.append(f"source {name} was {was} of the mix and is no longer in it")
        elif was is None:
            found.append(f"source {name} was not in the mix and is {share} of it")
        elif was != share:
            found.append(f"source {name} was {was} of the mix and is {share} of it")
        if was and share and before["shards"][name] != now["shards"][name]:
            found += changed_shards(name, units_before[name], units_now[name])
    return found


def describe_share(weights, name):
    if name not in weights:
        return None
    total = sum(weights.values())
    return f"{weights[name]}/{total} ({weights[name] / total:.2%})"


def changed_shards(source, before, now) -> list[str]:
    """Return sentences that name the added, removed or changed shards of a source."""
    verdicts = {
        "added": [name for name in now if name not in before],
        "removed": [name for name in before if name not in now],
        "changed": [name for name in now if name in before and before[name] != now[name]],
    }
    found = []
    for verdict, names in verdicts.items():
        if names:
            found.append(f"source {source}: {listing(names, NAMED)} {verdict}, {len(now)} shards now")
    return found or [f"source {source}: its shards are in another order"]
