"""The variants of the atlas: forms of routing and gating, budgets of heads, sizes. A form is one line of ``VARIANTS``.

The flags of a variant come after those of its size, so they take effect. A form whose flags this checkout does not know
is left out, and the atlas says so.
"""

from studies.table import Size, Table, Variant

COMMON = (
    "--vocab-size 4096 --seq-length 256 --precision fp32 --validation-fraction 0.02 --eval-samples 128 "
    "--log-interval 50 --keep-last 1"
).split()
# Rates are in proportion to 1 / width. Tokens per parameter are about 10 per parameter outside the embeddings.
SIZES = (
    Size("s", 8, 4e-3, 3, "--num-layers 3 --hidden-size 96 --head-dim 12 --intermediate-size 256 "
         "--batch-tokens 2K --micro-batch-size 8"),
    Size("m", 16, 2.4e-3, 4.7, "--num-layers 4 --hidden-size 160 --head-dim 10 --intermediate-size 384 "
         "--batch-tokens 4K --micro-batch-size 16"),
    Size("l", 32, 1.5e-3, 6, "--num-layers 4 --hidden-size 256 --head-dim 8 --intermediate-size 688 "
         "--batch-tokens 8K --micro-batch-size 16"),
)  # fmt: skip


class Form(Variant):
    """A form of routing or gating with a budget of heads, ``form-percent``."""

    @property
    def form(self):
        """The name without the percentage of heads or the length."""
        return self.name.partition("-")[0]


STATIC, PAPER, RELEASED, SCALED = (
    "--head-selection static", "--routing paper", "--routing released", "--routing paper_scaled",
)  # fmt: skip
SIGMOID, RELU, GATED = "--routing sigmoid", "--routing relu", "--head-selection gated"
ROUTED = {"static": STATIC, "paper": PAPER, "paper_scaled": SCALED, "sigmoid": SIGMOID, "released": RELEASED}
BIAS = "--load-balance-bias-rate 0.001 --load-balance-coefficient 0"
VARIANTS = (  # heads that are always on, and heads chosen for each token, in eighths
    Form("dense", None),
    Form("static-50", 2, 2, STATIC),
    Form("paper-50", 2, 2, PAPER),
    Form("paper_scaled-50", 2, 2, SCALED),
    Form("gated", None, 0, GATED),
    Form("gated-50", None, 0, f"{GATED} --num-attention-heads {{half}}"),  # a model with half of the heads
    Form("sigmoid-50", 2, 2, SIGMOID),
    Form("released-50", 2, 2, RELEASED),
    Form("dense-half", None, tokens=0.5),
    Form("dense-double", None, tokens=2),
    *(Form(f"{form}-75", 4, 2, flags, tier=2) for form, flags in ROUTED.items()),
    Form("gated-75", None, 0, f"{GATED} --num-attention-heads {{three_quarters}}", tier=2),
    *(Form(f"{form}-25", 1, 1, flags, tier=2) for form, flags in ROUTED.items()),
    Form("gated-25", None, 0, f"{GATED} --num-attention-heads {{quarter}}", tier=2),
    Form("bias-50", 2, 2, f"{SIGMOID} {BIAS}", tier=2),
    Form("bias_scaled-50", 2, 2, f"{SCALED} {BIAS}", tier=2),
    Form("own_keys-50", 2, 2, f"{SIGMOID} --routed-keys selected", tier=2),
    Form("relu-50", 2, 2, RELU, tier=3),
)
QUESTIONS = (
    ("gated-50", "gated", "half of the heads, all gated, or all of them"),
    ("sigmoid-50", "gated-50", "does choosing heads for each token add to gating?"),
    ("sigmoid-75", "gated-75", "choosing three quarters of the heads, or having as many"),
    ("sigmoid-25", "gated-25", "choosing a quarter of the heads, or having as many"),
    ("paper-50", "gated-50", "the paper's form, or as many gated heads"),
    ("paper_scaled-50", "paper-50", "gates that begin at 1, or those of Eq. 5"),
    ("released-50", "paper-50", "the authors' code, or their equations"),
)
TABLE = Table(VARIANTS, SIZES, COMMON, 20_000_000, QUESTIONS)  # with fewer, larger sizes repeat them
