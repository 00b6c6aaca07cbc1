"""Errors that end a run."""

import functools
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from moh_lm.config import Config, RunConfig
from moh_lm.run import loop, text
from tests.distributed import run_ranks
from tests.run.harm import run_and_suffer
from tests.training.runs import arguments


def zero_the_shards(directory):
    for path in directory.glob("*/*.bin"):
        path.write_bytes(bytes(path.stat().st_size))


def test_a_damaged_shard_ends_the_run_in_one_line_with_its_name(data_dir, tmp_path):
    output, data = tmp_path / "output", tmp_path / "data"
    shutil.copytree(data_dir, data)
    harm = functools.partial(zero_the_shards, data)
    with pytest.raises(AssertionError, match=r"exit codes \["):
        run_ranks(run_and_suffer, 2, arguments(data, tmp_path / "run"), 3, harm, output)
    said = "".join(Path(f"{output}-{rank}").read_text() for rank in (0, 1))
    assert re.search(r"moh_lm.pretrain: rank \d: .*unit-\d.bin: block 0, .* is damaged.*; copy it again with", said)


def step_with(flags, at_evaluation, monkeypatch):
    """What a step does, at which an evaluation and a save are due: stop flags before and after the evaluation."""
    done = []
    run = loop.Run.__new__(loop.Run)
    run.config = Config(run=RunConfig(log_interval=10, eval_interval=5, train_iters=9))
    run.state, run.log = SimpleNamespace(step=5), None
    run.profile = SimpleNamespace(begin=lambda step: None, end=lambda step: None)
    run.train = lambda: (0, SimpleNamespace(flags=(flags, False)))
    run.evaluate, run.save = partial(done.append, "evaluate"), partial(done.append, "save")
    run.saver = SimpleNamespace(collect=partial(done.append, "collect"))
    run.after_save = SimpleNamespace(poll=lambda: None)
    run.accumulator, run.flags, run.device = SimpleNamespace(spend=lambda part, seconds: None), lambda: None, None
    monkeypatch.setattr(loop, "set_on_any_rank", lambda *_: (at_evaluation, False))
    run.step()
    return done


def test_an_evaluation_is_logged_as_a_whole_or_not_at_all():
    """The next start takes one row of it for the whole."""
    evaluation = text.Evaluation.__new__(text.Evaluation)
    evaluation.log, evaluation.of_prompts = Mock(), Mock(side_effect=KeyboardInterrupt)
    evaluation.of_sources, evaluation.of_tasks = lambda: ({"even": 1.0}, {}), lambda: {"task": {"acc": 1.0}}
    with pytest.raises(KeyboardInterrupt):
        evaluation(4)
    assert not evaluation.log.mock_calls


def test_a_run_that_was_asked_to_stop_leaves_the_evaluation_to_the_next_start(monkeypatch):
    """The time that is left may end in the evaluation."""
    assert step_with(True, True, monkeypatch) == ["save"]
    assert step_with(False, True, monkeypatch) == ["evaluate", "save"]
    assert step_with(False, False, monkeypatch) == ["evaluate", "collect"]  # an earlier save
