"""Generates text with a checkpoint or an export, streamed for one prompt, or for several prompts at once.

    python tools/generate.py --model RUN_OR_STEP_OR_EXPORT_DIR --prompt "Once upon a time" [--max-new-tokens 100]
    python tools/generate.py --model DIR --prompt A --prompt B ... --temperature 0.8 --top-p 0.95 --seed 1
    python tools/generate.py --model DIR < FILE                 the file is the prompt

The model is the trainer's own with a key/value cache (moh_lm/inference/generate.py). Text goes to standard output,
tokens per second to standard error. --json prints an object for each prompt instead.

Exit codes: 0; 1 the device failed, or a graph was wrong; 2 an argument must be fixed.
"""

import json
import math
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import device, run_file
from moh_lm.config import ConfigError, raise_any
from moh_lm.units import at_least, integer, share

UNFINISHED = "\ufffd"  # a character whose bytes are not complete yet


def main(texts):
    words = {"failures": (RuntimeError,), "unheard": "ends"}
    return run_file(__file__, __doc__, add_flags, run, texts, check=check, **words)


def add_flags(parser):
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="run directory, step directory, or export")
    add("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated (default: standard input)")
    add("--max-new-tokens", type=at_least(1), default=100, metavar="N", help="tokens per prompt (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="X", help="0: always take the most likely token (default: "
        "%(default)s)")  # fmt: skip
    add("--top-p", type=share, default=1.0, metavar="X", help="draw only from the most likely tokens with this total "
        "probability (default: %(default)s)")  # fmt: skip
    add("--seed", type=seed, default=0, metavar="N", help="seed of the draws (default: %(default)s)")
    dtypes = ("float32", "bfloat16")
    add("--dtype", default="float32", choices=dtypes, help="precision of weights and cache (default: %(default)s)")
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if available, else cpu)")
    backends = ("auto", "dense", "loops", "triton")
    add("--attention-backend", default="auto", choices=backends, help="heads that a new token reads: dense: all; "
        "loops (CPU), triton (GPU): the selected ones; auto: whichever was measured to be faster (default: "
        "%(default)s)")  # fmt: skip
    add("--cuda-graph", action="store_true", help="replay each new token as one CUDA graph, compared with plain "
        "generation first; needs a GPU")  # fmt: skip
    add("--json", action="store_true", help="print a JSON object for each prompt: prompt, text, tokens")


def check(arguments):
    if not 0 <= arguments.temperature < math.inf:
        raise ConfigError([f"--temperature {arguments.temperature:g}: must be 0 or above, such as 0.8"])
    source = "--prompt" if arguments.prompt else "standard input"
    try:
        arguments.prompt = arguments.prompt or [sys.stdin.read()]
        for prompt in arguments.prompt:
            prompt.encode()  # bytes that are not UTF-8 arrive as surrogates
    except UnicodeError as error:
        raise ConfigError([f"{source}: is not UTF-8 text ({error}); convert it, or give --prompt"]) from error


def seed(text):
    value = integer(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError("must be a 64-bit number, such as 1234")
    return value


def run(arguments):
    from tools.hf.convert.trainer_model import load

    if arguments.cuda_graph:
        use_gpu(arguments)
    model, limit, encoder, ends = load(arguments, arguments.attention_backend)
    tokenizer = encoder.model
    prompts = [[*encoder.bos_ids, *tokenizer.encode(prompt, out_type=int)] for prompt in arguments.prompt]
    check_lengths(arguments, prompts, limit)
    write(arguments, model, tokenizer, prompts, ends)


def use_gpu(arguments):
    """Make the GPU the current one, which a graph is captured on. Raises ConfigError if there is none."""
    import torch

    from moh_lm.cli.devices import usable_device

    name = usable_device(arguments.device)
    if name == "cpu":
        raise ConfigError([f"--cuda-graph: needs a CUDA GPU, and --device is {name}; leave it out"])
    torch.cuda.set_device(torch.device(name).index or 0)


def check_lengths(arguments, prompts, limit):
    problems = []
    for text, prompt in zip(arguments.prompt, prompts, strict=True):
        if not prompt:
            problems.append(f"--prompt {text!r}: contains no tokens; give some text")
        elif len(prompt) + arguments.max_new_tokens > limit:
            length = f"{len(prompt)} tokens plus {arguments.max_new_tokens} new ones are too many"
            problems.append(f"--prompt {text[:20]!r}...: {length}; the model was trained on sequences of {limit}")
    raise_any(problems)


def write(arguments, model, tokenizer, prompts, ends):
    """ends: ids that end a document, or a turn in a chat."""
    from moh_lm.data.tokenizer import continuation
    from moh_lm.inference.generate import generate

    prompts = [list(map(int, prompt)) for prompt in prompts]
    stream = len(prompts) == 1 and not arguments.json
    new, shown = [[] for _ in prompts], ""
    if stream:
        print(arguments.prompt[0], end="", flush=True)
    started, first = time.perf_counter(), None
    settings = (
        arguments.temperature, arguments.top_p, arguments.seed, tokenizer.vocab_size(), arguments.attention_backend,
        arguments.cuda_graph,
    )  # fmt: skip
    for tokens in generate(model, prompts, arguments.max_new_tokens, ends, *settings):
        first = first or time.perf_counter()
        for row, token in enumerate(tokens):
            if token is not None:
                new[row].append(token)
        if stream:
            text = continuation(tokenizer, prompts[0], new[0])
            if text.startswith(shown) and not text.endswith(UNFINISHED):
                print(text[len(shown) :], end="", flush=True)
                shown = text
    done = time.perf_counter()
    texts = [continuation(tokenizer, prompt, tokens) for prompt, tokens in zip(prompts, new, strict=True)]
    if stream:
        print(texts[0][len(shown) :])
    for prompt, text, tokens in zip(arguments.prompt, texts, new, strict=True):
        if arguments.json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": tokens}))
        elif not stream:
            print(f"--- {prompt}{text}")
    read, made = sum(map(len, prompts)), sum(map(len, new))
    later = made - sum(map(bool, new))  # the first new tokens come from the prompts
    rate = f", then {later} in {done - first:.2f} s: {later / (done - first):.1f} tokens/s" if later else ""
    print(f"read {read} tokens in {first - started:.2f} s{rate}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
