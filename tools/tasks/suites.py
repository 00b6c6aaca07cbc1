"""The paper's sets of tasks for lm-evaluation-harness, from the hub or from local files (docs/evaluation.md).

Prompts, choices and metrics are those of the harness's own task files. Rows come from the data sets on the hub that
these name. ``datasets`` no longer runs those that are scripts there (LogiQA); of them the hub's conversion to Parquet
is read, CONFIGURATION/SPLIT/*.parquet in the branch refs/convert/parquet.

Local files: DATA/TASK/SPLIT.jsonl, one row of the official data set per line, with its own fields (``Entry.fields``).
TASK is the harness's name, of each subject for mmlu, ceval-valid and cmmlu (mmlu_anatomy, ...); SPLIT is the name that
the task file gives the split that is scored (test, else validation) and, with examples in the prompt, that of the
examples (dev or train). MC1 of TruthfulQA reads the rows of MC2. A small file per task includes the official one by its
path and replaces where rows come from.
"""

import json
from pathlib import Path
from typing import NamedTuple

import lm_eval
import yaml
from lm_eval.tasks import TaskManager

from moh_lm.config import ConfigError

SEED = 1234  # of the draw of examples for a prompt, as in the harness's own program
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


class Entry(NamedTuple):
    """One column of the paper's table.

    task: the harness's name of a task or group. folder: of the harness that defines it. shots: examples in the prompt.
    metric: the harness's key. fields: what a local row must have. parts: the harness's tasks whose mean is the column,
    if it is not one task; local rows are those of the last part.
    """

    column: str
    task: str
    folder: str
    shots: int
    metric: str
    fields: str
    parts: tuple[str, ...] = ()

    @property
    def tasks(self):
        """Names of the harness."""
        return self.parts or (self.task,)


ACC, ACC_NORM = "acc,none", "acc_norm,none"
ABCD = "question A B C D answer"
SCIQ = Entry("SciQ", "sciq", "sciq", 0, ACC_NORM, "support question correct_answer distractor1 distractor2 distractor3")
PIQA = Entry("PIQA", "piqa", "piqa", 0, ACC_NORM, "goal sol1 sol2 label")
WINOGRANDE = Entry("WinoGrande", "winogrande", "winogrande", 0, ACC, "sentence option1 option2 answer")
OPENBOOKQA = Entry("OpenbookQA", "openbookqa", "openbookqa", 0, ACC_NORM, "question_stem choices answerKey")
LOGIQA = Entry("LogiQA", "logiqa", "logiqa", 0, ACC_NORM, "context question options label")
TRUTHFULQA = Entry(
    "TruthfulQA", "truthfulqa", "truthfulqa", 0, ACC, "question mc1_targets mc2_targets",
    parts=("truthfulqa_mc1", "truthfulqa_mc2"),
)  # fmt: skip
MMLU = Entry("MMLU", "mmlu", "mmlu/default", 5, ACC, "question choices answer")
CEVAL = Entry("CEVAL", "ceval-valid", "ceval", 5, ACC, ABCD)
CMMLU = Entry("CMMLU", "cmmlu", "cmmlu", 5, ACC, "Question A B C D Answer")
GSM8K = Entry("GSM8K", "gsm8k", "gsm8k", 8, "exact_match,strict-match", "question answer")
HELLASWAG = Entry("HellaSwag", "hellaswag", "hellaswag", 10, ACC_NORM, "activity_label ctx_a ctx_b endings label")
BOOLQ = Entry("BoolQ", "boolq", "super_glue", 32, ACC, "passage question label")
LAMBADA = Entry("LAMBADA", "lambada_openai", "lambada", 0, ACC, "text")
NQ = Entry("NQ", "nq_open", "nq_open", 32, "exact_match,remove_whitespace", "question answer")
ARC_E = Entry("ARC-E", "arc_easy", "arc", 0, ACC_NORM, "question choices answerKey")
ARC_C = Entry("ARC-C", "arc_challenge", "arc", 25, ACC_NORM, "question choices answerKey")
SUITES = {
    "llm6": (SCIQ, PIQA, WINOGRANDE, OPENBOOKQA, LOGIQA, TRUTHFULQA),
    "llama14": (
        MMLU, CEVAL, CMMLU, GSM8K, TRUTHFULQA, HELLASWAG, LOGIQA, BOOLQ, LAMBADA, SCIQ, PIQA, WINOGRANDE, NQ, ARC_C,
    ),
    "llama14e": (
        MMLU, CMMLU, NQ, GSM8K, TRUTHFULQA, HELLASWAG, LOGIQA, BOOLQ, LAMBADA, SCIQ, PIQA, WINOGRANDE, ARC_E, ARC_C,
    ),
}  # fmt: skip


def entries_of(suite, names):
    """The entries of a suite, or those that ``names`` choose. Raises ConfigError for a name it does not have."""
    entries = SUITES[suite]
    known = [entry.task for entry in entries]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError([f"--tasks {name}: is not in {suite}; choose among {', '.join(known)}" for name in unknown])
    return [entry for entry in entries if not names or entry.task in names]


def task_manager(entries, data, scratch):
    """The harness's TaskManager of ``entries``, with their rows in ``data`` unless it is None.

    Only the folders of the entries are read: to read all of its files takes many seconds. Raises ConfigError.
    """
    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders = sorted({tasks / entry.folder for entry in entries})
    manager = TaskManager(include_path=folders, include_defaults=False)
    missing = [task for entry in entries for task in entry.tasks if task not in manager.task_index]
    if missing:
        raise ConfigError([f"lm_eval {lm_eval.__version__} has no task {', '.join(missing)}; install lm_eval 0.4.13"])
    if data is None:
        return manager
    write_local_tasks(entries, data, manager.task_index, scratch)
    local = TaskManager(include_path=scratch, include_defaults=False)
    manager.task_index.update(local.task_index)
    return manager


def load_tasks(manager, entries, data, scratch):
    """{task of the harness: what ``manager.load`` gives for it}, all rows read. Raises RuntimeError if some cannot be.

    manager: of ``task_manager(entries, data, scratch)``.
    """
    loaded = {}
    for task in (task for entry in entries for task in entry.tasks):
        try:
            loaded[task] = load_task(manager, task, scratch)
        except Exception as error:  # of datasets, the client of the hub, its HTTP library, or the harness
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = "give the rows with --data, or choose other --tasks" if data is None else "mend the rows in --data"
            raise RuntimeError(f"{task}: its rows cannot be read ({reason}); {remedy}") from error
    return loaded


def load_task(manager, task, scratch):
    try:
        return manager.load([task])
    except RuntimeError as error:
        if "Dataset scripts are no longer supported" not in str(error):
            raise
        script = error
    index = manager.task_index
    for leaf in leaves(index, task):
        write_task(converted_task(leaf, index[leaf].cfg, index[leaf].yaml_path), scratch)
    index.update(TaskManager(include_path=scratch, include_defaults=False).task_index)
    try:
        return manager.load([task])
    except (OSError, ValueError) as problem:
        raise RuntimeError(f"{script}; of the hub's conversion: {problem}") from problem


def leaves(index, name):
    """Names of the tasks that a task, tag or group of the harness's ``index`` consists of."""
    entry = index[name]
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    if entry.kind.name == "GROUP":
        members = [member if isinstance(member, str) else member.get("task", member.get("group"))
                   for member in entry.cfg["task"]]  # fmt: skip
        return [leaf for member in members for leaf in leaves(index, member)]
    return [name]


def write_local_tasks(entries, data, index, directory):
    """Write a task file for every leaf of ``entries`` into ``directory``, with its rows in ``data``.

    index: of the harness. Raises ConfigError for all files that are missing or have not the official fields.
    """
    problems, files = [], {}
    for entry in entries:
        for leaf in (leaf for task in entry.tasks for leaf in leaves(index, task)):
            config, rows = index[leaf].cfg, data / (entry.parts[-1] if entry.parts else leaf)
            found, wanted = splits_of(config, entry.shots, rows)
            problems += [f"{rows / split}.jsonl: is missing" for split in wanted if split not in found]
            problems += [problem for path in found.values() for problem in row_problems(path, entry.fields.split())]
            files[leaf] = local_task(leaf, config, index[leaf].yaml_path, found, directory)
    if problems:
        problems = list(dict.fromkeys(problems))  # parts share their rows
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise ConfigError([*(f"--data: {problem}" for problem in problems[:8]), *more])
    for content in files.values():
        write_task(content, directory)


def write_task(content, directory):
    (directory / f"{content['task']}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def splits_of(config, shots, directory):
    """{split: file} that ``directory`` has of a task's splits, and the splits that must be there."""
    scored = config.get("test_split") or config.get("validation_split")
    names = [config[key] for key in SPLITS if config.get(key)]
    found = {name: directory / f"{name}.jsonl" for name in names if (directory / f"{name}.jsonl").is_file()}
    wanted = [scored]
    if shots and not isinstance((config.get("fewshot_config") or {}).get("samples"), list):
        wanted.append(config.get("fewshot_split") or config.get("training_split") or scored)
    return found, list(dict.fromkeys(wanted))


def local_task(leaf, config, official, found, directory):
    """Content of a task file: the ``official`` one but for its rows."""
    absent = {key: None for key in SPLITS if config.get(key) and config[key] not in found}
    return {
        "include": str(official),
        "task": leaf,
        "tag": None,  # the groups know the official task by this name already
        "dataset_path": "json",
        "dataset_name": None,
        **absent,
        "dataset_kwargs": {
            "data_files": {split: str(path.resolve()) for split, path in found.items()},
            "cache_dir": str(directory / "cache"),
        },
    }


def converted_task(leaf, config, official):
    """Content of a task file: the ``official`` one with the rows of the hub's conversion."""
    folder = f"hf://datasets/{config['dataset_path']}@refs/convert/parquet/{config.get('dataset_name') or 'default'}"
    splits = sorted({config[key] for key in SPLITS if config.get(key)})
    return {
        "include": str(official),
        "task": leaf,
        "tag": None,
        "dataset_path": "parquet",  # under its own name the cache of datasets would hide next time that it is a script
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: f"{folder}/{split}/*.parquet" for split in splits}},
    }


def row_problems(path, fields):
    """Sentences if a local file has other rows than the data set: a prompt would silently lack what is absent."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                missing = [field for field in fields if field not in row]
            except (ValueError, TypeError) as error:
                return [f"{path}: line {number} is no JSON object ({error})"]
            if missing:
                return [f"{path}: line {number} has no {', '.join(missing)}"]
    return []
