"""Head-sparse attention side by side with dense attention: ratios of time, taken in turns in one process.

    python benchmarks/attention.py [--shapes llm-s llm-b llama3-8b] [--lengths 512 1024 2048 4096] [--active 50 75]
                                   [--levels core layer] [--threads 1] [--rounds 7] [--micro-batch N] [--dtype float32]
                                   [--documents 300] [--window 512] [--save]

The *core* is the attention of all heads from their queries, keys and values, routing given; the *layer* is the whole
attention layer with projections, rotary embeddings and router. ``--active``: percent of the heads that a token uses.
``--documents``: attention stays inside documents with this mean number of tokens. The program shows the median times of
the base and, for every contestant, the median over rounds of its time relative to the base in the same round: forward
alone, and forward with backward; on a CPU by the clock and, on the right, by CPU time. The base of the core is scaled
dot-product attention without gates, that of the layer the MoH layer with the backend ``dense``; ``no router`` is
ordinary attention. ``own keys`` is the sparse backend with --routed-keys selected; ``in groups`` chooses the same share
of the heads of every key/value group, where that is a whole number of some (--routing-unit head_in_group). ``joined``
is the sparse backend with --fused-projections, and ``fused`` with --fused-router, whose kernels need a GPU.

On a GPU, times come from replayed CUDA graphs and, on the right, from eager calls; a contestant that waits for the
GPU has only eager calls, and a line says so. The bases are FLASH (EFFICIENT in fp32, and with documents, which FLASH
cannot mask) and CUDNN, if they run. benchmarks/attention_gpu.py runs first. ``unfused`` is attention in separate
operations, which may be the paper's baseline. The micro-batch is 1 on a CPU, and 16,384 tokens on a GPU, unless
``--micro-batch`` sets another.

With ``--save``, training uses the results of this machine from then on (moh_lm/kernels/choose.py): its tiles, and the
times of layers, by which ``--attention-backend auto`` chooses. Nothing else should run meanwhile.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from benchmarks.flags import attention_flags, checked

    options = checked(attention_flags, sys.argv[1:])  # before the imports that take seconds

import platform
from datetime import date
from functools import partial
from itertools import product
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.flags import SHAPES
from benchmarks.timing import in_turns, ratio, set_up, stopwatch
from moh_lm.build import BACKENDS, build_model
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.kernels import measured
from moh_lm.kernels.gated_attention import gated_attention
from moh_lm.kernels.masks import apply_window, document_bounds
from moh_lm.model.balance import RouterRows, attach_loss
from moh_lm.model.batch_context import RouterInputs
from moh_lm.supervise.malloc import keep_freed_memory

LONGEST_TUNED = 16384  # tokens; longer sequences take minutes and use the tiles of this length
PARTS = ("forward", "both")
NEVER = 99  # a ratio worse than any other: the sparse backend could not run


def bases(documents, dtype):
    """The kernels of scaled dot-product attention on a GPU; FLASH cannot mask documents, nor compute in fp32."""
    first = "FLASH" if documents is None and dtype.itemsize < 4 else "EFFICIENT"
    return {name: getattr(SDPBackend, f"{name}_ATTENTION") for name in (first, "CUDNN")}


def main(options):
    device, dtype = set_up(options)
    if device.type == "cpu":
        keep_freed_memory()  # as training does
    print(conditions := describe(device, dtype))
    new = measured.Measurement(*measured.key_of(device, dtype), f"{date.today()}: {conditions}", 0, [], [])
    if device.type == "cuda":
        from benchmarks.attention_gpu import check_and_tune

        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # unfused attention in the requested precision
        tuned = [length for length in options.lengths if length <= LONGEST_TUNED]
        new, passed = check_and_tune(new, [SHAPES[name] for name in options.shapes], tuned, device, dtype)
        if options.save and not passed:
            sys.exit("--save: nothing is written, since auto must not use kernels that failed a check (see above)")
    sparse, ratios, elements = "triton" if device.type == "cuda" else "cpu_sparse", {}, []
    for level, shape, active, length in product(options.levels, options.shapes, options.active, options.lengths):
        batch = options.micro_batch or (max(1, 16384 // length) if device.type == "cuda" else 1)
        documents = make_documents(options.documents, length, batch, device, dtype)
        tokens = torch.empty(length, batch, device=device, dtype=dtype)
        documents = apply_window(documents, options.window, tokens, masked=True)
        contestants = core if level == "core" else layer
        functions = contestants(SHAPES[shape], active, length, batch, device, dtype, documents)
        first = list(bases(documents, dtype)) if device.type == "cuda" else ["dense"]
        title = f"{level} {shape} {active}% T={length} b={batch}"
        found = report(title, functions, first, options.rounds, device)
        if level == "layer":
            row = length, active / 100
            pairs = zip(ratios.get(row, (0, 0)), worst(found, sparse, device), strict=False)
            ratios[row] = [max(pair) for pair in pairs]
            elements.append(length * batch * SHAPES[shape][1] * SHAPES[shape][3])
    if options.save:
        rows = [[*row, *(round(min(value, NEVER), 3) for value in values)] for row, values in sorted(ratios.items())]
        if min(map(min, ratios.values())) > NEVER:
            sys.exit(f"--save: nothing is written, since no layer ran both by {sparse} and by a base (see above)")
        measured.save(new._replace(elements=min(elements), ratios=rows))
        print(f"written to {measured.FILE}")


def make_documents(mean, length, batch, device, dtype):
    """``AttentionMask`` of documents that end after each token with a probability of 1 / mean."""
    if mean is None:
        return None
    token = torch.arange(length)
    begins = torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) < 1 / mean
    positions = token - torch.where(begins, token, 0).cummax(1).values
    return document_bounds(positions.to(device), dtype)


def describe(device, dtype):
    """Return the machine, the versions and the command."""
    if device.type == "cuda":
        machine = f"{measured.machine(device)}, cuDNN {torch.backends.cudnn.version()}"
    else:
        load = f"{torch.get_num_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}"
        machine = f"{measured.machine(device)}, {os.cpu_count()} cores, {load}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {dtype}"
    return f"{machine}; {versions}\n$ python {' '.join(sys.argv)}"


def budgets(heads, active):
    """Return (shared heads, routed heads per token) for a percentage of the heads. Of 75 two thirds are shared, of 50
    and of 25 a half."""
    shared = heads // {75: 2, 50: 4, 25: 8}[active]
    return shared, heads * active // 100 - shared


def core(shape, active, length, batch, device, dtype, documents):
    """Return {name: (function of the inputs, inputs)}; the first, or on a GPU the first two, are bases."""
    _, heads, kv_heads, head_dim = shape
    num_shared, num_active = budgets(heads, active)
    torch.manual_seed(0)
    inputs = [
        torch.randn(length, batch, n, head_dim, device=device, dtype=dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    gates = torch.rand(length, batch, heads, device=device).requires_grad_()
    scores = torch.rand(length, batch, heads - num_shared, device=device)
    routed = torch.zeros_like(scores).scatter(-1, scores.topk(num_active, -1).indices, 1)
    selected = F.pad(routed, (num_shared, 0), value=1)

    def plain(query, key, value, gates):
        return gated_attention(query, key, value, mask=documents)

    def with_backend(backend, own_keys=False):
        sparse = BACKENDS[backend]
        return lambda *tensors: gated_attention(*tensors, selected, num_shared, documents, sparse, own_keys=own_keys)

    functions = {"dense": plain}
    if device.type == "cuda":
        functions = {name: restricted(plain, backend) for name, backend in bases(documents, dtype).items()}
        if length <= 2048:  # longer scores would fill the memory
            functions["unfused"] = restricted(plain, SDPBackend.MATH)
    sparse = "triton" if device.type == "cuda" else "cpu_sparse"
    functions |= {"dense, gates": with_backend("dense"), sparse: with_backend(sparse)}
    functions["own keys"] = with_backend(sparse, own_keys=True)
    return {name: (function, [*inputs, gates]) for name, function in functions.items()}


def layer(shape, active, length, batch, device, dtype, documents):
    """Do the same for attention layers with equal weights, with gradients of the input and of every parameter."""
    hidden, heads, kv_heads, head_dim = shape
    num_shared, num_active = budgets(heads, active)

    def make(selection, backend, *asked, budget=(num_shared, num_active), **options):
        config = HeadsConfig(selection, *((number,) for number in budget), **options)
        model = ModelConfig(1, hidden, 4 * hidden, heads, kv_heads, head_dim, heads=config)
        torch.manual_seed(0)
        module = build_model(model, backends=backend, **dict.fromkeys(asked, True)).model.layers[0].self_attn
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        module.to(device, dtype)

        def call(x, *_):
            output, routing = module(x, RouterInputs(), documents)
            return output if routing.loss is None else attach_loss(output, routing.loss, routing.rows, RouterRows())

        return call, list(module.parameters())

    torch.manual_seed(1)
    x = torch.randn(length, batch, hidden, device=device, dtype=dtype).requires_grad_()
    sparse = "triton" if device.type == "cuda" else "cpu_sparse"
    modules = {"dense": make("mixture", "dense"), "no router": make("all", "dense")}
    modules |= {sparse: make("mixture", sparse), "own keys": make("mixture", sparse, routed_keys="selected")}
    of_group, rest = divmod(heads * active // 100, kv_heads)
    if rest == 0 and 0 < of_group < heads // kv_heads:
        budget = (of_group - 1) * kv_heads, kv_heads
        modules["in groups"] = make("mixture", "groups", budget=budget, routing_unit="head_in_group")
    modules["joined"] = make("mixture", sparse, "fused_projections")
    modules["no router, joined"] = make("all", "dense", "fused_projections")
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        modules["fused"] = make("mixture", sparse, "fused_router")
        modules["fused, joined"] = make("mixture", sparse, "fused_router", "fused_projections")
    found = {name: (function, [x, *parameters]) for name, (function, parameters) in modules.items()}
    if device.type == "cuda":
        dense = found.pop("dense")
        kernels = bases(documents, dtype).items()
        found = {name: (restricted(dense[0], backend), dense[1]) for name, backend in kernels} | found
    return found


def restricted(function, backend):
    """Return ``function`` restricted to one kernel of scaled dot-product attention."""

    def call(*arguments):
        with sdpa_kernel(backend):
            return function(*arguments)

    return call


def report(title, functions, first, rounds, device):
    """Take the contestants in turns, and print a line for each under each base (``first``); those that cannot run here
    say so. Returns {(base, name): [(forward, both) by each clock]}, ratios."""
    clocks = {}
    for name, (function, inputs) in functions.items():
        try:
            calls = {part: partial(run, function, inputs, part == "both") for part in PARTS}
            clocks |= {(name, part): stopwatch(call, device, f"{title}: {name} {part}") for part, call in calls.items()}
        except Exception as error:  # Triton's are not RuntimeErrors
            reason = str(error).partition("\n")[0]
            print(f"{title}: {name} does not run here: {type(error).__name__} {reason}")
    times, found = in_turns(clocks, rounds), {}
    ran = list(dict.fromkeys(name for name, _ in clocks))
    for base in (name for name in first if name in ran):
        shown = [f"{part} {1e3 * median(time[0] for time in times[base, part]):.2f} ms" for part in PARTS]
        print(f"{title}: {base} {', '.join(shown)}")
        for name in (name for name in ran if name not in first):
            found[base, name] = [
                tuple(ratio(times[name, part], times[base, part], clock) for part in PARTS) for clock in range(2)
            ]
            other = "   eager: " if device.type == "cuda" else "   by CPU time: "
            columns = other.join(f"{forward:.2f}  {both:.2f}" for forward, both in found[base, name])
            print(f"    {name:17s} forward, both: {columns}", flush=True)
    return found


def worst(found, sparse, device):
    """Return the largest ratios of the sparse backend to a base, forward and backward: by the clock, or on a GPU for
    calls and CUDA graphs; infinity if it cannot run here."""
    clocks = (1, 0) if device.type == "cuda" else (0,)
    mine = [columns for (_, name), columns in found.items() if name == sparse]
    return [max((columns[clock][1] for columns in mine), default=float("inf")) for clock in clocks]


def run(function, inputs, backward):
    with torch.set_grad_enabled(backward):
        output = function(*inputs)
        if backward:
            leaves = [tensor for tensor in inputs if tensor.requires_grad]
            torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)


if __name__ == "__main__":
    main(options)
