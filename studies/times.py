"""Measures the seconds of a training step by short runs on this machine: all variants in turns for ``--times ROUNDS``,
and the dense model for ``--hours``.

A round trains a few steps of the dense model and of each variant, one after the other, so that a machine that is slow
for a while is slow for all of them. OUT/times/MACHINE/SIZE/VARIANT/round-N has the files of one of these runs. Variants
that are added later have rounds of their own.
"""

import re
import shutil
from statistics import median

import torch

from moh_lm.kernels.devices import on_gpu
from moh_lm.kernels.measured import machine
from studies.results import metrics
from studies.runs import Run, as_flags, differs, jobs_of, place, shares, train_all

STEPS, INTERVAL = 40, 4
WARM = 4  # first intervals that do not count, in which caches fill and --compile compiles
SHORT = {  # these replace flags for longer runs
    "train-iters": STEPS, "log-interval": INTERVAL, "eval-interval": 0, "warmup-iters": 1, "schedule": "wsd",
    "decay-iters": 1,
}  # fmt: skip


def measure(plan, sizes, variants, rounds):
    """Train the rounds that a ``Comparison`` still lacks. Raises RuntimeError if a run fails."""
    together = [each for each in dict.fromkeys((plan.table.variants[0], *variants)) if each.tokens == 1]
    runs = []
    for size in sizes:
        numbers, whole = [0, *numbers_of_rounds(plan, size)], 0
        for number in numbers[1:]:
            of_round = [short_run(plan, size, variant, number) for variant in together]
            for run in of_round:
                if differs(run, plan.flags.out):
                    shutil.rmtree(run.directory, ignore_errors=True)
            whole += all(seconds(run.directory) for run in of_round)
        for number in range(max(numbers) + 1, max(numbers) + 1 + rounds - whole):
            runs += [short_run(plan, size, variant, number) for variant in together]
    coming = iter(runs)
    codes = train_all(lambda busy, _: None if busy else next(coming, None), jobs_of(plan.flags), plan.flags.ranks)
    for run in runs:
        shutil.rmtree(run.directory / "checkpoints", ignore_errors=True)  # nothing resumes from them
    for directory, code in codes.items():
        if code:
            raise RuntimeError(f"{directory}.log says why these steps failed")


def short_run(plan, size, variant, number):
    """The run of a few steps of a variant in one round."""
    flags, device = plan.flags, torch.device("cuda" if on_gpu() else "cpu")
    threads = place(flags.ranks, shares(jobs_of(flags), flags.ranks)[0])
    here = re.sub(r"\W+", "-", f"{machine(device)} {threads}")
    name = f"times/{here}/{size.name}/{variant.name}/round-{number}"
    own = {"data-dir": flags.data_dir, "checkpoint-dir": flags.out / name}
    arguments = [*plan.model_arguments(size, variant), *plan.others, *as_flags(SHORT | own)]
    return Run(name, flags.out / name, STEPS, arguments)


def numbers_of_rounds(plan, size):
    """The numbers of the rounds that were begun at a size on this machine, in order."""
    place = short_run(plan, size, plan.table.variants[0], 1).directory.parents[1]
    return sorted({number for path in place.glob("*/round-*") if (number := number_of(path))})


def number_of(path):
    """The number of the directory of a round, or None for any other file or directory."""
    found = re.fullmatch(r"round-([1-9][0-9]{0,8})", path.name)
    return int(found[1]) if found and path.is_dir() else None


def dense_seconds(plan, size):
    """Seconds per token of the dense model on this machine, the median over rounds."""
    runs = [short_run(plan, size, plan.table.variants[0], number) for number in numbers_of_rounds(plan, size)]
    return median(filter(None, (seconds(run.directory) for run in runs)))


def seconds(directory, of=median):
    """Seconds per token of a short run, the median or ``of`` over intervals with a speed; None if it has not ended."""
    rows = [row for row in metrics(directory) if "tokens_per_second" in row]
    ended = rows and rows[-1]["step"] == STEPS
    speeds = [speed for row in rows[WARM:] if type(speed := row["tokens_per_second"]) in (int, float) and speed > 0]
    return of(1 / speed for speed in speeds) if ended and speeds else None


def read_times(out, size, reference):
    """Return {machine: {variant: [its seconds over those of the ``reference`` in the same round, by round]}}.

    The fastest interval of a run counts: whatever else a machine does only makes the others slower.
    """
    found = {}
    for path in sorted(filter(number_of, out.glob(f"times/*/{size}/*/round-*"))):
        own, dense = seconds(path, min), seconds(path.parents[1] / reference / path.name, min)
        if own and dense:
            found.setdefault(path.parents[2].name, {}).setdefault(path.parent.name, []).append(own / dense)
    return found
