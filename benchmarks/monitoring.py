"""What a run's figures and alarms cost, as a share of its steps: CPU time of all threads, in a run on one process.

    python benchmarks/monitoring.py [--steps 20] [flags of moh_lm.pretrain that change the run]

The run has 42M parameters, 8 layers of 8 heads, 4 sources of random tokens, 4 micro-batches of 128 tokens, and logs
every step. Each part is timed whenever it runs, between the work of the steps, and shown as the median in milliseconds
and as a share of the median step: once as measured, and once as it is with the default --log-interval.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, not this folder, whose tokenize.py hides a standard module
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from moh_lm import pretrain
from moh_lm.config import RunConfig
from moh_lm.data.shards import ShardWriter, write_manifest
from moh_lm.flags import parse_config
from moh_lm.monitor.alarms import Alarms
from moh_lm.monitor.interval import Interval
from moh_lm.monitor.log import RunLog
from moh_lm.run import loop
from moh_lm.run.directory import make_run_directory
from moh_lm.run.launch import start_process_group
from moh_lm.training.engine import Engine
from moh_lm.training.step_sums import RouterSums

FLAGS = """--num-layers 8 --hidden-size 512 --intermediate-size 1408 --num-attention-heads 8 --vocab-size 16384
    --seq-length 128 --batch-tokens 512 --micro-batch-size 1 --warmup-iters 2 --precision fp32 --log-interval 1
    --save-interval 0 --eval-interval 0 --eval-samples 1 --validation-fraction 0.01"""
IN_STEP = [(RouterSums, "take"), (Interval, "add")]
PER_INTERVAL = [
    (loop, "waits_and_memory"),
    (Interval, "head_figures"),
    (loop, "training_row"),
    (RunLog, "training"),
    (Alarms, "check"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    arguments, more = parser.parse_known_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    torch.set_num_threads(1)
    taken = {name: timed(owner, name) for owner, name in [(Engine, "train_step"), *IN_STEP, *PER_INTERVAL]}
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder) / "data")
        places = ["--data-dir", f"{folder}/data", "--checkpoint-dir", f"{folder}/run"]
        config, _ = parse_config([*FLAGS.split(), "--train-iters", str(arguments.steps), *places, *more])
        make_run_directory(config.run.checkpoint_dir)
        dataset = pretrain.open_dataset(config, [], False)
        pretrain.train(config, dataset, start_process_group(config.reliability.hang_timeout))
    step = median(taken["train_step"])
    print(f"step{'':18}{step * 1e3:10.2f} ms")
    seldom = RunConfig().log_interval
    for name, per_interval in [(name, parts is PER_INTERVAL) for parts in (IN_STEP, PER_INTERVAL) for _, name in parts]:
        cost, rarer = median(taken[name]), seldom if per_interval else 1
        print(f"{name:22}{cost * 1e3:10.3f} ms  {cost / step:8.3%}  {cost / step / rarer:8.3%}")


def timed(owner, name):
    """The list to which each call of ``owner.name`` from now on adds its CPU-seconds."""
    function, seconds = getattr(owner, name), []

    def call(*arguments, **more):
        started = time.process_time()
        try:
            return function(*arguments, **more)
        finally:
            seconds.append(time.process_time() - started)

    setattr(owner, name, call)
    return seconds


def make_data(directory):
    generator = np.random.default_rng(0)
    for source in ("a", "b", "c", "d"):
        (directory / source).mkdir(parents=True)
        with ShardWriter(directory / source / "unit", 16384) as shard:
            for _ in range(100):
                shard.add([*generator.integers(3, 16384, 999).tolist(), 2])
            tokenizer = {"sha256": "none", "vocab_size": 16384, "eos_id": 2}
            shard.commit({"tokenizer": tokenizer, "inputs": [], "text_bytes": 400_000})
    write_manifest(directory)


if __name__ == "__main__":
    main()
