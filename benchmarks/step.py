"""A whole training step side by side: forward, backward and AdamW, ours and Hugging Face's Llama of the same shape.

    python benchmarks/step.py [--shape llm-s] [--seq-length 1024 2048] [--contestants dense moh-75 moh-50 hf]
                              [--micro-batch-size 1] [--rounds 3] [--threads N] [--device cuda] [--peak-tflops 989]

All contestants train in one process, in turns, on the same random tokens: fp32 on a CPU, bf16 weights on a GPU, torch's
AdamW (fused on a GPU), no engine and no recomputation. hf is LlamaForCausalLM (sdpa) of the installed transformers;
hf-liger has the kernels of liger-kernel too, if that is installed, and then hf in the same process has some of them. A
name that continues with -compiled is the same under torch.compile, ours by layers as with ``--compile``. With -fused,
the kernels are those of ``--fused-loss`` and ``--fused-router``; with -joined after it, the products are those of
``--fused-projections``; with -captured at the end, forward and backward pass are one graph, as with ``--cuda-graph``.
A step's time is the median over the rounds, after one that does not count. A ratio is the median of the ratios within a
round, on a CPU by the clock and then by CPU time. GiB on a GPU is the most memory that a contestant needs during a
step, with its own weights and moments. MFU is the step's FLOPs by ``flops_per_token`` over time and --peak-tflops, for
all heads and for active ones.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from benchmarks.flags import checked, step_flags

    options = checked(step_flags, sys.argv[1:])  # before the imports that take seconds

import importlib.metadata
import importlib.util
import platform
import re
from statistics import median

import torch

from benchmarks.attention import budgets
from benchmarks.flags import MODELS, checked
from benchmarks.timing import first_graph, seconds
from moh_lm.build import build_model
from moh_lm.cli.devices import usable_device
from moh_lm.config import HeadsConfig, ModelConfig, raise_any
from moh_lm.cost.devices import known_device
from moh_lm.cost.flops import flops_per_token
from moh_lm.kernels.choose import choose_backend
from moh_lm.model.block import modules_of
from moh_lm.model.transformer import compile_layers
from moh_lm.supervise.malloc import keep_freed_memory
from moh_lm.training.captured import CapturedMicroBatch
from tools.hf.convert.keys import written


def main(arguments):
    sys.stdout.reconfigure(line_buffering=True)  # an interrupted run has shown the finished lengths
    device = torch.device(checked(usable_device, arguments.device))
    checked(check_backend, arguments, device)
    if device.index:
        torch.cuda.set_device(device)  # events, peak memory and name refer to the current GPU
    if device.type == "cpu":
        keep_freed_memory()  # as training does
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    arguments.peak_tflops = arguments.peak_tflops or getattr(known_device(name), "tflops", None)
    print(f"{name}; torch {torch.__version__}, Python {platform.python_version()}; {' '.join(sys.argv)}")
    for length in arguments.seq_length:
        compare(arguments, length, device)


def check_backend(arguments, device):
    """Raise ConfigError for a --backend that cannot train there."""
    backend, needed = arguments.backend, "cpu" if arguments.backend == "cpu_sparse" else "cuda"
    compiled = [name for name in arguments.contestants if "-compiled" in name and not name.startswith("hf")]
    of_gpus = "-captured" if os.environ.get("TRITON_INTERPRET") == "1" else "-captured|-fused"
    problems = [
        f"--contestants {name}: needs a GPU, and --device is {device}; leave it out"
        for name in arguments.contestants
        if device.type != "cuda" and re.search(of_gpus, name)
    ]
    if backend not in ("auto", "dense") and device.type != needed:
        place = {"cpu": "a CPU", "cuda": "a CUDA GPU"}[needed]
        problems.append(f"--backend {backend}: needs {place}, and --device is {device}; choose auto")
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        problems.append("--backend triton: the package triton is not installed; pip install triton, or choose auto")
    if backend == "cpu_sparse" and compiled:
        problems.append(f"--contestants {compiled[0]}: --backend cpu_sparse cannot be compiled; choose auto or dense")
    if "num_key_value_heads" not in MODELS[arguments.shape] and any("groups" in name for name in arguments.contestants):
        problems.append("--contestants groups-50: heads must share keys; choose --shape llm-s-grouped")
    raise_any(problems)


def compare(arguments, length, device):
    torch.compiler.reset()  # every length is compiled as if it were the only one
    contestants, own = {}, {}  # own: bytes kept between steps
    for name in arguments.contestants:
        before = allocated(device)
        contestants[name] = make(name, arguments, length, device)
        own[name] = allocated(device) - before
    generator = torch.Generator().manual_seed(0)
    vocab = ModelConfig(**MODELS[arguments.shape]).vocab_size
    times, losses, memory = {name: [] for name in contestants}, {}, {}
    for round in range(arguments.rounds + 1):
        tokens = torch.randint(vocab, (arguments.micro_batch_size, length + 1), generator=generator).to(device)
        for name, (step, _) in contestants.items():
            before = allocated(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found = []  # the loss
            taken = seconds(lambda step=step, tokens=tokens, found=found: found.append(step(tokens)), device, repeats=1)
            losses[name] = found[0].item()
            if device.type == "cuda":
                peak = (own[name] + torch.cuda.max_memory_allocated() - before) / 2**30
                memory[name] = max(memory.get(name, 0), peak)  # a replayed graph allocates nothing
            own[name] += allocated(device) - before  # the first step makes the moments
            times[name].append(taken)
            print(f"round {round}, {name}: {taken[0]:.3f} s, loss {losses[name]:.3f}", file=sys.stderr, flush=True)
    first, *_ = contestants
    print(f"\n{arguments.shape}, {arguments.micro_batch_size} x {length} tokens; seconds of a step; ratio to {first}")
    for name, (_, config) in contestants.items():
        taken = median(seconds for seconds, *_ in times[name][1:])
        line = f"{name:16}{taken:10.5f}{length * arguments.micro_batch_size / taken:12,.0f} tokens/s"
        for clock, introduction in enumerate(["", "  by CPU time"][: len(times[name][0])]):
            mine, others = ([taken[clock] for taken in times[which][1:]] for which in (name, first))
            ratios = sorted(a / b for a, b in zip(mine, others, strict=True))
            line += f"{introduction}{median(ratios):8.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        if arguments.peak_tflops:
            flops = {key: value * length * arguments.micro_batch_size for key, value in config.items()}
            line += "".join(f"  MFU {key} {flops[key] / taken / arguments.peak_tflops / 1e12:.1%}" for key in flops)
        print(line + (f"  {memory[name]:.1f} GiB" if memory else ""))


def allocated(device):
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def make(name, arguments, length, device):
    """Return (step: tokens [b, s + 1] -> loss, FLOPs per token) of a contestant."""
    sizes = MODELS[arguments.shape]
    heads = HeadsConfig(head_selection="all")
    kind, *ways = re.split("-(?=compiled|fused|joined|captured)", name)
    if kind.startswith("moh-"):
        shared, routed = budgets(sizes["num_attention_heads"], int(kind.removeprefix("moh-")))
        heads = HeadsConfig(num_shared_heads=(shared,), num_active_routed_heads=(routed,))
    elif kind.startswith("groups-"):
        number = sizes["num_attention_heads"] // 2
        heads = HeadsConfig(num_shared_heads=(0,), num_active_routed_heads=(number,), routing_unit="head_in_group")
    config = ModelConfig(**sizes, heads=heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if kind.startswith("hf"):
        with device:
            model, loss_of = hugging_face(config, length, "compiled" in ways, kind == "hf-liger"), hugging_face_loss
    else:
        share = config.active_heads(0) / config.num_attention_heads
        queries = (length, arguments.micro_batch_size, config.num_attention_heads, config.head_dim)
        facts = {"compiled": "compiled" in ways, "in_groups": config.chooses_in_groups}
        chosen = choose_backend(arguments.backend, device, dtype, queries, share, **facts)
        fused = dict.fromkeys(("fused_loss", "fused_router"), "fused" in ways)
        model = drawn(config, device, backends=chosen, fused_projections="joined" in ways, **fused)
        loss_of = our_loss
        if "compiled" in ways:
            compile_layers(model)
        print(f"{name}: attention backend {chosen}, {share:.0%} of the heads", file=sys.stderr)
    model = model.to(device=device, dtype=dtype).train()
    if "captured" in ways:
        rows = [block.rows for block in modules_of(model)]
        model.use_captured(CapturedMicroBatch(model, lambda: rows, device, first_graph().pool(), list))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda" or None)

    def step(tokens):
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, flops_per_token(config, length)


def drawn(config, device, **settings):
    """Return our model with random weights. settings: see ``build_model``."""
    with device:  # billions of weights are drawn quickly there
        model = build_model(config, **settings)
    for parameter in model.parameters():
        constant = parameter.init_std is None
        torch.nn.init.ones_(parameter) if constant else torch.nn.init.normal_(parameter, std=parameter.init_std)
    return model


def our_loss(model, tokens):
    return model(tokens[:, :-1], tokens[:, 1:])[0]


def hugging_face(config, length, compiled, liger):
    import transformers  # only this contestant needs it

    more = {"max_position_embeddings": length, "attn_implementation": "sdpa", "use_cache": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**written(config), **more))
    if liger and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
        print(f"hf-liger: liger-kernel {importlib.metadata.version('liger-kernel')}")
    elif liger:
        print("hf-liger: liger-kernel is not installed, so this is hf")
    print(f"hf: transformers {transformers.__version__}", file=sys.stderr)
    return torch.compile(model, dynamic=False) if compiled else model


def hugging_face_loss(model, tokens):
    return model(input_ids=tokens[:, :-1], labels=tokens[:, :-1], shift_labels=tokens[:, 1:].contiguous()).loss


if __name__ == "__main__":
    main(options)
