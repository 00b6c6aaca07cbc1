"""The report on the heads of a model: every number of heads.json, and the pictures of the page."""

import math

import numpy as np
from tqdm import tqdm

from tools.heads import findings
from tools.heads.ablation import measure_ablation, measure_pruning
from tools.heads.changes import rare_against_others
from tools.heads.findings import CLASSES, routed_mask, used_heads
from tools.heads.gates import measure_gates
from tools.heads.measures import measure_prefix, measure_rare, measure_text
from tools.heads.page import picture_of
from tools.heads.pictures import class_map, curves, head_maps, themed
from tools.heads.text import frequency_ranks, repeated_sequences

ABLATION_TOKENS = 2048  # default for models without routers


def report_of(arguments, model, tokenizer, domains, changes=None):
    """Return the content of heads.json, with arrays, and {picture: {"light", "dark": PNG}}. changes: result of
    ``measure_changes``."""
    kinds = findings.kinds_of(model)
    routed, num_layers = routed_mask(kinds), len(kinds)
    tokens = arguments.ablation_tokens
    if tokens is None:
        tokens = 0 if routed.any() and not arguments.l0 else ABLATION_TOKENS
    steps = num_layers * (2 if tokens else 1) + len(arguments.l0)
    with tqdm(total=steps, desc="layers", unit="layer", disable=None) as bar:
        measures = measure_text(model, domains, bar.update)
        ranks, counts = frequency_ranks(domains, model.model.embed_tokens.weight.shape[0])
        length = min(25, ((model.config.learned_positions or math.inf) - 1) // 4)  # four times after a start token
        start = [*tokenizer.bos_ids.tolist(), tokenizer.eos_id][0]
        repeated = repeated_sequences(ranks, counts, start, length=int(length))
        measures["prefix"] = measure_prefix(model, repeated)
        measures["rare"], chance = measure_rare(model, domains, ranks)
        used, ablation = used_heads(measures), {}
        if tokens:
            losses, rises = measure_ablation(model, domains, tokens, bar.update)
            curve = measure_pruning(model, domains, tokens, rises, used)
            gates = measure_gates(model, domains, tokens, arguments.l0, used, bar.update)
            ablation = {"ablation": {"tokens": tokens, "loss": losses, "rise": rises, "pruning": curve, "l0": gates}}
    near, which = findings.nearest(measures["cka"], used)
    report = {
        "model": str(arguments.model),
        "description": describe(kinds),
        "active": float(np.mean([load.sum(1).mean() for load in measures["load"].values()])),
        "seq_length": max(len(domain.windows[0]) for domain in domains),
        "domains": [{"name": d.name, "tokens": sum(map(len, d.windows)), "dropped": dict(d.dropped)} for d in domains],
        "routed": bool(routed.any()),
        "kind": kinds,
        "class": findings.classes_of(measures),
        "rare_chance": chance,
        "nearest_cka": near,
        "nearest_head": which,
        "alike": findings.alike(measures["cka"], used, 10),
        **{key: values for key, values in measures.items() if key not in ("gates", "half_load")},
        **ablation,
    }
    if changes is not None:
        whole = np.mean(list(measures["load"].values()), axis=0)
        rare = dict(zip(("ratio", "rare_load", "other_load"), rare_against_others(changes, whole, routed), strict=True))
        report["changes"] = {"since": str(arguments.since), "head": changes, **rare}
    if routed.any():
        report |= compare_domains(arguments, measures, domains, routed)
    return report, draw_pictures(report, used)


def compare_domains(arguments, measures, domains, routed):
    """The part of the report that compares the use of routed heads between domains."""
    bits = findings.specialisation(measures["load"], routed)
    found = {"similarity": findings.similarities(measures, routed), "specialisation": bits}
    found["specialisation_chance"] = findings.chance([sum(map(len, domain.windows)) for domain in domains])
    seen = routed & used_heads(measures)
    most = findings.ranked(bits, seen, min(arguments.examples, seen.sum()))
    rest = seen.copy()
    for place in most:
        rest[place.layer, place.head] = False
    for key, places in (("most", most), ("least", findings.ranked(bits, rest, arguments.examples, largest=False))):
        found[key] = [
            {
                **place._asdict(),
                "largest_gate": max(
                    float(gates[:, :, place.layer, place.head].max()) for gates in measures["gates"].values()
                ),
                "excerpts": findings.excerpts(measures, domains, place.layer, place.head, 3),
            }
            for place in places
        ]
    return found


def describe(kinds):
    """A sentence on the heads, such as "4 layers of 8 heads: 4 shared, 4 routed"."""
    counts = {name: [row.count(name) for row in kinds] for name in ("shared", "routed", "on", "off")}
    spans = {name: sorted({min(of), max(of)}) for name, of in counts.items() if any(of)}
    parts = ", ".join(f"{' to '.join(map(str, span))} {name}" for name, span in spans.items())
    return f"{len(kinds)} layers of {len(kinds[0])} heads: {parts}"


def draw_pictures(report, used):
    kinds, layers = report["kind"], range(len(report["kind"]))
    pictures = {"classes": themed(class_map, report["class"], list(CLASSES), kinds)}
    alike = report["nearest_cka"]
    pictures["redundancy"] = themed(head_maps, [(None, alike)], layers, "highest CKA", 0, highest(alike), kinds)
    if report["routed"]:
        routed = routed_mask(kinds)
        loads = np.stack([np.where(routed, 100 * load, np.nan) for load in report["load"].values()])
        panels = [(f"layer {layer}", loads[:, layer]) for layer in np.flatnonzero(routed.any(1))]
        pictures["load"] = themed(head_maps, panels, list(report["load"]), "load in percent", 0, highest(loads))
        bits = 1000 * report["specialisation"]
        pictures["specialisation"] = themed(head_maps, [(None, bits)], layers, "millibits", 0, highest(bits), kinds)
    for index, (name, rises) in enumerate(report.get("ablation", {"rise": {}})["rise"].items()):
        shown = np.where(used, 1000 * rises, np.nan)
        name = picture_of("importance", index, name)
        scale = "0.001 nats per token", min(0, np.nanmin(shown)), highest(shown)
        pictures[name] = themed(head_maps, [(None, shown)], layers, *scale, kinds)
    if "changes" in report:
        percent = 100 * report["changes"]["head"]
        pictures["changes"] = themed(head_maps, [(None, percent)], layers, "change in percent", 0, percent.max(), kinds)
    if "ablation" in report:
        kept, losses = report["ablation"]["pruning"].values()
        axes = 100 * np.array(kept), losses, "heads kept in percent", "loss in nats per token"
        pictures["pruning"] = themed(curves, *axes)
    return pictures


def highest(values):
    """Return the upper end of a scale, which is above 0 even if all values are 0 or NaN."""
    return max(1e-3, np.nanmax(values, initial=0))


def plain(value):
    """Return a JSON-able value: arrays as lists, NaN as null, numbers with six digits."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    return value
