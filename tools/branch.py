"""A decay branch of a stable run: the model at a smaller budget, without training again what comes before its decay.

    python tools/branch.py RUN --at STEP --decay-iters N --output BRANCH

copies a verified checkpoint of a run with --schedule wsd into a new run directory, and prints the flags that let the
run's own command go on there: N iterations of decay, then the end. The branch is, bit for bit, a run that was to end
at STEP + N from its beginning, if RUN has not decayed before STEP. Add --decay-mix for other data in the decay. RUN
stays as it is, and may go on.

Exit codes: 0; 2 an argument or the checkpoint has to be mended.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import shlex
from pathlib import Path

from moh_lm.config import Config, ConfigError
from moh_lm.flags import Parser
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
    step = arguments.run / "checkpoints" / f"step-{arguments.at}"
    config = Config.load(step / "config.json")
    first, last = stable_steps(config)
    if config.optimizer.schedule != "wsd":
        raise ConfigError([f"{step}: was trained with --schedule {config.optimizer.schedule}; only wsd has branches"])
    if not first <= arguments.at <= last:
        raise ConfigError([f"--at {arguments.at}: the rate of the run is stable from step {first} to {last}"])
    if arguments.decay_iters < 1:
        raise ConfigError([f"--decay-iters {arguments.decay_iters}: must be at least 1"])
    if (arguments.output / "checkpoints").exists():
        raise ConfigError([f"--output {arguments.output}: has checkpoints already; give another directory"])
    print(f"copied to {copy(step, arguments.output / 'checkpoints')}; the run's own command goes on with")
    end, place = arguments.at + arguments.decay_iters, shlex.quote(str(arguments.output))
    print(f"    --checkpoint-dir {place} --train-iters {end} --decay-iters {arguments.decay_iters}")


def stable_steps(config):
    """The first and the last step after which the rate of a wsd run is its peak."""
    optimizer, train_iters = config.optimizer, config.run.train_iters
    return optimizer.warmup_iters, train_iters - optimizer.decay(train_iters)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
