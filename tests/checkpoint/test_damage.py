"""What a start makes of what it finds: damage, wrong pointers, odd things, unreadable files, a disk that is full."""

import builtins
import contextlib
import errno
import io
import json
import os
import pickle
import random
import re
import shutil

import pytest
import torch

from moh_lm.checkpoint import manifest, saver, space
from moh_lm.checkpoint.directory import discard, newest_model, reading
from moh_lm.checkpoint.fragments import Fragment, FragmentReader, full_parameters
from moh_lm.checkpoint.manifest import BLOCK_BYTES, describe, read_entries, verify
from moh_lm.checkpoint.saver import CheckpointError, find_step
from moh_lm.config import Config, ConfigError
from moh_lm.monitor.events import EventLog
from moh_lm.parallel.layers import make_parameter
from moh_lm.run.intact import settle, trace_of_checkpoints
from tests.checkpoint.damage import (
    Canary,
    add_a_rank,
    empty,
    lengthen,
    remove,
    replace_by_directory,
    swap_ranks,
    truncate,
)
from tests.distributed import run_ranks
from tests.training.runs import arguments, events, rows, run


@pytest.fixture(scope="module")
def saved(data_dir, tmp_path_factory):
    """The run directory of a run of two ranks that was left after step 6, with steps 3 and 6."""
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(run, 2, arguments(data_dir, directory), 6)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


# --- Damage ---


def test_every_flipped_bit_of_every_file_is_found_and_placed(copy):
    step, generator = copy / "checkpoints" / "step-6", random.Random(0)
    for path in sorted(step.iterdir()):
        content = path.read_bytes()
        for position in [0, len(content) - 1, *(generator.randrange(len(content)) for _ in range(40))]:
            damaged = bytearray(content)
            damaged[position] ^= 1 << generator.randrange(8)
            path.write_bytes(damaged)
            found = verify(step)
            assert found and all(str(path) in sentence for sentence in found), (path, position)
        path.write_bytes(content)
    assert verify(step) == []


def test_the_block_of_the_damage_is_named(tmp_path):
    path, generator = tmp_path / "file", random.Random(0)
    path.write_bytes(generator.randbytes(2 * BLOCK_BYTES + 5))
    entry = describe(path)
    damaged = bytearray(path.read_bytes())
    damaged[BLOCK_BYTES] ^= 1
    path.write_bytes(damaged)
    (sentence,) = manifest.difference(path, entry)
    assert "block 1 (bytes 4,194,304 to 8,388,608)" in sentence


@pytest.mark.parametrize(
    "harm", [truncate, lengthen, empty, remove, replace_by_directory, swap_ranks, add_a_rank], ids=lambda f: f.__name__
)
def test_a_step_with_a_damaged_file_is_named(copy, harm):
    harm(copy / "checkpoints" / "step-6", copy / "checkpoints" / "step-6" / "rank-1.safetensors")
    with pytest.raises(ConfigError, match="step-6/rank-"):
        find_step(copy)


@pytest.mark.parametrize("harm", [truncate, swap_ranks], ids=lambda f: f.__name__)
def test_a_damaged_step_is_set_aside_and_the_run_is_the_same(copy, two_rank_run, data_dir, harm):
    steps = copy / "checkpoints"
    harm(steps / "step-6", steps / "step-6" / "rank-1.safetensors")
    run_ranks(run, 2, arguments(data_dir, copy))
    assert rows(copy) == rows(two_rank_run)
    assert (steps / "damaged-step-6").is_dir()
    assert len(events(copy, "damaged")) == 1
    assert (steps / "latest").read_text() == "step-7\n"
    assert find_step(copy).name == "step-7"


def test_a_copy_of_a_step_under_another_number_is_set_aside(copy, data_dir):
    steps = copy / "checkpoints"
    shutil.copytree(steps / "step-3", steps / "step-8")
    run_ranks(run, 1, arguments(data_dir, copy))
    assert (steps / "damaged-step-8").is_dir()
    assert [event["step"] for event in events(copy, "resumed")] == [6]


def test_a_run_without_a_sound_step_is_refused_and_left_as_it_is(copy, data_dir):
    steps = copy / "checkpoints"
    empty(None, steps / "step-3" / "state.json")
    remove(None, steps / "step-6" / "manifest.json")
    before = {path: path.read_bytes() for path in steps.rglob("*") if path.is_file()}
    with pytest.raises(AssertionError, match=r"(?s)6/manifest.json: cannot be read.*step-3/state.json: has 0 byte"):
        run_ranks(run, 2, arguments(data_dir, copy))
    assert before == {path: path.read_bytes() for path in steps.rglob("*") if path.is_file()}


def test_a_run_whose_newest_step_is_gone_says_from_which_it_goes_on(copy, data_dir):
    steps = copy / "checkpoints"
    shutil.rmtree(steps / "step-6")
    (printed,) = run_ranks(printed_by, 1, arguments(data_dir, copy))
    assert f"step 6 was saved (events.jsonl), but is missing; the run goes back to {steps}/step-3" in printed
    (printed,) = run_ranks(printed_by, 1, arguments(data_dir, copy))
    assert "is missing" not in printed


@pytest.mark.parametrize("harm", ["damaged", "events are a directory"])
def test_nothing_is_called_missing_that_was_set_aside_or_is_unknown(harm, tmp_path, capsys):
    step = tmp_path / "checkpoints" / "step-3"
    step.mkdir(parents=True)
    log = EventLog(tmp_path, True)
    log.add("saved", 6)
    if harm == "damaged":
        log.add("damaged", 6)  # before this start
    else:
        (tmp_path / "events.jsonl").unlink()
        (tmp_path / "events.jsonl").mkdir()
    settle(step, {}, log)
    assert "is missing" not in capsys.readouterr().out
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-3\n"


def printed_by(flags):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run(flags)
    return output.getvalue()


@pytest.mark.parametrize("kept", [True, False])
def test_a_step_that_goes_while_it_is_read_is_named(tmp_path, kept):
    step = tmp_path / "step-3"
    step.mkdir()
    failure, said = (FileNotFoundError, "absent") if kept else (ConfigError, f"{step}: was removed while it was read")
    with pytest.raises(failure, match=said), reading(step):
        if not kept:
            step.rmdir()
        (step / "absent").read_bytes()


def test_a_run_whose_checkpoints_are_gone_is_not_started_afresh(copy, data_dir):
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(AssertionError, match="step 6 was saved .* but is missing: restore it"):
        run_ranks(run, 1, arguments(data_dir, copy))
    (copy / "events.jsonl").unlink()
    (copy / "checkpoints").mkdir()
    (copy / "checkpoints" / "latest").write_text("step-6\n")
    (copy / "checkpoints" / "copy-step-6.tmp").mkdir()  # of a command that was killed
    with pytest.raises(AssertionError, match="copy-step-6.tmp: is all that is left"):
        run_ranks(run, 1, arguments(data_dir, copy))


def test_a_newest_step_on_a_disk_that_is_not_mounted_is_named(copy, data_dir):
    steps = copy / "checkpoints"
    (steps / "step-3").rename(copy / "archived")
    (steps / "step-3").symlink_to(copy / "absent")  # an older one does not matter
    (steps / "step-9").symlink_to(copy / "absent")
    with pytest.raises(AssertionError, match="step-9: is a link whose target does not exist; mount its disk"):
        run_ranks(run, 1, arguments(data_dir, copy))
    assert (steps / "latest").read_text() == "step-6\n"
    shutil.copytree(steps / "step-6", steps / "step-10")  # which is damaged: it holds step 6
    with pytest.raises(AssertionError, match="step-9: is a link whose target does not exist; mount its disk"):
        run_ranks(run, 1, arguments(data_dir, copy))
    assert (steps / "step-10").is_dir()
    shutil.rmtree(steps / "step-10")
    (steps / "step-9").unlink()
    run_ranks(run, 1, arguments(data_dir, copy))
    assert [event["step"] for event in events(copy, "resumed")] == [6]


def test_a_run_on_a_new_disk_is_a_new_run(tmp_path):
    for name in ("lost+found", ".snapshot"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert trace_of_checkpoints(tmp_path / "checkpoints", EventLog(tmp_path, writes=True)) is None


def test_a_copy_of_hard_links_leaves_the_logs_of_its_original_alone(copy, data_dir, tmp_path):
    linked = tmp_path / "linked"
    shutil.copytree(copy, linked, copy_function=os.link, ignore=shutil.ignore_patterns(".lock"))
    shutil.rmtree(linked / "checkpoints" / "step-6")
    names = ("events.jsonl", "metrics.jsonl")
    before = {name: (copy / name).read_bytes() for name in names}
    run_ranks(run, 1, arguments(data_dir, linked))
    assert {name: (copy / name).read_bytes() for name in names} == before
    assert rows(linked)[-1]["step"] == 7 and [event["step"] for event in events(linked, "resumed")] == [3]


def test_a_step_that_cannot_be_emptied_stays_a_step(tmp_path, monkeypatch):
    """Another user's, in a directory of a group; this user may rename it."""
    (tmp_path / "step-3").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="step-3"):
        discard(tmp_path / "step-3")
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def save_beside_a_leftover(directory):
    (directory / "step-3.tmp").mkdir()
    saver.remove_leftovers = lambda directory: None  # it is another user's
    writer = saver.Saver(directory)
    fragment = Fragment("w", make_parameter((4, 4)), 0, False, {"master": torch.zeros(16)})
    writer.save(3, [fragment], Config(), {}, None)
    writer.close()


def test_a_leftover_that_cannot_be_removed_does_not_stop_its_step(tmp_path):
    run_ranks(save_beside_a_leftover, 1, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-3.tmp", "latest", "step-3"]


def test_a_run_that_died_before_its_first_checkpoint_restarts(two_rank_run, copy, data_dir):
    shutil.rmtree(copy / "checkpoints")
    (copy / "events.jsonl").unlink()
    (copy / "checkpoints" / "step-3.tmp").mkdir(parents=True)  # a save that was killed
    (copy / "checkpoints" / "latest.tmp-7").touch()
    run_ranks(run, 2, arguments(data_dir, copy))
    assert rows(copy) == rows(two_rank_run)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["latest", "step-3", "step-6", "step-7"]


@pytest.mark.parametrize("pointer", [b"", b"step-3\n", b"step-9\n", b"../../etc\n", b"\xff\xfe", None])
def test_a_wrong_pointer_does_not_send_a_run_elsewhere(copy, data_dir, pointer):
    latest = copy / "checkpoints" / "latest"
    latest.unlink()
    if pointer is not None:
        latest.write_bytes(pointer)
    assert find_step(copy).name == "step-6"
    if pointer == b"step-3\n":
        run_ranks(run, 1, arguments(data_dir, copy))
        assert latest.read_text() == "step-7\n"
        assert [event["step"] for event in events(copy, "resumed")] == [6]


def test_odd_things_in_a_run_directory_do_not_stop_it(copy, data_dir, two_rank_run):
    steps = copy / "checkpoints"
    (steps / "latest").unlink()
    shutil.copytree(steps / "step-6", steps / "latest")
    (steps / "step-9.tmp").touch()
    for name in ("mine.tmp", "config.json.tmp-1", "notes.json.tmp"):
        (copy / name).mkdir()
    (copy / "metrics.json.tmp-old").touch()
    (copy / "config.json.tmp-2").touch()  # of a start that was killed
    with open(copy / "metrics.jsonl", "ab") as file:
        file.write(b'5\n["step"]\n{"step": "x"}\n\xff\n')
    run_ranks(run, 2, arguments(data_dir, copy))
    assert rows(copy) == rows(two_rank_run)
    assert (steps / "latest").read_text() == "step-7\n" and not verify(steps / "damaged-latest")
    names = {"mine.tmp", "config.json.tmp-1", "notes.json.tmp", "metrics.json.tmp-old"}
    assert {path.name for path in copy.glob("*.tmp*")} == names


def test_no_file_that_is_read_can_run_code(copy, data_dir, tmp_path):
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary))
    pickle.loads(payload).close()
    canary.unlink()  # the payload works
    step = copy / "checkpoints" / "step-6"
    entries = json.loads((step / "manifest.json").read_text())["files"]
    others = [step / "manifest.json", copy / "checkpoints" / "latest", copy / "events.jsonl", copy / "config.json"]
    for path in [*(step / name for name in entries), *others]:
        content = path.read_bytes()
        path.write_bytes(payload)
        if path.name in entries:  # with a manifest that agrees
            manifest.write_manifest(step, {**entries, path.name: describe(path)})
        with contextlib.suppress(AssertionError):
            run_ranks(run, 1, arguments(data_dir, copy))
        with contextlib.suppress(ConfigError, ValueError):
            list(full_parameters(find_step(copy)))
        assert not canary.exists(), path
        if step.exists():
            path.write_bytes(content)
            manifest.write_manifest(step, entries)


# --- What cannot be read or has no room ---


def test_what_cannot_be_read_is_not_called_damaged(copy, monkeypatch):
    """The tests may run as root, whom no permission stops: the error comes from ``open``."""
    step = copy / "checkpoints" / "step-6"
    for name in (*read_entries(step), "manifest.json"):
        with monkeypatch.context() as patch:
            refuse(patch, step / name)
            with pytest.raises(OSError, match=f"Stale.*{name}"):
                verify(step)
            with pytest.raises(ConfigError, match=rf"{name}: cannot be read \(Stale"):
                find_step(copy)
    with monkeypatch.context() as patch:
        refuse(patch, step / "rank-1.safetensors")
        with pytest.raises(OSError, match=r"Stale.*rank-1\.safetensors"):
            FragmentReader(step)
    (step / "rank-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"rank-1\.safetensors: not a rank file"):
        FragmentReader(step)
    monkeypatch.setattr("os.scandir", lambda path: stale(path))
    for search in (find_step, newest_model):
        with pytest.raises(ConfigError, match=r"checkpoints: cannot be read \(Stale"):
            search(copy)


def refuse(patch, path):
    """Make every ``open`` of ``path`` fail, as that of a network file system whose server has forgotten it."""

    def opened(file, *more, original=open, **named):
        stale(file, path)
        return original(file, *more, **named)

    patch.setattr(builtins, "open", opened)
    patch.setattr(io, "open", opened)  # which pathlib calls


def stale(file, path=None):
    if path is None or str(file) == str(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))


def fill_disk(flags, free_bytes):
    space.free_bytes = lambda directory: free_bytes
    try:
        run(flags)
    except (CheckpointError, ConfigError) as error:
        return type(error).__name__, error.problems


def test_a_full_disk_is_refused_before_anything_is_written(data_dir, tmp_path, copy):
    kind, (problem,) = run_ranks(fill_disk, 2, arguments(data_dir, tmp_path / "new"), 3_000_000)[1]
    assert kind == "ConfigError"
    assert re.search(r"no space left: 2\.86 MiB are free, and 2 checkpoints of [12]\.\d\d MiB must fit", problem)
    steps = copy / "checkpoints"
    before = {path: path.read_bytes() for path in steps.rglob("*") if path.is_file()}
    kind, (problem,) = run_ranks(fill_disk, 2, arguments(data_dir, copy), 2_000_000)[0]
    assert kind == "ConfigError" and "1 checkpoint of" in problem
    assert before == {path: path.read_bytes() for path in steps.rglob("*") if path.is_file()}
