"""A table of the losses of an imported model and of the mixture made of it, from its import to its newest evaluation.

    python -m launch.quickstart_losses ORIGINAL_RUN MIXTURE_RUN
"""

import sys
from pathlib import Path

from launch.quickstart_recovery import evaluations
from moh_lm.config import Config


def main(texts):
    original, mixture = map(Path, texts)
    tokens = Config.load(mixture / "config.json").run.batch_tokens
    dense = evaluations(original)[0]
    rows = {"original": dense}
    for step, losses in sorted(evaluations(mixture).items()):
        rows[f"mixture after {step * tokens:,} tokens" if step else "mixture before training"] = losses
    print(f"{'loss in nats per token':<32}" + "".join(f"{name:>12}" for name in dense) + f"{'lost':>12}")
    for label, losses in rows.items():
        found = "".join(f"{losses[name]:12.3f}" for name in dense)
        print(f"{label:<32}{found}{losses['mean'] - dense['mean']:+12.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
