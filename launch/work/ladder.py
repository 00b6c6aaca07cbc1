"""The work of launch/ladder.py: its runs and branches, in their order, and what is predicted between them."""

import itertools
import math
import shlex
import subprocess
import sys

import launch.work.ladder_report as report
from launch.atlas_forms import COMMON
from launch.work.runs import ROOT, Run, as_flags, check_flags, exit_code, jobs_of, lock_directory, train_all
from moh_lm.checkpoint.directory import list_steps
from moh_lm.checks import config_problems
from moh_lm.config import ConfigError
from moh_lm.config.presets import SIZES, parameters
from moh_lm.flags import make_parser, parse_config, parse_flags

PARTS = (1, 2, 4)  # the budgets are the whole one over these
DECAY = 5  # a budget over this is its decay, so that all decays begin at a multiple of a fifth of the whole run


def run(flags):
    if flags.report:
        report.write_widths(flags.out) if flags.widths else report.write(flags.out)
        return 0
    rungs = {"widths": width_runs(flags)} if flags.widths else rungs_of(flags)
    configs = {run.directory: parse_config(run.arguments)[0] for runs in rungs.values() for run in runs}
    if flags.dry_run:
        return max(dry_run(runs[0]) for size, runs in rungs.items() if size in ("widths", *flags.rungs))
    asked = [run for size, runs in rungs.items() for run in runs if size in ("widths", *flags.rungs)]
    for run in asked:
        if problems := config_problems(configs[run.directory], flags.ranks):
            raise ConfigError([f"{run.name}: {problems[0]}"])
    others = [size for size in SIZES if (flags.out / "runs" / size).exists()]  # the law takes them into account too
    runs = [*asked, *itertools.chain(*rungs_of(flags, others).values())]
    check_flags(runs, flags.out)
    check_gates(runs, flags.out)
    _lock = lock_directory(flags.out)
    codes = train_all(lambda busy, codes: next_run(rungs, configs, flags, busy, codes), jobs_of(flags), flags.ranks)
    report.write_widths(flags.out) if flags.widths else report.write(flags.out)
    return exit_code(codes)


def check_gates(runs, out):
    """Raise ConfigError if some of ``runs`` have begun with other gates than the rest will have: those of a former
    preset. A law is of one form."""
    forms = sorted({parse_config(run.arguments)[0].model.heads.routing for run in runs})
    if len(forms) > 1:
        raise ConfigError([f"{out}: its runs would have the gates of {' and of '.join(forms)}; choose another OUT"])


def iterations(arguments, size, flags):
    """Those of the largest budget, which every part and every decay divides."""
    tokens, unit = parse_config([*arguments, "--train-iters", "1"])[0].run.tokens_per_iteration, max(PARTS) * DECAY
    return unit * math.ceil(flags.tokens_per_parameter * parameters(size) / tokens / unit)


def make_run(name, arguments, steps, schedule, flags):
    directory = flags.out / "runs" / name
    own = {"train-iters": steps, **schedule, "data-dir": flags.data_dir, "checkpoint-dir": directory}
    return Run(name, directory, steps, [*arguments, *as_flags(own)])


def rungs_of(flags, sizes=None):
    """{size: [its stable run, which is its largest budget, and the branches of the others]}; by default of the rungs
    that are asked for, and of one size more."""
    rungs, given = {}, parse_flags(make_parser(), flags.others).values
    for size in sizes if sizes is not None else [*flags.rungs, *SIZES[SIZES.index(flags.rungs[-1]) + 1 :][:1]]:
        arguments = ["--preset", size, *COMMON, "--micro-batch-size", "16", "--schedule", "wsd", *flags.others]
        whole = iterations(arguments, size, flags)
        usual = {"warmup_iters": whole // 25, "eval_interval": whole, "save_interval": whole // DECAY, "keep_last": 0}
        arguments += as_flags({key.replace("_", "-"): value for key, value in usual.items() if key not in given})
        for part in PARTS:
            name, steps = f"{size}/tokens-{flags.tokens_per_parameter / part:g}", whole // part
            rungs.setdefault(size, []).append(make_run(name, arguments, steps, {"decay-iters": steps // DECAY}, flags))
    return rungs


def width_runs(flags):
    """A run for every width and rate, with the first width as base width and without one."""
    runs = []
    for width in flags.widths:
        for base in dict.fromkeys((flags.widths[0], width)):
            size = {"hidden-size": width, "num-layers": 4, "micro-batch-size": 16, "base-width": base}
            arguments = ["--preset", "1M", *COMMON, *as_flags(size), *flags.others]
            steps = iterations(arguments, "1M", flags)
            for rate in flags.rates:
                name, own = f"width-{width}-base-{base}-rate-{rate:g}", {"learning-rate": f"{rate:g}"}
                runs.append(make_run(name, arguments, steps, own, flags))
    return runs


def dry_run(run):
    """Show a command, and what it would do; returns its exit code."""
    command = [sys.executable, "-m", "moh_lm.pretrain", *run.arguments, "--dry-run"]
    print("+", shlex.join(["python", *command[1:]]), flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def next_run(rungs, configs, flags, busy, codes):
    """For ``train_all``: the rungs in their order; each begins after all runs of those before it, once predicted."""
    for size, (stable, *others) in rungs.items():
        if size in SIZES and not stable.log.exists():
            report.predict(flags.out, size, [(configs[run.directory], run.directory) for run in (stable, *others)])
        if size in SIZES and size not in flags.rungs:
            return None
        left = [run for run in (stable, *others) if not run.is_complete()]
        branches = others if size in SIZES else []
        for run in left:
            if run.directory not in {*busy, *codes} and not (run in branches and stable in left):
                if run in branches:
                    make_branch(run, stable, configs[run.directory])
                return run
        if left:
            return None
    return None


def make_branch(run, stable, config):
    """Copy the checkpoint of the ``stable`` run at which the decay of ``run`` begins."""
    if not list_steps(run.directory / "checkpoints"):
        decay = config.optimizer.decay_iters
        where = {"at": run.iterations - decay, "decay-iters": decay, "output": run.directory}
        command = [sys.executable, "tools/branch.py", stable.directory, *as_flags(where)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
