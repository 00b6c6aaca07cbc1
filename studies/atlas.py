"""Trains the forms of routing and gating at three sizes, the most informative runs first, within a budget of hours.

    python studies/atlas.py OUT --data-dir DIR [--hours H] [--sizes s m l] [--variants NAME ...] [--seeds N ...] [FLAGS]

``launch/atlas.sh`` calls it; docs/history/atlas.md has the protocol. FLAGS of moh_lm.pretrain override its own. Nothing
but the directories OUT/runs/SIZE/VARIANT/rate-FACTOR-seed-N records what was trained (runs.py).

Exit codes: 0; 1 a run failed; 2 the arguments must be fixed; 75 a run stopped as asked; 130 Ctrl-C.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.parser import Parser
from moh_lm.units import above_0
from studies.atlas_forms import SIZES, TABLE, VARIANTS
from studies.table import FLAGS, add_comparison_flags, read_flags, run_comparison


def main(texts):
    return run_comparison("atlas", parse_arguments, texts)


def parse_arguments(texts):
    """The flags of the atlas; ``others``: those of moh_lm.pretrain. Raises ConfigError."""
    parser = Parser(prog="python studies/atlas.py", description=__doc__.splitlines()[0], epilog=FLAGS)
    add, sizes = parser.add_argument, [size.name for size in SIZES]
    add_comparison_flags(parser, VARIANTS, [0.25, 0.5, 1])
    add("--sizes", nargs="+", metavar="NAME", default=sizes, choices=sizes, help="sizes to train (default: all)")
    add("--tokens-per-parameter", type=above_0, metavar="X", help="for the dense model, embeddings included "
        "(default: 3, 4.7, 6)")  # fmt: skip
    instead = {"--learning-rate": "--rates", "--seed": "--seeds", "--num-attention-heads": "--sizes"}
    instead |= dict.fromkeys(("--train-iters", "--train-tokens"), "--tokens-per-parameter")
    flags = read_flags(parser, texts, "atlas", instead)
    tokens = flags.tokens_per_parameter
    flags.table = TABLE._replace(sizes=tuple(size._replace(tokens=tokens or size.tokens) for size in SIZES))
    return flags


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through train_all, which tells its runs
    sys.exit(main(sys.argv[1:]))
