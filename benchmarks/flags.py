"""The flags of the timing programs, and the shapes they know; read before the imports that take seconds."""

import os
import sys
from pathlib import Path

from moh_lm.cli.command import device
from moh_lm.cli.parser import Parser
from moh_lm.config import FUSED, ConfigError
from moh_lm.units import above_0, at_least

SHAPES = {  # hidden size, query heads, key/value heads, head dimension
    "llm-s": (768, 12, 12, 64),
    "llm-s-grouped": (768, 12, 6, 64),
    "llm-b": (1536, 16, 16, 96),
    "llama3-8b": (4096, 32, 8, 128),
}
MODELS = {
    "llm-s": dict(num_layers=12, hidden_size=768, intermediate_size=2048, num_attention_heads=12, head_dim=64),
    "llm-b": dict(num_layers=24, hidden_size=1536, intermediate_size=4096, num_attention_heads=16, head_dim=96),
    "llama3-8b-4-layers": dict(
        num_layers=4, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128,
    ),
    "tiny": dict(num_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=4, vocab_size=1024),
}
MODELS["llm-s-grouped"] = MODELS["llm-s"] | {"num_key_value_heads": 6}
KERNELS = Path(__file__).resolve().parents[1] / "moh_lm" / "kernels"  # where --save writes


def checked(read, *arguments):
    """Return what ``read(*arguments)`` returns. A mistake is one line on standard error, and exit code 2."""
    try:
        return read(*arguments)
    except ConfigError as error:
        print("\n".join(f"{sys.argv[0]}: {problem}" for problem in error.problems), file=sys.stderr)
        sys.exit(2)


def attention_flags(texts):
    parser = Parser(description="Head-sparse attention side by side with dense attention, timed in turns.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llm-s", "llm-b"])
    parser.add_argument("--lengths", nargs="+", type=at_least(1), default=[512, 1024, 2048, 4096])
    parser.add_argument("--active", nargs="+", type=int, choices=(50, 75), default=[50, 75])
    parser.add_argument("--levels", nargs="+", choices=("core", "layer"), default=["core", "layer"])
    device_flags(parser, rounds=7)
    parser.add_argument("--micro-batch", type=at_least(1))
    parser.add_argument("--documents", type=at_least(1), help="their mean length in tokens (default: none)")
    parser.add_argument("--window", type=at_least(0), default=0, help="keys that a token sees; 0: all before it")
    parser.add_argument("--save", action="store_true", help="let auto use these times on this machine")
    options = parser.parse_args(texts)
    if options.save and (options.documents or options.window or "layer" not in options.levels):
        parser.error("--save: auto uses whole layers without --documents and --window; leave out these and --levels")
    if options.save and not os.access(KERNELS, os.W_OK):
        parser.error(f"--save: {KERNELS} cannot be written to; run it in a checkout of your own")
    return options


def decode_flags(texts):
    parser = Parser(description="Attention of one new token to a cache: all heads, and the selected ones.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llm-s", "llm-b", "llama3-8b"])
    parser.add_argument("--lengths", nargs="+", type=at_least(1), default=[2048, 8192, 32768])
    parser.add_argument("--batches", nargs="+", type=at_least(1), default=[1, 4])
    parser.add_argument("--active", nargs="+", type=int, choices=(50, 75), default=[50, 75])
    device_flags(parser, rounds=9)
    return parser.parse_args(texts)


def step_flags(texts):
    parser = Parser(description="A training step side by side: ours, and that of Hugging Face's Llama.")
    add = parser.add_argument
    add("--shape", default="llm-s", choices=MODELS)
    add("--seq-length", type=at_least(1), nargs="+", default=[1024])
    add("--micro-batch-size", type=at_least(1), default=1)
    names = ["dense", "moh-75", "moh-50", "hf", "moh-25", "groups-50", "hf-liger"]
    choices = [*names, *(f"{name}-compiled" for name in names)]
    choices += [f"{name}-fused" for name in choices if not name.startswith("hf")]
    choices += [f"{name}-joined" for name in choices if not name.startswith("hf")]
    choices += [f"{name}-captured" for name in choices if not name.startswith("hf")]
    add("--contestants", nargs="+", default=names[:4], choices=choices, metavar="NAME", help="(default: the first 4)")
    backends = ("auto", "dense", "triton", "cpu_sparse")
    add("--backend", default="auto", choices=backends, help="attention backend of ours (default: auto)")
    add("--rounds", type=at_least(1), default=3, help="that count (default: 3)")
    add("--threads", type=at_least(1), help="(default: torch's own number)")
    add("--device", type=device, help="(default: a GPU if there is one)")
    add("--peak-tflops", type=above_0, help="of the device, for the MFU (default: known for common GPUs)")
    return parser.parse_args(texts)


def ceiling_flags(texts):
    parser = Parser(description="What a device does at best: copies, products, and operations of the host.")
    parser.add_argument("--divisor", type=at_least(1), default=1, help="of every size, for a rehearsal on a CPU")
    device_flags(parser, rounds=7)
    return parser.parse_args(texts)


def loss_flags(texts):
    parser = Parser(description="Output head and loss side by side: torch, and the kernels of --fused-loss.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llm-s", "llm-b"])
    parser.add_argument("--tokens", type=at_least(1), default=16384)
    parser.add_argument("--vocab-size", type=at_least(2), default=65536)
    device_flags(parser, rounds=7)
    return parser.parse_args(texts)


def router_flags(texts):
    parser = Parser(description="Routers and their gates side by side: torch, and the kernels of --fused-router.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llm-s", "llm-b", "llama3-8b"])
    parser.add_argument("--tokens", type=at_least(1), default=16384)
    parser.add_argument("--routing", nargs="+", choices=FUSED, default=["sigmoid", "paper"])
    device_flags(parser, rounds=7)
    return parser.parse_args(texts)


def gpu_flags(texts):
    parser = Parser(description="Everything that can be measured of a GPU in some minutes, the most valuable first.")
    add = parser.add_argument
    add("--minutes", type=above_0, default=12.0, help="time limit (default: 12)")
    add("--output", type=Path, default=Path("gpu.jsonl"), metavar="FILE", help="rows, and what is complete (default: "
        "%(default)s)")  # fmt: skip
    add("--peak-tflops", type=above_0, help="of the GPU in bf16 (default: known for common GPUs)")
    add("--rehearse", action="store_true", help="the same programs with tiny shapes on a CPU")
    add("--table", action="store_true", help="measure nothing; print what the file has as tables for docs/results.md")
    return parser.parse_args(texts)


def device_flags(parser, rounds):
    """Add the flags of programs that run on the GPU, if there is one, or else on the CPU."""
    parser.add_argument("--threads", type=at_least(1), default=1)
    parser.add_argument("--rounds", type=at_least(1), default=rounds)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
