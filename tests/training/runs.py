"""Small runs of the training program on the ranks of a test, what they leave, and engines that take single steps."""

import json
import shutil
from pathlib import Path

import torch

from moh_lm.checkpoint.fragments import FragmentReader, full_parameters
from moh_lm.checkpoint.saver import find_step
from moh_lm.data.loader import MicroBatch
from moh_lm.flags import parse_config
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.run.text import TEXT
from moh_lm.supervise.processes import start_process_group
from moh_lm.training.text_engine import make_engine
from tests.running import rows, train_here

SIZES = """
    --num-layers 2 --hidden-size 32 --intermediate-size 64 --num-attention-heads 8 --vocab-size 64
    --seq-length 16 --batch-tokens 128 --micro-batch-size 2 --train-iters 7 --warmup-iters 2 --precision fp32
    --learning-rate 1e-2 --min-learning-rate 1e-3 --data-mix even=2.5 odd=1 --validation-fraction 0.1
    --log-interval 2 --save-interval 3 --eval-interval 4 --eval-samples 3
"""


def arguments(data_dir, directory, *more):
    """Flags of a run of 7 steps on ``data_dir`` in ``directory``; those of ``more`` count."""
    return [*SIZES.split(), "--data-dir", str(data_dir), "--checkpoint-dir", str(directory), *more]


def run(flags, stop_after=None):
    """The training program on this rank, without the page of the run, whose pictures take two seconds.

    stop_after: exit after the checkpoint of that step, as a crash would.
    """
    return train_here(TEXT, parse_config(["--run-report", "false", *flags])[0], stop_after)


def left_after(step, whole, directory):
    """Make ``directory`` what the run in ``whole`` had left if it had died after the checkpoint of ``step``."""
    shutil.copytree(whole, directory, dirs_exist_ok=True)
    checkpoints = Path(directory) / "checkpoints"
    (checkpoints / "latest").write_text(f"step-{step}\n")
    for path in checkpoints.glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def engine_of(config, num_sources=1):
    """The engine of this rank in the layout of ``config``; all ranks call it together."""
    device, parallel = start_process_group(900), config.parallel
    groups = ParallelGroups.create(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return make_engine(config, groups, device, num_sources)


def micro_batches_of(tokens, size):
    """[``MicroBatch``] of ``size`` rows each. tokens: int64 [rows, s + 1], all of source 0."""
    return [
        MicroBatch(part[:, :-1], part[:, 1:], torch.zeros(len(part), dtype=torch.int64)) for part in tokens.split(size)
    ]


def training_rows(directory):
    """Those of ``rows`` that are of training, not of an evaluation."""
    return [row for row in rows(directory) if "loss" in row]


def losses(directory):
    return [row["loss"] for row in training_rows(directory)]


def events(directory, kind):
    """The rows of events.jsonl of one kind."""
    lines = (Path(directory) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def parameters(directory):
    """{name: fp32 tensor} of the newest step."""
    return dict(full_parameters(find_step(directory)))


def state(directory, step):
    """{kind/name: whole tensor} of the masters and moments of a step."""
    reader = FragmentReader(Path(directory) / "checkpoints" / f"step-{step}")
    kinds = ("master", "exp_avg", "exp_avg_sq")
    return {f"{kind}/{name}": reader.read(kind, name) for name in reader.shapes for kind in kinds}


def equal(one, other):
    """Whether two mappings of tensors are the same to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def distance(got, expected):
    """Relative L2 distance of two tensors."""
    scale = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / scale if scale else got.double().norm().item()
