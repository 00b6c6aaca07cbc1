"""Checks how a model and a batch are divided among processes."""

import math

from moh_lm.checkpoint.directory import newest_model, step_number
from moh_lm.checks.model import structure_problems
from moh_lm.checks.ranges import below
from moh_lm.config import flag

DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


def layout_problems(config, world_size):
    """Check the arithmetic of processes and batches, once the numbers themselves are valid."""
    run, parallel = config.run, config.parallel
    found = below(parallel, 1, *DEGREES)
    if found or run.seq_length < 1 or run.micro_batch_size < 1:
        return found
    tp, cp = parallel.tensor_parallel_size, parallel.context_parallel_size
    found = [*rank_problems(parallel, world_size), *tensor_problems(config.model, tp)]
    found += [*context_problems(config.model, tp, cp), *pipeline_problems(config)]
    length, tokens = run.seq_length, run.batch_tokens
    if length % (tp * cp):
        flags = f"--tensor-parallel-size {tp}" + (f" * --context-parallel-size {cp} = {tp * cp}" if cp > 1 else "")
        found.append(f"--seq-length {length}: must be a multiple of {flags}, whose ranks share it")
    if tokens < length or tokens % length:
        nearest = [str(n) for n in (tokens // length * length, (tokens // length + 1) * length) if n > 0]
        return found + [
            f"--batch-tokens {tokens}: not a whole number of sequences of --seq-length {length}; "
            f"choose {' or '.join(nearest)}"
        ]
    dp = max(1, config.data_parallel_size(world_size))  # at least the ranks that one copy of the model needs
    chunk = run.micro_batch_size * dp
    if run.global_batch_size % chunk:
        return found + [
            f"--batch-tokens {tokens}: its {run.global_batch_size} sequences are not a multiple of {chunk} "
            f"(--micro-batch-size {run.micro_batch_size} on {dp} data-parallel rank{'s' * (dp > 1)}); "
            f"choose --batch-tokens {math.ceil(run.global_batch_size / chunk) * chunk * length} or another "
            "--micro-batch-size; a run that has begun keeps its batch, so choose another layout (tools/plan.py)"
        ]
    newest = newest_model(run.checkpoint_dir)[0] if run.batch_warmup else None
    return found + uneven_batch(config, chunk, step_number(newest) if newest else 0)


def uneven_batch(config, chunk, step):
    """Check that the batches of --batch-warmup from ``step`` on are multiples of ``chunk``, a micro-batch per rank."""
    run = config.run
    size = run.batch_at(run.samples_after(step))
    if size % chunk == 0:
        return []  # so are later ones, which are twice as large
    nearest = math.ceil(size / chunk) * chunk * run.seq_length
    if step:
        remedy = "a run that has begun keeps its batches, so choose another layout (tools/plan.py)"
    elif nearest < run.batch_tokens:
        remedy = f"choose {nearest}:{run.batch_warmup.partition(':')[2]}"
    else:
        remedy = "leave it out, or start fewer ranks"
    which = f"batch of {size} sequences after step {step}" if step else f"first batch of {size} sequences"
    return [
        f"--batch-warmup {run.batch_warmup}: its {which} is not a multiple of {chunk}, a micro-batch of every rank; "
        f"{remedy}"
    ]


def rank_problems(parallel, world_size):
    """Check that the degrees of parallelism divide the number of ranks."""
    ranks = parallel.ranks_of_a_sequence()
    if world_size % ranks == 0:
        return []
    degrees = {flag(key): getattr(parallel, key) for key in DEGREES if getattr(parallel, key) > 1}
    given = " * ".join(f"{name} {degree}" for name, degree in degrees.items())
    product, need = (f" = {ranks}", "need") if len(degrees) > 1 else ("", "needs")
    return [
        f"{given}{product}: {need} a multiple of {ranks} processes, and {world_size} "
        f"{'was' if world_size == 1 else 'were'} started; start {ranks}, as with torchrun --nproc-per-node {ranks}, or "
        "choose smaller degrees"
    ]


def pipeline_problems(config):
    parallel, pp = config.parallel, config.parallel.pipeline_parallel_size
    if pp == 1:
        return []
    found = []
    if parallel.zero_stage > 1:
        found.append(
            f"--zero-stage {parallel.zero_stage}: DeepSpeed's pipeline schedule needs whole gradients and weights; "
            f"choose --zero-stage 1, or --pipeline-parallel-size 1"
        )
    if parallel.offload_optimizer:
        found.append("--offload-optimizer: does not work with a pipeline; choose --pipeline-parallel-size 1")
    if pp > config.model.num_layers:
        found.append(
            f"--pipeline-parallel-size {pp}: there are more stages than decoder layers; choose at most "
            f"--num-layers {config.model.num_layers}"
        )
    return found


def context_problems(model, tp, cp):
    """Check that each rank that shares a sequence computes the same number of always-on heads and of other heads."""
    if cp == 1 or structure_problems(model):
        return []
    found = []
    given = f"--context-parallel-size {cp}" + (f" * --tensor-parallel-size {tp} = {tp * cp}" if tp > 1 else "")
    if model.chooses_in_groups:
        return group_problems(model, tp * cp, given)
    for layer in range(model.num_layers):
        heads, leading = model.of_layer(layer).num_attention_heads, model.always_on_heads(layer)
        if heads % (tp * cp) or leading % (tp * cp):
            found.append(
                f"{given}: must divide the {leading} heads that are always active and the {heads - leading} "
                f"others; choose a divisor of {math.gcd(heads, leading)}, or other --num-shared-heads"
            )
    return list(dict.fromkeys(found))


def tensor_problems(model, tp):
    """Check that every tensor-parallel rank holds the same number of shared (or static) and of other heads, in whole KV
    groups unless there are fewer groups than ranks."""
    if tp == 1 or structure_problems(model):
        return []
    shared_by = model.queries_per_key
    found = []
    if model.intermediate_size % tp:
        found.append(f"--intermediate-size {model.intermediate_size}: not divisible by --tensor-parallel-size {tp}")
    for layer in range(model.num_layers):
        of, leading = model.of_layer(layer), model.always_on_heads(layer)
        heads, keys, step = of.num_attention_heads, of.num_key_value_heads, tp * shared_by
        whole_groups = f", in whole key/value groups; choose a multiple of --tensor-parallel-size {tp} * {shared_by} "
        whole_groups += f"query heads per key/value head = {step}"
        if keys < tp:
            step, whole_groups = tp, f"; choose a multiple of --tensor-parallel-size {tp}"
        if model.chooses_in_groups:
            found += group_problems(model, tp, f"--tensor-parallel-size {tp}")
        elif heads % step:
            found.append(
                f"--tensor-parallel-size {tp}: must divide --num-key-value-heads {keys}, or be above it, and divide "
                f"--num-attention-heads {heads}"
            )
        elif leading % step:
            least = "" if model.heads.head_selection == "static" else ", or give --num-shared-heads 0"
            equal = f"every rank must hold equally many{whole_groups}{least}"
            found.append(f"{leading} heads that are always active: {equal}")
    return list(dict.fromkeys(found))


def group_problems(model, ranks, given):
    """Check that ranks hold whole key/value groups, inside which heads compete. ranks: number of ranks that share the
    heads of a layer. given: the flags that require it."""
    keys = {model.of_layer(layer).num_key_value_heads for layer in range(model.num_layers)}
    if not any(number % ranks for number in keys):
        return []
    numbers, most = ", ".join(map(str, sorted(keys))), math.gcd(*keys)
    return [
        f"{given}: must divide --num-key-value-heads {numbers}, since heads compete inside their group with "
        f"--routing-unit head_in_group; choose a divisor of {most}"
    ]
