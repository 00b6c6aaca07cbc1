"""Shows what each head of a trained model does: a page with load maps, specialised heads and their text, and attention.

    python tools/head_report.py --model RUN_OR_STEP_OR_EXPORT_DIR --data NAME='FILES' --data NAME=DIR ... --output DIR
    python tools/head_report.py --model runs/llm-b --data data/llm --output heads
    python tools/head_report.py --model runs/llm-b --suite llm6 --output heads

tools/heads/text.py says what --data accepts, and docs/monitoring.md what is measured. DIR receives index.html, which is
self-contained, its pictures as PNG, and heads.json with all numbers.

Exit codes: 0; 1 a shard is damaged, or the report cannot be written; 2 an argument must be fixed.
"""

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import device, output_path, run_file
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import ShardError, publish_own, refuse_foreign
from moh_lm.units import above_0, at_least
from tools.tasks.suites import SUITES

LONGEST_WINDOW = 1024  # tokens, unless --seq-length says otherwise


def main(texts):
    failures = (ShardError, RuntimeError)
    return run_file(__file__, __doc__, add_flags, run, texts, check=check, failures=failures, extra="plot")


def add_flags(parser):
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="run directory, step directory, or export")
    add("--data", default=[], nargs="+", action="extend", metavar="NAME=FILES", help="domains: NAME=FILES or "
        "NAME=DIR of shards, or DIR for every source of a data directory")  # fmt: skip
    add("--suite", choices=SUITES, help="read the prompts of each task of this suite instead (see tools/evaluate.py)")
    add("--task-data", type=Path, metavar="DIR", help="local rows for --suite, DIR/TASK/SPLIT.jsonl (default: the "
        "hub)")  # fmt: skip
    add("--tasks", nargs="+", metavar="TASK", help="use only these tasks of --suite, by the harness's names")
    add("--output", required=True, type=output_path, metavar="DIR", help="directory for index.html, pictures and "
        "heads.json")  # fmt: skip
    add("--tokens", type=at_least(1), default=16384, metavar="N", help="tokens per domain (default: %(default)s)")
    add("--seq-length", type=at_least(1), metavar="N", help="tokens per window (default: that of training, at most "
        "1024)")  # fmt: skip
    add("--text-key", default="text", metavar="KEY", help="key of the text in JSON lines and parquet (default: "
        "%(default)s)")  # fmt: skip
    add("--examples", type=at_least(1), default=5, metavar="N", help="most and least specialised heads shown (default: "
        "%(default)s)")  # fmt: skip
    add("--ablation-tokens", type=at_least(0), metavar="N", help="tokens per domain for importance by ablation; 0: "
        "leave it out (default: 2048 with --l0 and for models without routed heads, else 0)")  # fmt: skip
    add("--l0", type=above_0, nargs="+", default=[], metavar="X", help="penalties for each head of L0 gates that are "
        "trained on the tokens of the ablation (Voita et al. 2019), such as 0.001 0.003 0.01")  # fmt: skip
    add("--since", type=Path, metavar="DIR", help="an earlier step directory, to show how far each head has moved "
        "since")  # fmt: skip
    add("--treebank", type=Path, metavar="FILE", help="sentences in CoNLL-U, for heads that follow syntax")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="precision of the weights (default: "
        "%(default)s)")  # fmt: skip
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if available, else cpu)")


def check(arguments):
    problems = []
    if bool(arguments.data) == bool(arguments.suite):
        problems.append("give text with either --data or --suite")
    of_suite = {"--tasks": arguments.tasks, "--task-data": arguments.task_data}
    problems += [f"{flag}: needs --suite" for flag, value in of_suite.items() if value and not arguments.suite]
    if arguments.l0 and arguments.ablation_tokens == 0:
        problems.append("--l0: trains on --ablation-tokens, which is 0; leave one flag out")
    raise_any(problems)


def run(arguments):
    from data_prep.output import writable_directory
    from tools.heads.changes import measure_changes
    from tools.heads.measures import SEGMENT
    from tools.heads.page import page
    from tools.heads.report import plain, report_of
    from tools.heads.syntax import measure_syntax, read_treebank
    from tools.heads.text import SHORTEST, read_domains
    from tools.hf.convert.trainer_model import load

    if arguments.tokens < SHORTEST:
        raise ConfigError([f"--tokens {arguments.tokens}: must be {SHORTEST} or above, such as 16384"])
    if arguments.suite and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError([f"--suite {arguments.suite}: pip install -e '.[eval]' for its tasks"])
    refuse_foreign(writable_directory(arguments.output), ("heads.json", "index.html"))
    model, limit, tokenizer, _ = load(arguments)
    if len(model.config.head_counts) > 1 or model.config.head_dims:
        raise ConfigError([f"--model {arguments.model}: must have equally many heads of one width in every layer"])
    if limit < SEGMENT:
        reason = f"was trained on {limit} tokens at once, and a report needs {SEGMENT}"
        raise ConfigError([f"--model {arguments.model}: {reason}; give another model"])
    length = arguments.seq_length or min(limit, LONGEST_WINDOW)
    if not SEGMENT <= length <= limit:
        raise ConfigError([f"--seq-length {length}: must be between {SEGMENT} and {limit}, the length of training"])
    vocab_size = model.model.embed_tokens.weight.shape[0]
    domains = read_domains(arguments.data, tokenizer, vocab_size, length, arguments.tokens, arguments.text_key)
    if arguments.suite:
        from tools.heads.task_text import task_domains

        of_tasks = arguments.suite, arguments.tasks, arguments.task_data
        domains += task_domains(*of_tasks, tokenizer, length, arguments.tokens)
    sentences = arguments.treebank and read_treebank(arguments.treebank, tokenizer, arguments.tokens, length)
    changes = None
    if arguments.since:
        try:
            earlier = load(Namespace(**{**vars(arguments), "model": arguments.since}))[0]
        except ConfigError as error:
            raise ConfigError([text.replace("--model", "--since", 1) for text in error.problems]) from error
        changes = measure_changes(model, earlier)
    report, pictures = report_of(arguments, model, tokenizer, domains, changes)
    report["syntax"] = measure_syntax(model, sentences) if sentences else None
    text = page(report, pictures, tokenizer.model.decode)
    files = {f"{name}.png": themes["light"] for name, themes in pictures.items()}
    files |= {"heads.json": json.dumps(plain(report)).encode() + b"\n", "index.html": text.encode()}
    publish_own(arguments.output, files)
    print(f"{arguments.output / 'index.html'}: {len(text) / 1e6:.1f} MB, {len(pictures)} pictures")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
