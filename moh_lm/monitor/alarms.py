"""Alarms: one event when something begins to go wrong, and one when it is over.

docs/monitoring.md says when each of them fires. A running median covers the last ``WINDOW`` intervals in which the
alarm's condition did not hold, and is used once there are ``ENOUGH`` of them. Checkpoints record which alarms have
fired, so a resumed run does not fire them again. The lines of ``Announcer``, which people read, are fewer than the
events.

A source with the share w has a sample among any m consecutive samples with m w >= 2, because moh_lm.data.mixture keeps
its count in every prefix within less than one sample of its share.
"""

import math
import statistics

from moh_lm.monitor.head_load import high_load
from moh_lm.monitor.ranks import stage_medians
from moh_lm.units import listing

WINDOW, ENOUGH = 50, 5
AGAIN = 10  # intervals from a line about a kind of alarm to its next one, at least
COLLAPSE, BALANCE, THROUGHPUT, SOURCE = "routing collapse", "balance loss", "throughput", "dead source"
DRIFT, SLOW_RANK = "gate drift", "slow rank"
PLACES = {SOURCE: "source", SLOW_RANK: "rank"}  # for kinds that are not about a layer


class Alarms:
    """The alarms that fire. A condition is (kind, place, head); place is a layer, source or rank, head a routed head.
    Either may be None.

    settings: ``AlarmConfig``. layers: ``RoutedLayer``s. shares: {source: its share of the mix}.
    """

    def __init__(self, settings, layers, shares):
        self.settings = settings
        self.layers = layers
        self.unit = layers[0].unit if layers else "head"
        self.shares = shares
        self.streaks = {}  # {condition: intervals that it has held for}
        self.firing = {}  # {condition: intervals that it has not held for}
        self.history = {}  # {(kind, place): values at which it did not hold}
        self.unseen = dict.fromkeys(shares, 0)  # samples of all sources since the last one of each

    def check(self, accumulator, figures, ranks=()):
        """Return [facts for the event log] of the alarms that begin or end with an interval.

        accumulator: ``MetricsAccumulator`` of the interval. figures: its ``head_figures``, or None. ranks: result of
        ``rank_figures``.
        """
        held = dict(self.dead_sources(accumulator))
        if accumulator.timed_tokens:
            held.update(self.slow(accumulator, ranks))
            held.update(self.slow_ranks(ranks))
        known = {THROUGHPUT, SOURCE, SLOW_RANK}
        if figures:
            held.update(self.collapsed(figures))
            held.update(self.unbalanced(figures))
            held.update(self.drifted(figures))
            known |= {COLLAPSE, BALANCE, DRIFT}
        # Alarms about which this interval has no information stay as they were.
        unknown = {condition: number for condition, number in self.streaks.items() if condition[0] not in known}
        self.streaks = unknown | {condition: self.streaks.get(condition, 0) + 1 for condition in held}
        for condition in self.firing:
            if condition[0] in known:
                self.firing[condition] = 0 if condition in held else self.firing[condition] + 1
        begun = [c for c in held if c not in self.firing and self.streaks[c] >= self.patience(c)]
        ended = [c for c, quiet in self.firing.items() if quiet >= self.patience(c)]
        self.firing = {c: quiet for c, quiet in self.firing.items() if c not in ended} | dict.fromkeys(begun, 0)
        return [
            *grouped("alarm", begun, held, self.unit),
            *grouped("alarm over", sorted(ended, key=str), {}, self.unit),
        ]

    def patience(self, condition):
        return 1 if condition[0] == SOURCE else self.settings.alarm_intervals

    def collapsed(self, figures):
        low, high = self.settings.alarm_head_low, self.settings.alarm_head_high
        for layer, loads in zip(self.layers, figures["load"], strict=True):
            fair = layer.fair_load(loads)
            for number, load in zip(layer.routed_numbers, loads, strict=True):
                dead = low and load == 0  # even if all heads of a layer are, with --routing relu
                if dead or load < low * fair or load > high_load(fair, high):
                    text = f"{layer.unit} {number} is selected by {load:.1%} of the tokens; fair is {fair:.1%}"
                    yield (COLLAPSE, layer.index, number), text

    def unbalanced(self, figures):
        for layer, loss in zip(self.layers, figures["balance_loss"], strict=True):
            if loss is None:
                continue  # it balances nothing
            usual = self.beyond((BALANCE, layer.index), loss, 0, self.settings.alarm_balance_loss)
            if usual is not None:
                yield (BALANCE, layer.index, None), f"{loss:.4f} after a median of {usual:.4f}"

    def drifted(self, figures):
        factor = self.settings.alarm_gate_drift
        for layer, gate in zip(self.layers, figures["gate_mean"], strict=True):
            usual = self.beyond((DRIFT, layer.index), gate, factor and 1 / factor, factor)
            if usual is not None:
                yield (DRIFT, layer.index, None), f"mean gate {gate:.4f} after a median of {usual:.4f}"

    def slow(self, accumulator, ranks):
        rate, seconds = accumulator.tokens_per_second(), accumulator.seconds_per_step()
        usual = self.beyond((THROUGHPUT, None), rate, self.settings.alarm_throughput, 0)
        if usual is not None:
            text = f"{rate:,.0f} tokens/s after a median of {usual:,.0f}"
            waits = [figures.data for figures in ranks]
            if waits and max(waits) > (sum(seconds.values()) - seconds["save"]) / 10:
                text += f"; rank {waits.index(max(waits))} waits {max(waits):.2f} s per step for its data"
            yield (THROUGHPUT, None, None), text

    def slow_ranks(self, ranks):
        limit, medians = self.settings.alarm_slow_rank, stage_medians(ranks)
        for rank, figures in enumerate(ranks if limit else ()):
            median = medians[figures.stage]
            if figures.own > limit * median:
                text = f"{figures.own:.3g} s of own work per step; the median of ranks like it is {median:.3g}"
                yield (SLOW_RANK, rank, None), text

    def beyond(self, key, value, low, high):
        """Return the running median if ``value`` is below ``low`` or above ``high`` times it. Otherwise return None,
        and ``value`` enters the median.

        low, high: 0 for no limit.
        """
        history = self.history.setdefault(key, [])
        if len(history) >= ENOUGH:
            median = statistics.median(history)
            if (low and value < low * median) or (high and value > high * median):
                return median
        if math.isfinite(value):
            history.append(value)
        del history[:-WINDOW]
        return None

    def dead_sources(self, accumulator):
        sequences = accumulator.sequences()
        samples = sum(sequences.values())
        losses = dict(zip(accumulator.names, accumulator.losses.tolist(), strict=True))
        for name, share in self.shares.items():
            self.unseen[name] = 0 if sequences[name] else self.unseen[name] + samples
            total, tokens, seen = losses[name]
            if share * self.unseen[name] >= 2:
                text = f"no sample among {self.unseen[name]:,.0f}, although its share of the mix is {share:.2%}"
            elif name in accumulator.not_finite:
                text = f"not finite; steps skipped for it: {accumulator.not_finite[name]}"
            elif seen and not tokens:
                text = f"no token of {seen:,.0f} sequences has a label"
            elif seen and total == 0:
                text = f"a loss of exactly 0 over {tokens:,.0f} tokens"
            else:
                continue
            yield (SOURCE, name, None), text

    def state(self):
        """Return the alarms' state as a JSON-able object; ``restore`` reads it."""
        return {
            "streaks": [[*condition, number] for condition, number in self.streaks.items()],
            "ringing": [[*condition, number] for condition, number in self.firing.items()],
            "history": [[*key, values] for key, values in self.history.items()],
            "unseen": self.unseen,
        }

    def restore(self, state, same_data):
        """Restore ``state()``. same_data: whether the sources and their shares are those of the state."""
        self.streaks = {tuple(condition): number for *condition, number in state["streaks"]}
        self.firing = {tuple(condition): number for *condition, number in state["ringing"]}
        self.history = {tuple(key): values for *key, values in state["history"]}
        self.forget(SLOW_RANK)  # rank numbers may belong to other devices now
        if same_data:
            self.unseen = dict(state["unseen"])
        else:
            self.forget(SOURCE)

    def forget(self, *kinds):
        """Reset the alarms of these kinds, because later values are not comparable with earlier ones."""
        self.streaks = {condition: number for condition, number in self.streaks.items() if condition[0] not in kinds}
        self.firing = {condition: quiet for condition, quiet in self.firing.items() if condition[0] not in kinds}
        self.history = {key: values for key, values in self.history.items() if key[0] not in kinds}


def grouped(event, conditions, details, unit):
    """Return one object of facts for all ``conditions`` of a kind and place. ``details``: {condition: text about it}.

    unit: what an expert is called.
    """
    groups = {}
    for condition in conditions:
        groups.setdefault(condition[:2], []).append(condition)
    found = []
    for (kind, place), members in groups.items():
        heads = sorted(head for _, _, head in members if head is not None)
        said = [details[condition] for condition in members if details.get(condition)]
        if heads and not said:
            said = [f"{unit} {head}" for head in heads]
        facts = {"event": event, "alarm": kind, "details": said}
        facts |= {PLACES.get(kind, "layer"): place} if place is not None else {}
        found.append(facts | ({f"{unit}s": heads} if heads else {}))
    return found


class Announcer:
    """Makes lines about alarms for people: one for all of a kind that begin together, and one for those that end.

    The next line about a kind comes at least ``AGAIN`` intervals later, and covers everything since the last one.
    """

    def __init__(self):
        self.waiting = {}  # {kind: [facts]}
        self.silent = {}  # {kind: intervals left}

    def lines(self, found):
        """Return the lines of an interval. found: result of ``Alarms.check``."""
        for facts in found:
            self.waiting.setdefault(facts["alarm"], []).append(facts)
        self.silent = {kind: left - 1 for kind, left in self.silent.items() if left > 1}
        due = [kind for kind in self.waiting if kind not in self.silent]
        self.silent |= dict.fromkeys(due, AGAIN)
        return [line for kind in due for line in announced(kind, self.waiting.pop(kind))]

    def rest(self):
        """Return the lines that still wait, when no interval follows."""
        waiting, self.waiting = self.waiting, {}
        return [line for kind, facts in waiting.items() for line in announced(kind, facts)]


def announced(kind, waiting):
    """Yield lines for the ``waiting`` facts: one for alarms that begin and one for those that end, in time order."""
    latest_first = list(dict.fromkeys(facts["event"] for facts in reversed(waiting)))
    for event in reversed(latest_first):
        same = [facts for facts in waiting if facts["event"] == event]
        word = "note" if (kind, event) == (THROUGHPUT, "alarm") else event  # a busy machine does not affect results
        what = PLACES.get(kind, "layer")
        places = list(dict.fromkeys(facts.get(what) for facts in same))
        said = same[-1]["details"]
        if len(places) > 1 and said:
            said = [f"for example {said[0]} ({what} {places[-1]})"]
        more = f"; and {len(said) - 8} more" if len(said) > 8 else ""
        yield f"{word}: {kind}{where(kind, places)}" + (f": {'; '.join(said[:8])}{more}" if said else "")


def where(kind, places):
    """Return a place such as " in layer 3"; a source and a rank are named alone."""
    if places == [None]:
        return ""
    layers = "" if kind in PLACES else " in layer" + "s" * (len(places) > 1)
    return f"{layers} {listing(places)}"
