"""What the tests of the atlas share: plans that know the speed of each size, and the rows of short runs."""

import json

from studies import atlas as command
from studies import comparison, times
from studies.atlas_forms import VARIANTS


def make(out, *more):
    """The plan of an atlas that knows the speed of each size."""
    plan = comparison.Comparison(command.parse_arguments([str(out), "--data-dir", str(out / "data"), *more]))
    for size, speed in zip(plan.table.sizes, (1000, 500, 250), strict=True):
        write_rows(times.short_run(plan, size, VARIANTS[0], 1).directory, *rows_of_steps(speed))
    return plan


def rows_of_steps(speed):
    """The rows of a short run: slow at first, then of this speed."""
    return [{"step": step, "tokens_per_second": 1 if step < 20 else speed} for step in range(4, 44, 4)]


def write_rows(directory, *rows):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
