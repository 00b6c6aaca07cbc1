"""Run directories as training leaves them."""

import json
from types import SimpleNamespace

import pytest

from moh_lm.flags import parse_config
from tests.monitor.reported import EVENTS, FLAGS, SINK, STEPS, SURROUNDINGS, training_record


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two run directories: one as ``reported`` has it, killed; a second one with another rate, complete."""
    found = SimpleNamespace(folder=tmp_path_factory.mktemp("runs"))
    for name, more in (("first", []), ("second", ["--learning-rate", "2e-3", "--train-iters", str(STEPS - 1)])):
        run = found.folder / name
        run.mkdir()
        config, _ = parse_config([*FLAGS.split(), *more])
        (run / "config.json").write_text(json.dumps(config.to_dict()))
        rows = [json.dumps(training_record(step)) for step in range(1, STEPS)]
        rows.insert(800, json.dumps({"step": 800, "evaluation": {"web": 3.5}, "evaluation_mean": 3.5, "sink": SINK}))
        (run / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 1001, "lo')
        events = [*EVENTS, ("complete", STEPS - 1)] if more else EVENTS
        times = "2026-01-01T00:00:00Z"
        facts = {"started": SURROUNDINGS}
        lines = [
            json.dumps({"time": times, "event": event, "step": step, **facts.get(event, {"why": "<i>"})})
            for event, step in events
        ]
        (run / "events.jsonl").write_text("\n".join(lines) + "\n")
        setattr(found, name, run)
    return found
