"""Trains the forms of routing and gating at three sizes, the most informative runs first, within a budget of hours.

    python studies/atlas.py OUT --data-dir DIR [--hours H] [--sizes s m l] [--variants NAME ...] [--seeds N ...] [FLAGS]

``launch/atlas.sh`` calls it; docs/history/atlas.md has the protocol. FLAGS of moh_lm.pretrain override its own.

Exit codes: 0; 1 a run failed; 2 the arguments must be fixed; 75 a run stopped as asked; 130 Ctrl-C.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from studies.atlas_forms import TABLE
from studies.table import parse_sized, run_comparison


def main(texts):
    return run_comparison("atlas", parse_arguments, texts)


def parse_arguments(texts):
    return parse_sized("atlas", __doc__.splitlines()[0], TABLE, texts, [0.25, 0.5, 1])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends train_all, which stops its runs
    sys.exit(main(sys.argv[1:]))
