"""The tasks of a suite for lm-evaluation-harness, with their rows from the hub or local files (docs/huggingface.md).

Prompts, choices and metrics are those of the harness's own task files, which name the data sets on the hub. Since
``datasets`` no longer runs data sets that are scripts (LogiQA), the hub's conversion to Parquet is read for them,
CONFIGURATION/SPLIT/*.parquet in the branch refs/convert/parquet.

Local files are DATA/TASK/SPLIT.jsonl, one row of the official data set per line, with its own fields
(``Entry.fields``). TASK is the harness's name, for mmlu, ceval-valid and cmmlu that of each subject (mmlu_anatomy,
...). SPLIT is the task file's name of the scored split (test, else validation) and, with examples in the prompt, that
of the examples (dev or train). MC1 of TruthfulQA reads the rows of MC2. A small file per task includes the official one
by its path and replaces the source of the rows.
"""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import lm_eval
import yaml
from lm_eval.tasks import TaskManager

from moh_lm.config import ConfigError
from moh_lm.parsing import parse_json
from tools.tasks.suites import SEED

SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


def task_manager(entries, data, scratch):
    """The harness's TaskManager for ``entries``, with rows from ``data`` unless it is None.

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


@contextmanager
def load_tasks(entries, data):
    """Context with the harness's TaskManager for ``entries`` and {task: result of its ``load``}, with all rows read.

    Raises ConfigError, and RuntimeError if some rows cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch, loaded = Path(folder), {}
        manager = task_manager(entries, data, scratch)
        for task in (task for entry in entries for task in entry.tasks):
            try:
                loaded[task] = load_task(manager, task, scratch)
            except Exception as error:  # from datasets, the client of the hub, its HTTP library, or the harness
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                remedy = "fix the rows in --data" if data else "give the rows with --data, or choose other --tasks"
                raise RuntimeError(f"{task}: its rows cannot be read ({reason}); {remedy}") from error
        yield manager, loaded


def requests_of(task, shots, limit):
    """The requests of a ``task`` of the harness for its first ``limit`` questions, with ``shots`` examples in each."""
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(SEED)
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return task.instances


def load_task(manager, task, scratch):
    try:
        return manager.load([task])
    except RuntimeError as error:
        if "Dataset scripts are no longer supported" not in str(error):
            raise
        script = error
    index = manager.task_index
    for leaf in leaves(index, task):
        write_task(leaf, converted_task(index[leaf]), scratch)
    index.update(TaskManager(include_path=scratch, include_defaults=False).task_index)
    try:
        return manager.load([task])
    except (OSError, ValueError) as problem:
        raise RuntimeError(f"{script}; of the hub's conversion: {problem}") from problem


def leaves(index, name):
    """Names of the tasks in a task, tag or group of the harness's ``index``."""
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

    index: the harness's index. Raises ConfigError with all files that are missing or lack official fields.
    """
    problems, files = [], {}
    for entry in entries:
        for leaf in (leaf for task in entry.tasks for leaf in leaves(index, task)):
            config, rows = index[leaf].cfg, data / (entry.parts[-1] if entry.parts else leaf)
            found, wanted = splits_of(config, entry.shots, rows)
            problems += [f"{rows / split}.jsonl: is missing" for split in wanted if split not in found]
            problems += [problem for path in found.values() for problem in row_problems(path, entry.fields.split())]
            files[leaf] = local_task(index[leaf], found, directory)
    if problems:
        problems = list(dict.fromkeys(problems))  # parts share their rows
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise ConfigError([*(f"--data: {problem}" for problem in problems[:8]), *more])
    for leaf, content in files.items():
        write_task(leaf, content, directory)


def write_task(leaf, content, directory):
    """Write a task file: the official one with the rows that ``content`` names, and without tags."""
    content = {"task": leaf, "tag": None, "dataset_name": None, **content}  # the groups know the official task already
    (directory / f"{leaf}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def splits_of(config, shots, directory):
    """Return {split: file} of a task's splits in ``directory``, and the splits that must exist."""
    scored = config.get("test_split") or config.get("validation_split")
    names = [config[key] for key in SPLITS if config.get(key)]
    found = {name: directory / f"{name}.jsonl" for name in names if (directory / f"{name}.jsonl").is_file()}
    wanted = [scored]
    if shots and not isinstance((config.get("fewshot_config") or {}).get("samples"), list):
        wanted.append(config.get("fewshot_split") or config.get("training_split") or scored)
    return found, list(dict.fromkeys(wanted))


def local_task(official, found, directory):
    """Content of a task file: the ``official`` one of the index with rows from local files, ``found``."""
    config = official.cfg
    return {
        "include": str(official.yaml_path),
        "dataset_path": "json",
        **{key: None for key in SPLITS if config.get(key) and config[key] not in found},
        "dataset_kwargs": {
            "data_files": {split: str(path.resolve()) for split, path in found.items()},
            "cache_dir": str(directory / "cache"),
        },
    }


def converted_task(official):
    """Content of a task file: the ``official`` one of the index with the rows of the hub's conversion."""
    config = official.cfg
    folder = f"hf://datasets/{config['dataset_path']}@refs/convert/parquet/{config.get('dataset_name') or 'default'}"
    splits = sorted({config[key] for key in SPLITS if config.get(key)})
    return {
        "include": str(official.yaml_path),
        "dataset_path": "parquet",  # with its own name, the cache of datasets would hide later that it is a script
        "dataset_kwargs": {"data_files": {split: f"{folder}/{split}/*.parquet" for split in splits}},
    }


def row_problems(path, fields):
    """Return sentences if a local file has other fields than the data set, because prompts would silently lack them."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = parse_json(line.decode())
                missing = [field for field in fields if field not in row]
            except (ValueError, TypeError) as error:
                return [f"{path}: line {number} is not a JSON object ({error})"]
            if missing:
                return [f"{path}: line {number} has no {', '.join(missing)}"]
    return []
