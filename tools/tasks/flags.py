"""What tools/evaluate.py and tools/evaluate_prepare.py ask of the command line alike."""

from pathlib import Path

from moh_lm.config import ConfigError, flag

try:
    from tools.tasks.suites import SUITES, entries_of
except ImportError as error:
    MISSING = error.name
else:
    MISSING = None


def add_task_flags(parser):
    """Raises ConfigError where the harness is not installed."""
    if MISSING:
        raise ConfigError([f"{MISSING} is not installed: pip install -e '.[eval]' (lm_eval and accelerate)"])
    add = parser.add_argument
    add("--suite", required=True, choices=SUITES, help="the tasks of which table of the paper")
    add("--data", type=Path, metavar="DIR", help="local rows, DIR/TASK/SPLIT.jsonl (default: the hub)")
    add("--tasks", nargs="+", metavar="TASK", help="only these of the suite, by the harness's names")
    add("--limit", type=int, metavar="N", help="only the first N questions of each task: for a trial")


def task_problems(arguments):
    """Sentences for what is wrong with them, and with --output, before anything is read or loaded."""
    problems = []
    for name in ("limit", "max_length"):
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            problems.append(f"{flag(name)} {value}: must be at least 1")
    if arguments.output and not arguments.output.parent.is_dir():
        problems.append(f"--output {arguments.output}: there is no directory {arguments.output.parent}; make it")
    try:
        entries_of(arguments.suite, arguments.tasks)
    except ConfigError as error:
        problems += error.problems
    return problems
