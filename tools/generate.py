"""Text from a model: of a checkpoint or an export, streamed as it comes, or for several prompts at once.

    python tools/generate.py --model RUN_OR_STEP_OR_EXPORT_DIR --prompt "Once upon a time" [--max-new-tokens 100]
    python tools/generate.py --model DIR --prompt A --prompt B ... --temperature 0.8 --top-p 0.95 --seed 1
    python tools/generate.py --model DIR < FILE                 the file is the prompt

The model is the trainer's own with a key/value cache (moh_lm/inference/generate.py). Text goes to standard output,
tokens per second to standard error. --json prints an object for each prompt instead.

Exit codes: 0; 2 an argument has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import math

from moh_lm.cli.command import device, run
from moh_lm.cli.parser import Parser
from moh_lm.config import ConfigError
from moh_lm.units import at_least, integer, share


def main(texts):
    return run("generate", parse_arguments, texts, unheard="ends")


def parse_arguments(texts):
    parser = Parser(prog="python tools/generate.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="run directory, step directory, or export")
    add("--prompt", action="append", metavar="TEXT", help="may be repeated (default: standard input)")
    add("--max-new-tokens", type=at_least(1), default=100, metavar="N", help="of each prompt (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="X", help="0: the most likely token (default: %(default)s)")
    add("--top-p", type=share, default=1.0, metavar="X", help="share of probability drawn from (default: %(default)s)")
    add("--seed", type=seed, default=0, metavar="N", help="of the draws (default: %(default)s)")
    dtypes = ("float32", "bfloat16")
    add("--dtype", default="float32", choices=dtypes, help="of weights and cache (default: %(default)s)")
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if there is one, else cpu)")
    backends = ("auto", "dense", "loops", "triton")
    add("--attention-backend", default="auto", choices=backends, help="a new token reads its selected heads (triton; "
        "on a CPU loops), all (dense), or what was faster (default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="an object for each prompt: prompt, text, tokens")
    arguments = parser.parse_args(texts)
    if not 0 <= arguments.temperature < math.inf:
        raise ConfigError([f"--temperature {arguments.temperature:g}: must be 0 or above, such as 0.8"])
    source = "--prompt" if arguments.prompt else "standard input"
    try:
        arguments.prompt = arguments.prompt or [sys.stdin.read()]
        for prompt in arguments.prompt:
            prompt.encode()  # bytes that are not UTF-8 arrive as surrogates
    except UnicodeError as error:
        raise ConfigError([f"{source}: is no text in UTF-8 ({error}); give some, or --prompt"]) from error
    return arguments


def seed(text):
    value = integer(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError("must be a number of 64 bits, such as 1234")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
