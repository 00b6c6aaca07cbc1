"""The page of a head report: one self-contained HTML file, pictures included.

page.html is the template. This file makes the rows of its tables and formats numbers and texts.
"""

import base64
import math

import numpy as np

from moh_lm.monitor.report.page import template_beside
from moh_lm.monitor.report.series import name_of
from tools.heads import ablation, changes, findings, gates, measures, syntax

NEWLINE = "\N{DOWNWARDS ARROW WITH TIP LEFTWARDS}"
MOST_PLACES = 48  # most heads of a class that are listed


def page(report, pictures, decode):
    """The HTML text. report, pictures: results of ``report_of`` in report.py. decode: a function from token ids to
    text."""
    template = template_beside(__file__, number=number, percent=percent, image=image, numbered=numbered)
    columns = head_columns(report)
    formulas = {"Measures": measures, "Findings": findings, "Importance": ablation, "L0 gates": gates, "Syntax": syntax}
    formulas["Changes"] = changes
    return template.render(
        report={"ablation": None, "syntax": None, "changes": None, **report},
        pictures=pictures,
        name=name_of(report["model"]),
        shown=findings.shown,
        picture_of=picture_of,
        newline=NEWLINE,
        heads=list(range(len(report["class"][0]))),
        spans=lambda excerpt: zip(token_texts(excerpt.tokens, decode), excerpt.gates, strict=True),
        formulas={title: module.__doc__.strip() for title, module in formulas.items()},
        **summary(report),
        **(routed_rows(report) if report["routed"] else {}),
        class_rows=class_rows(report["class"]),
        alike_rows=[(layer, other, head, number(value)) for layer, head, other, value in report["alike"]],
        sink_columns=["layer", *(f"{of} {name}" for of in ("sink %", "gate") for name in report["sink"])],
        sink_rows=sink_rows(report),
        l0_rows=[
            [f"{row['lambda']:g}", percent(row["kept"]), *(number(loss, 4) for loss in row["loss"].values())]
            for row in report.get("ablation", {}).get("l0", [])
        ],
        syntax_rows=syntax_rows(report.get("syntax") or {}),
        head_columns=list(columns),
        head_rows=[
            [cell(i, j) for cell in columns.values()] for i, row in enumerate(report["class"]) for j in range(len(row))
        ],
    )


def number(value, digits=3):
    return "" if value is None or math.isnan(value) else f"{round(value, digits) + 0.0:.{digits}f}"  # no -0.0


def percent(value):
    return "" if value is None else number(100 * value, 1)


def numbered(values, factor, digits):
    """Rows of a table, each with its number first, of ``values`` [rows, columns]."""
    return [[index, *(number(value and factor * value, digits) for value in row)] for index, row in enumerate(values)]


def image(content):
    """Return a data URL with the content of a PNG."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def picture_of(kind, index, domain):
    """The name of a domain's picture, which is also its file name."""
    return f"{kind}_{index}_" + "".join(char if char.isalnum() else "-" for char in domain[:40])


def token_texts(ids, decode):
    """The text that each token adds; a character of several tokens counts for its last token."""
    texts, before = [], ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end])
        if text.endswith("\ufffd") and end < len(ids) or not text.startswith(before):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        before = text
    return [text.replace("\n", NEWLINE).replace("\t", "  ") for text in texts]


def syntax_rows(relations):
    """Return for each relation the baseline, the best head, and all heads that follow it."""
    rows = []
    for name, of in relations.items():
        best = np.unravel_index(np.nanargmax(of["share"]), of["share"].shape) if not np.isnan(of["share"]).all() else ()
        follows = ", ".join(f"{layer}.{head}" for layer, head in np.argwhere(of["follows"]))
        share = percent(of["share"][best]) if best else ""
        rows.append([name, of["pairs"], percent(of["baseline"]), ".".join(map(str, best)), share, follows])
    return rows


def summary(report):
    classes = [name for row in report["class"] for name in row]
    counted = [f"{classes.count(name)} {findings.shown(name)}" for name in findings.CLASSES if name in classes]
    dropped = [
        f"{domain['name']}: {count} {reason}"
        for domain in report["domains"]
        for reason, count in domain["dropped"].items()
    ]
    return {"counted": ", ".join(counted), "dropped": "; ".join(dropped)}


def routed_rows(report):
    kinds, loads, similarity = report["kind"], report["load"], report["similarity"]
    layers = [layer for layer, of in enumerate(kinds) if "routed" in of]
    heads = [head for head, of in enumerate(zip(*kinds, strict=True)) if "routed" in of]
    return {
        "load_heads": heads,
        "load_rows": [
            [layer, name, *(percent(load[layer][head]) if kinds[layer][head] == "routed" else "" for head in heads)]
            for layer in layers
            for name, load in loads.items()
        ],
        "similarity_rows": [[a, *(number(similarity[a][b]) for b in similarity)] for a in similarity],
    }


def sink_rows(report):
    """Return for each layer its attention to the first token and the RMS of its gates in each domain."""
    sinks, gates = (list(report[key].values()) for key in ("sink", "gate_rms"))
    return [
        [layer, *(percent(of[layer]) for of in sinks), *(number(of[layer]) for of in gates)]
        for layer in range(len(report["class"]))
    ]


def class_rows(classes):
    rows = []
    for name in findings.CLASSES:
        places = [f"{i}.{j}" for i, row in enumerate(classes) for j, found in enumerate(row) if found == name]
        more = ["..."] if len(places) > MOST_PLACES else []
        rows.append([findings.shown(name), len(places), ", ".join(places[:MOST_PLACES] + more)])
    return rows


def load_of_routed(kinds, load):
    return lambda i, j: percent(load[i][j]) if kinds[i][j] == "routed" else ""


def head_columns(report):
    """Return {title: function from layer and head to a cell} of the table of all heads."""

    def of(values, write=number):
        return lambda i, j: write(values[i][j])

    def fine(value):
        return number(value, 4)

    columns = {
        "head": lambda i, j: f"{i}.{j}",
        "kind": of(report["kind"], str),
        "class": of(report["class"], findings.shown),
        "offset": of(report["offset"], lambda offset: offset if offset >= 0 else ""),
        "at it %": of(report["offset_share"], percent),
        **{key: of(report[key]) for key in ("previous", "second", "first", "prefix")},
        "rare %": of(report["rare"], percent),
        "written": of(report["written"]),
        "CKA": of(report["nearest_cka"]),
        "with": lambda i, j: report["nearest_head"][i][j] if columns["CKA"](i, j) else "",
    }
    if report["routed"]:
        columns["bits"] = of(report["specialisation"], fine)
        columns |= {f"load % {name}": load_of_routed(report["kind"], load) for name, load in report["load"].items()}
        columns |= {f"gate {name}": of(gate) for name, gate in report["gate"].items()}
    if "changes" in report:
        columns["change %"] = of(report["changes"]["head"], percent)
    if "ablation" in report:
        columns |= {f"rise {name}": of(rises, fine) for name, rises in report["ablation"]["rise"].items()}
    return columns
