"""Trains every variant of the ablation with every seed, several at a time, and has the report made.

    python launch/ablation.py OUT --data-dir DIR [--seeds 1 2 3] [--variants NAME ...] [--jobs N] [--ranks N] [FLAGS]

``launch/ablation.sh`` calls it. FLAGS of moh_lm.pretrain win over those of the table and of a variant. Runs of one seed
have the same initial weights where they have the same parameters, and the same samples in the same order, so that they
can be compared in pairs. OUT/runs/NAME-SEED is the directory of a run (launch/runs.py).

Exit codes: 0; 1 a run failed; 2 the arguments have to be mended.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dataclasses import dataclass

from moh_lm.config import ConfigError
from moh_lm.parser import Parser
from moh_lm.quantities import at_least
from tools.command import run

FLAGS = "and the flags of python -m moh_lm.pretrain --help, which win over those of the table"  # the end of --help
COMMON = (
    "--num-layers 4 --hidden-size 128 --intermediate-size 384 --vocab-size 2048 --seq-length 256 --batch-tokens 2K "
    "--micro-batch-size 8 --precision fp32 --learning-rate 2e-3 --min-learning-rate 2e-4 --warmup-iters 40 "
    "--validation-fraction 0.05 --eval-samples 96 --log-interval 25 --save-interval 200 --keep-last 1"
).split()


@dataclass(frozen=True)
class Variant:
    """Heads in eighths of all heads: always on, and chosen for each token; None: ordinary attention."""

    name: str
    shared: int | None
    active: int = 0
    flags: str = ""

    def arguments(self, heads):
        """Its flags with ``heads`` attention heads."""
        if self.shared is None:
            budget = ["--head-selection", "all"]
        else:
            shared, active = self.shared * heads // 8, self.active * heads // 8
            budget = ["--num-shared-heads", str(shared), "--num-active-routed-heads", str(active)]
        return ["--num-attention-heads", str(heads), *budget, *self.flags.format(groups=heads // 2).split()]


VARIANTS = (
    Variant("dense", None),
    Variant("moh-75", 4, 2),
    Variant("moh-50", 2, 2),
    Variant("static-50", 2, 2, "--head-selection static"),
    Variant("moh-75-released", 4, 2, "--routing released"),
    Variant("moh-50-released", 2, 2, "--routing released"),
    Variant("moh-50-global", 2, 2, "--load-balance-scope global_batch"),
    Variant("moh-50-released-global", 2, 2, "--routing released --load-balance-scope global_batch"),
    Variant("moh-50-one-stage", 2, 2, "--two-stage false"),
    Variant("moh-50-shared-0", 0, 4),
    Variant("moh-50-shared-1", 1, 3),
    Variant("moh-50-shared-3", 3, 1),
    Variant("moh-25", 1, 1),
    Variant("moh-top-p", 2, 4, "--routing-top-p 0.6"),
    Variant("gqa-dense", None, 0, "--num-key-value-heads {groups}"),
    Variant("gqa-50", 2, 2, "--num-key-value-heads {groups}"),
    Variant("gqa-50-groups", 2, 2, "--num-key-value-heads {groups} --routing-unit key_value_group"),
)


def main(texts):
    return run("ablation", parse_arguments, texts, work="launch.work.ablation")


def parse_arguments(texts):
    """The flags of the table; ``others``: those of moh_lm.pretrain. Raises ConfigError."""
    parser = Parser(prog="python launch/ablation.py", description=__doc__.splitlines()[0], epilog=FLAGS)
    add_flags(parser, VARIANTS)
    add = parser.add_argument
    add("--num-attention-heads", type=at_least(8), metavar="N", default=8, help="a multiple of 8 (default: 8)")
    add("--train-iters", type=at_least(1), metavar="N", default=600, help="iterations of each run (default: 600)")
    flags, flags.others = parser.parse_known_args(texts)
    problems = parser.all_problems()
    if not problems and flags.num_attention_heads % 8:
        problems = [f"--num-attention-heads {flags.num_attention_heads}: must be a multiple of 8"]
    if "--train-tokens" in flags.others:
        problems.append("--train-tokens: give --train-iters, which tells complete runs from others")
    if problems:
        raise ConfigError(problems)
    return flags


def add_flags(parser, variants):
    """Those of every table of runs."""
    add, names = parser.add_argument, [variant.name for variant in variants]
    add("out", type=whole_path, metavar="OUT", help="directory for runs and report")
    add("--data-dir", type=whole_path, metavar="DIR", required=True, help="written by data_prep/tokenize.py")
    add("--variants", nargs="+", metavar="NAME", default=names, choices=names, help="by name (default: all)")
    add("--seeds", type=at_least(0), metavar="N", nargs="+", default=[1, 2, 3], help="of weights and order of samples "
        "(default: 1 2 3)")  # fmt: skip
    add("--jobs", type=at_least(1), metavar="N", default=1, help="runs at a time (default: 1)")
    add("--ranks", type=at_least(1), metavar="N", default=1, help="processes of each run, one per GPU (default: 1)")


def whole_path(text):
    return Path(text).resolve()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through train_all, which tells its runs
    sys.exit(main(sys.argv[1:]))
