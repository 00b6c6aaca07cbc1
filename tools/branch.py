"""A decay branch of a stable run: the model at a smaller budget, without training again what comes before its decay.

    python tools/branch.py RUN --at STEP --decay-iters N --output BRANCH

copies a verified checkpoint of a run with --schedule wsd into a new run directory, and prints the flags that let the
run's own command go on there: N iterations of decay, then the end (docs/training.md). Add --decay-mix for other data in
the decay.

Exit codes: 0; 2 an argument or the checkpoint has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import math
import shlex

from moh_lm.checkpoint.directory import list_steps
from moh_lm.config import Config, ConfigError
from moh_lm.flags import Parser
from moh_lm.monitor.journal import complete_rows
from tools.checkpoints.write import copy
from tools.command import exit_code


def main(texts):
    parser = Parser(prog="branch.py", description="A decay branch of a stable run.", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with --schedule wsd")
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="a checkpoint before its decay")
    parser.add_argument("--decay-iters", type=int, required=True, metavar="N", help="iterations of the decay")
    parser.add_argument("--output", type=Path, required=True, metavar="BRANCH", help="run directory to be made")
    return exit_code("branch.py", lambda: branch(parser.parse_args(texts)), failures=(OSError,), code=2)


def branch(arguments):
    checkpoints = arguments.run / "checkpoints"
    step = checkpoints / f"step-{arguments.at}"
    steps = list_steps(checkpoints)
    if step not in steps:
        there = ", ".join(path.name.removeprefix("step-") for path in reversed(steps))
        raise ConfigError([f"--at {arguments.at}: {checkpoints} has no such step; it has {there or 'none'}"])
    config = Config.load(step / "config.json")
    optimizer, train_iters = config.optimizer, config.run.train_iters
    first, last = optimizer.warmup_iters, train_iters - optimizer.decay(train_iters)  # the rate is at its peak
    if config.optimizer.schedule != "wsd":
        raise ConfigError([f"{step}: was trained with --schedule {config.optimizer.schedule}; only wsd has branches"])
    if not first <= arguments.at <= last:
        raise ConfigError([f"--at {arguments.at}: the rate of the run is stable from step {first} to {last}"])
    if lower := steps_below_the_peak(arguments.run / "metrics.jsonl", config.optimizer, arguments.at):
        raise ConfigError([f"--at {arguments.at}: the run had decayed at step {lower[0]}; give a step before that"])
    if config.model.after(arguments.at + arguments.decay_iters) != config.model:
        warmup = f"--dense-warmup-iters {config.model.heads.dense_warmup_iters}"
        raise ConfigError([f"--at {arguments.at}: the branch would end in the run's {warmup}; give a later step"])
    if arguments.decay_iters < 1:
        raise ConfigError([f"--decay-iters {arguments.decay_iters}: must be at least 1"])
    if checkpoints.resolve() in (arguments.output / "checkpoints").resolve().parents:
        raise ConfigError([f"--output {arguments.output}: lies among the checkpoints of RUN; give another directory"])
    if (arguments.output / "checkpoints").exists():
        raise ConfigError([f"--output {arguments.output}: has checkpoints already; give another directory"])
    print(f"copied to {copy(step, arguments.output / 'checkpoints')}; the run's own command goes on with")
    end, place = arguments.at + arguments.decay_iters, shlex.quote(str(arguments.output))
    print(f"    --checkpoint-dir {place} --train-iters {end} --decay-iters {arguments.decay_iters}")


def steps_below_the_peak(path, optimizer, last):
    """The steps from the warm-up to ``last`` whose rate, in the log ``path``, is below the peak."""
    rows = [row for _, row in complete_rows(path) if optimizer.warmup_iters < row["step"] <= last]
    return [row["step"] for row in rows if row.get("learning_rate", math.inf) < optimizer.learning_rate]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
