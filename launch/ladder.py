"""Trains presets of growing size with three budgets each, and predicts the loss of a size before it is trained.

    python -m launch.ladder OUT --data-dir DIR [--rungs 1M 3M 10M] [--tokens-per-parameter 20] [FLAGS]
    python -m launch.ladder OUT --data-dir DIR --widths 128 256 512 [--rates R ...] [FLAGS]

``launch/ladder.sh`` calls it; docs/ladder.md has the method. FLAGS of moh_lm.pretrain win over its own. A size is
trained once, with --schedule wsd, for the largest budget. The others branch off where their decay begins, and equal
runs that were to end there. With --widths it trains one depth at several widths and learning rates, with and without
--base-width. The directories below OUT are all that is remembered (launch/runs.py).

Exit codes: 0; 1 a run failed; 2 the arguments have to be mended.
"""

import argparse
import math
import shlex
import signal
import subprocess
import sys

import launch.ladder_report as report
from launch.atlas_forms import COMMON
from launch.runs import ROOT, Run, add_flags, as_flags, check_flags, exit_code, refuse, train_all
from moh_lm.config import ConfigError
from moh_lm.config.presets import SIZES, parameters
from moh_lm.flags import parse_config

PARTS = (1, 2, 4)  # the budgets are the whole one over these
DECAY = 5  # a budget over this is its decay, so that all decays begin at a multiple of a fifth of the whole run
RATES = [3e-3 * 2**power for power in (-2, -1, 0, 1, 2)]  # for --widths


def main(arguments):
    flags, others = read_arguments(arguments)
    try:
        rungs = {"widths": width_runs(flags, others)} if flags.widths else rungs_of(flags, others)
        configs = {run.directory: parse_config(run.arguments)[0] for runs in rungs.values() for run in runs}
    except ConfigError as error:
        refuse(error)
    if flags.dry_run:
        return max(dry_run(runs[0]) for size, runs in rungs.items() if size in ("widths", *flags.rungs))
    check_flags([run for runs in rungs.values() for run in runs])
    codes = train_all(lambda busy, codes: next_run(rungs, configs, flags, busy, codes), flags.jobs, flags.ranks)
    report.write_widths(flags.out) if flags.widths else report.write(flags.out)
    return exit_code(codes)


def read_arguments(arguments):
    """(flags of the ladder, flags of moh_lm.pretrain)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_flags(parser)
    add = parser.add_argument
    add("--rungs", nargs="+", metavar="SIZE", default=["1M", "3M", "10M"], choices=SIZES, help="of --preset, by size")
    add("--tokens-per-parameter", type=float, default=20, help="of the largest budget (default: 20)")
    add("--widths", type=int, nargs="+", help="compare learning rates at these widths instead, multiples of 32")
    add("--rates", type=float, nargs="+", default=RATES, help="learning rates for --widths (default: 3e-3 / 4 to x 4)")
    add("--dry-run", action="store_true", help="show the command of each size and what it would do, and end")
    flags, others = parser.parse_known_args(arguments)
    flags.rungs.sort(key=SIZES.index)
    for wrong in {text.partition("=")[0] for text in others} & {"--train-iters", "--train-tokens", "--schedule"}:
        parser.error(f"{wrong}: the ladder sets it; give --tokens-per-parameter")
    if not flags.tokens_per_parameter > 0:
        parser.error(f"--tokens-per-parameter {flags.tokens_per_parameter:g}: must be above 0")
    return flags, others


def iterations(arguments, size, flags):
    """Those of the largest budget, which every part and every decay divides."""
    tokens, unit = parse_config([*arguments, "--train-iters", "1"])[0].run.tokens_per_iteration, max(PARTS) * DECAY
    return unit * math.ceil(flags.tokens_per_parameter * parameters(size) / tokens / unit)


def make_run(name, arguments, steps, schedule, flags):
    directory = flags.out / "runs" / name
    own = {"train-iters": steps, **schedule, "data-dir": flags.data_dir, "checkpoint-dir": directory}
    return Run(name, directory, steps, [*arguments, *as_flags(own)])


def rungs_of(flags, others):
    """{size: [its stable run, which is its largest budget, and the branches of the others]}, and of one size more."""
    rungs = {}
    for size in [*flags.rungs, *SIZES[SIZES.index(flags.rungs[-1]) + 1 :][:1]]:
        arguments = ["--preset", size, *COMMON, "--micro-batch-size", "16", "--schedule", "wsd", *others]
        whole = iterations(arguments, size, flags)
        saves = {"save-interval": whole // DECAY, "keep-last": 0}
        arguments += as_flags({"warmup-iters": whole // 25, "eval-interval": whole, **saves})
        for part in PARTS:
            name, steps = f"{size}/tokens-{flags.tokens_per_parameter / part:g}", whole // part
            rungs.setdefault(size, []).append(make_run(name, arguments, steps, {"decay-iters": steps // DECAY}, flags))
    return rungs


def width_runs(flags, others):
    """A run for every width and rate, with the first width as base width and without one."""
    runs = []
    for width in flags.widths:
        for base in dict.fromkeys((flags.widths[0], width)):
            size = {"hidden-size": width, "num-layers": 4, "micro-batch-size": 16, "base-width": base}
            arguments = ["--preset", "1M", *COMMON, *as_flags(size), *others]
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
    if not (run.directory / "checkpoints").exists():
        decay = config.optimizer.decay_iters
        where = {"at": run.iterations - decay, "decay-iters": decay, "output": run.directory}
        command = [sys.executable, "tools/branch.py", stable.directory, *as_flags(where)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through train_all, which tells its runs
    sys.exit(main(sys.argv[1:]))
