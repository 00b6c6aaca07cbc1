"""Text from a model: of a checkpoint or an export, streamed as it comes, or for several prompts at once.

    python tools/generate.py --model RUN_OR_STEP_OR_EXPORT_DIR --prompt "Once upon a time" [--max-new-tokens 100]
    python tools/generate.py --model DIR --prompt A --prompt B ... --temperature 0.8 --top-p 0.95 --seed 1
    python tools/generate.py --model DIR < FILE                 the file is the prompt

The model is the trainer's own with a key/value cache (moh_lm/model/generation.py). Text goes to standard output, tokens
per second to standard error. --json prints an object for each prompt instead.

Exit codes: 0; 2 an argument has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import importlib.util
import json
import time

import torch

from data_prep.encoding import Tokenizer
from moh_lm.checkpoint.fragments import full_parameters, step_config
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import ConfigError
from moh_lm.flags import Parser
from moh_lm.kernels.break_even import TRITON_HEAD_DIMS
from moh_lm.kernels.decode import BACKENDS
from moh_lm.model.generation import generate
from moh_lm.model.transformer import CausalLM, saved_tensors
from tools.command import exit_code
from tools.hf.export_files import exported_files
from tools.hf.import_config import model_config, read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
UNFINISHED = "\ufffd"  # a character of which not all bytes are there yet


def main(texts):
    return exit_code("generate", run, texts)


@torch.no_grad()
def run(texts):
    arguments = parse_arguments(texts)
    model, limit, encoder = load(arguments, arguments.attention_backend)
    tokenizer = encoder.model
    prompts = [tokenizer.encode(prompt, out_type=int) for prompt in arguments.prompt]
    check_lengths(arguments, prompts, limit)
    write(arguments, model, tokenizer, prompts)


def parse_arguments(texts):
    parser = Parser(prog="python tools/generate.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, type=Path, help="run directory, step directory, or export")
    add("--prompt", action="append", metavar="TEXT", help="may be repeated (default: standard input)")
    add("--max-new-tokens", type=count, default=100, help="of each prompt (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 takes the most likely token (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="share of probability to draw from (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    add("--dtype", default="float32", choices=DTYPES, help="of weights and cache (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    backends = "a new token reads its selected heads (triton; on a CPU loops), all (dense), or what was faster"
    add("--attention-backend", default="auto", choices=BACKENDS, help=f"{backends} (default: %(default)s)")
    add("--json", action="store_true", help="an object for each prompt: prompt, text, tokens")
    arguments = parser.parse_args(texts)
    if arguments.temperature < 0 or not 0 < arguments.top_p <= 1:
        raise ConfigError(["--temperature is at least 0, --top-p above 0 and at most 1"])
    if arguments.prompt is None:
        arguments.prompt = [sys.stdin.read()]
    return arguments


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: write a number from 1 on")
    return int(text)


def load(arguments, attention_backend="auto"):
    """(model on its device, its longest sequence, its ``Tokenizer``). Raises ConfigError."""
    directory = arguments.model
    if not directory.is_dir():
        raise ConfigError([f"--model {directory}: no such directory; give a run, a step or an export"])
    values = read_config(directory) if (directory / "config.json").exists() else {}
    if "model_type" in values:
        config, limit = model_config(values), values.get("max_position_embeddings")
        if not isinstance(limit, int):
            raise ConfigError([f"--model {directory}: config.json has no max_position_embeddings; add it"])
        parameters = ((name, file.get_tensor(name)) for name, file in exported_files(directory).items())
    else:
        directory = find_step(directory)
        run = step_config(directory)
        config, limit, parameters = run.model, run.run.seq_length, full_parameters(directory)
    if attention_backend == "triton":
        check_triton(arguments.device, config)
    if attention_backend == "loops" and torch.device(arguments.device).type != "cpu":
        raise ConfigError([f"--attention-backend loops: needs a CPU, and --device is {arguments.device}; choose auto"])
    try:
        torch.empty(0, device=arguments.device)
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines()[0]
        raise ConfigError([f"--device {arguments.device}: cannot be used ({text}); choose cpu"]) from error
    try:
        tokenizer = Tokenizer(str(directory))
    except ConfigError as error:
        advice = "copy that of its data there"
        raise ConfigError([f"--model {directory}: has no tokenizer that can be read; {advice}"]) from error
    with torch.device("meta"):
        model = CausalLM(config).to(DTYPES[arguments.dtype])
    model.to_empty(device=arguments.device)
    wanted = dict(saved_tensors(model))
    with torch.no_grad():
        for name, tensor in parameters:
            wanted.pop(name).copy_(tensor)
    if wanted:
        raise ConfigError([f"--model {directory}: has no {', '.join(wanted)}; export it again"])
    return model.eval(), limit, tokenizer


def check_triton(device, config):
    problems, head_dim = [], config.head_dim
    if any(map(config.own_keys, range(config.num_layers))):
        problems.append("cannot leave out keys, which the heads of this model do; choose auto or dense")
    if torch.device(device).type != "cuda":
        problems.append(f"needs a CUDA GPU, and --device is {device}; choose auto")
    if importlib.util.find_spec("triton") is None:
        problems.append("the package triton is not installed; pip install triton, or choose auto")
    if head_dim not in TRITON_HEAD_DIMS:
        allowed = ", ".join(map(str, TRITON_HEAD_DIMS))
        problems.append(f"has no kernels for head dimension {head_dim}, only for {allowed}; choose auto")
    if problems:
        raise ConfigError([f"--attention-backend triton: {problem}" for problem in problems])


def check_lengths(arguments, prompts, limit):
    problems = []
    for text, prompt in zip(arguments.prompt, prompts, strict=True):
        if not len(prompt):
            problems.append(f"--prompt {text!r}: has no token; give some text")
        elif len(prompt) + arguments.max_new_tokens > limit:
            length = f"{len(prompt)} tokens and {arguments.max_new_tokens} new ones"
            problems.append(f"--prompt {text[:20]!r}...: {length}; the model was trained on {limit} together")
    if problems:
        raise ConfigError(problems)


def write(arguments, model, tokenizer, prompts):
    prompts = [list(map(int, prompt)) for prompt in prompts]
    stream = len(prompts) == 1 and not arguments.json
    new, shown = [[] for _ in prompts], ""
    if stream:
        print(arguments.prompt[0], end="", flush=True)
    started, first = time.perf_counter(), None
    settings = (
        arguments.temperature, arguments.top_p, arguments.seed, tokenizer.vocab_size(), arguments.attention_backend,
    )  # fmt: skip
    for tokens in generate(model, prompts, arguments.max_new_tokens, tokenizer.eos_id(), *settings):
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
    later = made - sum(map(bool, new))  # the first ones come out of the prompts
    rate = f", then {later} in {done - first:.2f} s: {later / (done - first):.1f} tokens/s" if later else ""
    print(f"read {read} tokens in {first - started:.2f} s{rate}", file=sys.stderr)


def continuation(tokenizer, prompt, tokens):
    """What ``tokens`` add to the text of ``prompt``: a token may be a part of a character, or lead with a space."""
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
