"""Trains the arms of the study, which choose heads, gate them or have fewer, the most informative runs first.

    python studies/study.py OUT --data-dir DIR [--sizes s2 m2 l2] [--variants NAME ...] [--seeds N ...] [FLAGS]

``launch/study.sh`` calls it; docs/study.md has the protocol. FLAGS of moh_lm.pretrain override its own.

Exit codes: 0; 1 a run failed; 2 the arguments must be fixed; 75 a run stopped as asked; 130 Ctrl-C.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from studies.study_arms import TABLE
from studies.table import parse_sized, run_comparison


def main(texts):
    return run_comparison("study", parse_arguments, texts)


def parse_arguments(texts):
    return parse_sized("study", __doc__.splitlines()[0], TABLE, texts, [0.7, 1, 1.4], [1, 2, 3, 4, 5], ["s2"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends train_all, which stops its runs
    sys.exit(main(sys.argv[1:]))
