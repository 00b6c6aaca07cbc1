"""Whole runs inside tests: the training program on this rank, and what it logged."""

import contextlib
import json
from pathlib import Path

from moh_lm.checkpoint.saver import Saver
from moh_lm.run.program import train
from moh_lm.supervise.processes import start_process_group
from moh_lm.supervise.run_directory import make_run_directory

MEASURED = ("tokens_per_second", "runtime")


def train_here(task, config, stop_after=None):
    """Train on this rank; whether the run is complete. stop_after: leave after the checkpoint of that step, as a crash
    would."""
    if stop_after is not None:
        save = Saver.save

        def save_and_stop(saver, step, *others):
            save(saver, step, *others)
            if step == stop_after:
                saver.close()
                raise KeyboardInterrupt

        Saver.save = save_and_stop
    config, data = task.open_data(config, [], False)
    make_run_directory(config.run.checkpoint_dir)
    with contextlib.suppress(KeyboardInterrupt):
        return train(task, config, data, start_process_group(900))


def rows(directory):
    """The rows of metrics.jsonl without what is measured: times and memory."""
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]
