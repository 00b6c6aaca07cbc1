"""What each head of a trained model is for: a page with maps of loads, specialised heads and their text, attention.

    python tools/head_report.py --model RUN_OR_STEP_OR_EXPORT_DIR --data NAME='FILES' --data NAME=DIR ... --output DIR
    python tools/head_report.py --model runs/llm-b --data data/llm --output heads
    python tools/head_report.py --model runs/llm-b --suite llm6 --output heads

tools/heads/text.py says what --data takes, docs/heads.md what is measured. DIR gets index.html, one file that needs no
other, its pictures as PNG, and heads.json with all numbers.

Exit codes: 0; 1 a shard is damaged, or the report cannot be written; 2 an argument has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import math

import numpy as np
import torch
from tqdm import tqdm

from data_prep.output import writable_directory
from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, publish
from moh_lm.flags import Parser
from tools.command import exit_code
from tools.generate import DTYPES, count, load
from tools.heads import findings
from tools.heads.ablation import measure_ablation, measure_pruning
from tools.heads.findings import CLASSES, routed_mask, used_heads
from tools.heads.measures import SEGMENT, measure_prefix, measure_rare, measure_text
from tools.heads.page import page, picture_of
from tools.heads.text import frequency_ranks, read_domains, repeated_sequences

try:
    from tools.heads.pictures import class_map, curves, head_map, head_panels
except ModuleNotFoundError:
    head_map = None  # no matplotlib

try:
    from tools.heads.task_text import task_domains
    from tools.tasks.suites import SUITES
except ModuleNotFoundError:
    SUITES = ()  # no lm-evaluation-harness

LONGEST_WINDOW = 1024  # tokens, unless --seq-length says otherwise
ABLATION_TOKENS = 2048
PANELS = 4  # layers whose loads are shown by domain


def main(texts):
    return exit_code("head_report", run, texts, failures=(ShardError, RuntimeError, OSError))


def run(texts):
    arguments = parse_arguments(texts)
    model, limit, tokenizer = load(arguments)
    length = arguments.seq_length or min(limit, LONGEST_WINDOW)
    if not SEGMENT <= length <= limit:
        raise ConfigError([f"--seq-length {length}: must be between {SEGMENT} and {limit}, the length of training"])
    vocab_size = model.model.embed_tokens.weight.shape[0]
    domains = read_domains(arguments.data, tokenizer, vocab_size, length, arguments.tokens, arguments.text_key)
    if arguments.suite:
        of_tasks = arguments.suite, arguments.tasks, arguments.task_data
        domains += task_domains(*of_tasks, tokenizer, length, arguments.tokens)
    report, pictures = report_of(arguments, model, tokenizer, domains)
    text = page(report, pictures, tokenizer.model.decode)
    files = {f"{name}.png": themes["light"] for name, themes in pictures.items()}
    files |= {"heads.json": json.dumps(plain(report)).encode() + b"\n", "index.html": text.encode()}
    for name, content in files.items():
        publish(arguments.output / name, content)
    print(f"{arguments.output / 'index.html'}: {len(text) / 1e6:.1f} MB, {len(pictures)} pictures")


def parse_arguments(texts):
    parser = Parser(prog="python tools/head_report.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, type=Path, help="run directory, step directory, or export")
    add("--data", default=[], nargs="+", action="extend", metavar="NAME=FILES", help="domains: NAME=FILES or "
        "NAME=DIR of shards, or DIR for every source of a data directory")  # fmt: skip
    add("--suite", help="or the prompts of each task of a suite of tools/evaluate.py: llm6, llama14, llama14e")
    add("--task-data", type=Path, metavar="DIR", help="of --suite: local rows, DIR/TASK/SPLIT.jsonl (default: the hub)")
    add("--tasks", nargs="+", metavar="TASK", help="only these of --suite, by the harness's names")
    add("--output", required=True, type=Path, metavar="DIR", help="gets index.html, pictures and heads.json")
    add("--tokens", type=count, default=16384, help="of each domain (default: %(default)s)")
    add("--seq-length", type=count, help=f"of a window (default: that of training, at most {LONGEST_WINDOW})")
    add("--text-key", default="text", help="of JSON lines and parquet (default: %(default)s)")
    add("--examples", type=count, default=5, help="most and least specialised heads shown (default: %(default)s)")
    add("--ablation-tokens", type=int, help="of each domain, for the importance by ablation; 0: leave it out (default: "
        f"{ABLATION_TOKENS} for dense and static models, else 0)")  # fmt: skip
    add("--dtype", default="float32", choices=DTYPES, help="of the weights (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    arguments = parser.parse_args(texts)
    if bool(arguments.data) == bool(arguments.suite):
        raise ConfigError(["give the text by one of --data and --suite"])
    if arguments.suite and arguments.suite not in SUITES:
        problem = f"choose one of {', '.join(SUITES)}" if SUITES else "pip install -e '.[eval]' for its tasks"
        raise ConfigError([f"--suite {arguments.suite}: {problem}"])
    if head_map is None:
        raise ConfigError(["pictures are drawn by matplotlib, which is not installed: pip install matplotlib"])
    writable_directory(arguments.output)
    return arguments


def report_of(arguments, model, tokenizer, domains):
    """(what heads.json holds, with arrays, {picture: {"light", "dark": PNG}})."""
    kinds = findings.kinds_of(model)
    routed, num_layers = routed_mask(kinds), len(kinds)
    tokens = arguments.ablation_tokens
    if tokens is None:
        tokens = 0 if routed.any() else ABLATION_TOKENS
    with tqdm(total=num_layers * (2 if tokens else 1), desc="layers", unit="layer", disable=None) as bar:
        measures = measure_text(model, domains, bar.update)
        ranks, counts = frequency_ranks(domains, model.model.embed_tokens.weight.shape[0])
        measures["prefix"] = measure_prefix(model, repeated_sequences(ranks, counts, tokenizer.eos_id))
        measures["rare"], chance = measure_rare(model, domains, ranks)
        used, ablation = used_heads(measures), {}
        if tokens:
            losses, rises = measure_ablation(model, domains, tokens, bar.update)
            curve = measure_pruning(model, domains, tokens, rises, used)
            ablation = {"ablation": {"tokens": tokens, "loss": losses, "rise": rises, "pruning": curve}}
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
    if routed.any():
        report |= compare_domains(arguments, measures, domains, routed)
    return report, draw_pictures(report, used)


def compare_domains(arguments, measures, domains, routed):
    """What the report says of routed heads over the domains."""
    bits = findings.specialisation(measures["load"], routed)
    found = {"similarity": findings.similarities(measures, routed), "specialisation": bits}
    layers = np.flatnonzero(routed.any(1))
    picked = np.unique(np.linspace(0, len(layers) - 1, PANELS).round().astype(int))
    found["panel_layers"] = layers[picked].tolist()
    sizes = sum(sum(map(len, domain.windows)) for domain in domains)
    found["specialisation_chance"] = (len(domains) - 1) / (2 * sizes * math.log(2))
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
    pictures = {"classes": class_map(report["class"], list(CLASSES), kinds)}
    pictures["redundancy"] = head_map(report["nearest_cka"], layers, "highest CKA", 0, 1, kinds)
    if report["routed"]:
        loads = [np.where(routed_mask(kinds), 100 * load, np.nan) for load in report["load"].values()]
        panels = [(f"layer {layer}", np.stack([load[layer] for load in loads])) for layer in report["panel_layers"]]
        pictures["load_layers"] = head_panels(panels, list(report["load"]), "load in percent", 0, 100)
        for index, (name, load_of_domain) in enumerate(zip(report["load"], loads, strict=True)):
            name = picture_of("load", index, name)
            pictures[name] = head_map(load_of_domain, layers, "load in percent", 0, 100, kinds)
        bits = 1000 * report["specialisation"]
        pictures["specialisation"] = head_map(bits, layers, "millibits", 0, max(1e-3, np.nanmax(bits)), kinds)
    for index, (name, rises) in enumerate(report.get("ablation", {"rise": {}})["rise"].items()):
        shown = np.where(used, 1000 * rises, np.nan)
        low, high = min(0, np.nanmin(shown)), max(1e-3, np.nanmax(shown))
        name = picture_of("importance", index, name)
        pictures[name] = head_map(shown, layers, "0.001 nats per token", low, high, kinds)
    if "ablation" in report:
        kept, losses = report["ablation"]["pruning"].values()
        pictures["pruning"] = curves(100 * np.array(kept), losses, "heads kept in percent", "loss in nats per token")
    return pictures


def plain(value):
    """JSON-able: arrays as lists, NaN as null, numbers with six digits."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
