"""The page of a head report: one HTML file, with its pictures inside and nothing from elsewhere."""

import base64
import html
import math

from tools.generate import UNFINISHED
from tools.heads import ablation, findings, measures

NEWLINE = "\N{DOWNWARDS ARROW WITH TIP LEFTWARDS}"
STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --page: #ffffff; --soft: #f1f3f5; --line: #cfd4da; --muted: #5c6570;
  --link: #0b57b0; }
@media (prefers-color-scheme: dark) { :root { --ink: #d8dce2; --page: #16181c; --soft: #212429; --line: #3b4048;
  --muted: #9aa3ae; --link: #8ab4f8; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 72rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid var(--line);
  padding-top: 1rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
a { color: var(--link); } nav a { margin-right: 1rem; white-space: nowrap; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; align-items: flex-start; margin: .5rem 0 1.5rem; }
.pair > figure { flex: 0 1 360px; margin: 0; max-width: 100%; }
.pair > .scroll { flex: 1 1 320px; max-height: 26rem; }
img { max-width: 100%; height: auto; display: block; }
.scroll { overflow: auto; max-width: 100%; min-width: 0; max-height: 34rem; }
table { border-collapse: collapse; border: 1px solid var(--line); font-size: .85rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .3rem .5rem; color: var(--muted); }
th, td { padding: .15rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, .left { text-align: left; }
.wide { white-space: normal; width: 24rem; min-width: 14rem; }
thead th { position: sticky; top: 0; background: var(--soft); }
.text { font: .85rem/1.7 ui-monospace, monospace; white-space: break-spaces; border: 1px solid var(--line);
  padding: .4rem .6rem; margin: .3rem 0; }
.text span { border-radius: 2px; } .text b { color: var(--muted); font-weight: normal; }
.note { color: var(--muted); font-size: .9rem; }
pre { overflow-x: auto; background: var(--soft); padding: .75rem; font-size: .8rem; line-height: 1.4; }
"""


def page(report, pictures, decode):
    """The HTML text. report, pictures: of ``head_report.report_of``. decode: a function from token ids to text."""
    parts = [
        ("load", "Load", load_section(report, pictures) if report["routed"] else None),
        ("domains", "Domains compared", similarity_section(report) if report["routed"] else None),
        ("special", "Most and least specialised", special_section(report, pictures, decode)),
        ("importance", "Importance", importance_section(report, pictures) if "ablation" in report else None),
        ("attention", "What heads attend to", attention_section(report, pictures)),
        ("redundancy", "Redundancy", redundancy_section(report, pictures)),
        ("heads", "All heads", heads_section(report)),
        ("formulas", "How it is measured", formulas_section()),
    ]
    parts = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in parts)
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{text}</section>' for name, title, text in parts)
    title = f"Heads of {escape(report['model'])}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1>{summary(report)}<nav>{links}</nav>{body}</body></html>\n"
    )


# --- Pieces ---


def escape(text):
    return html.escape(str(text))


def number(value, digits=3):
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def percent(value):
    return "" if value is None or math.isnan(value) else f"{100 * value:.1f}"


def picture_of(kind, index, domain):
    """The name of a picture of a domain, for a file too."""
    return f"{kind}_{index}_" + "".join(char if char.isalnum() else "-" for char in domain)


def figure(pictures, name, alt):
    """A picture in the colours of the page; alt: what it shows."""
    light, dark = (f"data:image/png;base64,{base64.b64encode(pictures[name][k]).decode()}" for k in ("light", "dark"))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img width="360" alt="{escape(alt)}" src="{light}"></picture></figure>'
    )


def table(head, rows, caption="", words=(), lists=()):
    """rows: texts, escaped already. words, lists: columns with these instead of numbers."""
    names = dict.fromkeys(words, "left") | dict.fromkeys(lists, "left wide")
    style = [f' class="{names[index]}"' if index in names else "" for index in range(len(head))]
    top = "".join(f"<th{s}>{cell}</th>" for s, cell in zip(style, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{s}>{cell}</td>" for s, cell in zip(style, row, strict=True)) + "</tr>" for row in rows
    )
    caption = f"<caption>{caption}</caption>" if caption else ""
    rows = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0"><table>{caption}{rows}</table></div>'


def numbers(values, caption, form, first="layer", names=None):
    """A table of values [rows, heads]."""
    names = range(len(values)) if names is None else map(escape, names)
    rows = [[name, *map(form, row)] for name, row in zip(names, values, strict=True)]
    return table([first, *range(len(values[0]))], rows, caption)


def pair(*parts):
    return f'<div class="pair">{"".join(parts)}</div>'


# --- Sections ---


def summary(report):
    sizes = ", ".join(f"{escape(d['name'])} {d['tokens']:,}" for d in report["domains"])
    classes = [name for row in report["class"] for name in row]
    counted = ", ".join(f"{classes.count(name)} {name}" for name in findings.CLASSES if name in classes)
    dropped = [
        f"{escape(domain['name'])}: {count} {escape(reason)}"
        for domain in report["domains"]
        for reason, count in domain["dropped"].items()
    ]
    return (
        f"<p>{escape(report['description'])}. A token uses {report['active']:.2f} of them on average.</p>"
        f"<p>Tokens read of each domain: {sizes}, in windows of at most {report['seq_length']}. "
        f"Heads by what they attend to: {counted}.</p>"
        + (f"<p>Documents that could not be read: {'; '.join(dropped)}.</p>" if dropped else "")
        + '<p class="note">Layers and heads are counted from 0, shared heads first; a red line in the maps ends them. '
        "What a measure is, and from which value on a head counts as something, stands under "
        '<a href="#formulas">How it is measured</a>.</p>'
    )


def load_section(report, pictures):
    text = (
        "<p>Load: the percentage of the tokens of a domain that use a head. Shared heads, which every token uses, are "
        "grey in these maps.</p>"
    )
    layers = report["panel_layers"]
    names = list(report["load"])
    text += pair(
        figure(pictures, "load_layers", f"Load of each head by domain, in layers {layers}"),
        table(
            ["layer", "domain", *range(len(report["class"][0]))],
            [
                [layer, escape(name), *map(percent, report["load"][name][layer])]
                for layer in layers
                for name in names
            ],
            "load in percent, by layer and domain",
            words=(1,),
        ),
    )
    for index, name in enumerate(names):
        text += f"<h3>{escape(name)}</h3>" + pair(
            figure(pictures, picture_of("load", index, name), f"Load of each head of each layer on {name}"),
            numbers(report["load"][name], f"load on {escape(name)} in percent", percent),
        )
    return text


def similarity_section(report):
    names = list(report["similarity"])
    rows = [[escape(a), *(number(report["similarity"][a][b]) for b in names)] for a in names]
    return (
        "<p>The share of the selections of routed heads that two domains have in common (1 - total variation, the mean "
        "over layers). The diagonal compares one half of the windows of a domain with the other: what is not clearly "
        "below it may be chance.</p>" + table(["", *map(escape, names)], rows)
    )


def special_section(report, pictures, decode):
    if not report["routed"]:
        return None
    if len(report["load"]) < 2:
        return "<p>Specialisation compares domains: give a second one.</p>"
    text = (
        "<p>Specialisation: what one token's use of a head tells of its domain, in thousandths of a bit (the "
        "Jensen-Shannon divergence of the head's load over the domains). About "
        f"{1000 * report['specialisation_chance']:.1g} of them come from chance alone if tokens are taken as "
        "independent; they are not, so read small values with care.</p>"
    )
    text += pair(
        figure(pictures, "specialisation", "Specialisation of each routed head of each layer, in millibits"),
        numbers(report["specialisation"], "specialisation in millibits", lambda v: number(v and 1000 * v, 1)),
    )
    text += (
        "<p>Below, for each head, the text on which its gates are largest: the larger the gate of a token against the "
        "largest one of the head, the stronger the colour. Tokens without colour do not use the head; "
        f"{NEWLINE} is a line break.</p>"
    )
    for key, title in (("most", "Most specialised"), ("least", "Least specialised")):
        text += f"<h3>{title}</h3>"
        for place in report[key]:
            layer, head = place["layer"], place["head"]
            loads = ", ".join(f"{escape(name)} {100 * load[layer][head]:.1f}%" for name, load in report["load"].items())
            text += (
                f"<p><strong>layer {layer}, head {head}</strong>: {1000 * place['value']:.2f} millibits; load {loads}; "
                f"attention class: {report['class'][layer][head]}</p>"
            )
            text += "".join(highlighted(excerpt, place["largest_gate"], decode) for excerpt in place["excerpts"])
    return text


def highlighted(excerpt, largest, decode):
    spans = []
    for text, gate in zip(token_texts(excerpt.tokens, decode), excerpt.gates, strict=True):
        text = escape(text).replace("\n", NEWLINE).replace("\t", "  ")
        share = gate / largest
        colour = f' style="background: rgba(230, 120, 0, {0.12 + 0.68 * share:.2f})"' if gate > 0 else ""
        spans.append(f'<span{colour} title="{gate:.3g}">{text}</span>')
    return f'<div class="text"><b>{escape(excerpt.domain)}</b> {"".join(spans)}</div>'


def token_texts(ids, decode):
    """What each token adds to the text; the last token of a character has the character."""
    texts, before = [], ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end])
        if text.endswith(UNFINISHED) and end < len(ids) or not text.startswith(before):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        before = text
    return texts


def importance_section(report, pictures):
    ablation = report["ablation"]
    losses = ", ".join(f"{escape(name)} {loss:.4f}" for name, loss in ablation["loss"].items())
    text = (
        "<p>How much the loss rises if the output of a head is 0, in nats per token, over about "
        f"{ablation['tokens']:,} tokens of each domain. Loss with all heads: {losses}.</p>"
    )
    for index, (name, rises) in enumerate(ablation["rise"].items()):
        text += f"<h3>{escape(name)}</h3>" + pair(
            figure(pictures, picture_of("importance", index, name), f"Rise of the loss on {name} without each head"),
            numbers(rises, f"rise on {escape(name)} in 0.001 nats per token", lambda v: number(v and 1000 * v, 2)),
        )
    return text


def attention_section(report, pictures):
    rows = []
    for name in findings.CLASSES:
        places = [(i, j) for i, row in enumerate(report["class"]) for j, found in enumerate(row) if found == name]
        shown = ", ".join(f"{i}.{j}" for i, j in places[:48]) + (", ..." if len(places) > 48 else "")
        rows.append([name, len(places), shown])
    return (
        "<p>Each head by where its attention goes, over the tokens that use it.</p>"
        + pair(
            figure(pictures, "classes", "Attention class of each head of each layer"),
            table(["class", "heads", "layer.head"], rows, lists=(2,)),
        )
        + '<p class="note">Of a head whose attention lay anywhere with equal chances, '
        f"{percent(report['rare_chance'])}% of the queries would count for the test of rare tokens.</p>"
    )


def redundancy_section(report, pictures):
    rows = [[layer, other, head, number(value)] for layer, head, other, value in report["alike"]]
    return (
        "<p>Linear CKA of the outputs of two heads of a layer, before their gates: 1 if one is the other but for a "
        "rotation and a factor. The map shows for each head the highest one with another head of its layer.</p>"
        + pair(
            figure(pictures, "redundancy", "Highest CKA of each head with another head of its layer"),
            numbers(report["nearest_cka"], "highest CKA with another head of the layer", lambda v: number(v, 2)),
        )
        + table(["layer", "head", "head", "CKA"], rows, "the pairs most alike")
    )


def heads_section(report):
    domains = list(report["load"])
    head = ["head", "kind", "class", "offset", "at it %", "previous", "first", "prefix", "rare %", "written", "CKA"]
    head.append("with")
    routed = report["routed"]
    head += ["bits", *(f"load % {escape(name)}" for name in domains)] if routed else []
    head += [f"gate {escape(name)}" for name in domains] if routed else []
    head += [f"rise {escape(name)}" for name in report["ablation"]["rise"]] if "ablation" in report else []
    rows = []
    for i, row in enumerate(report["class"]):
        for j, name in enumerate(row):
            offset = report["offset"][i][j]
            cells = [f"{i}.{j}", report["kind"][i][j], name, offset if offset >= 0 else ""]
            cells += [percent(report["offset_share"][i][j])]
            cells += [number(report[key][i][j]) for key in ("previous", "first", "prefix")]
            cells += [percent(report["rare"][i][j]), number(report["written"][i][j])]
            near = report["nearest_cka"][i][j]
            cells += [number(near), "" if near is None or math.isnan(near) else report["nearest_head"][i][j]]
            if routed:
                cells.append(number(report["specialisation"][i][j], 4))
                cells += [percent(report["load"][domain][i][j]) for domain in domains]
                cells += [number(report["gate"][domain][i][j]) for domain in domains]
            if "ablation" in report:
                cells += [number(rises[i][j], 4) for rises in report["ablation"]["rise"].values()]
            rows.append(cells)
    return table(head, rows, "all measures; head: layer.head", words=(1, 2))


def formulas_section():
    """The docstrings of the chapters that measure: said once."""
    parts = {
        "Measures": measures.__doc__, "Findings": findings.__doc__, "Importance": ablation.__doc__,
    }  # fmt: skip
    return "".join(f"<h3>{title}</h3><pre>{escape(text.strip())}</pre>" for title, text in parts.items())
