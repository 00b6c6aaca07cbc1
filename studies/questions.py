"""The answers that a report gives to the questions of its table, by the rules of docs/history/study.md."""

import math

from studies.results import differences, interval, section


def answers(sizes, table, diverged, elsewhere):
    """Return lines with the differences that answer the questions of the table, by size, and the answers.

    diverged: {size: {(variant, seed) of a compared run that diverged}}; at a size that decides, such a variant is not
    better than others. elsewhere: {size: variants that have no run there at their best factor yet}; such a question is
    open.
    """
    rows, ruling = [], table.sizes[:2]
    gave_up = {name for size in ruling for name, _ in diverged.get(size.name, ())}
    early = {name for size in ruling for name in elsewhere.get(size.name, ())}
    for name, against, question in table.questions:
        found = {
            size: differences(variants.get(name, {}), variants.get(against, {})) for size, variants in sizes.items()
        }
        if any(found.values()):
            pairs = []
            for size in ruling:
                lost = {seed for each, seed in diverged.get(size.name, ()) if each in (name, against)}
                pairs.append((found.get(size.name, []), max(2, size.seeds - len(lost))))
            answer = verdict(pairs)
            if {"better": name, "worse": against}.get(answer) in gave_up:
                answer = "undecided"
            if early & {name, against}:
                answer = "open"
            rows.append([name, against, question, *map(limits, found.values()), answer])
    titles = ["", "against", "", *(f"difference at {size}" for size in sizes), "answer"]
    return section("Questions", titles, rows) if rows else []


def verdict(pairs):
    """The answer to a question, given [(its differences, how many it needs)] of the sizes that decide.

    "better" or "worse": the 90% interval at the first size excludes zero, and the means at the others have its sign.
    It is "open" until each size has as many as it needs.
    """
    if any(len(values) < needed for values, needed in pairs):
        return "open"
    (center, width), *others = (interval(values) for values, _ in pairs)
    if width < abs(center) and all(other * center > 0 for other, _ in others):
        return "better" if center < 0 else "worse"
    return "undecided"


def limits(values):
    """The mean of the differences with the ends of its interval and the number of seeds; empty without any."""
    if not values:
        return ""
    center, width = interval(values)
    ends = f" [{center - width:+.4f}, {center + width:+.4f}]" if width < math.inf else ""
    return f"{center:+.4f}{ends} ({len(values)})"
