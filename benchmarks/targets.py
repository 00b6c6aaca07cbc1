"""The targets of a GPU, and which of them the rows of benchmarks/gpu.py meet. Ratios are those of the median times."""

import re
from functools import reduce
from operator import truediv

STEPS = {  # part: (shape, how its steps are computed)
    "captured": ("LLM-S, 8 x 2,048", "compiled-fused-captured"),
    "medium step": ("LLM-S, 2 x 8,192", "compiled-fused-captured"),
    "long step": ("LLM-B, 2 x 8,192", "compiled-fused"),
    "long graph": ("LLM-B, 2 x 8,192, captured", "compiled-fused-captured"),
}


def over_dense(percent, limit, *parts):
    for part in parts:
        shape, kind = STEPS[part]
        name = f"a step with {percent}% of the heads over a dense one, {shape}"
        yield name, part, "<=", (limit,), *(rf"^{of}-{kind} +([\d.]+) " for of in (f"moh-{percent}", "dense"))


TARGETS = [  # name, part, sign, limits of an H100 and, if it differs, of an H200, patterns of the figure and its base
    ("loss with its products, LLM-S, ms", "loss", "<=", (11,), r"loss llm-s .* fused +([\d.]+) ms"),
    ("MFU, dense LLM-S, 8 x 2,048, %", "captured", ">=", (34, 37), r"^dense-\S+-captured .* MFU dense ([\d.]+)%"),
    ("MFU, dense LLM-B, 2 x 8,192, %", "long step", ">=", (42, 45), r"^dense-compiled-fused .* MFU dense ([\d.]+)%"),
    ("a step over Hugging Face's with Liger, LLM-S", "peers", "<=", (0.95,), r"^dense-compiled-fused +([\d.]+) ",
     r"^hf-liger-compiled +([\d.]+) "),
    *over_dense(50, 1.00, "captured"),
    *over_dense(50, 0.94, "medium step", "long step", "long graph"),
    *over_dense(75, 1.03, "captured", "medium step", "long step"),
    *over_dense(25, 0.83, "medium step", "long step"),
    ("router and gates of a layer, LLM-S, ms", "router", "<=", (0.10,), r"router llm-s sigmoid .* fused +([\d.]+) ms"),
    ("a new token by calls over one by a graph, LLM-S", "decoding", ">=", (8,),
     *(rf"generation, llm-s T=2048 b=1, dense .*{way} +([\d.]+) us" for way in ("calls", "captured"))),
]  # fmt: skip


def met_and_missed(rows):
    """Yield lines of Markdown. rows: those of the file of benchmarks/gpu.py, of which the newest count."""
    yield from ("\n### targets\n", "| | target | measured | |", "|---|---|---|---|")
    for name, part, sign, limits, *patterns in TARGETS:
        lines = [row["line"] for row in rows if row["part"] == part and "line" in row]
        found = [re.findall(pattern, "\n".join(lines), re.MULTILINE)[-1:] for pattern in patterns]
        limit = limits[-1] if any("H200" in line for line in lines) else limits[0]
        verdict = "not measured |"
        if all(found):
            figure = reduce(truediv, (float(number) for (number,) in found))
            met = figure <= limit if sign == "<=" else figure >= limit
            verdict = f"{figure:.3g} | {'met' if met else 'missed'}"
        yield f"| {name} | {sign} {limit:g} | {verdict} |"
