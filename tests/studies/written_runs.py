"""Directories of runs that were never trained, for the reports that read them."""

import json
from dataclasses import replace

from moh_lm.config import Config, DataConfig, ModelConfig, RunConfig
from moh_lm.data.files import write_json
from studies.runs import opening


def write_run(directory, name, seed, losses, speeds, active_heads=None, iterations=10, **heads):
    """A run as moh_lm.pretrain leaves it: losses {step: {source: loss}}, a row of the log for each of ``speeds``."""
    run = directory / "runs" / f"{name}-{seed}"
    run.mkdir(parents=True)
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=8, vocab_size=64)
    config = Config(
        model=replace(model, heads=replace(model.heads, **heads)),
        data=DataConfig(data_dir="data"),
        run=RunConfig(seq_length=16, batch_tokens=32, train_iters=iterations),
    )
    write_json(run / "config.json", config.to_dict())
    (run / "events.jsonl").touch()
    rows = [{"step": step, "evaluation": evaluation} for step, evaluation in losses.items()]
    figures = {"heads": {"layer": [0, 1], "active_heads": active_heads}} if active_heads else {}
    rows[1:1] = [{"step": 5, "loss": 3.0, "tokens_per_second": speed, **figures} for speed in speeds]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1')  # cut off


def begin(run, said=b""):
    """Leave the log of a ``Run`` that has begun with one process, and has ``said`` something since."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.log.write_bytes(opening(run, 1, {}) + said)


def write_times(path, seconds):
    """A short run whose first intervals, which do not count, are slow."""
    path.mkdir(parents=True)
    speeds = {step: 1 / seconds if step > 16 else 1.0 for step in range(4, 44, 4)}
    rows = [json.dumps({"step": step, "tokens_per_second": speed}) + "\n" for step, speed in speeds.items()]
    (path / "metrics.jsonl").write_text("".join(rows))
