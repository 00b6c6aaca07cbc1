"""Saves: a failed one leaves the checkpoints before it, and one in the background has the values of its step."""

import errno
import math
import os
import resource
import signal
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from moh_lm.checkpoint import manifest, saver, space, writing
from moh_lm.checkpoint.directory import list_steps
from moh_lm.checkpoint.fragments import Fragment, FragmentReader
from moh_lm.checkpoint.manifest import BLOCK_BYTES, HashedFile, verify
from moh_lm.checkpoint.saver import CheckpointError, NonFiniteState, Saver, find_step
from moh_lm.config import Config
from moh_lm.monitor.report.series import RunRecord
from moh_lm.parallel import consensus
from moh_lm.parallel.layers import make_parameter
from tests.distributed import run_ranks
from tests.training.runs import arguments, events, run


def save_with_a_limit(flags, limit, guilty, steps):
    """``run``, whose rank ``guilty`` may not write files of more than ``limit`` bytes when it saves these steps."""
    save = Saver.save

    def limited(saver, step, *others):
        saver.collect()  # what it prints is not limited
        if step in steps and dist.get_rank() == guilty:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            save(saver, step, *others)
            if saver.pending:
                saver.pending.join()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    Saver.save = limited
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        run(flags)
    except CheckpointError as error:
        return error.problems


def test_a_disk_that_cannot_flush_a_file_is_told_with_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output") as told, HashedFile(tmp_path / "rank") as file:
        file.write(b"some bytes")
    assert told.value.filename == str(tmp_path / "rank")


@pytest.mark.parametrize(
    "limit, guilty, background",
    [(0, 1, "false"), (1000, 0, "false"), (1000, 1, "true"), (100_000, 0, "true")],
)
def test_a_failed_save_leaves_the_checkpoints_before_it(data_dir, tmp_path, limit, guilty, background):
    step, last = (6, 7) if background == "false" else (5, 5)  # one in the background ends the run if it is the last
    flags = arguments(data_dir, tmp_path, "--async-save", background, "--train-iters", str(last))
    one, other = run_ranks(save_with_a_limit, 2, flags, limit, guilty, [step])
    assert one == other and len(one) == 1
    assert f"step-{step}.tmp/rank-{guilty}.safetensors: file too large: the checkpoint takes " in one[0]
    assert one[0].endswith(f"the last checkpoint is {tmp_path}/checkpoints/step-3")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-3"]
    assert find_step(tmp_path).name == "step-3"


def test_a_run_tries_again_after_a_failed_background_save(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, "--save-interval", "1")
    (problem,), = run_ranks(save_with_a_limit, 1, flags, 1000, 0, [2, 4, 5])  # two in a row end it
    assert "step-5.tmp/rank-0.safetensors: file too large" in problem
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"latest", "step-1", "step-3"}
    assert [event["step"] for event in events(tmp_path, "save failed")] == [2, 4]
    assert len(events(tmp_path, "unsaved")) == 1 and not events(tmp_path, "failed")
    assert RunRecord(tmp_path).state.startswith("unsaved after step ")


def save_without_room(flags, steps):
    """``run``, for whose saves of these steps the disk has no room."""
    save, free_bytes = Saver.save, saver.free_bytes

    def on_a_full_disk(writer, step, *others):
        saver.free_bytes = (lambda path: 0) if step in steps else free_bytes
        save(writer, step, *others)

    Saver.save = on_a_full_disk
    try:
        run(flags)
    except CheckpointError as error:
        return error.problems


def test_a_full_disk_ends_no_run_before_its_last_save(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, "--save-interval", "1", "--train-iters", "3")
    (problem,), = run_ranks(save_without_room, 1, flags, [1, 3])
    assert "step-3.tmp: no space left on device: the checkpoint takes " in problem
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"latest", "step-2"}
    assert [event["step"] for event in events(tmp_path, "save failed")] == [1]


def test_a_run_that_can_save_no_more_still_copies_what_it_has_saved(data_dir, tmp_path):
    copies = tmp_path / "copies"
    flags = ("--save-interval", "1", "--train-iters", "4", "--after-save", f"sleep 0.5; echo {{path}} >> {copies}")
    (problem,), other = run_ranks(save_without_room, 2, arguments(data_dir, tmp_path / "run", *flags), [3, 4])
    assert problem == other[0] and "step-4.tmp: no space left" in problem
    steps = [tmp_path / "run" / "checkpoints" / f"step-{step}" for step in (1, 2)]
    assert copies.read_text().split() == [str(step) for step in steps]


def save_through_errors(directory, name, error):
    """Save two steps. After the second is in its place, ``name`` of the module fails with ``error``."""
    fragment = Fragment("w", make_parameter((4, 4)), 0, False, {"master": torch.zeros(16)})
    saved = []
    writer = Saver(directory, keep_last=1, on_saved=lambda step, *_: saved.append(step))
    writer.save(1, [fragment], Config(), {}, None)
    found = getattr(saver, name)

    def failing(path):
        if (directory / "step-2").exists():
            raise error
        return found(path)

    setattr(saver, name, failing)
    writer.save(2, [fragment], Config(), {}, None)
    writer.close()
    return saved


@pytest.mark.parametrize("name", ["list_steps", "point_latest", "flush"])
def test_a_step_in_its_place_is_saved_whatever_follows(tmp_path, name):
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(tmp_path))
    assert run_ranks(save_through_errors, 1, tmp_path, name, stale) == [[1, 2]]
    assert verify(tmp_path / "step-2") == [] and (tmp_path / "step-1").exists() == (name != "point_latest")


def save_in_a_run_that_moves(directory):
    fragment = Fragment("w", make_parameter((4, 4)), 0, False, {"master": torch.zeros(16)})
    failed = []
    writer = Saver(directory, background=True, on_failed=lambda *facts: failed.append(facts))
    writer.save(1, [fragment], Config(), {}, None)
    writer.collect()
    directory.rename(directory.with_name("moved"))
    writer.save(2, [fragment], Config(), {}, None)
    writer.collect()
    return failed


def test_a_run_directory_that_was_moved_is_not_made_again(tmp_path):
    """The lock of the run is where it moved to, and nothing keeps another run from the old place."""
    (tmp_path / "run").mkdir()
    (((step, (problem,)),),) = run_ranks(save_in_a_run_that_moves, 1, tmp_path / "run")
    assert step == 2 and f"{tmp_path}/run/step-2.tmp: no such file or directory" in problem
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_file_system_that_is_away_is_said_to_be(tmp_path, monkeypatch):
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "step-3.tmp")
    monkeypatch.setattr(writing, "free_bytes", Mock(side_effect=stale))
    text = writing.describe_failure(stale, tmp_path, 5 * 2**30)
    assert text.startswith("step-3.tmp: stale file handle: the checkpoint takes 5.00 GiB and an unknown number ")


def test_the_files_of_the_tokenizer_need_room_too(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(space, "from_all_ranks", lambda value: [value])
    (tmp_path / "tokenizer.json").write_bytes(bytes(3_000_000))
    needed = [space.needed_bytes([], tokenizer) for tokenizer in (tmp_path / "tokenizer.json", None)]
    assert needed[0] - needed[1] == 3_000_000
    (tmp_path / "tokenizer.json").unlink()  # the data are out of reach
    files = writing.rank_0_files(2, Config(), {}, tmp_path / "tokenizer.json")
    assert files["tokenizer.json"] == bytes(3_000_000)


def save_not_finite(directory):
    parameter = make_parameter((4, 4))
    values = torch.zeros(16)
    fragment = Fragment("w", parameter, 0, False, {"master": values, "exp_avg": values.clone()})
    saver = Saver(directory)
    saver.save(1, [fragment], Config(), {}, None)
    for bad in (math.nan, math.inf, -math.inf):
        fragment.tensors["exp_avg"][dist.get_rank() * 3] = bad if dist.get_rank() else 0
        with pytest.raises(NonFiniteState, match=r"exp_avg of w is not finite on rank 1 .*the last checkpoint is"):
            saver.save(2, [fragment], Config(), {}, None)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    run_ranks(save_not_finite, 2, tmp_path)
    assert [step.name for step in list_steps(tmp_path)] == ["step-1"]


def test_a_state_on_two_devices_is_looked_at():
    with FakeTensorMode():  # knows devices that are not there
        tensors = torch.ones(3), torch.ones(2, dtype=torch.int32, device="cuda")
        assert saver.are_finite(tensors).shape == (2,)


def save_with_a_broken_writer(directory):
    fragment = Fragment("w", make_parameter((4, 4)), 0, False, {"master": torch.zeros(16)})
    writer = Saver(directory, keep_last=1)
    writer.save(1, [fragment], Config(), {}, None)
    if dist.get_rank() == 1:
        writing.write_safetensors = broken
    with pytest.raises(CheckpointError, match="step-2.tmp/rank-1.safetensors: MemoryError"):
        writer.save(2, [fragment], Config(), {}, None)


def broken(*_):
    raise MemoryError


def test_a_writer_that_fails_in_any_way_leaves_the_step_before(tmp_path):
    run_ranks(save_with_a_broken_writer, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def save_below_a_file(directory):
    fragment = Fragment("w", make_parameter((4, 4)), 0, dist.get_rank() > 0, {"master": torch.zeros(16)})
    with pytest.raises(CheckpointError, match="step-1.tmp: not a directory: the checkpoint takes"):
        Saver(directory).save(1, [fragment], Config(), {}, None)


def test_an_error_of_rank_0_is_an_error_of_all_ranks(tmp_path):
    (tmp_path / "checkpoints").touch()
    run_ranks(save_below_a_file, 2, tmp_path / "checkpoints")


def save_in_the_background(directory):
    values = torch.ones(100_000)
    fragment = Fragment("w", make_parameter((100_000,)), 0, dist.get_rank() > 0, {"master": values})
    saver = Saver(directory, background=True)
    for step in (1, 2, 3):
        saver.save(step, [fragment], Config(), {}, None)
        values += 1  # the training goes on at once
    saver.close()


def test_a_background_save_holds_the_values_of_its_step(tmp_path):
    run_ranks(save_in_the_background, 2, tmp_path)
    for step in (1, 2, 3):
        assert verify(tmp_path / f"step-{step}") == []
        assert (FragmentReader(tmp_path / f"step-{step}").read("master", "w") == step).all()


def test_a_long_file_is_flushed_in_parts_that_report_progress(tmp_path, monkeypatch):
    path, flushed, reported = tmp_path / "long", [], []
    monkeypatch.setattr(manifest, "FLUSH_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    with HashedFile(path, lambda: reported.append(len(flushed))) as file:
        file.write(bytes(5 * BLOCK_BYTES))
    assert max(stop - start for start, stop in pairwise([0, *flushed])) == 2 * BLOCK_BYTES
    assert reported == [0, 1, 1, 2, 2]


def test_waiting_for_other_ranks_is_progress_while_they_write(monkeypatch):
    other, reported = [(True, 1), (True, 2), (True, 2), (True, 2), (False, 3)], []
    monkeypatch.setattr(consensus, "from_all_ranks", lambda own: [own, other.pop(0)])
    thread = SimpleNamespace(join=lambda seconds: None, is_alive=lambda: False, blocks=1)
    consensus.wait_for_all(thread, lambda: reported.append(len(other)))
    assert reported == [4, 3, 0]
