"""The model card of an export: the model, its data, the length of its training, its losses, and how heads are used.

Everything comes from the step directory: the configuration, the segments of the data in state.json (tokens per source,
exact), and the routers' shares there (head load of the last step). Losses come from metrics.jsonl of the run, two
directories above, device and software from its events.jsonl; a step that was copied elsewhere has none, and the card
says so. An import that was not trained has neither data nor losses. Losses are rounded to digits that do not depend on
the layout.
"""

import os
from collections import Counter
from pathlib import Path

import yaml

from moh_lm.config import TWO_STAGE
from moh_lm.cost import description
from moh_lm.cost.summary import describe_cache
from moh_lm.data.mixture import sample_counts
from moh_lm.data.segments import tokens_read
from moh_lm.monitor.events import complete_rows
from moh_lm.monitor.report.series import check_event, takes
from moh_lm.monitor.report.tables import software_of
from moh_lm.units import short, words
from tools.hf.convert.keys import model_type

ALL = "all sources"  # name of the last row of losses; names of sources have no spaces
ENOUGH = 10**9  # tokens; a model that was trained from scratch on fewer is a toy


def model_card(step, config, state, dtype, parameters, begins, head, name=None, stock=None):
    """Return the content of README.md.

    step: a step directory. state: its state.json. parameters: their number. begins: whether the tokenizer puts
    BOS before a text, None if it was not made from that of the data. head: {key: value or None} of the card's header on
    the hub. name: OWNER/NAME there, or None. stock: see stock_classes.py, or None. The content does not depend on the
    layout of the run, nor on the names of directories.
    """
    shown = {
        "Model": model_facts(config.model, dtype, parameters, config.run.seq_length),
        "Training": table([*training_facts(config, state).items(), *surroundings(step, state["step"])]),
        "Data": data_facts(state),
        "Losses": loss_facts(step, state["step"]),
        "Head load": load_facts(config.model, state),
    }
    selection, kind = config.model.heads.head_selection, model_type(config.model)
    if selection == "mixture" and not config.model.routed_layers():
        selection = "gated"
    what, sentence = KINDS[kind if kind in KINDS else selection]
    if stock:
        sentence = STOCK.format(architecture=stock.architecture)
    tokens = all_tokens(config, state)
    limits = [TOY.format(tokens=short(tokens))] if tokens < ENOUGH and "imported" not in state else []
    limits += [] if begins is None else [BEGINS if begins else TOKENIZER]
    limits += [ROUTING] if selection == "mixture" else []
    return CARD.format(
        head="".join(yaml.safe_dump({key: value}) for key, value in head.items() if value),
        tag="" if selection == "all" else "tags:\n- mixture-of-head-attention\n",
        title=name.rpartition("/")[2] if name else what,
        opening=f"{what}, exported" if name else "Exported",
        sentence=sentence,
        source=name or ".",
        remote=", trust_remote_code=True" if kind == "moh_llama" and not stock else "",
        tables="\n".join(f"## {name}\n\n{text}\n" for name, text in shown.items() if text),
        limits="\n## Limits\n\n" + "\n\n".join(limits) + "\n" if limits else "",
    )


def table(rows, header=("", "")):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def model_facts(model, dtype, parameters, seq_length):
    heads = model.heads
    rope = f"base {model.rope_theta:g}"
    if model.rope_type != "default":
        rope += f", {model.rope_type}, factor {model.rope_factor:g}"
    facts = {
        "parameters": f"{parameters:,}, {str(dtype).removeprefix('torch.')}",
        "shape": f"{model.num_layers} layers, hidden {model.hidden_size}, intermediate {model.intermediate_size}, "
        f"vocabulary {model.vocab_size:,}",
        "attention": f"{words(model.num_attention_heads)} heads of {description.describe_width(model)}, "
        + description.describe_kv(model),
        **({"positions": positions} if (positions := description.describe_positions(model)) else {}),
        **({"rotary embedding": rope} if "rotary" in model.position else {}),
        **({"sliding window": description.describe_window(model)} if any(model.window) else {}),
        "key/value cache": describe_cache(model, seq_length, dtype.itemsize),
        "head selection": heads.head_selection,
    }
    if norms := description.describe_norms(model):
        facts["norms"] = norms
    if heads.head_selection != "all":
        facts["shared heads per layer"] = " ".join(map(str, heads.num_shared_heads))
        facts["active routed heads per layer"] = " ".join(map(str, heads.num_active_routed_heads))
    if heads.head_selection == "mixture":
        one_stage = heads.routing in TWO_STAGE and not heads.two_stage
        facts["routing"] = ", ".join(description.routing_facts(model)) + ", without a1 and a2" * one_stage
        facts["load balance"] = f"{heads.load_balance_coefficient:g}, {heads.load_balance_scope}"
    return table(facts.items())


def all_tokens(config, state):
    """Return the number of tokens that the model was trained on."""
    return tokens_read(state["data"]["segments"], state["consumed_samples"], config.run.seq_length)


def training_facts(config, state):
    """Return {what: value} of the training."""
    run, optimizer = config.run, config.optimizer
    imported = state.get("imported", {})
    facts = {}
    if imported:  # a card does not name local paths
        facts["began with"] = f"{Path(imported['source']).name}, config.json {imported['config_sha256'][:12]} (SHA-256)"
        facts["vocabulary"] = imported["vocabulary"]
        facts["shared heads"] = f"chosen: {imported['shared_heads']}"
    if state["step"] == 0:
        return facts | {"steps": "0: not trained here"}
    skipped = state["step"] - state["optimizer_steps"]
    if "averaged" in state:
        facts["mean"] = f"of the weights after steps {', '.join(map('{:,}'.format, state['averaged']))}"
    facts |= {
        "steps": f"{state['step']:,} of {run.train_iters:,}" + (f", {skipped:,} of them skipped" if skipped else ""),
        "tokens": f"{all_tokens(config, state):,}",
        "batch": f"{run.tokens_per_iteration:,} tokens in sequences of {run.seq_length:,}",
        "learning rate": f"{optimizer.learning_rate:g} to {optimizer.min_learning_rate:g}, {optimizer.schedule}; "
        f"{optimizer.warmup_iters:,} steps of warm-up from {optimizer.warmup_init_lr:g}",
        "AdamW": f"beta {optimizer.adam_beta1:g} and {optimizer.adam_beta2:g}, "
        f"weight decay {optimizer.weight_decay:g}, clipping at {optimizer.gradient_clipping:g}",
        **muon_facts(optimizer),
        "precision": run.precision,
        "seed": run.seed,
    }
    return facts


def surroundings(step, number):
    """Return rows for the device and the software of the last start before step ``number``, if the run has its
    events."""
    rows = [row for _, row in complete_rows(run_of(step) / "events.jsonl") if takes(check_event, row)]
    started = next((row for row in rows[::-1] if row["event"] == "started" and row.get("step", 0) < number), {})
    return [("device", started["device"]), ("software", software_of(started))] if started else []


def run_of(step):
    """Return the run directory of a step. The step may be a link to another disk, or be named by a link elsewhere."""
    places = [Path(path(step)).parent.parent for path in (os.path.abspath, os.path.realpath)]
    return next((place for place in places if (place / "metrics.jsonl").exists()), places[0])


def muon_facts(optimizer):
    if optimizer.optimizer != "muon":
        return {}
    rate = optimizer.matrix_learning_rate or optimizer.learning_rate
    by = {"matrix": "whole", "head": "head by head", "group": "by key/value groups"}[optimizer.muon_split]
    return {"Muon": f"of the matrices of blocks, attention {by}; rate {rate:g}, momentum {optimizer.muon_momentum:g}"}


def data_facts(state):
    """Return the tokens of every source over all segments of the run, and the weights of the last segment."""
    segments = state["data"]["segments"]
    if not segments or not state["consumed_samples"]:
        return ""
    tokens = Counter()
    ends = [*(segment["first_sample"] for segment in segments[1:]), state["consumed_samples"]]
    for segment, end in zip(segments, ends, strict=True):
        names = sorted(segment["weights"])
        counts = sample_counts([segment["weights"][name] for name in names], end - segment["first_sample"])
        tokens.update({name: n * segment["seq_length"] for name, n in zip(names, counts.tolist(), strict=True)})
    last, total = segments[-1]["weights"], sum(segments[-1]["weights"].values())
    rows = [
        (name, f"{100 * last.get(name, 0) / total:.2f}%", f"{count:,}")
        for name, count in sorted(tokens.items())
    ]
    return table(rows, ("source", "share of the mix", "tokens seen"))


def loss_facts(step, number):
    """Return the last training interval and the last evaluation up to step ``number`` in metrics.jsonl of the run."""
    rows = [row for _, row in complete_rows(run_of(step) / "metrics.jsonl") if row["step"] <= number]
    training = next((row for row in reversed(rows) if row.get("loss") is not None), None)
    evaluation = next((row for row in reversed(rows) if "evaluation" in row), None)
    if not training and not evaluation:
        return "" if number == 0 else "The log of the run was not beside the checkpoint."
    header, columns = ["mean loss per token"], []
    if training:
        header.append(f"training, up to step {training['step']:,}")
        columns.append({**training["source_loss"], ALL: training["loss"]})
    if evaluation:
        header.append(f"held out, after step {evaluation['step']:,}")
        columns.append({**evaluation["evaluation"], ALL: evaluation["evaluation_mean"]})
    names = [*sorted(set().union(*columns) - {ALL}), ALL]
    return table([[name, *(loss(column.get(name)) for column in columns)] for name in names], header)


def loss(value):
    return "" if value is None else f"{value:.3f}"


def load_facts(model, state):
    """Return the lowest and highest share of the last step's tokens that used a routed head or group, by layer."""
    layers = model.routed_layers()
    most = "about " if model.heads.routing == "relu" else "" if model.heads.routing_top_p is None else "at most "
    rows = [
        (
            layer.index,
            layer.num_shared,
            f"{most}{layer.num_active} of {layer.num_routed}",
            *(f"{share:.1%}" for share in (layer.fair_load(shares), min(shares), max(shares))),
        )
        for layer, shares in zip(layers, state["router_shares"], strict=False)
    ]
    if not rows or state["step"] == 0:
        return ""
    unit = layers[0].unit
    header = ("layer", f"shared {unit}s", f"routed {unit}s per token", "even load", "lowest load", "highest load")
    return f"Share of the tokens of the last step that used a routed {unit}.\n\n{table(rows, header)}"


TOY = """\
It has read {tokens} tokens, so it is a toy: a model that has read less than about a billion tokens writes nonsense."""
STOCK = "Every token uses all attention heads, each with a gate, as `{architecture}` of transformers computes them."
KINDS = {  # model_type, or head selection -> what it is, description
    "mixture": (
        "A language model with Mixture-of-Head attention",
        "Each token uses the shared attention heads and the routed heads that a router selects for it\n"
        "([arXiv 2410.11842](https://arxiv.org/abs/2410.11842)); `modeling_moh.py` and `moh_router.py` hold the\n"
        "equations.",
    ),
    "static": (
        "A language model with a fixed part of its attention heads",
        "Every token uses the same attention heads, the first ones of each layer; there is no router. It is a\n"
        "baseline of Mixture-of-Head attention ([arXiv 2410.11842](https://arxiv.org/abs/2410.11842)).",
    ),
    "gated": (
        "A language model whose attention heads have gates",
        "Every token uses all attention heads, each with a gate; `moh_router.py` holds the equations.",
    ),
    "all": (
        "A language model with all attention heads",
        "Every token uses all attention heads. Shape, attention, windows, norms or positions are unlike Llama's: see\n"
        "`moh_attention.py` and `moh_positions.py`.",
    ),
    "llama": (
        "A language model in the form of Llama",
        "Every token uses all attention heads: it is an ordinary `LlamaForCausalLM`.",
    ),
    "mistral": (
        "A language model in the form of Mistral",
        "Every token uses all attention heads and sees the last tokens only: it is an ordinary `MistralForCausalLM`.",
    ),
}
CARD = """---
library_name: transformers
pipeline_tag: text-generation
{head}{tag}---

# {title}

{opening} by MoH-LM. {sentence}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

source = "{source}"  # OWNER/NAME on the hub, or the directory of these files
tokenizer = AutoTokenizer.from_pretrained(source{remote})
model = AutoModelForCausalLM.from_pretrained(source{remote})
tokens = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(tokens[0]))
```

{tables}{limits}"""

TOKENIZER = """\
In training every document ends with EOS, and it begins with BOS only if its data were made so (`tokenize.py --bos`).
The tokenizer adds neither to a text."""
BEGINS = """\
In training every document begins with BOS and ends with EOS. The tokenizer adds only BOS to a text."""
ROUTING = """\
Routing is computed in fp32, from inputs in the precision of the model. In bfloat16 their rounding changes the selected
heads of a few tokens, and differently with and without a cache or in batches of other sizes: such runs agree closely,
not exactly. Compare implementations in fp32."""
