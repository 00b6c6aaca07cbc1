"""The mean of several checkpoints of a run, as a checkpoint of a new run directory.

    python tools/average.py RUN --steps 800 900 1000 --output AVERAGE

The command averages the fp32 master weights of these steps, whatever layouts wrote them, and moving averages if there
are any. AVERAGE/checkpoints/step-1000 has the mean instead of the weights of step 1000. Everything else is copied from
step 1000, so every tool reads it, and a run can resume from it.

Exit codes: 0; 2 an argument or a checkpoint has to be fixed, and nothing was written.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.checkpoint.directory import list_steps, step_number
from moh_lm.cli.command import output_path, run_file
from moh_lm.config import raise_any
from moh_lm.units import at_least


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, code=2)


def add_flags(parser):
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    help_of_steps = "two or more checkpoints of the run"
    parser.add_argument("--steps", type=at_least(1), nargs="+", required=True, metavar="STEP", help=help_of_steps)
    parser.add_argument("--output", type=output_path, required=True, metavar="AVERAGE", help="run directory to be made")


def run(arguments):
    from tools.checkpoints.mean import write_mean
    from tools.checkpoints.read import Step, misnamed

    numbers, output = sorted(set(arguments.steps)), arguments.output
    problems = [f"--output {output}: has checkpoints already; give another directory"]
    raise_any([*(problems if list_steps(output / "checkpoints") else []), *step_problems(arguments.run, numbers)])
    steps = [Step(arguments.run / "checkpoints" / f"step-{number}") for number in numbers]
    raise_any([
        f"--steps {number}: has other parameters than step {numbers[-1]}; average steps of one model"
        for number, step in zip(numbers, steps, strict=True)
        if (step.shapes, step.reader.averaged) != (steps[-1].shapes, steps[-1].reader.averaged)
    ])
    problems = [problem for step in steps for problem in misnamed(step.path, step.state)]
    raise_any([f"{problem}; rename its directory" for problem in problems])
    print(f"wrote the mean of steps {', '.join(map(str, numbers))} as {write_mean(steps, output)}")


def step_problems(directory, numbers):
    """Sentences for steps that a run directory does not have, or that are too few."""
    there = sorted(map(step_number, list_steps(directory / "checkpoints")))
    has = f"{directory / 'checkpoints'} has {', '.join(map(str, there)) or 'none'}"
    found = [f"--steps {number}: there is no such checkpoint; {has}" for number in numbers if number not in there]
    return found or ([f"--steps {numbers[0]}: is one checkpoint; give several; {has}"] if len(numbers) < 2 else [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
