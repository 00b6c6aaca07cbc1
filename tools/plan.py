"""Finds a layout to train with: for a model and a number of GPUs, the layouts that fit, fastest first.

    python tools/plan.py --gpus 64 [--gpu-memory 80 --gpu-tflops 989 ...] [flags of moh_lm.pretrain] [--json]

For every legal combination of tensor, pipeline, context and data parallelism, ZeRO stage and recomputation, with
micro-batches of 1, 2, 4, ... 64 sequences, it estimates the memory of the fullest rank (moh_lm/cost/memory.py) and the
seconds of a step:

    compute    the micro-batches on the slowest stage at --efficiency of the peak, but none faster than the host starts
               the kernels of its layers (moh_lm/cost/time.py); a third longer with recomputation
    bubble     the pp - 1 micro-batches during which a stage waits
    tensor     gathers and scatters of activations: eight per layer, twelve with recomputation
    context    queries, keys, values and outputs of attention, exchanged and back; again with recomputation
    data       gradients summed in fp32 and weights gathered, once per step; under ZeRO-2 the sums, and under ZeRO-3 the
               gathers too, once per micro-batch
    muon       its iterations, divided among the data-parallel ranks, and the momenta and updates sent
    pipeline   activations and their gradients between stages

Nothing is assumed to overlap. The times rank layouts; they do not promise a speed. Units: GiB, GB/s per GPU, 1e12
FLOP/s.
"""

import json
import sys
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import run_command
from moh_lm.cli.parser import Parser
from moh_lm.config import BUDGETS, Config, ConfigError, raise_any
from moh_lm.cost.devices import EFFICIENCY
from moh_lm.flags import add_config_flags, config_of, model_of_run, parse_flags
from moh_lm.units import above_0, at_least, share, short, wrapped

DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
USABLE = 0.92  # share of a GPU's memory; the CUDA context, fragmentation and communication buffers need the rest
H100 = 989  # TFLOPS
DAY = 24 * 3600


def main(texts):
    return run_command("plan", parse_arguments, run, texts)


def parse_arguments(texts):
    """Settings of the machine; ``config`` comes from the flags of moh_lm.pretrain. Raises ConfigError."""
    parser = Parser(prog="python tools/plan.py", description=__doc__.splitlines()[0], usage="%(prog)s [flags]")
    machine = parser.add_argument_group("machine: what the layouts are planned for").add_argument
    machine("--gpus", type=at_least(1), metavar="N", required=True, help="number of GPUs (required)")
    machine("--gpus-per-node", type=at_least(1), metavar="N", default=8, help="GPUs in one machine (default: 8)")
    machine("--gpu-memory", type=above_0, metavar="GIB", default=80, help="memory of each GPU (default: 80)")
    machine("--gpu-tflops", type=above_0, metavar="X", help=f"dense peak of a GPU (default: that of "
            f"--peak-tflops, or {H100:g}, an H100 in bf16)")  # fmt: skip
    machine("--efficiency", type=share, metavar="X", default=EFFICIENCY, help="share of the peak that matrix "
            "products reach (default: %(default)s, as measured on an H200)")  # fmt: skip
    bandwidth = {"type": above_0, "metavar": "GB/s"}
    machine("--intra-node", **bandwidth, default=300, help="bandwidth of each GPU inside a node (default: 300)")
    machine("--inter-node", **bandwidth, default=40, help="bandwidth of each GPU between nodes (default: 40)")
    machine("--top", type=at_least(1), metavar="N", default=10, help="layouts to show (default: 10)")
    machine("--json", action="store_true", help="print everything as one JSON object")
    add_config_flags(parser)
    arguments = parse_flags(parser, texts)
    arguments.config = config_of(arguments)
    peak = arguments.gpu_tflops or arguments.config.run.peak_tflops
    if not peak and arguments.config.run.precision == "fp32":
        raise ConfigError(["--precision fp32: the default peak is that of bf16; give the fp32 one by --gpu-tflops"])
    arguments.gpu_tflops = peak or H100
    return arguments


def run(machine):
    from moh_lm.checks import run as checks
    from moh_lm.checks.ranges import below
    from moh_lm.checks.schedule import batch_warmup_problems, length_warmup_problems

    config = machine.config
    problems = [*of_model(config)(config.model), *checks.optimizer_problems(config.optimizer)]
    problems += [*checks.window_problems(config), *checks.router_problems(config), *length_warmup_problems(config)]
    problems += batch_warmup_problems(config.run)
    problems += checks.fused_router_problems(config.model.heads) if config.run.fused_router else []
    problems += below(config.run, 1, "seq_length")
    raise_any(problems)
    show = show_json if machine.json else show_table
    show(config, machine, rank_layouts(config, machine))


def rank_layouts(config, machine):
    """Return plans of all legal layouts: those that fit first, then by speed. Raises ConfigError if there is none."""
    from moh_lm.checks.layout import layout_problems
    from moh_lm.checks.run import frozen_problems, graph_problems, projection_problems, split_problems

    plans = [make_plan(variant, machine) for variant in legal_variants(config, machine)]
    if not plans:
        problems = split_problems(config) or frozen_problems(config) or projection_problems(config)
        problems = problems or layout_problems(config, machine.gpus) or graph_problems(config, on_gpu=True)
        problems = problems or ["no layout is legal for this batch and these heads"]
        raise ConfigError([f"{machine.gpus} GPUs: {problem}" for problem in problems])
    return sorted(plans, key=lambda plan: (not plan["fits"], plan["seconds_per_step"], plan["memory_gib"]))


def legal_variants(config, machine):
    """Yield ``config`` in every layout that the trainer accepts on the machine's GPUs."""
    from moh_lm.checks.layout import context_problems, layout_problems, tensor_problems
    from moh_lm.checks.run import frozen_problems, graph_problems, projection_problems, split_problems

    gpus, model_problems = machine.gpus, of_model(config)
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for degrees in product(divisors, repeat=3):
        if gpus % prod(degrees) == 0:
            spread = with_degrees(config, dict(zip(DEGREES, degrees, strict=True)), machine.values)
            tp, cp = spread.parallel.tensor_parallel_size, spread.parallel.context_parallel_size
            if model_problems(spread.model) or split_problems(spread) or frozen_problems(spread):
                continue
            if tensor_problems(spread.model, tp) or context_problems(spread.model, tp, cp):
                continue  # whatever the rest of the layout
            sizes = [2**n for n in range(7) if 2**n <= config.run.global_batch_size]
            for zero, micro_batch, recompute in product((1, 2, 3), sizes, (False, True)):
                parallel = replace(spread.parallel, zero_stage=zero)
                run = replace(config.run, micro_batch_size=micro_batch, recompute=recompute)
                variant = replace(spread, parallel=parallel, run=run)
                refused = projection_problems(variant) or graph_problems(variant, on_gpu=True)
                if not refused and not layout_problems(variant, gpus):
                    yield variant


def of_model(config):
    """Return the check of models: that of new ones, or what a run needs that has begun."""
    from moh_lm.checks.model import model_problems, structure_problems

    return structure_problems if model_of_run(config.run.checkpoint_dir) else model_problems


def with_degrees(config, degrees, given):
    """Return ``config`` with these degrees, and with heads from --head-budget that its ranks can split evenly.

    given: {field: value} of the flags. The heads of a run that has begun stay.
    """
    has_begun = bool(model_of_run(config.run.checkpoint_dir))
    spread = BUDGETS if config.model.heads.head_budget is not None and not has_begun else ()
    values = {key: value for key, value in config.to_dict().items() if key not in spread or key in given}
    return Config.from_dict(values | degrees)


def make_plan(config, machine):
    """Return the estimates for one layout."""
    from moh_lm.cost.flops import computed_share, flops_per_token
    from moh_lm.cost.memory import memory_estimate
    from moh_lm.cost.time import step_seconds

    parallel, run, gpus = config.parallel, config.run, machine.gpus
    memory = {part: size / 2**30 for part, size in memory_estimate(config, gpus).items()}
    seconds = step_seconds(config, machine)
    step, tokens = sum(seconds.values()), run.tokens_per_iteration
    days = None if run.train_iters is None else run.samples_after(run.train_iters) / run.global_batch_size * step / DAY
    flops = flops_per_token(config.model, run.seq_length)["dense"] * tokens * computed_share(config.optimizer)
    return {
        **{degree: getattr(parallel, degree) for degree in DEGREES},
        "data_parallel_size": config.data_parallel_size(gpus),
        "zero_stage": parallel.zero_stage,
        "micro_batch_size": run.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps(gpus),
        "recompute": run.recompute,
        "memory_gib": sum(memory.values()),
        "memory_gib_by_part": memory,
        "fits": sum(memory.values()) <= USABLE * machine.gpu_memory,
        "seconds_per_step": step,
        "seconds_by_part": seconds,
        "tokens_per_second_per_gpu": tokens / step / gpus,
        "mfu": flops / step / gpus / (machine.gpu_tflops * 1e12),
        "days": days,
        "gpu_hours": None if days is None else 24 * days * gpus,
    }


def show_json(config, machine, plans):
    from moh_lm.cost.flops import flops_per_token
    from moh_lm.cost.memory import cache_bytes, parameter_counts

    width = 2 if config.run.precision == "bf16" else 4
    content = {
        "parameters": parameter_counts(config.model),
        "flops_per_token": flops_per_token(config.model, config.run.seq_length),
        "cache_bytes_per_token": cache_bytes(config.model, config.run.seq_length, width),
        "layouts": plans,
    }
    print(json.dumps(content, indent=1))


def show_table(config, machine, plans):
    from moh_lm.cost.memory import parameter_counts
    from moh_lm.cost.summary import describe_cache, describe_cost, describe_flops
    from moh_lm.cost.time import assumptions

    counts, width = parameter_counts(config.model), 2 if config.run.precision == "bf16" else 4
    fitting = [plan for plan in plans if plan["fits"]]
    found = f"{len(plans)} legal on {machine.gpus} GPUs, {len(fitting)} fit into {machine.gpu_memory:g} GiB"
    print(f"parameters {short(counts['total'])} ({counts['total']:,})")
    print(wrapped(f"FLOPs      {describe_flops(config)}"))
    print(wrapped(f"cache      {describe_cache(config.model, config.run.seq_length, width)}"))
    print(f"layouts    {found}" + "; ! does not" * (len(plans) > len(fitting)))
    print(" tp  pp  cp   dp zero micro accum recompute    GiB  s/step  tok/s/GPU    MFU    days")
    for plan in plans[: machine.top]:
        days = "-" if plan["days"] is None else f"{plan['days']:.2f}"
        print(
            f"{plan['tensor_parallel_size']:>3}{plan['pipeline_parallel_size']:>4}{plan['context_parallel_size']:>4}"
            f"{plan['data_parallel_size']:>5}"
            f"{plan['zero_stage']:>5}{plan['micro_batch_size']:>6}{plan['gradient_accumulation_steps']:>6}"
            f"{'yes' if plan['recompute'] else 'no':>10}{plan['memory_gib']:>7.1f}{' ' if plan['fits'] else '!'}"
            f"{plan['seconds_per_step']:>7.2f}{plan['tokens_per_second_per_gpu']:>11,.0f}{plan['mfu']:>7.1%}{days:>8}"
        )
    print(wrapped(f"estimate   {assumptions(machine)}"))
    if fitting and fitting[0]["days"] is not None:
        print(f"time       {describe_cost(config.run, fitting[0]['days'] * DAY, machine.gpus)} for the first")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
