"""Scores one or more models on the tasks of the paper's tables, with lm-evaluation-harness.

    python tools/evaluate.py --model DIR --suite {llm6,llama14,llama14e} [--data DIR] [--tasks ...] [--limit N]
                             [--output FILE]
    python tools/evaluate.py --model DIR --suite llm6 --compare OTHER_DIR_OR_FILE.json ...

DIR is an export of tools/export_hf.py, or any causal model that transformers loads. An export runs with the code of
this installation. No Python file in DIR is run unless --trust-code is given. Each model is loaded in a process of its
own. FILE (JSON) holds the table, all metrics of the harness, and the versions. docs/huggingface.md says which scores
can be compared with the paper's.

Exit codes: 0; 1 rows of the hub cannot be read, or the harness or the model failed; 2 an argument or a file of --data
has to be fixed.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import device, output_path, run_file
from moh_lm.config import ConfigError, flag, raise_any
from moh_lm.parsing import parse_json
from moh_lm.units import at_least
from tools.tasks.flags import add_task_flags, task_problems
from tools.tasks.suites import SEED, entries_of

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def main(texts):
    failures = (ValueError, RuntimeError)
    return run_file(__file__, __doc__, add_flags, run, texts, check=check, failures=failures, extra="eval")


def add_flags(parser):
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="an export, or another Hugging Face model")
    add_task_flags(parser)
    add("--batch-size", default="8", type=batch_size, metavar="N", help="sequences per forward pass, or auto (default: "
        "%(default)s)")  # fmt: skip
    add("--max-length", type=at_least(1), metavar="N", help="most tokens of prompt and answer; longer ones lose their "
        "beginning (default: the model's sequence length)")  # fmt: skip
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", default="auto", choices=dtypes, help="precision; auto: the precision of the weights (default: auto)")
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if there is one, else cpu)")
    add("--trust-code", action="store_true", help="run the Python files in the directories of the models")
    add("--output", type=output_path, metavar="FILE.json", help="write the table and all metrics of one model")
    add("--compare", nargs="+", type=Path, default=[], metavar="DIR_OR_FILE", help="other models, or files of "
        "--output, to add to the table")  # fmt: skip

def check(arguments):
    problems = task_problems(arguments)
    if arguments.compare and arguments.output:
        problems.append("--output: is the file of one model; leave --compare out")
    raise_any(problems)


def batch_size(text):
    if not re.fullmatch(r"auto(:[1-9]\d*)?|0*[1-9]\d*", text):
        raise ValueError("write a number from 1 on, auto, or auto:TIMES")
    return text


def run(arguments):
    from moh_lm.cli.devices import usable_device

    problems = model_problems("--model", arguments.model, arguments)
    for path in (path for path in arguments.compare if not path.is_file()):
        absent = [f"--compare {path}: is neither a model nor a file of --output"]
        problems += model_problems("--compare", path, arguments) if path.exists() else absent
    raise_any(problems)
    arguments.device = usable_device(arguments.device)
    if arguments.compare:
        files = {path: result_in(path, arguments) for path in arguments.compare if not is_model(path)}
        models = [arguments.model, *arguments.compare]
        print_table([files.get(model) or result_of(model, arguments) for model in models], arguments)
        return
    with contextlib.redirect_stdout(sys.stderr):  # the harness prints beside the table
        result = evaluate(arguments)
    print_table([result], arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def is_model(path):
    return (path / "config.json").is_file()


def model_problems(flag, path, arguments):
    """Sentences if ``path`` is not a model that can be evaluated. Raises ConfigError for a run, or without a
    configuration."""
    from tools.hf.convert.import_config import read_config, refuse_run
    from tools.hf.convert.shipped_code import foreign_code

    if not path.exists():
        return [f"{flag} {path}: does not exist; give an export of tools/export_hf.py, or another model"]
    refuse_run(flag, path)
    if not is_model(path):
        return [f"{flag} {path}: has no config.json; give an export of tools/export_hf.py, or another model"]
    values, max_length = read_config(path), arguments.max_length
    if is_export(path) and not arguments.trust_code and (files := foreign_code(path)):
        found = f"differs from the code of this installation in {', '.join(files)}, which is not run"
        return [f"{flag} {path}: {found}; export the model again, or read the files and add --trust-code"]
    table = values.get("learned_positions") or values.get("n_positions")  # the latter for models like GPT-2
    if max_length and table and max_length > table:
        return [f"--max-length {max_length}: {path} has a table of {table} positions; give at most {table}"]
    if any((path / name).is_file() for name in TOKENIZERS):
        return []
    return [f"{flag} {path}: has no tokenizer; add the model's own tokenizer files"]


def evaluate(arguments):
    """The table row of one model as a JSON-able dictionary."""
    import lm_eval
    import torch
    import transformers

    from tools.tasks.rows import load_tasks

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # the harness's pool for bootstraps sometimes never ends
    entries = entries_of(arguments.suite, arguments.tasks)
    with load_tasks(entries, arguments.data) as (manager, tasks):
        model = load_model(arguments)
        harness = {}
        for shots in sorted({entry.shots for entry in entries}):  # the harness accepts one number for all of its tasks
            names = [task for entry in entries if entry.shots == shots for task in entry.tasks]
            try:
                output = lm_eval.simple_evaluate(
                    model=model,
                    tasks=[tasks[name]["groups"].get(name) or tasks[name]["tasks"][name] for name in names],
                    num_fewshot=shots,
                    fewshot_random_seed=SEED,
                    limit=arguments.limit,
                    log_samples=False,
                    bootstrap_iters=1000,  # for the perplexity of LAMBADA; errors of accuracies need none
                    task_manager=manager,
                )
            except AssertionError as error:  # the harness raises it if an answer does not fit
                asked = f"{', '.join(names)}: prompts with answers do not fit into {model.max_length} tokens"
                remedy = "give a larger --max-length, or choose other --tasks"
                raise ConfigError([f"{asked} ({str(error) or 'an answer alone is longer'}); {remedy}"]) from error
            harness |= output["results"]
    rows = [table_row(entry, harness) for entry in entries]
    errors = [row["stderr"] for row in rows]
    return {
        "model": str(arguments.model),
        "suite": arguments.suite,
        "limit": arguments.limit,
        "tasks": rows,
        "average": sum(row["value"] for row in rows) / len(rows),
        "average_stderr": None if None in errors else math.hypot(*errors) / len(errors),
        "versions": {module.__name__: module.__version__ for module in (lm_eval, transformers, torch)},
        "dtype": arguments.dtype,
        "batch_size": arguments.batch_size,
        "max_length": model.max_length,
        "harness": harness,
    }


def load_model(arguments):
    """The harness's model. Raises ConfigError if it needs code that is not to be run."""
    from lm_eval.models.huggingface import HFLM

    from tools.hf.convert.shipped_code import use_own_code

    if is_export(arguments.model) and not arguments.trust_code:
        use_own_code()
    try:
        return HFLM(
            pretrained=str(arguments.model),
            trust_remote_code=arguments.trust_code,
            dtype=arguments.dtype,
            device=arguments.device,
            batch_size=arguments.batch_size,
            max_length=arguments.max_length,
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        found = "needs Python files of its own, which are not run; read them, and add --trust-code"
        raise ConfigError([f"--model {arguments.model}: {found}"]) from error


def is_export(model):
    from tools.hf.convert.import_config import read_config

    return read_config(model).get("model_type") == "moh_llama"


def table_row(entry, harness):
    """One number of the table, in percent, and its standard error, or None. harness: {task or group: its results}."""
    name, _, extraction = entry.metric.partition(",")
    values = {task: 100 * harness[task][entry.metric] for task in entry.tasks}
    errors = [harness[task].get(f"{name}_stderr,{extraction}") for task in entry.tasks]
    known = all(isinstance(error, float) for error in errors)  # "N/A" if there is one question, or a group has such
    return {
        "column": entry.column,
        "task": entry.task,
        "shots": entry.shots,
        "metric": entry.metric,
        "value": sum(values.values()) / len(values),
        "stderr": 100 * sum(errors) / len(errors) if known else None,
        **({"parts": values} if entry.parts else {}),
    }


def result_in(path, arguments):
    """The result in a file of --output. Raises ConfigError if it belongs to other tasks or questions."""
    try:
        result = parse_json(path.read_text(encoding="utf-8"))
        found = [(row["task"], row["shots"], row["metric"]) for row in result["tasks"]]
        suite, limit = result["suite"], result["limit"]
        _ = [result[key] for key in ("model", "average", "average_stderr", "max_length")]  # KeyError if one is missing
        _ = way_of(result)
        _ = [row[key] for row in result["tasks"] for key in ("column", "value", "stderr")]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError([f"--compare {path}: is neither a model nor a file of --output"]) from error
    if suite != arguments.suite:
        raise ConfigError([f"--compare {path}: holds no result of --suite {arguments.suite}"])
    if found != [(entry.task, entry.shots, entry.metric) for entry in entries_of(arguments.suite, arguments.tasks)]:
        tasks = " ".join(task for task, _, _ in found)
        raise ConfigError([f"--compare {path}: has other columns, those of --tasks {tasks}; give the same --tasks"])
    if limit != arguments.limit:
        given = f"--limit {limit}" if limit else "no --limit"
        raise ConfigError([f"--compare {path}: was made with {given}; a table needs the same questions for all"])
    return result


def result_of(path, arguments):
    """The result of a model evaluated in a process of its own with the same arguments."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "result.json"
        names = ("suite", "data", "limit", "dtype", "batch_size", "max_length", "device")
        given = {name: getattr(arguments, name) for name in names} | {"model": path, "output": output}
        flags = [text for name, value in given.items() if value is not None for text in (flag(name), str(value))]
        flags += ["--tasks", *arguments.tasks] if arguments.tasks else []
        flags += ["--trust-code"] if arguments.trust_code else []
        finished = subprocess.run([sys.executable, __file__, *flags], stdout=subprocess.DEVNULL, check=False)
        if finished.returncode:
            raise RuntimeError(f"{path} could not be evaluated (exit code {finished.returncode})")
        return parse_json(output.read_text(encoding="utf-8"))


def way_of(result):
    """Return the program and the precision by which a result was made, in words."""
    return f"lm_eval {result['versions']['lm_eval']} and --dtype {result['dtype']}"


def print_table(results, arguments):
    """Every model's numbers in percent, and below them their standard errors."""
    from data_prep.report import table

    columns = [row["column"] + (f" ({row['shots']})" if row["shots"] else "") for row in results[0]["tasks"]]
    lines = [["model", *columns, "Average"]]
    for result in results:
        values = [(row["value"], row["stderr"]) for row in result["tasks"]]
        values.append((result["average"], result["average_stderr"]))
        lines.append([result["model"], *(f"{value:.1f}" for value, _ in values)])
        lines.append(["", *("" if stderr is None else f"±{stderr:.1f}" for _, stderr in values)])
    print("\n".join(table(lines[0], lines[1:])))
    for result in results:
        for row in result["tasks"]:
            if "parts" in row:
                shown = ", ".join(f"{task} {value:.1f}" for task, value in row["parts"].items())
                print(f"{row['column']} of {result['model']} is the mean of {shown}")
    lengths = [result["max_length"] for result in results]
    if len(set(lengths)) > 1:
        shown = ", ".join(f"{result['max_length'] or 'unknown'} of {result['model']}" for result in results)
        print(f"the models saw different lengths: at most {shown}; --max-length gives all the same")
    if len(set(map(way_of, results))) > 1:
        shown = ", ".join(f"{way_of(result)} for {result['model']}" for result in results)
        print(f"the models were scored in different ways: by {shown}; evaluate them again in the same way")
    if arguments.limit:
        print(f"limited to the first {arguments.limit} questions of each task")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
