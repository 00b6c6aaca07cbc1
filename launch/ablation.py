"""Trains every variant of the ablation with every seed, several at a time, and has the report made.

    python launch/ablation.py OUT --data-dir DIR [--seeds 1 2 3] [--variants NAME ...] [--jobs N] [--ranks N] [FLAGS]

``launch/ablation.sh`` calls it. FLAGS of moh_lm.pretrain win over those of the table and of a variant. Runs of one seed
have the same initial weights where they have the same parameters, and the same samples in the same order, so that they
can be compared in pairs. OUT/runs/NAME-SEED is the directory of a run (launch/work/runs.py).

Exit codes: 0; 1 a run failed; 2 the arguments have to be mended; 75 a run stopped as asked; 130 Ctrl-C.
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
from tools.command import GOES_ON, run

FLAGS = "and the flags of python -m moh_lm.pretrain --help, which win over those of the table"  # the end of --help
COMMON = (
    "--hidden-size 128 --intermediate-size 384 --vocab-size 2048 --seq-length 256 --batch-tokens 2K "
    "--micro-batch-size 8 --precision fp32 --learning-rate 2e-3 --min-learning-rate 2e-4 --warmup-iters 40 "
    "--validation-fraction 0.05 --eval-samples 96 --log-interval 25 --save-interval 200 --keep-last 1"
).split()


@dataclass(frozen=True)
class Variant:
    """Heads in eighths of all heads: always on, and chosen for each token; None: ordinary attention.

    Eighths need not be whole: over all layers the numbers are as near to them as whole heads allow. table: the name by
    which ``--variants`` chooses it with its neighbours; those without one are trained if none is chosen.
    """

    name: str
    shared: float | None
    active: float = 0
    flags: str = ""
    table: str = ""

    def arguments(self, heads, layers=1):
        """Its flags with ``heads`` attention heads. layers: of the model; one will do where eighths are whole."""
        if self.shared is None:
            budget = ["--head-selection", "all"]
        else:
            shared = spread(self.shared * heads / 8, layers)
            used = spread((self.shared + self.active) * heads / 8, layers)
            active = [both - always for both, always in zip(used, shared, strict=True)]
            budget = ["--num-shared-heads", *numbers(shared), "--num-active-routed-heads", *numbers(active)]
        return ["--num-attention-heads", str(heads), *budget, *self.flags.format(half=heads // 2).split()]


def spread(mean, layers):
    """A whole number for each layer, which differ by at most 1; their sum is the nearest to ``mean`` times layers."""
    ends = [round(round(mean * layers) * layer / layers) for layer in range(layers + 1)]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def numbers(values):
    """The values of a flag: one for each layer, or one for all."""
    return [str(value) for value in (values if len(set(values)) > 1 else values[:1])]


SHARES = (13.9, 27.6, 31.3, 35.9, 37.5, 40.5, 46.8, 60.4, 74.0)  # of Table 7, in percent of the heads that a token uses
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
    Variant("gqa-dense", None, 0, "--num-key-value-heads {half}"),
    Variant("gqa-50", 2, 2, "--num-key-value-heads {half}"),
    Variant("gqa-50-groups", 2, 2, "--num-key-value-heads {half} --routing-unit key_value_group"),
    # Table 6: shared heads, then the second stage
    Variant("moh-75-shared-0", 0, 6, table="table6"),
    Variant("moh-75-one-stage", 4, 2, "--two-stage false", table="table6"),
    *(Variant(f"moh-75-share-{share}", 0.06 * share, 6 - 0.06 * share, table="table7") for share in SHARES),
    # the number of heads at equal width, as in Table 3 (A) of "Attention Is All You Need"
    *(Variant(f"dense-heads-{heads}", None, 0, f"--num-attention-heads {heads}", "heads") for heads in (1, 4, 16, 32)),
    # Mixture of Attention heads: the selected heads share one key/value head, none is always on, gates add up to 1
    Variant("moa-50", 0, 4, "--routing released --num-key-value-heads 1", "forms"),
    # SwitchHead's gates: a sigmoid of each selected head, none always on. Its experts inside a head are not here
    Variant("switch-50", 0, 4, "--routing sigmoid", "forms"),
)


def main(texts):
    return run("ablation", parse_arguments, texts, work="launch.work.ablation", interrupted=GOES_ON)


def parse_arguments(texts):
    """The flags of the table; ``others``: those of moh_lm.pretrain. Raises ConfigError."""
    parser = Parser(prog="python launch/ablation.py", description=__doc__.splitlines()[0], epilog=FLAGS)
    add_flags(parser, VARIANTS)
    add = parser.add_argument
    add("--num-attention-heads", type=at_least(8), metavar="N", default=8, help="a multiple of 8 (default: 8)")
    add("--num-layers", type=at_least(1), metavar="N", default=4, help="of each model (default: 4)")
    add("--train-iters", type=at_least(1), metavar="N", default=600, help="iterations of each run (default: 600)")
    flags, flags.others = parser.parse_known_args(texts)
    problems = parser.all_problems()
    if not problems and flags.num_attention_heads % 8:
        problems = [f"--num-attention-heads {flags.num_attention_heads}: must be a multiple of 8"]
    problems += own_flags("ablation", flags.others, {"--train-tokens": "--train-iters"})
    if problems:
        raise ConfigError(problems)
    return flags


def add_flags(parser, variants=()):
    """Those of every table of runs; ``variants``: what it compares with several seeds."""
    add = parser.add_argument
    add("out", type=whole_path, metavar="OUT", help="directory for runs and report")
    add("--data-dir", type=whole_path, metavar="DIR", required=True, help="written by data_prep/tokenize.py")
    if variants:
        tables = sorted({variant.table for variant in variants} - {""})
        names = [variant.name for variant in variants]
        usual = [variant.name for variant in variants if not variant.table]
        words = f"by name{', or all of ' if tables else ''}{', '.join(tables)} (default: {usual[0]} to {usual[-1]})"
        add("--variants", nargs="+", metavar="NAME", default=usual, choices=names + tables, help=words)
        add("--seeds", type=at_least(0), metavar="N", nargs="+", default=[1, 2, 3], help="of weights and order of "
            "samples (default: 1 2 3)")  # fmt: skip
    add("--jobs", type=at_least(1), metavar="N", default=1, help="runs at a time (default: 1)")
    add("--report", action="store_true", help="write the report of what is complete, and end")
    add("--ranks", type=at_least(1), metavar="N", default=1, help="processes of each run, one per GPU (default: 1)")


def own_flags(program, others, instead):
    """Sentences for what is among ``others`` although the program sets it; {flag: what to give ``instead``}."""
    given = {text.partition("=")[0] for text in others}
    instead = {**instead, "--checkpoint-dir": "OUT"}
    problems = [f"{flag}: the {program} sets it; give {instead[flag]}" for flag in sorted(given & instead.keys())]
    save = "--save-config: there are many runs; config.json of each has its flags"
    return problems + [save] * ("--save-config" in given)


def whole_path(text):
    return Path(text).resolve()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through train_all, which tells its runs
    sys.exit(main(sys.argv[1:]))
