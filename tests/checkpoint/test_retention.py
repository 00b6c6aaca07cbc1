"""Which checkpoints stay: the newest whole ones, those that the flags keep, and what is not of the run."""

import random

import pytest
import torch

from moh_lm.checkpoint.directory import list_steps, outdated, remove_leftovers
from moh_lm.checkpoint.fragments import Fragment
from moh_lm.checkpoint.manifest import verify
from moh_lm.checkpoint.saver import Saver
from moh_lm.config import Config
from moh_lm.parallel.layers import make_parameter
from tests.distributed import run_ranks
from tests.training.runs import arguments, run


def test_retention_keeps_the_newest_verified_steps():
    generator = random.Random(0)
    for _ in range(1000):
        steps = sorted(generator.sample(range(1, 30), generator.randrange(9)), reverse=True)
        verified = set(generator.sample(steps, generator.randrange(len(steps) + 1)))
        keep_last, keep_every = generator.randrange(4), generator.choice([0, 0, 5])
        gone = outdated(steps, verified, keep_last, keep_every)
        left = [step for step in steps if step not in gone]
        good = sorted(verified, reverse=True)
        assert set(good[:keep_last]) <= set(left)
        assert not verified or good[0] in left
        assert all(step % 5 for step in gone) or not keep_every
        assert not gone or keep_last
        if keep_last and len(good) >= keep_last:  # nothing else is left that is older
            assert all(step >= good[keep_last - 1] or (keep_every and step % keep_every == 0) for step in left)
        else:
            assert not gone


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_keeps_the_checkpoints_that_its_flags_say(data_dir, tmp_path, background):
    more = ("--save-interval", "1", "--keep-last", "2", "--keep-every", "3", "--async-save", background)
    run_ranks(run, 2, arguments(data_dir, tmp_path, *more))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"latest", "step-3", "step-6", "step-7"}
    assert all(verify(step) == [] for step in list_steps(tmp_path / "checkpoints"))


def save_in_starts(directory, steps):
    fragment = Fragment("w", make_parameter((4, 4)), 0, False, {"master": torch.zeros(16)})
    for step in steps:
        writer = Saver(directory, keep_last=3, verified=[step - 1])
        writer.save(step, [fragment], Config(), {}, None)
        writer.close()


def test_steps_of_earlier_starts_count_if_they_are_whole(tmp_path):
    """Starts that save once each, as jobs that end early: else all steps would stay."""
    run_ranks(save_in_starts, 1, tmp_path, range(1, 6))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3", "step-4", "step-5"]
    (tmp_path / "step-4" / "state.json").write_text("")
    run_ranks(save_in_starts, 1, tmp_path, [6])
    assert [step.name for step in list_steps(tmp_path)] == ["step-6", "step-5", "step-4", "step-3"]
    run_ranks(save_in_starts, 1, tmp_path, [7])
    assert [step.name for step in list_steps(tmp_path)] == ["step-7", "step-6", "step-5"]


def save_beside_a_link(directory, elsewhere):
    fragment = Fragment("w", make_parameter((4, 4)), 0, False, {"master": torch.zeros(16)})
    writer = Saver(directory, keep_last=1)
    writer.save(1, [fragment], Config(), {}, None)
    (directory / "step-1").rename(elsewhere)
    (directory / "step-1").symlink_to(elsewhere)
    for step in (2, 3, 4):
        writer.save(step, [fragment], Config(), {}, None)
    writer.close()


def test_removing_a_link_keeps_the_step_that_it_points_to(tmp_path):
    """Under its own name, and as the leftover of a removal that was cut short."""
    steps, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    steps.mkdir()
    run_ranks(save_beside_a_link, 1, steps, elsewhere)
    assert sorted(path.name for path in steps.iterdir()) == ["latest", "step-4"]
    (steps / "step-3.old.tmp").symlink_to(elsewhere)
    (steps / "step-5.tmp").symlink_to(tmp_path / "nowhere")
    (steps / "step-notes.tmp").write_text("of somebody else")
    remove_leftovers(steps)
    assert sorted(path.name for path in steps.iterdir()) == ["latest", "step-4", "step-notes.tmp"]
    assert verify(elsewhere) == []


def save_over_another(directory):
    fragment = Fragment("w", make_parameter((4, 4)), 0, False, {"master": torch.zeros(16)})
    (directory / "step-1").mkdir()
    (directory / "step-1" / "notes").write_text("of somebody else")
    writer = Saver(directory, keep_last=1)
    writer.save(1, [fragment], Config(), {}, None)
    writer.close()


def test_a_save_keeps_what_has_its_name(tmp_path):
    run_ranks(save_over_another, 1, tmp_path)
    assert verify(tmp_path / "step-1") == [] and (tmp_path / "damaged-step-1" / "notes").exists()
