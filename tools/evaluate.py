"""The tasks of the paper's tables for one or more models, by lm-evaluation-harness.

    python tools/evaluate.py --model DIR --suite {llm6,llama14,llama14e} [--data DIR] [--tasks ...] [--limit N]
                             [--output FILE]
    python tools/evaluate.py --model DIR --suite llm6 --compare OTHER_DIR_OR_FILE.json ...

DIR is an export of tools/export_hf.py, or any causal model that transformers loads. The code in an export is run (its
config.json says ``moh_llama``); that of other models is not. Each model is loaded in a process of its own. FILE (JSON)
holds the table, all metrics of the harness, and the versions. docs/evaluation.md says what compares with the paper.

Exit codes: 0; 1 rows of the hub cannot be read, or the harness or the model failed; 2 an argument or a file of --data
has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import re

from moh_lm.cli.command import device, output_path, run
from moh_lm.cli.parser import Parser
from moh_lm.config import raise_any
from moh_lm.units import at_least
from tools.tasks.flags import add_task_flags, task_problems


def main(texts):
    return run("evaluate", parse_arguments, texts, extra="eval")


def parse_arguments(texts):
    parser = Parser(prog="python tools/evaluate.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="an export, or another model")
    add_task_flags(parser)
    add("--batch-size", default="8", type=batch_size, metavar="N", help="sequences per forward pass, or auto (default: "
        "%(default)s)")  # fmt: skip
    add("--max-length", type=at_least(1), metavar="N", help="tokens of prompt and answer; what is longer loses its "
        "beginning (default: the model's sequence length)")  # fmt: skip
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", default="auto", choices=dtypes, help="to compute in; auto: that of the weights (default: auto)")
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if there is one, else cpu)")
    add("--output", type=output_path, metavar="FILE.json", help="write table and all metrics, of one model")
    add("--compare", nargs="+", type=Path, default=[], metavar="DIR_OR_FILE", help="other models, or files of "
        "--output, for the same table")  # fmt: skip
    arguments = parser.parse_args(texts)
    problems = task_problems(arguments)
    if arguments.compare and arguments.output:
        problems.append("--output: is the file of one model; leave --compare out")
    raise_any(problems)
    return arguments


def batch_size(text):
    if not re.fullmatch(r"auto(:[1-9]\d*)?|0*[1-9]\d*", text):
        raise ValueError("write a number from 1 on, auto, or auto:TIMES")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
