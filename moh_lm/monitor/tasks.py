"""Multiple-choice tasks scored while a model trains, as lm-evaluation-harness scores them on its export.

``tools/evaluate_prepare.py`` writes the tasks once, with the harness's own prompts, as JSON lines:

    {"tokenizer": SHA-256 of tokenizer.model or tokenizer.json}                                   the first line
    {"task": name, "gold": index, "choices": [[context ids, continuation ids, characters], ...]}  one line per question

The score of a choice is the log-likelihood of its continuation after its context. ``acc`` is the share of questions
whose choice with the highest score is the right one; ``acc_norm`` divides the scores by the characters of the choices,
which are null where the task has no such metric.
Where ``gold`` is a list of 0 and 1 for the choices (TruthfulQA MC2), ``acc`` is the mean probability of the true ones.

The training nodes need neither the harness nor the data sets, and no second copy of the model: choices go through the
forward pass of the evaluation, each as a sequence whose labels are its continuation.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import sha256_of
from moh_lm.data.loader import MicroBatch
from moh_lm.model.gates import check_causal
from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.parsing import parse_json


class Question(NamedTuple):
    gold: int | list
    choices: list  # of (context ids, continuation ids, characters or None)


class Tasks:
    """The questions of ``config.run.eval_tasks`` by task, and a rank's share of their choices as micro-batches.

    tokenizer: path of the data's, or None. Raises ConfigError if it is not a file of tasks, or was made for another
    tokenizer, vocabulary or length, or the model is not causal.
    """

    def __init__(self, config, tokenizer):
        self.questions = {}  # {task: [Question]}
        self.seq_length = config.run.seq_length
        path = config.run.eval_tasks
        if not path:
            return
        check_causal(config.model)
        try:
            header, *rows = map(parse_json, Path(path).read_text(encoding="utf-8").splitlines())
            made_with = header["tokenizer"]
            for row in rows:
                self.questions.setdefault(row["task"], []).append(Question(row["gold"], row["choices"]))
            texts = [choice[:2] for row in rows for choice in row["choices"]]
            longest = max(len(continuation) for _, continuation in texts)
            largest = max(max(context + continuation) for context, continuation in texts)
        except (OSError, ValueError, LookupError, TypeError) as error:
            remedy = "make one with tools/evaluate_prepare.py"
            raise ConfigError([f"--eval-tasks {path}: is no file of tasks ({error}); {remedy}"]) from error
        problems = []
        if tokenizer and made_with != sha256_of(tokenizer):
            problems.append(f"was made with another tokenizer than {tokenizer}; make it again")
        if largest >= config.model.vocab_size:
            problems.append(f"has the id {largest}, beyond --vocab-size {config.model.vocab_size}; make it again")
        if longest > self.seq_length:
            problems.append(f"has a choice of {longest} tokens, more than --seq-length {self.seq_length}")
        raise_any([f"--eval-tasks {path}: {problem}" for problem in problems])

    def micro_batches(self, task, *share):
        """This rank's ``share`` of the choices of ``task``, and how many there are in all."""
        texts = [choice[:2] for question in self.questions[task] for choice in question.choices]
        return labelled_rows(texts, self.seq_length, *share), len(texts)

    def metrics(self, task, losses):
        """{"acc": ..., "acc_norm": ...} from the losses of all choices, summed over their continuations."""
        losses, rights = iter(losses), {"acc": [], "acc_norm": []}
        for gold, choices in self.questions[task]:
            scores = np.array([-next(losses) for _ in choices])
            if isinstance(gold, list):
                likelihoods = np.exp(scores - scores.max())  # each by itself may be 0 in a float
                rights["acc"].append(likelihoods[np.array(gold) == 1].sum() / likelihoods.sum())
            else:
                rights["acc"].append(scores.argmax() == gold)
                characters = [characters for _, _, characters in choices]
                if None not in characters:
                    rights["acc_norm"].append((scores / characters).argmax() == gold)
        return {name: float(np.mean(values)) for name, values in rights.items() if values}


def labelled_rows(texts, seq_length, micro_batch_size, rank, size):
    """The rows of data-parallel rank ``rank`` of ``size``, [``MicroBatch``], as many on every rank.

    texts: [(context ids, continuation ids)], a row each, whose number is its source. The labels of a row are its
    continuation. Rows without labels make up the rest.
    """
    rows = len(texts) + -len(texts) % (micro_batch_size * size)
    tokens, labels = np.zeros((rows, seq_length), np.int64), np.full((rows, seq_length), IGNORED)
    for row, (context, continuation) in enumerate(texts):
        ids = [*context, *continuation][-(seq_length + 1) :]
        tokens[row, : len(ids) - 1] = ids[:-1]
        labels[row, len(ids) - len(continuation) - 1 : len(ids) - 1] = continuation
    numbers = np.minimum(np.arange(rows), len(texts) - 1)  # what has no label adds nothing to the last one
    mine = np.arange(rows).reshape(-1, size, micro_batch_size)[:, rank]  # [n, b]
    tensors = [torch.from_numpy(array) for array in (tokens, labels, numbers)]
    return [MicroBatch(*(tensor[here] for tensor in tensors)) for here in mine]
