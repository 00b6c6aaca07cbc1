"""What the ranks find together before a run goes on: unreadable files, a disk that is full, files that are gone."""

import errno
import importlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from moh_lm import pretrain
from moh_lm.checkpoint import directory as steps
from moh_lm.checkpoint import manifest
from moh_lm.checkpoint.fragments import Fragment
from moh_lm.checkpoint.manifest import write_manifest
from moh_lm.checkpoint.saver import Saver
from moh_lm.config import Config, ConfigError
from moh_lm.data.files import write_json
from moh_lm.flags import parse_config
from moh_lm.monitor.events import EventLog
from moh_lm.monitor.writers import Writers
from moh_lm.parallel import consensus
from moh_lm.parallel.layers import make_parameter
from moh_lm.run import state
from moh_lm.run.intact import sound_step, trace_of_checkpoints
from moh_lm.run.resume import contradictions, tokenizer_changes
from moh_lm.run.text import budget_problems
from moh_lm.supervise.rendezvous import Unreachable
from tests.distributed import run_ranks
from tests.training.runs import arguments, events, run


def progress_of_a_resume(checkpoints):
    """How often ``sound_step`` reports progress on this rank, when rank 0 alone has a file, which it reads slowly."""
    consensus.ROUND_S, calls, difference = 0.05, [], manifest.difference

    def slow(*given):
        for _ in range(10):
            time.sleep(0.1)
            given[-1]()  # progress
        return difference(*given)

    manifest.difference = slow
    sound_step(checkpoints, EventLog(checkpoints.parent, writes=False), lambda: calls.append(None))
    return len(calls)


def test_a_rank_without_a_file_reports_the_progress_of_others(tmp_path):
    step = tmp_path / "checkpoints/step-1"
    step.mkdir(parents=True)
    write_json(step / "state.json", {"step": 1})
    write_manifest(step, {"state.json": manifest.describe(step / "state.json")})
    assert min(run_ranks(progress_of_a_resume, 2, step.parent)) >= 5


def find_with_a_late_file(run):
    """What ``sound_step`` raises on this rank while rank 1 does not see a file of the newest step until it has been
    verified; what it finds afterwards."""
    checkpoints, event_log = run / "checkpoints", EventLog(run, writes=dist.get_rank() == 0)
    stat, describe, seen = Path.stat, manifest.describe, []

    def late(original):
        def call(path, *more, **named):
            if dist.get_rank() == 1 and path.name == "state.json" and not seen:
                seen.extend([path] * (original is describe))
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            return original(path, *more, **named)

        return call

    Path.stat, manifest.describe = late(stat), late(describe)
    with pytest.raises(Unreachable) as raised:
        sound_step(checkpoints, event_log, lambda: None)
    Path.stat, manifest.describe = stat, describe
    return str(raised.value), sound_step(checkpoints, event_log, lambda: None)


def test_a_step_that_not_all_nodes_see_yet_is_not_set_aside(tmp_path):
    step = tmp_path / "checkpoints/step-1"
    step.mkdir(parents=True)
    write_json(step / "rank-0.json", {})
    write_json(step / "state.json", {"step": 1})  # the second file, which rank 1 verifies
    write_manifest(step, {path.name: manifest.describe(path) for path in step.iterdir()})
    expected = f"{step}: some nodes see all of its files, others do not yet; start the run again", step
    assert run_ranks(find_with_a_late_file, 2, tmp_path) == [expected] * 2


def fail(number, path=None):
    """A function that fails with this error of the system, for files below ``path`` if one is given."""

    def failing(original):
        def call(file, *more, **named):
            if path is None or str(file).startswith(str(path)):
                raise OSError(number, os.strerror(number), str(file))
            return original(file, *more, **named)

        return call

    return failing


def find_with_errors(run):
    """[problems] of ``sound_step`` on this rank, with one error after the other; what it finds without."""
    checkpoints, event_log = run / "checkpoints", EventLog(run, writes=dist.get_rank() == 0)
    checkpoints.mkdir(exist_ok=True)
    writer = Saver(checkpoints)
    fragment = Fragment("w", make_parameter((4, 4)), 0, dist.get_rank() > 0, {"master": torch.zeros(16)})
    for step in (1, 2):
        writer.save(step, [fragment], Config(), {"consumed_samples": 0}, None)
    (checkpoints / "latest").write_text("step-1\n")
    newest = checkpoints / "step-2"
    cases = [
        (1, manifest, "describe", fail(errno.ESTALE, newest)),
        (0, manifest, "describe", fail(errno.EACCES, newest)),
        (1, manifest, "read_json", fail(errno.EIO, newest)),
        (0, os, "scandir", fail(errno.EACCES, checkpoints)),
        (0, steps, "publish", fail(errno.ENOSPC)),
    ]
    found = []
    for rank, module, name, failing in cases:
        original = getattr(module, name)
        if dist.get_rank() == rank:
            setattr(module, name, failing(original))
        try:
            sound_step(checkpoints, event_log, lambda: None)
        except ConfigError as error:
            found.append(error.problems)
        setattr(module, name, original)
    return found, sound_step(checkpoints, event_log, lambda: None)


def test_a_file_that_one_rank_cannot_read_ends_all_ranks(tmp_path):
    (found, step), other = run_ranks(find_with_errors, 2, tmp_path)
    assert other == (found, step)
    expected = [
        ("step-2/rank-0.safetensors: stale file handle", 1),
        ("step-2/config.json: permission denied", 0),
        ("step-2/manifest.json: input/output error", 1),
        ("checkpoints: permission denied", 0),
        ("checkpoints/latest: no space left on device", 0),
    ]
    for problems, (words, rank) in zip(found, expected, strict=True):
        (problem,) = problems
        assert f"{words} (rank {rank} on " in problem
        assert problem.endswith("fix this, and run the same command again")
    assert step == tmp_path / "checkpoints" / "step-2"
    assert sorted(path.name for path in step.parent.iterdir()) == ["latest", "step-1", "step-2"]


def test_an_unreadable_configuration_is_refused(tmp_path):
    config, path = parse_config(["--checkpoint-dir", str(tmp_path)])[0], tmp_path / "config.json"
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    for broken in ("{", "[]", "[" * 100_000, '{"save_interval": "often"}'):
        path.write_text(broken)
        assert contradictions(config) == []
        assert trace_of_checkpoints(tmp_path / "checkpoints", EventLog(tmp_path, writes=True)) is None
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ConfigError) as error:
        contradictions(config)
    assert error.value.problems == [f"{path}: cannot be read (Too many levels of symbolic links); make it readable"]


def test_a_run_with_only_tensorboard_left_is_not_a_new_one(tmp_path):
    checkpoints, event_log = tmp_path / "checkpoints", EventLog(tmp_path, writes=True)
    writers = Writers(tmp_path, 0)
    (tmp_path / "config.json").write_text(json.dumps(Config().to_dict()))
    writers.scalars({"loss_validation/a": 3.0}, 0)
    writers.tensorboard.flush()
    assert trace_of_checkpoints(checkpoints, event_log) is None  # killed before its first line
    writers.scalars({"loss/train": 2.0}, 5)
    writers.close()
    (tmp_path / "metrics.jsonl").touch()
    assert trace_of_checkpoints(checkpoints, event_log) is None  # killed as it started again
    (tmp_path / "metrics.jsonl").unlink()
    trace = trace_of_checkpoints(checkpoints, event_log)
    assert "metrics.jsonl: is missing, like all checkpoints, although tensorboard/ reaches step 5" in trace
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-9])  # a crash has cut off the only row
    assert trace_of_checkpoints(checkpoints, event_log) is None


def test_a_run_whose_first_saves_failed_starts_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"save_interval": 5}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 15, "loss": 3.0}\n')
    event_log = EventLog(tmp_path, writes=True)
    trace = trace_of_checkpoints(tmp_path / "checkpoints", event_log)
    assert trace.endswith("empty, although metrics.jsonl reaches step 15 and saves were due every 5")
    event_log.add("save failed", 5)
    assert trace_of_checkpoints(tmp_path / "checkpoints", event_log) is None
    event_log.add("saved", 10)
    assert "step 10 was saved" in trace_of_checkpoints(tmp_path / "checkpoints", event_log)


def test_another_micro_batch_of_a_balance_loss_is_recorded(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, "--load-balance-scope", "micro_batch")
    run_ranks(run, 1, flags, 3)
    run_ranks(run, 1, [*flags, "--micro-batch-size", "8"])
    (event,) = events(tmp_path, "loss changed")
    assert (event["step"], event["changes"]) == (3, {"micro_batch_size": [2, 8]})
    state = manifest.read_json(tmp_path / "checkpoints" / "step-7" / "state.json")
    assert [len(values) for values in state["guard"]["history"].values()] == [4, 4]
    assert {len(values) for kind, _, values in state["alarms"]["history"] if kind != "throughput"} == {3}  # 4, 6 and 7


def test_a_resume_that_trains_otherwise_is_an_event_and_on_the_page(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, "--run-report", "true", "--train-iters", "4")
    run_ranks(run, 1, flags, 3)
    more = "--learning-rate 2e-3 --warmup-iters 1 --weight-decay 0.2 --gradient-clipping 0.5 --train-iters 5"
    run_ranks(run, 1, [*flags, *more.split(), "--log-interval", "1"])
    (event,) = events(tmp_path, "training changed")
    changes, before = event["changes"], parse_config(flags)[0].to_dict()
    now = {"learning_rate": 2e-3, "warmup_iters": 1, "weight_decay": 0.2, "gradient_clipping": 0.5, "train_iters": 5}
    assert event["step"] == 3 and changes.pop("train_tokens")
    assert changes == {name: [before[name], value] for name, value in now.items()}
    page = (tmp_path / "report.html").read_text()
    assert f"weight_decay {before['weight_decay']}, now 0.2" in page and "train_iters 4, now 5" in page
    run_ranks(run, 1, [*flags, *more.split(), "--train-iters", "6", "--save-interval", "1", "--run-report", "false"])
    changes = events(tmp_path, "training changed")[1]["changes"]
    assert changes.keys() == {"train_iters", "train_tokens"}  # other intervals and saves train the same


@pytest.mark.parametrize(
    "length, budget, steps",
    [
        (32, "--train-tokens 10000", 45),  # 10 + (10,000 - 1,280) / 256
        (32, "--train-tokens 10240", 45),  # a multiple, but that of the checkpoint
        (32, "--train-tokens 1000", 10),
        (32, "--train-iters 45", None),
        (16, "--train-tokens 10000", None),
    ],
)
def test_a_token_budget_does_not_end_early_after_a_new_length(length, budget, steps):
    def parsed(length, budget):
        return parse_config([*f"--seq-length {length} --batch-tokens {8 * length}".split(), *budget.split()])[0]

    saved = {"step": 10, "consumed_samples": 80, "data": {"segments": [{"first_sample": 0, "seq_length": 16}]}}
    now = parsed(length, budget)
    found = budget_problems(now, saved, parsed(16, "--train-tokens 10240").to_dict())
    assert len(found) == (steps is not None)
    assert all(text.endswith(f"; give --train-iters {steps} to read the rest") for text in found)


def test_a_run_of_two_lengths_resumes_with_iterations_only():
    segments = [{"first_sample": 0, "seq_length": 16}, {"first_sample": 80, "seq_length": 32}]
    saved = {"step": 20, "consumed_samples": 160, "data": {"segments": segments}}
    for budget, problems in (("--train-iters 45", 0), ("--train-tokens 10000", 1)):
        now = parse_config([*"--seq-length 32 --batch-tokens 256".split(), *budget.split()])[0]
        assert len(budget_problems(now, saved, now.to_dict())) == problems


@pytest.mark.parametrize(
    ("number", "of_step", "of_data", "same", "goes_on"),
    [
        (5, "tokenizer.json", "tokenizer.json", True, True),
        (5, "tokenizer.json", "tokenizer.json", False, False),
        (5, "tokenizer.json", "tokenizer.model", False, False),
        (5, "tokenizer.model", None, False, False),
        (5, None, "tokenizer.json", False, False),
        (0, None, "tokenizer.json", False, True),
        (0, "tokenizer.model", "tokenizer.json", False, False),
        (0, "tokenizer.json", "tokenizer.model", False, True),  # it is the source's
        (0, "tokenizer.json", "tokenizer.json", True, True),
        (0, "tokenizer.json", "tokenizer.json", False, False),
        (0, "tokenizer.json", None, False, True),
    ],
)
def test_a_run_goes_on_with_the_tokenizer_of_its_step_alone(tmp_path, number, of_step, of_data, same, goes_on):
    data = tmp_path / "data"
    data.mkdir()
    entries = {"state.json": {"bytes": 0, "sha256": []}}
    for directory, name, content in ((tmp_path, of_step, "a"), (data, of_data, "a" if same else "b")):
        if name:
            (directory / name).write_text(content)
            (directory / "tokenizer_config.json").write_text("{}")
    for path in tmp_path.glob("tokenizer*"):
        entries[path.name] = manifest.describe(path)
    manifest.write_manifest(tmp_path, entries)
    found = tokenizer_changes(tmp_path, {"step": number}, data / of_data if of_data else None)
    assert len(found) == (0 if goes_on else 1)
    assert all("the data directory has none" in sentence for sentence in found) == (of_data is None or goes_on)
    assert all(f"--tokenizer {data} " in sentence for sentence in found) == (number == 0 or goes_on)


def test_a_dry_run_passes_by_a_damaged_step_as_a_start_does(data_dir, one_rank_run, tmp_path, capsys):
    shutil.copytree(one_rank_run, tmp_path, dirs_exist_ok=True)
    newest = steps.list_steps(tmp_path / "checkpoints")[0]
    for harm in (lambda path: path.write_bytes(b""), lambda path: path.unlink()):
        harm(newest / "state.json")
        with pytest.raises(SystemExit, match="0"):
            pretrain.main([*arguments(data_dir, tmp_path), "--dry-run"])
        older = steps.list_steps(tmp_path / "checkpoints")[1]
        assert f"\nresumes    from {older}\n" in capsys.readouterr().out


def test_a_dry_run_names_a_file_that_cannot_be_read(data_dir, one_rank_run, capsys, monkeypatch):
    file = steps.list_steps(one_rank_run / "checkpoints")[0] / "state.json"
    monkeypatch.setattr(state, "read_json", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle", str(file))))
    with pytest.raises(SystemExit, match="2"):
        pretrain.main([*arguments(data_dir, one_rank_run), "--dry-run"])
    assert capsys.readouterr().err == f"moh_lm.pretrain: {file}: cannot be read (Stale file handle); make it readable\n"


def test_ctrl_c_during_the_imports_prints_nothing(monkeypatch, capsys):
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        pretrain.main([])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "change, named",
    [
        (["--num-active-routed-heads", "3"], "num_active_routed_heads was .*2, 2.* and is .*3, 3"),
        (["--seed", "9"], "--seed was 1234 and is 9"),
        (["--batch-tokens", "256"], "--batch-tokens 256"),
    ],
)
def test_a_changed_model_or_sample_order_is_refused_by_name(data_dir, one_rank_run, change, named, capsys):
    with pytest.raises(AssertionError, match=named):
        run_ranks(run, 1, arguments(data_dir, one_rank_run, *change))
    with pytest.raises(SystemExit, match="2"):  # a dry run refuses what the start would
        pretrain.main([*arguments(data_dir, one_rank_run, *change), "--dry-run"])
    assert re.search(named, capsys.readouterr().err)
