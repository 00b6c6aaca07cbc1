"""The flags that tools/evaluate.py and tools/evaluate_prepare.py share."""

import os
from pathlib import Path

from moh_lm.config import ConfigError
from moh_lm.units import at_least
from tools.tasks.suites import SUITES, entries_of


def add_task_flags(parser):
    add = parser.add_argument
    add("--suite", required=True, choices=SUITES, help="table of the paper whose tasks are used")
    add("--data", type=Path, metavar="DIR", help="local rows, DIR/TASK/SPLIT.jsonl (default: the hub)")
    add("--tasks", nargs="+", metavar="TASK", help="only these tasks of the suite, by the harness's names")
    add("--limit", type=at_least(1), metavar="N", help="use only the first N questions of each task, for a trial")


def task_problems(arguments):
    """Sentences for what is wrong with the flags and with --output, before anything is read or loaded."""
    problems = []
    if arguments.output and not os.path.isdir(arguments.output.parent):
        problems.append(f"--output {arguments.output}: there is no directory {arguments.output.parent}; create it")
    if arguments.output and os.path.isdir(arguments.output):
        problems.append(f"--output {arguments.output}: is a directory; give a file in it")
    if arguments.data and not os.path.isdir(arguments.data):
        problems.append(f"--data {arguments.data}: does not exist; put the rows there, or leave it out to use the hub")
    try:
        entries_of(arguments.suite, arguments.tasks)
    except ConfigError as error:
        problems += error.problems
    return problems
