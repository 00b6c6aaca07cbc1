"""Prints the losses of an imported model and of the mixture made from it, from the import to the newest evaluation.

    python launch/quickstart_losses.py --original RUN --mixture RUN
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.quickstart_recovery import evaluations
from moh_lm.cli.command import run_file
from moh_lm.config import Config, ConfigError


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts)


def add_flags(parser):
    parser.add_argument("--original", type=Path, metavar="RUN", required=True, help="run directory of the import")
    parser.add_argument("--mixture", type=Path, metavar="RUN", required=True, help="run directory of the mixture")


def run(arguments):
    mixture = arguments.mixture
    tokens = Config.load(mixture / "config.json").run.batch_tokens
    dense = evaluations(arguments.original).get(0)
    if dense is None:
        raise ConfigError([f"--original {arguments.original}: was not evaluated before its first step; give another"])
    rows = {"original": dense}
    for step, losses in sorted(evaluations(mixture).items()):
        rows[f"mixture after {step * tokens:,} tokens" if step else "mixture before training"] = losses
    print(f"{'loss in nats per token':<32}" + "".join(f"{name:>12}" for name in dense) + f"{'lost':>12}")
    for label, losses in rows.items():
        found = "".join(f"{losses[name]:12.3f}" for name in dense)
        print(f"{label:<32}{found}{losses['mean'] - dense['mean']:+12.3f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
