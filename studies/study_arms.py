"""The arms that the study compares (docs/study.md), one line each, and the sizes at which they are trained.

Every arm has the key/value heads of its size, so that arms differ by their query heads, by gates and by choice. With
four query heads per key/value head, half of a group may consist of a shared head and a chosen one. The three ``mha``
arms have a key/value head for every head: heads that keep only their own tokens save memory only in this case.
"""

from studies.atlas_forms import BIAS, COMMON, GATED, PAPER, RELEASED, SCALED, SIGMOID
from studies.table import Size, Table, Variant

# There are five tokens per parameter outside the embeddings. The rates are in proportion to 1 / width. With 5% of the
# steps as a warm-up, what the first hundred steps did to dense decided the comparison (docs/history/study.md).
SIZES = (
    Size("s2", 8, 8e-3, 1.425, "--num-layers 3 --hidden-size 96 --head-dim 16 --num-key-value-heads 2 "
         "--intermediate-size 256 --batch-tokens 2K --micro-batch-size 8", warmup=30, evaluations=2, seeds=5),
    Size("m2", 8, 6e-3, 1.92, "--num-layers 3 --hidden-size 128 --head-dim 32 --num-key-value-heads 2 "
         "--intermediate-size 352 --batch-tokens 4K --micro-batch-size 16", warmup=30, evaluations=2),
    Size("l2", 16, 2e-3, 3.4, "--num-layers 4 --hidden-size 384 --head-dim 32 --num-key-value-heads 4 "
         "--intermediate-size 1024 --batch-tokens 16K --micro-batch-size 64", warmup=30, evaluations=2),
)  # fmt: skip

GROUPS = f"{SIGMOID} --routing-unit head_in_group"
MHA = "--num-key-value-heads {all}"
OWN_KEYS = f"{SIGMOID} {MHA} --routed-keys selected"
HALF, MOST, QUARTER = (f"--num-attention-heads {{{share}}}" for share in ("half", "three_quarters", "quarter"))
# The columns are heads that are always on, and heads chosen for each token, in eighths. Rules name those of the first
# two tiers, except paper_gated-50, and paper-75 and released-75.
VARIANTS = (
    Variant("dense", None),
    Variant("gated-50", None, 0, f"{GATED} {HALF}"),  # a model with half of the query heads
    Variant("sigmoid-50", 2, 2, SIGMOID),
    Variant("groups-50", 0, 4, GROUPS),
    Variant("dense-half", None, tier=2, tokens=0.5),
    Variant("dense-double", None, tier=2, tokens=2),
    Variant("paper-50", 2, 2, PAPER, tier=2),
    Variant("paper_gated-50", 2, 2, f"{PAPER} {HALF}", tier=2),  # all heads of a model with half of them
    Variant("paper_scaled-50", 2, 2, SCALED, tier=2),
    Variant("released-50", 2, 2, RELEASED, tier=2),
    Variant("groups_shared-50", 2, 2, GROUPS, tier=2),
    Variant("gated-75", None, 0, f"{GATED} {MOST}", tier=2),
    Variant("sigmoid-75", 4, 2, SIGMOID, tier=2),
    Variant("gated", None, 0, GATED, tier=3),
    Variant("paper_gated", 4, 4, PAPER, tier=3),
    Variant("fewer-50", None, 0, HALF, tier=3),
    Variant("fewer-75", None, 0, MOST, tier=3),
    Variant("bias-50", 2, 2, f"{SIGMOID} {BIAS}", tier=3),
    Variant("paper-75", 4, 2, PAPER, tier=3),
    Variant("released-75", 4, 2, RELEASED, tier=3),
    Variant("gated-25", None, 0, f"{GATED} {QUARTER}", tier=4),
    Variant("sigmoid-25", 1, 1, SIGMOID, tier=4),
    Variant("groups-25", 0, 2, GROUPS, tier=4),
    Variant("mha", None, 0, MHA, tier=4),
    Variant("mha_own_keys-50", 2, 2, OWN_KEYS, tier=4),
    Variant("mha_own_places-50", 2, 2, f"{OWN_KEYS} --routed-positions head", tier=4),
)
QUESTIONS = (
    ("sigmoid-50", "gated-50", "does choosing heads for each token add to gating?"),
    ("groups-50", "gated-50", "does choosing inside of key/value groups?"),
    ("sigmoid-75", "gated-75", "does choosing three quarters of the heads?"),
    ("sigmoid-25", "gated-25", "does choosing a quarter?"),
    ("gated-50", "fewer-50", "what gates add to half of the heads"),
    ("gated-75", "fewer-75", "what gates add to three quarters"),
    ("gated-50", "gated", "half of the heads, all gated, or all of them"),
    ("sigmoid-50", "gated", "half of the heads of each token, or all gated: as many parameters"),
    ("groups-50", "sigmoid-50", "as many heads of every group, or any heads"),
    ("groups_shared-50", "groups-50", "a shared head in every group"),
    ("groups_shared-50", "sigmoid-50", "as many shared and chosen heads, in every group or anywhere"),
    ("paper-50", "sigmoid-50", "the paper's gates, or the default"),
    ("paper-50", "paper_gated-50", "does choosing heads add to the paper's gates?"),
    ("paper-50", "paper_gated", "the same, where both begin with an output of about one size"),
    ("paper_gated-50", "gated-50", "the paper's gates without a choice, or the default's"),
    ("paper_gated", "dense", "what the paper's gates do to all heads"),
    ("paper_scaled-50", "sigmoid-50", "the paper's gates, beginning at 1, or the default"),
    ("released-50", "sigmoid-50", "the authors' code, or the default"),
    ("paper-75", "sigmoid-75", "the paper's gates with three quarters"),
    ("released-75", "sigmoid-75", "the authors' code with three quarters"),
    ("bias-50", "sigmoid-50", "balance by a bias, or by the loss of Eq. 7"),
    ("sigmoid-50", "sigmoid-75", "half of the heads, or three quarters"),
    ("gated-50", "gated-75", "the same without a choice"),
    ("sigmoid-25", "sigmoid-50", "a quarter of the heads, or half"),
    ("mha_own_keys-50", "mha", "heads that keep their own tokens, or all tokens and heads"),
    ("mha_own_keys-50", "dense", "the same, or keys and values that four heads share"),
    ("mha_own_places-50", "mha_own_keys-50", "positions counted inside the head's own tokens"),
)
TABLE = Table(VARIANTS, SIZES, [*COMMON, "--qk-norm"], 6_600_000, QUESTIONS)  # as many as dense-double of m2 reads
