"""The prompts of benchmark tasks as domains of a head report: which heads a task uses (Fig. 3 of the paper).

Each column of a suite (tools/tasks/suites.py) is a domain. It holds the harness's prompts with their examples, each as
a document. Answers are not included. The subjects of a group, such as those of MMLU, take turns.
"""

from collections import Counter
from itertools import chain, zip_longest

from tools.heads.text import Domain, first_tokens, windows_of
from tools.tasks.rows import load_tasks, requests_of
from tools.tasks.suites import entries_of

SHORT = 8  # fewest tokens of a prompt; it limits the number of questions that are read


def task_domains(suite, names, data, tokenizer, seq_length, num_tokens):
    """A ``Domain`` for each column of ``suite``, or of its tasks ``names``, of about ``num_tokens`` tokens.

    data: directory of local rows, or None for the hub. Raises ConfigError, and RuntimeError for rows that cannot be
    read.
    """
    entries, domains = entries_of(suite, names), []
    with load_tasks(entries, data) as (_, tasks):
        for entry in entries:
            texts = prompts(tasks[entry.tasks[-1]]["tasks"].values(), entry.shots, num_tokens // SHORT)
            tokens = first_tokens(texts, tokenizer, num_tokens)
            domains.append(Domain(entry.column, windows_of(entry.column, tokens, seq_length), Counter()))
    return domains


def prompts(tasks, shots, limit):
    """Return prompts of the harness's ``tasks``, about ``limit`` in all: one question of each, then the next."""
    found = []
    for task in tasks:
        of_questions = {}  # several requests for one question, one per choice
        for request in requests_of(task, shots, -(-limit // len(tasks))):
            of_questions.setdefault(request.doc_id, request.args[0])
        found.append(of_questions.values())
    return [prompt for prompt in chain(*zip_longest(*found)) if prompt is not None]
