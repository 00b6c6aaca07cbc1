"""A comparison of variants: the next run to train, its cost, and the time to write the report."""

import itertools
import math
import time
from statistics import mean
from typing import NamedTuple

from moh_lm.checks import config_problems
from moh_lm.checks.schedule import schedule_problems
from moh_lm.config import ConfigError
from moh_lm.cost.flops import flops_per_token
from moh_lm.cost.memory import parameter_counts
from moh_lm.data.shards import ShardError, read_manifest
from moh_lm.flags import parse_config
from studies import recorded, report, times
from studies.results import factor_and_seed, final_evaluation, has_diverged, metrics, run_name
from studies.runs import Run, as_flags, check_flags, exit_code, jobs_of, lock_directory, train_all
from studies.table import SEEDS, TUNING_SEED, Size, Variant
from studies.tuning import mean_losses, neighbours, search

OVERHEAD = 1.1  # time with evaluations and the start of a run over its training time


class Trial(NamedTuple):
    """A run that the table requires. factor: multiplies the learning rate; a guess until tuning makes it ``known``."""

    size: Size
    variant: Variant
    factor: float
    seed: int
    known: bool = True


def compare(flags):
    if flags.report:
        return report.write(flags.out, flags.table)
    comparison = Comparison(flags)
    describe_data(flags.data_dir, flags.table.enough_tokens)
    for variant, reason in comparison.refused.items():
        print(f"left out: {variant}: {reason}")
    if not comparison.variants:
        raise ConfigError(list(dict.fromkeys(comparison.refused.values())))
    comparison.check_flags()
    _lock = lock_directory(flags.out)
    if flags.plan or flags.hours < math.inf:
        times.measure(comparison, comparison.trained, flags.table.variants[:1], rounds=1)
        comparison.describe_plan()
    if flags.plan:
        return 0
    codes = {}
    if flags.recorded:
        print(recorded.take_over(comparison, flags.recorded))
    elif flags.times:
        times.measure(comparison, comparison.sizes, comparison.variants, flags.times)
    else:
        codes = train_all(comparison.next_run, jobs_of(flags), flags.ranks)
    report.write(flags.out, flags.table)
    return exit_code(codes)


def describe_data(directory, enough):
    """Print the tokens of each source, and whether they suffice. Raises ConfigError if there are none."""
    try:
        sources = read_manifest(directory)["sources"]
    except ShardError as error:
        advice = "give a directory that data_prep/tokenize.py has finished"
        raise ConfigError([f"--data-dir {directory}: {error}; {advice}"]) from error
    tokens = {name: sum(unit["tokens"] for unit in source["units"].values()) for name, source in sources.items()}
    found = sum(tokens.values())
    print(f"text: {found:,} tokens: " + ", ".join(f"{name} {count:,}" for name, count in tokens.items()))
    if found < enough:
        print(f"text: fewer than {enough:,} tokens, so they are read more often")


class Comparison:
    """The requested runs, the existing ones, and the next one. ``refused``: {variant: why it cannot be trained}."""

    def __init__(self, flags):
        self.flags, self.table, self.others, self.begun = flags, flags.table, flags.others, time.monotonic()
        self.sizes = [size for size in self.table.sizes if size.name in flags.sizes]
        tuned = self.table.sizes[:1] if len(flags.rates) > 1 else ()
        self.trained = list(dict.fromkeys((*tuned, *self.sizes)))  # sizes that have runs
        self.refused, self.variants = {}, []
        chosen = [each for each in self.table.variants if {each.name, each.table} & {*flags.variants}]
        for variant in chosen:
            try:
                configs = [self.config(size, variant) for size in self.trained]
                problems = [problem for config in configs for problem in config_problems(config, self.flags.ranks)]
            except ConfigError as error:
                problems = error.problems
            if problems:
                self.refused[variant.name] = problems[0]
            else:
                self.variants.append(variant)

    def model_arguments(self, size, variant):
        """Return the flags of the model, without those of its budget, rate and seed."""
        return [*self.table.common, *size.flags.split(), *variant.arguments(size.heads, size.layers)]

    def config(self, size, variant):
        """Return the ``Config`` of the variant with a budget that leaves room for any schedule. Raises ConfigError."""
        place = ["--data-dir", "data", "--checkpoint-dir", "run", "--train-iters", "1000000"]
        return parse_config([*self.model_arguments(size, variant), *place, *self.others])[0]

    def iterations(self, size, variant):
        """Return the iterations of the size, or those that give its first variant the size's tokens per parameter."""
        if size.iterations:
            return math.ceil(size.iterations * variant.tokens)
        config = self.config(size, self.table.variants[0])
        tokens = size.tokens * parameter_counts(config.model)["total"] * variant.tokens
        return math.ceil(tokens / config.run.tokens_per_iteration)

    def run(self, trial):
        size, variant, factor, seed, *_ = trial
        steps = self.iterations(size, variant)
        name = f"{size.name}/{variant.name}/{run_name(factor, seed)}"
        directory = self.flags.out / "runs" / name
        schedule = {
            "train-iters": steps,
            "warmup-iters": max(1, steps * size.warmup // 100),
            "eval-interval": max(1, steps // size.evaluations),
            "save-interval": max(1, steps // 8),
            "learning-rate": f"{factor * size.rate:g}",
            "min-learning-rate": f"{factor * size.rate / 10:g}",
        }
        schedule = {key: value for key, value in schedule.items() if f"--{key}" not in self.table.common}
        own = {"seed": seed, "data-dir": self.flags.data_dir, "checkpoint-dir": directory}
        arguments = [*self.model_arguments(size, variant), *as_flags(schedule), *self.others, *as_flags(own)]
        return Run(name, directory, steps, arguments)

    def trials(self):
        """Yield all requested runs, the most informative first, by tier: forms are tuned, then compared by size.

        Seeds beyond the first three come after all tiers."""
        best, few = {}, len(SEEDS)
        tiers = sorted({variant.tier for variant in self.variants})
        for seeds, tier in itertools.product((self.flags.seeds[:few], self.flags.seeds[few:]), tiers):
            variants = [variant for variant in self.variants if variant.tier == tier]
            for variant in variants:
                if variant.form not in best:
                    tuning, *best[variant.form] = self.tune(variant.form)
                    yield from tuning
            for size in self.sizes:
                for seed in seeds:
                    trials = (Trial(size, variant, factor, seed, known)
                              for variant in variants for factor, known in [best[variant.form]])  # fmt: skip
                    yield from (trial for trial in trials if not self.tunes(trial))

    def tune(self, form):
        """Return (trials that find the factor of a form, the best one or a guess, whether it is known)."""
        rates, tuned = self.flags.rates, self.first_of(form)
        if len(rates) == 1:
            return [], rates[0], True
        losses = self.tuning_losses(tuned)
        bracket, middle = search(mean_losses(losses, [TUNING_SEED]), rates)
        likely = middle or sorted(rates)[len(rates) // 2]
        factors, best = search(mean_losses(losses, SEEDS), neighbours(likely, bracket), bracket)
        size, bracketed = self.table.sizes[0], middle is not None
        trials = [Trial(size, tuned, factor, TUNING_SEED) for factor in bracket]
        trials += [Trial(size, tuned, factor, seed, bracketed) for factor in factors for seed in SEEDS]
        return trials, best or likely, bracketed and best is not None

    def first_of(self, form):
        """Return the variant with which a form is tuned."""
        return next(variant for variant in self.table.variants if variant.form == form)

    def tunes(self, trial):
        """Whether ``tune`` asks for a trial."""
        tuned = len(self.flags.rates) > 1 and trial.variant is self.first_of(trial.variant.form)
        return tuned and trial.size is self.table.sizes[0] and trial.seed in SEEDS

    def tuning_losses(self, variant):
        """{factor: {seed: final loss}} of the runs that have ended; inf for those that diverged."""
        size = self.table.sizes[0]
        folder, steps, found = self.flags.out / "runs" / size.name / variant.name, self.iterations(size, variant), {}
        for path in folder.glob("rate-*-seed-*"):
            losses, named = final_evaluation(path, steps), factor_and_seed(path)
            if named and has_diverged(path):
                found.setdefault(named[0], {})[named[1]] = math.inf
            elif named and losses and None not in losses.values():
                found.setdefault(named[0], {})[named[1]] = mean(losses.values())
        return found

    def next_run(self, busy, codes):
        """Return for ``train_all`` the first run that can start and would end within the hours."""
        left = self.flags.hours - (time.monotonic() - self.begun) / 3600
        speeds = {size: self.speed(size) for size in self.trained} if left < math.inf else {}
        for trial in self.trials():
            if not trial.known:
                continue
            run = self.run(trial)
            begun = run.directory in {*busy, *codes} or run.has_ended()
            if not begun and (left == math.inf or self.hours(trial, speeds[trial.size]) <= left):
                return run
        return None

    def check_flags(self):
        """Raise ConfigError if a run of the plan has no room for its schedule, or an existing run has other flags.

        This includes runs of variants that are not requested now, because the report compares with them.
        """
        runs = [self.run(trial) for trial in self.trials() if trial.known]
        for run in runs:
            if problems := schedule_problems(parse_config(run.arguments)[0]):
                raise ConfigError([f"{run.name}: {problems[0]}"])
        check_flags([*runs, *map(self.run, self.there())], self.flags.out)

    def there(self):
        """Return the trials of the table that have a directory, or a log that a requested variant would replace, at
        any rate: tuning may still add it."""
        for size, variant in itertools.product(self.trained, self.table.variants):
            folder = self.flags.out / "runs" / size.name / variant.name
            paths = [path for path in folder.glob("rate-*") if variant in self.variants or path.is_dir()]
            for path in sorted({path.with_name(path.name.removesuffix(".log")) for path in paths}):
                if named := factor_and_seed(path):
                    yield Trial(size, variant, *named)

    # --- What it costs ---

    def speed(self, size):
        """Tokens per second of the dense model, which ``times.measure`` has measured."""
        return 1 / times.dense_seconds(self, size)

    def hours(self, trial, speed):
        """Estimate the hours of the rest of a run. FLOPs say how much slower than the dense model it is."""
        run, config = self.run(trial), self.config(trial.size, trial.variant)
        cost, dense = (flops_per_token(each.model, each.run.seq_length)["active"]
                       for each in (config, self.config(trial.size, self.table.variants[0])))  # fmt: skip
        done = max((row["step"] for row in metrics(run.directory)), default=0)
        tokens = max(0, run.iterations - done) * config.run.tokens_per_iteration
        return OVERHEAD * tokens * cost / dense / speed / 3600

    def describe_plan(self):
        """Print what has ended, what fits into the hours, and what is left out."""
        there, planned, left_out = 0, {}, {}
        free = [0.0] * jobs_of(self.flags)  # when each job ends
        speeds = {size: self.speed(size) for size in self.trained}
        for trial in self.trials():
            cell = f"{trial.size.name} {trial.variant.name}" + (" (tuning)" if trial.seed == TUNING_SEED else "")
            if self.run(trial).has_ended():
                there += 1
                continue
            hours = self.hours(trial, speeds[trial.size])
            free.sort()
            fits = free[0] + hours <= self.flags.hours
            if fits:
                free[0] += hours
            (planned if fits else left_out).setdefault(cell, []).append(hours)
        for title, cells in (("planned", planned), (f"left out of --hours {self.flags.hours:g}", left_out)):
            if not cells:
                continue
            total = sum(map(sum, cells.values()))
            print(f"{title}: {sum(map(len, cells.values()))} runs, {total:.1f} hours of one job")
            for cell, hours in cells.items():
                print(f"    {cell:<28}{len(hours)} x {mean(hours):.2f} h")
        print(f"complete or diverged already: {there} runs. Hours are estimated from a few steps of the dense model.")
