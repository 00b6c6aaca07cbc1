"""A run whose log is missing is in a table only if its own files say that it trained what the table wants."""

import json

import pytest

from moh_lm.config import ConfigError
from moh_lm.data.files import write_json
from moh_lm.flags import parse_config
from moh_lm.monitor.events import EventLog
from moh_lm.monitor.surroundings import commit
from moh_lm.run.state import KEYS
from moh_lm.run.text import open_data
from studies import ablation, comparison

SMALL = (
    "--variants dense --seeds 1 --train-iters 60 --num-layers 1 --hidden-size 32 --vocab-size 64 --seq-length 16 "
    "--batch-tokens 128"
).split()


def plan_of(out, data_dir, *more):
    given = [str(out), "--data-dir", str(data_dir), *SMALL, *more]
    return comparison.Comparison(ablation.parse_arguments(given))


@pytest.fixture
def finished(data_dir, tmp_path):
    """(plan, its run): the run is complete, as moh_lm.pretrain leaves it, and has no log."""
    plan = plan_of(tmp_path, data_dir)
    run = plan.next_run(set(), {})
    config = parse_config(run.arguments)[0]
    step = run.directory / "checkpoints" / f"step-{run.iterations}"
    step.mkdir(parents=True)
    consumed = run.iterations * config.run.global_batch_size
    data = open_data(config, [], False)[1].state(consumed)
    state = {"step": run.iterations, "consumed_samples": consumed, "data": data}
    write_json(step / "state.json", dict.fromkeys(KEYS) | state)
    for directory in (step, run.directory):
        write_json(directory / "config.json", config.to_dict())
    (run.directory / "metrics.jsonl").write_text(json.dumps({"step": run.iterations, "evaluation": {"a": 3.0}}) + "\n")
    EventLog(run.directory, writes=True).add("started", 0, commit=commit()[:9])  # as git shortens it
    return plan, run


def test_a_run_without_a_log_is_adopted_if_it_trained_the_same(finished, data_dir, tmp_path):
    plan, run = finished
    plan.check_flags()
    assert plan.next_run(set(), {}) is None
    with pytest.raises(ConfigError, match="its .log is missing, and its config.json has another intermediate_size"):
        plan_of(tmp_path, data_dir, "--intermediate-size", "64").check_flags()


@pytest.mark.parametrize(
    "name, key, said",
    [
        ("config.json", "learning_rate", "its config.json has another learning_rate; restore the log"),
        ("config.json", "window", "its config.json has another window; restore the log"),
        ("state.json", "shards", "it has read other data: source even: "),
    ],
)
def test_a_run_without_a_log_that_trained_something_else_is_refused(finished, name, key, said):
    plan, run = finished
    path = (run.directory if name == "config.json" else run.directory / f"checkpoints/step-{run.iterations}") / name
    content = json.loads(path.read_text())
    content[key] = {"learning_rate": 1e-4, "window": [8], "shards": None}[key]
    if key == "shards":
        del content[key]
        content["data"]["segments"][0]["shards"]["even"] = "0" * 64
        content["data"]["units"]["even"] = {"unit-0": "0" * 16}
    write_json(path, content)
    with pytest.raises(ConfigError, match=f"rate-1-seed-1: its .log is missing, and {said}"):
        plan.check_flags()


def test_a_run_without_a_log_of_another_commit_is_refused(finished):
    plan, run = finished
    EventLog(run.directory, writes=True).add("resumed", 30, commit="0" * 40)
    with pytest.raises(ConfigError, match=f"it was trained by commit {'0' * 12}, while this is {commit()[:12]}"):
        plan.check_flags()


def test_a_run_without_a_log_or_events_is_refused(finished):
    plan, run = finished
    (run.directory / "events.jsonl").unlink()
    with pytest.raises(ConfigError, match="and no events.jsonl says which code trained it"):
        plan.check_flags()


def test_a_run_without_a_log_whose_data_nothing_tells_is_refused(finished):
    plan, run = finished
    step = run.directory / f"checkpoints/step-{run.iterations}"
    step.rename(run.directory / "aside")
    with pytest.raises(ConfigError, match="and no checkpoint says which data it has read"):
        plan.check_flags()
    (run.directory / "config.json").unlink()
    with pytest.raises(ConfigError, match="and it has no config.json"):
        plan.check_flags()
