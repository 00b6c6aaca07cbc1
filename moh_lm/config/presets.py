"""Sizes from 100K to 1B parameters by one formula, for --preset N and the rungs of launch/ladder.sh.

N counts the parameters of the blocks, 12 d^2 in a layer of width d, without embedding and output head. A value given by
a flag is kept, and the values below follow from it.

    width d            128 (N / 1M)^0.4, in steps of 16, of 64 from 1M on, of 256 from 30M on: depth and width grow
                       together, from 12 columns per layer to 102; in GPT-3's family, from 64 to 85 (Brown et al. 2020)
    layers             N / 12 d^2
    MLP                8/3 d in steps of 64, SwiGLU's share (Shazeer 2020)
    heads              four below 1M, where d is a multiple of 8; else 32 features each, and 64 from 30M on
    head split         the default: a token uses half of them
    routing            the default, sigmoid: its gates begin at 1 at every width, which width transfer needs
    vocabulary         4096 (N / 1M)^0.43 to the next power of two: V d in proportion to N^0.83 (Tao et al. 2024, arXiv
                       2407.13623)
    sequence           1024 tokens at every size, so that losses compare
    tokens             20 N (Hoffmann et al. 2022, arXiv 2203.15556)
    batch              16K (N / 1M)^0.6 tokens to the next power of two: C^0.3, as in DeepSeek LLM (arXiv 2401.02954)
    warm-up            1/25 of the iterations
    learning rate      1.5e-3, the atlas' at the width 256, down to a tenth; other widths by --base-width 256
"""

import math

from moh_lm.config.fields import ConfigError, tuple_of

SIZES = ("100K", "300K", "1M", "3M", "10M", "30M", "100M", "300M", "1B")


def parameters(size):
    """Return the number N that a size such as "30M" stands for."""
    return int(size[:-1]) * {"K": 10**3, "M": 10**6, "B": 10**9}[size[-1]]


def preset(size, given):
    """Return {field: value} of what ``size`` sets, except for the fields in ``given``."""
    n, values = parameters(size), dict(given)
    scale, choose = n / 1e6, values.setdefault
    unit, head = (16, 8) if scale < 1 else (64, 32) if scale < 30 else (256, 64)
    d = choose("hidden_size", round(128 * scale**0.4 / unit) * unit)
    choose("num_layers", max(1, round(n / (12 * max(1, d) ** 2))))
    choose("intermediate_size", max(1, round(8 / 3 * d / 64)) * 64)
    if d % head and not {"num_attention_heads", "head_dim"} & values.keys():
        advice = f"choose a multiple of {head}, or give --num-attention-heads"
        has = "four heads of even width" if scale < 1 else f"heads of {head}"
        raise ConfigError([f"--hidden-size {d}: --preset {size} has {has}; {advice}"])
    heads = tuple_of(choose("num_attention_heads", (4 if scale < 1 else max(1, d // head),)))
    if not values.get("head_dims"):
        choose("head_dim", d // max(1, *heads))
    if values.get("attention") == "latent":
        choose("kv_lora_rank", max(1, d // 2))
    choose("vocab_size", 2 ** round(math.log2(4096 * scale**0.43)))
    length = choose("seq_length", 1024)
    batch = choose("batch_tokens", 2 ** round(math.log2(16 * 1024 * scale**0.6)))
    iterations = values.get("train_iters") or choose("train_tokens", 20 * n) // max(1, batch, length)
    choose("warmup_iters", iterations // 25)
    choose("min_learning_rate", float(f"{choose('learning_rate', 1.5e-3) / 10:.6g}"))
    choose("base_width", 256)
    return {key: value for key, value in values.items() if key not in given}
