"""The images of the quickstart of image models: the 1,797 handwritten digits that scikit-learn ships, as 32 x 32 PNGs.

    python -m launch.quickstart_images make OUT           OUT/train and OUT/val, a folder for each digit
    python -m launch.quickstart_images compare RUN RUN    the last accuracy of each run

The digits are of the UCI repository (Alpaydin and Kaynak 1998), 8 x 8 pixels of 17 greys.
"""

import json
import sys
from pathlib import Path

SIDE = 32  # the smallest size for four stages
HELD_OUT = 5  # one image in this many


def make(out):
    import numpy as np  # after reading the flags, because these take seconds
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = Path(out) / ("val" if number % HELD_OUT == 0 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * 255 / 16).round().astype(np.uint8))
        image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / f"{number:04d}.png")
    print(f"wrote {number + 1} images to {out}")


def compare(*runs):
    for run in runs:
        lines = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = [row for row in map(json.loads, lines) if "accuracy" in row][-1]
        print(f"{run}: {last['accuracy']['top_1']['share']:.1%} of the held-out images after {last['step']} iterations")


if __name__ == "__main__":
    commands = {"make": make, "compare": compare}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
