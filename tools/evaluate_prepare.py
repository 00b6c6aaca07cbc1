"""Writes benchmark questions for evaluations during training: ``python -m moh_lm.pretrain --eval-tasks FILE``.

    python tools/evaluate_prepare.py --suite llm6 --tokenizer tokenizer.model --output FILE [--data DIR] [--limit N]

Questions, prompts and choices are those that tools/evaluate.py uses for an export, as ids of the export's tokenizer.
The format is described in moh_lm/monitor/tasks.py. Tasks without choices, which generate text or ask whether a text
would be generated (GSM8K, NQ, LAMBADA), are left out with a note.
"""

import json
import math
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run_file
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import publish
from tools.tasks.flags import add_task_flags, task_problems
from tools.tasks.suites import entries_of


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, check=check, failures=(RuntimeError,), extra="eval")


def add_flags(parser):
    add_task_flags(parser)
    words = "tokenizer of the run, or its data directory"
    parser.add_argument("--tokenizer", required=True, type=Path, metavar="MODEL", help=words)
    parser.add_argument("--bos", action="store_true", help="begin every context with the beginning-of-sequence token, "
                        "as tokenize.py --bos begins documents")  # fmt: skip
    parser.add_argument("--output", required=True, type=output_path, metavar="FILE", help="file to write, in JSON "
                        "lines")  # fmt: skip


def check(arguments):
    raise_any(task_problems(arguments))


def run(arguments):
    from data_prep.encoding import Tokenizer
    from tools.tasks.rows import load_tasks

    entries = entries_of(arguments.suite, arguments.tasks)
    tokenizer = Tokenizer(str(arguments.tokenizer), arguments.bos)
    encode, facts = encoder(tokenizer), tokenizer.description
    header = {"tokenizer": facts["sha256"], **({"bos_id": facts["bos_id"]} if arguments.bos else {})}
    lines, counts = [json.dumps(header)], {}
    with load_tasks(entries, arguments.data) as (_, tasks):
        for entry in entries:
            for name in entry.tasks:
                for task in tasks[name]["tasks"].values():
                    if task.OUTPUT_TYPE != "multiple_choice":
                        continue
                    rows = [{"task": name, **row} for row in questions(task, entry, encode, arguments.limit)]
                    refuse_unscorable(rows)
                    lines += map(json.dumps, rows)
                    counts[name] = counts.get(name, 0) + len(rows)
    if not counts:
        raise ConfigError(["--tasks: none of these tasks has choices; choose others"])
    publish(arguments.output, ("\n".join(lines) + "\n").encode())
    for name in (name for entry in entries for name in entry.tasks):
        print(f"{name}: {counts.get(name, 'no choices, left out')}")


def refuse_unscorable(rows):
    """Raise ConfigError for the first row that a run would refuse, such as one with an empty answer."""
    from moh_lm.monitor.tasks import row_problem

    for number, row in enumerate(rows):
        if problem := row_problem(row, vocab_size=math.inf, longest=math.inf):
            raise ConfigError([f"{row['task']}: row {number}: {problem}; fix the row, or choose other --tasks"])


def encoder(tokenizer):
    """Return a function from (context, continuation) to their ids, split as in the harness.

    A context begins with the BOS of ``tokenizer``, if it puts one before documents. An empty one is BOS, or else EOS.
    """
    begin = tokenizer.bos_ids.tolist()

    def ids(text):
        return list(map(int, tokenizer.model.encode(text)))

    def encode(context, continuation):
        if not context:
            return begin or [tokenizer.eos_id], ids(continuation)
        before = ids(context.rstrip())  # spaces at its end belong to the continuation
        return begin + before, ids(context + continuation)[len(before) :]

    return encode


def questions(task, entry, encode, limit):
    """The rows of moh_lm/monitor/tasks.py for a ``task`` of the harness, without its name."""
    from tools.tasks.rows import requests_of

    normed = any(metric["metric"] == "acc_norm" for metric in task.config.metric_list)
    rows = {}
    for request in requests_of(task, entry.shots, limit):
        row = rows.setdefault(request.doc_id, {"gold": gold(task, request.doc), "choices": []})
        text = task.doc_to_choice(request.doc)[len(row["choices"])]
        row["choices"].append([*encode(*request.args), len(text) if normed else None])
    return list(rows.values())


def gold(task, doc):
    """The number of the right choice, or a 0 or 1 for each choice if several can be right."""
    if task.config.task == "truthfulqa_mc2":
        return doc["mc2_targets"]["labels"]
    answer = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    return task.doc_to_choice(doc).index(answer) if isinstance(answer, str) else int(answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
