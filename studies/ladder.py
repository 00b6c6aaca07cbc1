"""Trains presets of growing size with three budgets each, and makes a table of their losses.

    python studies/ladder.py OUT --data-dir DIR [--rungs 1M 3M 10M] [--tokens-per-parameter 20] [FLAGS]
    python studies/ladder.py OUT --data-dir DIR --widths 128 256 512 [--rates R ...] [FLAGS]

``launch/ladder.sh`` calls it; docs/history/ladder.md describes it. FLAGS of moh_lm.pretrain override its own. Each size
is trained once, with --schedule wsd, for the largest budget. The smaller budgets branch off where their decay begins,
and give the same results as runs planned for them. With --widths it trains one depth at several widths and learning
rates, with and without --base-width. Nothing but the directories below OUT records what was trained (runs.py).

Exit codes: 0; 1 a run failed; 2 the arguments must be fixed; 75 a run stopped as asked; 130 Ctrl-C.
"""

import itertools
import signal
import sys
from pathlib import Path
from subprocess import CalledProcessError

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import RESUMES, run_command
from moh_lm.cli.parser import Parser
from moh_lm.config import ConfigError, raise_any
from moh_lm.config.presets import SIZES
from moh_lm.units import above_0, at_least
from studies.table import FLAGS, add_flags, read_flags

RATES = [3e-3 * 2**power for power in (-2, -1, 0, 1, 2)]  # for --widths


def main(texts):
    failures = (CalledProcessError,)
    return run_command("ladder", parse_arguments, run, texts, failures=failures, interrupted=RESUMES, trains=True)


def parse_arguments(texts):
    """The flags of the ladder; ``others``: those of moh_lm.pretrain. Raises ConfigError."""
    parser = Parser(prog="python studies/ladder.py", description=__doc__.splitlines()[0], epilog=FLAGS)
    add_flags(parser)
    add = parser.add_argument
    add("--rungs", nargs="+", metavar="SIZE", default=["1M", "3M", "10M"], choices=SIZES, help="sizes, as for --preset")
    add("--tokens-per-parameter", type=above_0, metavar="X", default=20, help="largest budget (default: 20)")
    add("--widths", type=at_least(32), metavar="N", nargs="+", help="compare learning rates at these widths instead, "
        "multiples of 32")  # fmt: skip
    add("--rates", type=above_0, metavar="X", nargs="+", default=RATES, help="learning rates for --widths (default: "
        "3e-3 / 4 to x 4)")  # fmt: skip
    add("--dry-run", action="store_true", help="show the command for each size and what it would do, and exit")
    instead = dict.fromkeys(("--train-iters", "--train-tokens", "--schedule"), "--tokens-per-parameter")
    if any(text.partition("=")[0] == "--widths" for text in texts):
        instead |= {"--learning-rate": "--rates", "--hidden-size": "--widths", "--base-width": "--widths"}
    else:
        branching = "none, since branches begin at its checkpoints"
        instead |= dict.fromkeys(("--decay-iters", "--save-interval", "--keep-last"), branching)
    flags = read_flags(parser, texts, "ladder", {**instead, "--preset": "--rungs or --widths"})
    if flags.rates is not RATES and not flags.widths:
        raise ConfigError(["--rates: needs --widths; add it, or give --learning-rate"])
    raise_any([f"--widths {width}: must be a multiple of 32" for width in flags.widths or () if width % 32])
    flags.rungs = sorted({*flags.rungs}, key=SIZES.index)
    flags.widths, flags.rates = list(dict.fromkeys(flags.widths or ())), list(dict.fromkeys(flags.rates))
    return flags


def run(flags):
    from moh_lm.checks import config_problems
    from moh_lm.flags import parse_config
    from studies.ladder_report import write, write_widths
    from studies.rungs import dry_run, next_run, rungs_of, width_runs
    from studies.runs import check_flags, exit_code, jobs_of, lock_directory, train_all

    report = write_widths if flags.widths else write
    if flags.report:
        return report(flags.out)
    rungs = {"widths": width_runs(flags)} if flags.widths else rungs_of(flags, flags.rungs)
    if flags.dry_run:
        return max(dry_run(runs[0]) for runs in rungs.values())
    asked = [run for runs in rungs.values() for run in runs]
    configs = {run.directory: parse_config(run.arguments)[0] for run in asked}
    for run in asked:
        if problems := config_problems(configs[run.directory], flags.ranks):
            raise ConfigError([f"{run.name}: {problems[0]}"])
    there = [size for size in SIZES if (flags.out / "runs" / size).exists()]  # the report includes them
    check_flags([*asked, *itertools.chain(*rungs_of(flags, there).values())], flags.out)
    _lock = lock_directory(flags.out)
    codes = train_all(lambda busy, codes: next_run(rungs, configs, busy, codes), jobs_of(flags), flags.ranks)
    report(flags.out)
    return exit_code(codes)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends train_all, which stops its runs
    sys.exit(main(sys.argv[1:]))
