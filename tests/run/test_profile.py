"""--profile: which steps and ranks leave a trace, what is in it, and that a run trains as without it."""

import gzip
import json
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from moh_lm.checks import config_problems
from moh_lm.flags import parse_config
from moh_lm.run.profile import ALLOCATIONS, StepProfile
from tests.distributed import run_ranks
from tests.running import rows
from tests.training.runs import arguments, run
from tools import run_report

SHORT = """--train-iters 5 --eval-interval 0 --eval-samples 1 --log-interval 1 --save-interval 3 --num-layers 1
    --batch-tokens 64""".split()
PROFILED = (*SHORT, "--profile", "2:4", "--profile-memory", "--profile-ranks", "all")


def traced_steps(path):
    """The numbers of the steps in a trace that computes something."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert "aten::mm" in names and "[memory]" in names
    return sorted({int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")})


def test_a_profiled_run_trains_alike_through_a_resume(data_dir, tmp_path):
    world_size, more = 2, ("--tensor-parallel-size", "2")
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    run_ranks(run, world_size, arguments(data_dir, plain, *SHORT, *more))
    flags = arguments(data_dir, profiled, *PROFILED, *more)
    run_ranks(run, world_size, flags, 3)
    assert not (profiled / "profile").exists()  # it was killed in the middle
    run_ranks(run, world_size, flags)
    assert rows(profiled) == rows(plain)
    found = sorted(path.name for path in (profiled / "profile").iterdir())
    assert found == [f"steps-4-4-rank-{rank}.pt.trace.json.gz" for rank in range(world_size)]
    assert [traced_steps(path) for path in (profiled / "profile").iterdir()] == [[4]] * world_size


def test_the_first_rank_alone_is_traced_and_linked(data_dir, tmp_path):
    run_ranks(run, 2, arguments(data_dir, tmp_path, *PROFILED, "--profile-ranks", "first"))
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "steps-2-4-rank-0.pt.trace.json.gz" and traced_steps(trace) == [2, 3, 4]
    assert run_report.main([str(tmp_path)]) == 0
    assert f'<a href="profile/{trace.name}">' in (tmp_path / "report.html").read_text()


def test_a_profile_that_cannot_be_written_ends_no_run(data_dir, tmp_path):
    (tmp_path / "profile").write_text("in the way")
    run_ranks(run, 1, arguments(data_dir, tmp_path, *PROFILED))
    assert rows(tmp_path)[-1]["step"] == 5


def test_nothing_is_recorded_after_a_profile_that_cannot_be_written(data_dir, tmp_path, monkeypatch):
    history = Mock()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", Mock(side_effect=OSError("no space left")))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    profile = StepProfile(parse_config(arguments(data_dir, tmp_path, *PROFILED))[0].run, torch.device("cuda"))
    for step in (2, 3, 4):
        profile.begin(step)
        assert torch.autograd._profiler_enabled() and history.call_args == call(max_entries=ALLOCATIONS)
        profile.end(step)
    assert not torch.autograd._profiler_enabled() and history.call_args == call(enabled=None)


@pytest.mark.parametrize("given", ["3", "4:3", "0:2", "a:b", "1:2:3"])
def test_a_range_that_is_none_is_refused(data_dir, tmp_path, given):
    config, _ = parse_config(arguments(data_dir, tmp_path, "--profile", given))
    expected = f"--profile {given}: write the first and the last step as FROM:TO, such as 10:12"
    assert config_problems(config, 1) == [expected]


def test_a_memory_profile_of_no_step_is_refused(data_dir, tmp_path):
    (problem,) = config_problems(parse_config(arguments(data_dir, tmp_path, "--profile-memory"))[0], 1)
    assert problem.startswith("--profile-memory: is a part of a profile")
