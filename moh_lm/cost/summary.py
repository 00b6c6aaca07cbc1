"""A summary of what a run will do, printed before it starts and by ``--dry-run``."""

from collections import Counter
from itertools import groupby

import torch

from moh_lm.build import layer_backends
from moh_lm.config import walk
from moh_lm.config.text import doublings_between
from moh_lm.cost import description
from moh_lm.cost.devices import Machine, known_device
from moh_lm.cost.flops import computed_share, flops_per_token, peak_flops
from moh_lm.cost.gain import attention_times
from moh_lm.cost.memory import cache_bytes, memory_estimate, parameter_counts
from moh_lm.cost.time import FUSED_ROUTER, against_dense, assumptions, step_seconds
from moh_lm.kernels.choose import is_estimated, measured_ratio
from moh_lm.kernels.devices import on_gpu
from moh_lm.kernels.measured import MEASURED, machine, measurement
from moh_lm.units import binary_size, listing, short, time_left, words, wrapped

LARGEST_GPU = 288 * 2**30  # bytes of memory


def describe_run(config, dataset, world_size, problems, device=None):
    """Return the lines that describe a run, from its model to its time. dataset: None if there is no data yet.
    problems: see ``attention_times``. device: the target ``Device``, by default that of this machine."""
    lines = [
        *describe_model(config.model),
        *describe_warmup(config),
        *describe_attention(config, device),
        *describe_batches(config),
        *describe_data(config, dataset),
        describe_layout(config, world_size),
        *describe_memory(config, world_size),
        f"cache      {describe_cache(config.model, config.run.seq_length, 2 if config.run.precision == 'bf16' else 4)}",
        f"FLOPs      {describe_flops(config)}",
        f"time       {describe_time(config, world_size, device)}",
        *describe_gain(config, problems, device),
    ]
    return list(map(wrapped, lines))


def describe_configuration(config):
    """Return every resolved field, under the title of its section."""
    lines = []
    for section, pairs in groupby(walk(config), key=lambda pair: pair[0]):
        values = {entry: getattr(section, entry.name) for _, entry in pairs}
        listed = [entry for entry, value in values.items() if "metavar" in entry.metadata and isinstance(value, tuple)]
        values |= {entry: list(values[entry]) for entry in listed}  # not one per layer
        settings = ", ".join(f"{entry.name}\0{words(value)}" for entry, value in values.items())
        lines += ["", type(section).__doc__, wrapped(f"  {settings}", 2).replace("\0", " ")]
    return lines


def describe_model(model):
    counts, keys = parameter_counts(model), description.describe_kv(model)
    yield (
        f"model      {model.num_layers} layers, hidden {model.hidden_size}, intermediate {model.intermediate_size}, "
        f"{words(model.num_attention_heads)} heads x {description.describe_width(model)}, {keys}, "
        f"vocabulary {model.vocab_size}"
    )
    yield (
        f"parameters {short(counts['total'])} ({counts['total']:,}): embedding and output head "
        f"{short(counts['embedding'])}, routers {short(counts['router'])}"
    )
    yield f"heads      {description.describe_heads(model)}"
    if any(model.window):
        yield f"window     {description.describe_window(model)}"
    if positions := description.describe_positions(model):
        yield f"positions  {positions}"
    if norms := description.describe_norms(model):
        yield f"norms      {norms}"


def describe_warmup(config):
    """Describe the dense warm-up, if there is one, and what changes when it ends."""
    model, length = config.model, config.run.seq_length
    if model.after(0) != model:
        saved = 1 - flops_per_token(model, length)["active"] / flops_per_token(model.after(0), length)["dense"]
        yield f"warm-up    dense, for {model.heads.dense_warmup_iters:,} iterations; then {saved:.1%} fewer FLOPs:"
        yield f"           {describe_switch(model)}"


def describe_switch(model):
    """Describe what happens to the heads when the routers of ``model`` start to select."""
    share = f"{model.active_share():.1%} of the heads"
    if model.heads.routing == "relu":
        share = f"its shared heads and about half of the others, and in time {share}"
    elif model.heads.routing_top_p is not None:
        share = f"at most {share}"
    own = ", and a routed head sees its own tokens only" if model.heads.routed_keys == "selected" else ""
    return f"a token uses {share}, with gates that start near 1{own}"


def describe_attention(config, named=None):
    """Describe the backend that ``auto`` chooses on this machine or, if it has no measurements, how to make them.

    named: the target ``Device``, which need not be in this machine.
    """
    run, model = config.run, config.model
    always_dense = model.heads.head_selection == "all" and not any(model.window)
    if always_dense or run.attention_backend != "auto":
        return
    device, dtype = this_device(run)
    if model.chooses_in_groups and (named or device.type == "cuda" or run.compile):
        yield "attention  auto: ordinary attention of the heads that tokens choose in each key/value group"
        return
    if named:
        ships = any(known_device(one.machine) == named for one in MEASURED)
        by = "measurements of one that ship with moh_lm" if ships else "measurements made there; without them, dense"
        if not ships and named.is_estimated:
            by += " unless layers are compiled and an estimate says that selected heads save time"
        yield f"attention  auto: chosen on the {named.name}, by {by};"
        yield "           to measure one: python benchmarks/attention.py --levels layer --save"
        return
    if device.type == "cpu" and run.compile:
        yield "attention  auto: dense in every layer, because cpu_sparse cannot be compiled"
        return
    backends = Counter(layer_backends(config, device))
    chosen = ", ".join(f"{backend} in {count} of {model.num_layers} layers" for backend, count in backends.items())
    found = measurement(device, dtype)
    if found:
        yield f"attention  auto: {chosen}, as measured on {found.machine}"
    else:
        estimated = is_estimated(device, dtype) and (run.compile or run.cuda_graph)
        by = "as estimated from layers on one H200, because" if estimated else "because"
        flags = f"--dtype {str(dtype).removeprefix('torch.')}"
        flags += f" --threads {torch.get_num_threads()}" if device.type == "cpu" else ""
        yield f"attention  auto: {chosen}, {by} there is no measurement of {machine(device)} with {flags};"
        yield f"           to make one: python benchmarks/attention.py --levels layer {flags} --save"


def this_device(run):
    """Return the device of this machine, and the dtype of the run."""
    device = torch.device("cuda" if on_gpu() else "cpu")
    return device, torch.bfloat16 if run.precision == "bf16" else torch.float32


def describe_batches(config):
    run, optimizer = config.run, config.optimizer
    yield f"batch      {run.global_batch_size} sequences x {run.seq_length} = {run.tokens_per_iteration:,} tokens"
    yield (
        f"budget     {run.train_iters:,} iterations = {config.tokens_after(run.train_iters):,} tokens; "
        f"warm-up {optimizer.warmup_iters:,}, then {optimizer.schedule}"
    )
    if run.batch_warmup:
        sizes = {size: first for first, _, size in run.stages}  # if two begin together, the larger one
        yield "batches    " + ", ".join(f"{size} from step {first:,}" for size, first in sizes.items())
    if config.data.seq_length_warmup:
        yield describe_lengths(config)


def describe_lengths(config):
    """Return the lengths of --seq-length-warmup and the steps at which they start."""
    length, iterations = config.data.length_warmup
    doublings = doublings_between(length, config.run.seq_length)
    starts = [-(-number * iterations // max(1, doublings)) for number in range(doublings + 1)]  # rounded up
    lengths = {step: config.length_at(config.run.samples_after(step)) for step in starts}
    return "lengths    " + ", ".join(f"{length:,} from step {step:,}" for step, length in lengths.items())


def describe_layout(config, world_size):
    parallel = config.parallel
    degrees = {"tensor": parallel.tensor_parallel_size, "pipeline": parallel.pipeline_parallel_size}
    if parallel.context_parallel_size > 1:
        degrees["context"] = parallel.context_parallel_size
    degrees["data"] = config.data_parallel_size(world_size)
    product = " x ".join(f"{name} {size}" for name, size in degrees.items())
    micro_batches = f"{config.gradient_accumulation_steps(world_size)} micro-batches of {config.run.micro_batch_size}"
    return (
        f"layout     {product}, ZeRO-{parallel.zero_stage}, {config.run.precision}; "
        f"{micro_batches} {config.sample_name} per rank"
    )


def describe_data(config, dataset):
    if dataset is None:
        yield f"data       {config.data.data_dir}, which does not exist yet"
        return
    rows = dataset.plan(config.run.samples_after(config.run.train_iters))
    yield f"data       {config.data.data_dir}"
    width = max(len("source"), *(len(row["name"]) for row in rows))
    yield f"  {'source':<{width}}  {'share':>7}  {'tokens':>9}  {'samples':>11}  {'epochs':>8}  {'held-out':>8}"
    for row in rows:
        yield (
            f"  {row['name']:<{width}}  {float(row['share']):>7.2%}  {short(row['tokens']):>9}  {row['samples']:>11,}  "
            f"{row['epochs']:>8.3f}  {row['validation_windows']:>8,}"
        )
    if dataset.packer:
        yield from dataset.packer.describe(dataset.source_names)
    yield from (f"  {note}" for note in dataset.notes)
    asked = config.run.eval_samples
    few = [f"{row['name']} {row['validation_windows']}" for row in rows if 0 < row["validation_windows"] < asked]
    if few:
        remedy = "a larger --validation-fraction holds out more"
        yield f"  fewer sequences are held out than --eval-samples {asked}: {listing(few)}; {remedy}"


def describe_memory(config, world_size):
    parts = memory_estimate(config, world_size)
    shown = ", ".join(f"{name} {binary_size(size)}" for name, size in parts.items())
    yield f"memory     about {binary_size(sum(parts.values()))} per rank (estimated): {shown}"


def memory_warnings(config, world_size, device=None):
    """Yield a sentence if a rank needs more memory than ``device``, this GPU, or else the largest GPU has."""
    need, room = sum(memory_estimate(config, world_size).values()), LARGEST_GPU
    if device:
        room = device.gib * 2**30
    elif on_gpu():
        room = torch.cuda.get_device_properties(0).total_memory
    if need > room:
        less = "choose --recompute or a smaller --micro-batch-size, or split the model (tools/plan.py ranks layouts)"
        yield f"memory: about {binary_size(need)} per rank, and a GPU has {binary_size(room)}; {less}"


def describe_flops(config):
    """Return the FLOPs of training per token and for the run; see ``flops_per_token``."""
    run, share = config.run, computed_share(config.optimizer)
    flops = {kind: share * found for kind, found in flops_per_token(config.model, run.seq_length).items()}
    most = "" if config.model.heads.routing_top_p is None else "at most "
    dense, active = (f"{flops[kind]:.3e}" for kind in ("dense", "active"))
    tokens = config.tokens_after(run.train_iters or 0)
    whole = f"; {flops['dense'] * tokens:.3g} for the whole run" if tokens else ""
    return f"{dense} per token with all heads, {most}{active} with the active ones{whole}"


def describe_time(config, world_size, device=None):
    """Estimate the time and cost of the run, with the assumptions. device: by default the one in this machine."""
    peak = known_peak(config.run, device)
    if not peak and config.run.precision == "fp32":
        return "unknown; peaks are known in bf16 only; give --peak-tflops"
    if not peak:
        return "unknown; give --peak-tflops or --device-name for an estimate, or compare layouts with tools/plan.py"
    there = Machine(world_size, peak / 1e12)
    whole = config.run.samples_after(config.run.train_iters) / config.run.global_batch_size
    seconds = whole * sum(step_seconds(config, there).values())
    devices = f"on {world_size} device{'s' * (world_size > 1)}"
    return f"{describe_cost(config.run, seconds, world_size)} {devices}; {assumptions(there)}"


def known_peak(run, device):
    """Return the FLOP/s of ``device``, or of the one here; None if they are not known."""
    if device and run.peak_tflops is None and run.precision == "bf16":
        return device.tflops * 1e12
    return peak_flops(run, this_device(run)[0])


def describe_gain(config, problems, device=None):
    """Say what the mixture saves or costs at this length, cite the source, and say what would save more."""
    model, run, peak = config.model, config.run, known_peak(config.run, device)
    if not model.routed_layers():
        return
    length, found = run.seq_length, None if device else measurement(*this_device(run))
    queries = length, run.micro_batch_size, max(model.head_counts), model.query_dim
    ratio = measured_ratio(found, queries, model.active_share(), run.compile)
    if ratio and not model.chooses_in_groups:  # heads were measured that tokens choose among all
        yield (
            f"MoH        an attention layer of {length:,} tokens takes {ratio:.2f} of the time of a dense one if it "
            f"computes only the selected heads; measured on {found.machine}"
        )
    if not peak:
        return
    there, router = Machine(1, peak / 1e12), FUSED_ROUTER if run.fused_router else 1
    cases = attention_times(config, problems)
    times = [f"{against_dense(model, length, there, time, router):.2f} {case}" for case, time in cases.items()]
    yield (
        f"MoH        a step of {length:,} tokens takes, relative to a dense one, about {listing(times)}; estimated "
        "from layers on one H200 (docs/results.md), without the time of the host"
    )


def describe_cost(run, seconds, world_size):
    hours = seconds * world_size / 3600
    cost = "" if run.gpu_hour_price is None else f" at {run.gpu_hour_price:g} = {hours * run.gpu_hour_price:,.2f}"
    return f"{time_left(seconds)}, {hours:,.1f} GPU-hours{cost}"


def describe_cache(model, seq_length, width):
    """Return the size of the key/value cache per token and how much of it one step reads, in numbers of ``width``
    bytes."""
    sizes = cache_bytes(model, seq_length, width)
    most, factor = "" if model.heads.routing_top_p is None else "at most ", sizes["multi_head"] / sizes["whole"]
    smaller = f"; multi-head attention keeps {factor:.3g} times as many" if factor != 1 else ""
    return (
        f"{sizes['whole']:,.0f} bytes per token at {seq_length:,} tokens; generating a token reads "
        f"{most}{sizes['read']:,.0f} of them{smaller}"
    )
