"""What is wrong with how a model and a batch are spread over processes."""

import math

from moh_lm.checks.model import model_problems
from moh_lm.checks.ranges import below
from moh_lm.model.routing import is_causal


def layout_problems(config, world_size):
    """The arithmetic of processes and batches; only asked once the numbers by themselves are sound."""
    run, parallel = config.run, config.parallel
    found = below(parallel, 1, "tensor_parallel_size", "pipeline_parallel_size")
    if found or run.seq_length < 1 or run.micro_batch_size < 1:
        return found
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if world_size % (tp * pp):
        return [
            f"{world_size} processes: not a multiple of tensor_parallel_size({tp}) * pipeline_parallel_size({pp}) "
            f"= {tp * pp}; start a multiple of {tp * pp} processes or change the degrees"
        ]
    found = [*tensor_problems(config.model, tp), *pipeline_problems(config)]
    length, tokens = run.seq_length, run.batch_tokens
    if length % tp:
        found.append(f"--seq-length {length}: must be a multiple of --tensor-parallel-size {tp}, whose ranks share it")
    if tokens < length or tokens % length:
        nearest = [str(n) for n in (tokens // length * length, (tokens // length + 1) * length) if n > 0]
        return found + [
            f"--batch-tokens {tokens}: not a whole number of sequences of --seq-length {length}; "
            f"choose {' or '.join(nearest)}"
        ]
    dp = config.data_parallel_size(world_size)
    chunk = run.micro_batch_size * dp
    if run.global_batch_size % chunk:
        return found + [
            f"--batch-tokens {tokens}: its {run.global_batch_size} sequences are not a multiple of "
            f"micro_batch_size({run.micro_batch_size}) * data_parallel_size({dp}) = {chunk}; "
            f"choose {math.ceil(run.global_batch_size / chunk) * chunk * length} or another --micro-batch-size"
        ]
    return found


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
        found.append("--offload-optimizer: not together with a pipeline; choose --pipeline-parallel-size 1")
    if pp > config.model.num_layers:
        found.append(
            f"--pipeline-parallel-size {pp}: is more stages than decoder layers; choose at most "
            f"--num-layers {config.model.num_layers}"
        )
    return found


def tensor_problems(model, tp):
    """Every tensor-parallel rank holds the same number of shared (or static) and of other heads, in whole KV groups
    unless there are fewer groups than ranks."""
    if tp == 1 or model_problems(model):
        return []
    shared_by = model.queries_per_key
    found = []
    if not is_causal(model):
        given = f"--routing {model.heads.routing}"
        found.append(f"--tensor-parallel-size {tp}: the router of {given} needs whole sequences; choose 1")
    if model.intermediate_size % tp:
        found.append(f"--intermediate-size {model.intermediate_size}: not a multiple of --tensor-parallel-size {tp}")
    for layer in range(model.num_layers):
        of, leading = model.of_layer(layer), model.leading_heads(layer)
        heads, keys, step = of.num_attention_heads, of.num_key_value_heads, tp * shared_by
        whole_groups = f", in whole key/value groups; choose a multiple of --tensor-parallel-size {tp} * {shared_by} "
        whole_groups += f"query heads per key/value head = {step}"
        if keys < tp:
            step, whole_groups = tp, f"; choose a multiple of --tensor-parallel-size {tp}"
        if heads % step:
            found.append(
                f"--tensor-parallel-size {tp}: must divide --num-key-value-heads {keys}, or be above it, and divide "
                f"--num-attention-heads {heads}"
            )
        elif leading % step:
            found.append(f"{leading} heads always on: every rank must hold as many{whole_groups}")
    return list(dict.fromkeys(found))
