"""Multiple-choice tasks that are scored during training as lm-evaluation-harness scores them on an export.

``tools/evaluate_prepare.py`` writes the tasks once, with the harness's own prompts, as JSON lines:

    {"tokenizer": SHA-256 of tokenizer.model or tokenizer.json, "bos_id": id (with --bos)}         the first line
    {"task": name, "gold": index, "choices": [[context ids, continuation ids, characters], ...]}  one line per question

The score of a choice is the log-likelihood of its continuation after its context. ``acc`` is the share of questions
whose choice with the highest score is the right one; ``acc_norm`` divides the scores by the characters of the choices,
which are null if the task has no such metric.
If ``gold`` is a list of 0 and 1 for the choices (TruthfulQA MC2), ``acc`` is the mean probability of the true ones.

The training nodes need neither the harness, nor the data sets, nor a second copy of the model: choices go through the
evaluation's forward pass, each as a sequence whose labels are its continuation.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import sha256_of
from moh_lm.data.loader import MicroBatch, dealt
from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.parsing import parse_json

SHOWN = 8  # invalid questions that are named


class Question(NamedTuple):
    gold: int | list
    choices: list  # [(context ids, continuation ids, characters or None)]


class Tasks:
    """The questions of ``config.run.eval_tasks`` by task, and a rank's share of their choices as micro-batches.

    tokenizer: path of the data's tokenizer, or None. bos_id: begins documents of the data, or None. Raises ConfigError
    if the file does not hold tasks, has an invalid question, or was made for another tokenizer, BOS, vocabulary or
    length.
    """

    def __init__(self, config, tokenizer, bos_id):
        self.questions = {}  # {task: [Question]}
        self.seq_length = config.run.seq_length
        path = config.run.eval_tasks
        if not path:
            return
        try:
            header, *rows = map(parse_json, Path(path).read_text(encoding="utf-8").splitlines())
            made_with, begin = header["tokenizer"], header.get("bos_id")
        except (OSError, ValueError, LookupError, TypeError) as error:
            remedy = "make one with tools/evaluate_prepare.py"
            raise ConfigError([f"--eval-tasks {path}: is not a file of tasks ({error}); {remedy}"]) from error
        problems = row_problems(rows, config.model.vocab_size, self.seq_length)
        if tokenizer and made_with != sha256_of(tokenizer):
            problems.append(f"was made with another tokenizer than {tokenizer}")
        if begin != bos_id:
            problems.append("was made with --bos, unlike the data" if bos_id is None else "lacks the --bos of the data")
        remedy = "make it again with tools/evaluate_prepare.py"
        raise_any([f"--eval-tasks {path}: {problem}; {remedy}" for problem in problems])
        for row in rows:
            self.questions.setdefault(row["task"], []).append(Question(row["gold"], row["choices"]))

    def micro_batches(self, task, *share):
        """Return this rank's ``share`` of the choices of ``task``, and their number on all ranks."""
        texts = [choice[:2] for question in self.questions[task] for choice in question.choices]
        return labelled_rows(texts, self.seq_length, *share), len(texts)

    def metrics(self, task, losses):
        """Return {"acc": ..., "acc_norm": ...} from the losses of all choices, summed over their continuations."""
        losses, rights = iter(losses), {"acc": [], "acc_norm": []}
        for gold, choices in self.questions[task]:
            scores = np.array([-next(losses) for _ in choices])
            if isinstance(gold, list):
                likelihoods = np.exp(scores - scores.max())  # without the maximum, exp could underflow to 0
                rights["acc"].append(likelihoods[np.array(gold) == 1].sum() / likelihoods.sum())
            else:
                rights["acc"].append(scores.argmax() == gold)
                characters = [characters for _, _, characters in choices]
                if None not in characters:
                    rights["acc_norm"].append((scores / characters).argmax() == gold)
        return {name: float(np.mean(values)) for name, values in rights.items() if values}


def row_problems(rows, vocab_size, longest):
    """Return sentences for the first ``SHOWN`` invalid questions with their lines, and the number of the others."""
    if not rows:
        return ["has no question"]
    found = [(line, problem) for line, row in enumerate(rows, 2) if (problem := row_problem(row, vocab_size, longest))]
    problems = [f"line {line}: {problem}" for line, problem in found[:SHOWN]]
    return problems + [f"and {len(found) - SHOWN} more"] * (len(found) > SHOWN)


def row_problem(row, vocab_size, longest):
    """Return what is wrong with a question, or None. An answer without tokens would always win, and a gold of -1 would
    mean the last choice."""
    if not isinstance(row, dict) or not {"task", "gold", "choices"} <= row.keys():
        return "is not a question with task, gold and choices"
    task, gold, choices = row["task"], row["gold"], row["choices"]
    if not isinstance(task, str) or not task:
        return f"task {json.dumps(task)}: give a name"
    if not isinstance(choices, list) or len(choices) < 2:
        return f"has {len(choices) if isinstance(choices, list) else 'no'} choice; a question has two or more"
    for number, choice in enumerate(choices):
        if problem := choice_problem(choice, vocab_size, longest):
            return f"choice {number}: {problem}"
    if len({choice[2] is None for choice in choices}) == 2:
        return "has the characters of some choices only"
    if isinstance(gold, list):
        rights = gold if all(type(value) is int for value in gold) else []
        several = len(rights) == len(choices) and {*rights} == {0, 1}
        return None if several else f"gold {json.dumps(gold)}: give 0 or 1 for each of {len(choices)} choices, and both"
    if type(gold) is not int or not 0 <= gold < len(choices):
        return f"gold {json.dumps(gold)}: choose 0 to {len(choices) - 1}"
    return None


def choice_problem(choice, vocab_size, longest):
    """Return what is wrong with a choice of a question, or None."""
    match choice:
        case [list() as context, list() as continuation, None | int() as characters]:
            pass
        case _:
            return "is not [context ids, continuation ids, characters]"
    if not continuation:
        return "has no token"
    if not context:
        return "has no token before it"
    if len(continuation) > longest:
        return f"has {len(continuation)} tokens, more than --seq-length {longest}"
    wrong = [token for token in context + continuation if type(token) is not int or not 0 <= token < vocab_size]
    if wrong:
        return f"has the id {json.dumps(wrong[0])}, but ids are from 0 to below --vocab-size {vocab_size}"
    if characters is not None and not 1 <= characters < 2**31:
        return f"has {characters} characters"
    return None


def labelled_rows(texts, seq_length, micro_batch_size, rank, size):
    """Return the rows of data-parallel rank ``rank`` of ``size``, [``MicroBatch``], equally many on every rank.

    texts: [(context ids, continuation ids)], a row each, whose number is its source. The labels of a row are its
    continuation. Rows without labels make up the rest.
    """
    mine = dealt(np.arange(len(texts)), micro_batch_size, rank, size)  # [n, b]
    tokens, labels = np.zeros((*mine.shape, seq_length), np.int64), np.full((*mine.shape, seq_length), IGNORED)
    for place in zip(*np.nonzero(mine >= 0), strict=True):
        context, continuation = texts[mine[place]]
        ids = [*context, *continuation][-(seq_length + 1) :]
        tokens[place][: len(ids) - 1] = ids[:-1]
        labels[place][len(ids) - len(continuation) - 1 : len(ids) - 1] = continuation
    numbers = np.where(mine < 0, len(texts) - 1, mine)  # filler without labels adds nothing to the last text
    return [MicroBatch(*batch) for batch in zip(*map(torch.from_numpy, (tokens, labels, numbers)), strict=True)]
