"""What a run will do and cost, known before it starts: parameters, batches, epochs per source, memory.

The counts come from the model itself, built on the meta device; nothing about its shape is said a second time.
"""

import torch

from moh_lm.config import walk
from moh_lm.model.transformer import CausalLM


def parameter_counts(model_config):
    """Parameters of the whole model: {"total", "embedding" (with the output head), "router"}."""
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in CausalLM(model_config).named_parameters()}
    return {
        "total": sum(sizes.values()),
        "embedding": sum(size for name, size in sizes.items() if "embed_tokens" in name or "lm_head" in name),
        "router": sum(size for name, size in sizes.items() if ".router." in name),
    }


def memory_estimate(config, world_size):
    """Bytes on one rank by part, for data parallelism with ZeRO: an estimate to plan with, not a measurement.

    Weights and gradient sums are divided by ZeRO-3 and ZeRO-2; masters and Adam moments (3 x 4 bytes) by every stage.
    Activations count what the backward pass of a layer keeps, in units of tokens x hidden size; logits are kept twice
    in fp32.
    """
    model, run = config.model, config.run
    parallel = config.parallel
    shards = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    dp = config.data_parallel_size(world_size)
    parameters = parameter_counts(model)["total"] / shards
    width = 2 if run.precision == "bf16" else 4
    tokens = run.micro_batch_size * run.seq_length
    # Saved per token: two norms' inputs and outputs (4 d), q, k, v and context, gate, up and their product.
    heads_width = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    per_layer = 4 * model.hidden_size + heads_width + 3 * model.intermediate_size
    kept = model.num_layers * model.hidden_size + per_layer if run.recompute else model.num_layers * per_layer
    return {
        "weights": width * parameters / (dp if parallel.zero_stage == 3 else 1),
        "gradients": 4 * parameters / (dp if parallel.zero_stage > 1 else 1),
        "optimizer": (12 if width == 2 else 8 + 4 * (dp > 1)) * parameters / dp,
        "activations": width * tokens * kept / shards,
        "logits": 2 * 4 * tokens * model.vocab_size / parallel.tensor_parallel_size,
    }


def describe_run(config, dataset, world_size):
    """Lines that say what the run is: model, heads, batches, data, memory. dataset: None if there is no data yet."""
    return [
        *describe_model(config.model),
        *describe_batches(config, world_size),
        *describe_data(config, dataset),
        *describe_memory(config, world_size),
    ]


def describe_configuration(config):
    """One line per field, resolved, under the title of its section."""
    lines, title = [], None
    for section, entry in walk(config):
        if type(section) is not title:
            title = type(section)
            lines += ["", title.__doc__]
        lines.append(f"  {entry.name:<26}{getattr(section, entry.name)}")
    return [*lines[1:], ""]


def describe_model(model):
    counts = parameter_counts(model)
    yield (
        f"model      {model.num_layers} layers, hidden {model.hidden_size}, intermediate {model.intermediate_size}, "
        f"{model.num_attention_heads} heads x {model.head_dim}, {model.num_key_value_heads} key/value heads, "
        f"vocabulary {model.vocab_size}"
    )
    yield (
        f"parameters {short(counts['total'])} ({counts['total']:,}): embedding and output head "
        f"{short(counts['embedding'])}, routers {short(counts['router'])}"
    )
    yield f"heads      {describe_heads(model)}"


def describe_heads(model):
    heads = model.heads
    if heads.head_selection == "all":
        return "all of them for every token"
    on = [shared + active for shared, active in zip(heads.num_shared_heads, heads.num_active_routed_heads, strict=True)]
    share = sum(on) / (len(on) * model.num_attention_heads)
    budget = f"{span(heads.num_shared_heads)} shared + {span(heads.num_active_routed_heads)} routed"
    if heads.head_selection == "static":
        return f"static: the first {span(on)} of {model.num_attention_heads} ({share:.1%})"
    return f"mixture: {budget} of {model.num_attention_heads} per token ({share:.1%} active), routing {heads.routing}"


def describe_batches(config, world_size):
    run, parallel = config.run, config.parallel
    degrees = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, config.data_parallel_size(world_size))
    product = " x ".join(f"{name} {size}" for name, size in zip(("tensor", "pipeline", "data"), degrees, strict=True))
    yield f"processes  {world_size} = {product}, ZeRO-{parallel.zero_stage}, {run.precision}"
    yield (
        f"batch      {run.global_batch_size} sequences x {run.seq_length} = {run.tokens_per_iteration:,} tokens, "
        f"{config.gradient_accumulation_steps(world_size)} micro-batches of {run.micro_batch_size} per rank"
    )
    yield f"budget     {run.train_iters:,} iterations = {run.train_iters * run.tokens_per_iteration:,} tokens"


def describe_data(config, dataset):
    if dataset is None:
        yield f"data       {config.data.data_dir} does not exist yet: a run needs it, and so do the planned epochs"
        return
    rows = dataset.plan(config.run.train_iters * config.run.global_batch_size)
    yield f"data       {config.data.data_dir}"
    width = max(len("source"), *(len(row["name"]) for row in rows))
    yield f"  {'source':<{width}}  {'share':>7}  {'tokens':>9}  {'samples':>11}  {'epochs':>8}  {'held-out':>8}"
    for row in rows:
        yield (
            f"  {row['name']:<{width}}  {float(row['share']):>7.2%}  {short(row['tokens']):>9}  {row['samples']:>11,}  "
            f"{row['epochs']:>8.3f}  {row['validation_windows']:>8,}"
        )
    yield from (f"  {note}" for note in dataset.notes)


def describe_memory(config, world_size):
    parts = memory_estimate(config, world_size)
    shown = ", ".join(f"{name} {gibibytes(size)}" for name, size in parts.items())
    yield f"memory     about {gibibytes(sum(parts.values()))} per rank (estimated): {shown}"


def span(numbers):
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def short(number):
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f}{unit}" if unit == "B" else f"{number / size:.0f}{unit}"
    return str(number)


def gibibytes(size):
    return f"{size / 2**30:.2f} GiB"
