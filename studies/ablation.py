"""Trains variants of one model with several seeds, several runs at a time, and writes a report.

    python studies/ablation.py OUT --data-dir DIR [--seeds 1 2 3] [--variants NAME ...] [--rates X ...] [FLAGS]

``launch/ablation.sh`` calls it. FLAGS of moh_lm.pretrain override those of the table and of a variant. Runs of one
seed have equal initial weights in common parameters and read the same samples in the same order, so that they can be
compared in pairs. With several --rates, each variant uses its best (tuning.py).
OUT/runs/model/VARIANT/rate-FACTOR-seed-N is the directory of a run (runs.py).

Exit codes: 0; 1 a run failed; 2 the arguments must be fixed; 75 a run stopped as asked; 130 Ctrl-C.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.parser import Parser
from moh_lm.config import ConfigError
from moh_lm.units import above_0, at_least
from studies.table import FLAGS, Size, Table, Variant, add_comparison_flags, read_flags, run_comparison

COMMON = (
    "--hidden-size 128 --intermediate-size 384 --vocab-size 2048 --seq-length 256 --batch-tokens 2K "
    "--micro-batch-size 8 --precision fp32 --warmup-iters 40 --validation-fraction 0.05 --eval-samples 96 "
    "--log-interval 25 --save-interval 200 --keep-last 1"
).split()
PAPER = "--routing paper"
SHARES = (13.9, 27.6, 31.3, 35.9, 37.5, 40.5, 46.8, 60.4, 74.0)  # of Table 7: percent of heads that a token uses
VARIANTS = (
    Variant("dense", None),
    Variant("moh-75", 4, 2, PAPER),
    Variant("moh-50", 2, 2, PAPER),
    Variant("static-50", 2, 2, "--head-selection static"),
    Variant("moh-75-released", 4, 2, "--routing released"),
    Variant("moh-50-released", 2, 2, "--routing released"),
    Variant("moh-50-global", 2, 2, f"{PAPER} --load-balance-scope global_batch"),
    Variant("moh-50-released-global", 2, 2, "--routing released --load-balance-scope global_batch"),
    Variant("moh-50-one-stage", 2, 2, f"{PAPER} --two-stage false"),
    Variant("moh-50-shared-0", 0, 4, PAPER),
    Variant("moh-50-shared-1", 1, 3, PAPER),
    Variant("moh-50-shared-3", 3, 1, PAPER),
    Variant("moh-25", 1, 1, PAPER),
    Variant("moh-top-p", 2, 4, f"{PAPER} --routing-top-p 0.6"),
    Variant("gqa-dense", None, 0, "--num-key-value-heads {half}"),
    Variant("gqa-50", 2, 2, f"{PAPER} --num-key-value-heads {{half}}"),
    Variant("gqa-50-groups", 2, 2, f"{PAPER} --num-key-value-heads {{half}} --routing-unit key_value_group"),
    # Table 6: shared heads, then the second stage
    Variant("moh-75-shared-0", 0, 6, PAPER, table="table6"),
    Variant("moh-75-one-stage", 4, 2, f"{PAPER} --two-stage false", table="table6"),
    *(Variant(f"moh-75-share-{share}", 0.06 * share, 6 - 0.06 * share, PAPER, table="table7") for share in SHARES),
    # the number of heads at equal width, as in Table 3 (A) of "Attention Is All You Need"
    *(Variant(f"dense-heads-{heads}", None, 0, f"--num-attention-heads {heads}", "heads") for heads in (1, 4, 16, 32)),
    # Mixture of Attention heads: the selected heads share one key/value head, none is always on, gates add up to K
    Variant("moa-50", 0, 4, "--routing released --num-key-value-heads 1", "forms"),
    # SwitchHead's gates times 2: a sigmoid of each selected head, none always on. Its experts in a head are not here
    Variant("switch-50", 0, 4, "--routing sigmoid", "forms"),
    # tokens to the same loss, whole matrices orthogonalised or heads by themselves
    Variant("dense-half", None, table="muon", tokens=0.5),
    Variant("dense-double", None, table="muon", tokens=2),
    Variant("dense-muon", None, 0, "--optimizer muon", "muon"),
    Variant("dense-muon-head", None, 0, "--optimizer muon --muon-split head", "muon"),
    Variant("moh-50-muon", 2, 2, f"{PAPER} --optimizer muon", "muon"),
    Variant("moh-50-muon-head", 2, 2, f"{PAPER} --optimizer muon --muon-split head", "muon"),
)
QUESTIONS = (
    ("moh-75", "dense", "do 75% of the heads do as well as all?"),
    ("moh-50", "dense", "do 50%?"),
    ("moh-25", "dense", "do 25%?"),
    ("moh-50", "static-50", "does choosing heads for each token help?"),
    ("moh-75-released", "moh-75", "`released` or `paper`, 75%"),
    ("moh-50-released", "moh-50", "`released` or `paper`, 50%"),
    ("moh-50-global", "moh-50", "balance over the global batch or each sequence"),
    ("moh-50-released-global", "moh-50-released", "the same with `released`"),
    ("moh-50-one-stage", "moh-50", "without the second stage of the router"),
    ("moh-50-shared-0", "moh-50", "no shared heads instead of a quarter"),
    ("moh-50-shared-1", "moh-50", "an eighth shared"),
    ("moh-50-shared-3", "moh-50", "three eighths shared"),
    ("moh-top-p", "moh-75", "as many heads as a token needs, 2 to 6 of 8, instead of 6"),
    ("moh-75-shared-0", "moh-75", "75% without shared heads, and so in one stage (Table 6)"),
    ("moh-75-one-stage", "moh-75", "75% with shared heads in one stage (Table 6)"),
    *((f"moh-75-share-{share}", "moh-75", f"{share}% of used heads shared, for 66.7% (Table 7)") for share in SHARES),
    *((f"dense-heads-{heads}", "dense", f"heads: {heads} at the same width") for heads in (1, 4, 16, 32)),
    ("moa-50", "gqa-dense", "half of the heads, one key/value head, gates that add up to K (K times MoA's)"),
    ("switch-50", "moh-50", "sigmoid gates, no shared head (2 times SwitchHead's)"),
    ("dense-muon", "dense", "Muon instead of AdamW, all heads"),
    ("dense-muon-head", "dense-muon", "its q, k, v and o orthogonalised by heads"),
    ("moh-50-muon", "moh-50", "Muon instead of AdamW, 50%"),
    ("moh-50-muon-head", "moh-50-muon", "its q, k, v and o orthogonalised by heads"),
    ("gqa-50", "gqa-dense", "50% under grouped-query attention"),
    ("gqa-50-groups", "gqa-50", "whole key/value groups instead of single heads"),
)


def main(texts):
    return run_comparison("ablation", parse_arguments, texts)


def parse_arguments(texts):
    """The flags of the table; ``others``: those of moh_lm.pretrain. Raises ConfigError."""
    parser = Parser(prog="python studies/ablation.py", description=__doc__.splitlines()[0], epilog=FLAGS)
    add_comparison_flags(parser, VARIANTS, [1])
    add = parser.add_argument
    add("--num-attention-heads", type=at_least(8), metavar="N", default=8, help="heads, a multiple of 8 (default: 8)")
    add("--num-layers", type=at_least(1), metavar="N", default=4, help="layers (default: 4)")
    add("--train-iters", type=at_least(1), metavar="N", default=600, help="iterations of each run (default: 600)")
    add("--learning-rate", type=above_0, metavar="X", default=2e-3, help="peak, multiplied by --rates (default: 2e-3)")
    instead = {"--train-tokens": "--train-iters", "--seed": "--seeds"}
    of_a_file = ("--num-attention-heads", "--num-layers", "--train-iters", "--learning-rate")
    instead |= dict.fromkeys(of_a_file, "it on the command line")
    flags = read_flags(parser, texts, "ablation", instead)
    heads, layers = flags.num_attention_heads, flags.num_layers
    if heads % 8:
        raise ConfigError([f"--num-attention-heads {heads}: must be a multiple of 8"])
    size = Size("model", heads, flags.learning_rate, 0, f"--num-layers {layers}", layers, flags.train_iters)
    flags.table, flags.sizes = Table(VARIANTS, (size,), COMMON, questions=QUESTIONS), [size.name]
    return flags


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends train_all, which stops its runs
    sys.exit(main(sys.argv[1:]))
