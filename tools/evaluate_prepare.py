"""Benchmark questions for the evaluation of a run that trains: ``python -m moh_lm.pretrain --eval-tasks FILE``.

    python tools/evaluate_prepare.py --suite llm6 --tokenizer tokenizer.model --output FILE [--data DIR] [--limit N]

The questions, prompts and choices are those that tools/evaluate.py puts to an export, and the ids are those of its
tokenizer. The format is described in moh_lm/monitor/tasks.py. Tasks without choices, which generate text or ask whether
a text would be generated (GSM8K, NQ, LAMBADA), are left out, and said.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run
from moh_lm.cli.parser import Parser
from moh_lm.config import raise_any
from tools.tasks.flags import add_task_flags, task_problems


def main(texts):
    return run("evaluate_prepare", parse_arguments, texts, extra="eval")


def parse_arguments(texts):
    parser = Parser(prog="python tools/evaluate_prepare.py", description=__doc__.splitlines()[0])
    add_task_flags(parser)
    words = "of the run, or its data directory"
    parser.add_argument("--tokenizer", required=True, type=Path, metavar="MODEL", help=words)
    parser.add_argument("--output", required=True, type=output_path, metavar="FILE", help="JSON lines")
    arguments = parser.parse_args(texts)
    raise_any(task_problems(arguments))
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
