"""A decay branch of a stable run: the model of a smaller budget, without repeating the training before its decay.

    python tools/branch.py RUN --at STEP --decay-iters N --output BRANCH

The command copies a verified checkpoint of a run with --schedule wsd into a new run directory. It prints the flags with
which the run's own command continues there with N iterations of decay (docs/training.md). Add --decay-mix to use other
data during the decay.

Exit codes: 0; 2 an argument or the checkpoint must be fixed.
"""

import shlex
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.checkpoint.directory import list_steps
from moh_lm.cli.command import output_path, run_file
from moh_lm.config import Config, ConfigError
from moh_lm.monitor.events import complete_rows
from moh_lm.units import at_least


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, code=2)


def add_flags(parser):
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with --schedule wsd")
    parser.add_argument("--at", type=at_least(0), required=True, metavar="STEP", help="step of a checkpoint before "
                        "the decay")  # fmt: skip
    parser.add_argument("--decay-iters", type=at_least(1), required=True, metavar="N", help="length of the decay")
    parser.add_argument("--output", type=output_path, required=True, metavar="BRANCH", help="run directory to create")


def run(arguments):
    from tools.checkpoints.write import copy

    checkpoints = arguments.run / "checkpoints"
    step = checkpoints / f"step-{arguments.at}"
    steps = list_steps(checkpoints)
    if step not in steps:
        there = ", ".join(path.name.removeprefix("step-") for path in reversed(steps))
        raise ConfigError([f"--at {arguments.at}: {checkpoints} has no such step; its steps are {there or 'none'}"])
    config = Config.load(step / "config.json")
    optimizer, train_iters = config.optimizer, config.run.train_iters
    if optimizer.schedule != "wsd":
        raise ConfigError([f"{step}: was trained with --schedule {optimizer.schedule}; only runs with wsd can branch"])
    first, last = optimizer.warmup_iters, train_iters - optimizer.decay(train_iters)  # the rate is at its peak
    if not first <= arguments.at <= last:
        constant = f"the learning rate is constant from step {first} to {last} only; choose one of these"
        raise ConfigError([f"--at {arguments.at}: {constant}"])
    if lower := steps_below_the_peak(arguments.run / "metrics.jsonl", optimizer, arguments.at):
        decayed = f"the learning rate had already decayed at step {lower[0]}; give an earlier step"
        raise ConfigError([f"--at {arguments.at}: {decayed}"])
    if config.model.after(arguments.at + arguments.decay_iters - 1) != config.model:
        warmup = f"--dense-warmup-iters {config.model.heads.dense_warmup_iters}"
        raise ConfigError([f"--at {arguments.at}: the branch would end in the run's {warmup}; give a later step"])
    if checkpoints.resolve() in (arguments.output / "checkpoints").resolve().parents:
        raise ConfigError([f"--output {arguments.output}: lies among the checkpoints of RUN; give another directory"])
    if list_steps(arguments.output / "checkpoints"):
        raise ConfigError([f"--output {arguments.output}: has checkpoints already; give another directory"])
    print(f"copied to {copy(step, arguments.output / 'checkpoints')}; to continue, add to the run's command")
    end, place = arguments.at + arguments.decay_iters, shlex.quote(str(arguments.output))
    budget = f"--train-iters {end} --decay-iters {arguments.decay_iters} --warmup-iters {optimizer.warmup_iters}"
    print(f"    --checkpoint-dir {place} {budget}")


def steps_below_the_peak(path, optimizer, last):
    """Return the steps from the warm-up to ``last`` whose rate, in the log ``path``, is below the peak and below an
    earlier rate. A run that was resumed with a higher peak has not decayed."""
    rows = [row for _, row in complete_rows(path) if optimizer.warmup_iters < row["step"] <= last]
    found, highest = [], 0.0
    for row in (row for row in rows if "learning_rate" in row):
        found += [row["step"]] if row["learning_rate"] < min(highest, optimizer.learning_rate) else []
        highest = max(highest, row["learning_rate"])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
