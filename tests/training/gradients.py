"""How far the gradients of each layout are from exact ones, by kind of parameter, near initialisation and later.

    torchrun --nproc-per-node 2 tests/training/gradients.py [--steps 40] [flags of moh_lm.pretrain]

A small model is trained for so many steps on the bytes of Python's own library. With its weights at the beginning and
at the end, the gradient of one batch is computed by autograd on one process in float64, fp32 and bf16, and by the
engine in layouts of two ranks. A distance is |a - b| / |b|, L2 norms over the gradient of one parameter. Shown are the
median and the largest over the parameters of a kind:

    fp32    from float64
    bf16    from float64 with the same weights, rounded to bf16; in layouts, from one process in bf16
"""

import argparse
import ast
import os
import statistics
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from moh_lm.build import build_model
from moh_lm.checkpoint.fragments import FragmentReader, full_parameters, load_fragments
from moh_lm.checkpoint.saver import Saver
from moh_lm.data.loader import MicroBatch
from moh_lm.flags import parse_config
from moh_lm.parallel.consensus import from_rank_zero
from moh_lm.parallel.groups import ParallelGroups, group_rank
from moh_lm.supervise.processes import exit_process, log_rank0, start_process_group
from moh_lm.training.text_engine import make_engine

FLAGS = """--num-layers 4 --hidden-size 128 --intermediate-size 352 --num-attention-heads 8 --vocab-size 260
    --seq-length 64 --micro-batch-size 4 --gradient-clipping 0 --weight-decay 0 --train-iters 1"""
SEQUENCES, RATE, WARMUP = 16, 3e-3, 10
LAYOUTS = {
    "ZeRO-3": "--zero-stage 3",
    "tensor 2": "--tensor-parallel-size 2",
    "pipeline 2": "--pipeline-parallel-size 2",  # last: DeepSpeed keeps its grid
}
KINDS = {
    "embedding": ("embed_tokens",),
    "norms": ("norm",),
    "queries, keys": ("q_proj", "k_proj"),
    "values, outputs": ("v_proj", "o_proj"),
    "MLP": ("mlp",),
    "w_shared, w_type": ("w_shared", "w_type"),
    "w_routed": ("w_routed",),
    "output head": ("lm_head",),
    "all": ("",),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    arguments, flags = parser.parse_known_args()
    bench = Bench(flags, start_process_group(600))
    directory = Path(from_rank_zero(tempfile.mkdtemp() if dist.get_rank() == 0 else None))
    try:
        bench.train(directory, arguments.steps)
        for step, columns in bench.distances(directory, (0, arguments.steps)).items():
            log_rank0(f"\nafter {step} steps\n" + "\n".join(table(columns)))
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
    exit_process(0, together=True)


class Bench:
    """flags: of moh_lm.pretrain, for the model and its micro-batches."""

    def __init__(self, flags, device):
        text = b"".join(path.read_bytes() for path in sorted(Path(ast.__file__).parent.glob("*.py"))[:60])
        self.tokens = np.frombuffer(text, np.uint8).astype(np.int64) + 3
        self.flags = flags
        self.device = device

    def config(self, *more):
        batch = ["--batch-tokens", str(SEQUENCES * 64)]
        return parse_config([*FLAGS.split(), *batch, *self.flags, *more])[0]

    def engine(self, config):
        parallel = config.parallel
        groups = ParallelGroups.create(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        return make_engine(config, groups, self.device, 1)

    def batches(self, step, config):
        """All micro-batches of a step, in the order of their samples."""
        length = config.run.seq_length
        starts = np.random.default_rng(step).integers(len(self.tokens) - length - 1, size=SEQUENCES)
        rows = torch.from_numpy(np.stack([self.tokens[start : start + length + 1] for start in starts]))
        return [
            MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), torch.zeros(len(part), dtype=torch.int64))
            for part in rows.split(config.run.micro_batch_size)
        ]

    def step(self, engine, number, rate):
        batches = self.batches(number, engine.config)
        first = group_rank(engine.groups.data) * engine.micro_batches
        return engine.train_step(batches[first : first + engine.micro_batches], rate)

    def train(self, directory, steps):
        """Write step-0 and step-``steps``."""
        config = self.config("--precision", "fp32")
        directory.mkdir(parents=True, exist_ok=True)
        engine, saver = self.engine(config), Saver(directory)
        saver.save(0, engine.fragments(), config, {}, None)
        for number in range(1, steps + 1):
            self.step(engine, number, RATE * min(1, number / WARMUP))
        saver.save(steps, engine.fragments(), config, {}, None)
        saver.close()

    def of_layout(self, directory, step, *flags):
        """{name: gradient} of the engine: AdamW's first moment is a tenth of it."""
        config = self.config(*flags)
        engine = self.engine(config)
        load_fragments(directory / f"step-{step}", engine.fragments())
        for fragment in engine.fragments():
            fragment.tensors["exp_avg"].zero_()
        engine.adopt(0, [[0.0] * layer.num_routed for layer in config.model.routed_layers()])
        self.step(engine, 0, 0.0)
        folder = Path(from_rank_zero(tempfile.mkdtemp() if dist.get_rank() == 0 else None))
        saver = Saver(folder)
        saver.save(1, engine.fragments(), config, {}, None)
        saver.close()
        reader = FragmentReader(folder / "step-1")
        found = {name: reader.read("exp_avg", name).double() * 10 for name in reader.shapes}
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return found

    def of_autograd(self, directory, step, weights_dtype, dtype):
        """{name: gradient} on this process, summed over micro-batches in fp32 or wider."""
        config = self.config()
        batches = self.batches(0, config)
        model = build_model(config.model).to(dtype)
        model.batch.begin(False, len(batches))
        weights = {name: weight.to(weights_dtype) for name, weight in full_parameters(directory / f"step-{step}")}
        model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
        wide = torch.promote_types(dtype, torch.float32)
        sums = {name: torch.zeros_like(weight, dtype=wide) for name, weight in model.named_parameters()}
        for batch in batches:
            model.batch.feed([None])
            model.zero_grad()
            mean, _ = model(batch.tokens, batch.labels)
            (mean / len(batches)).backward()
            for name, weight in model.named_parameters():
                sums[name] += weight.grad.to(wide)
        return {name: total.double() for name, total in sums.items()}

    def distances(self, directory, steps):
        """{step: {title of a column: {name of a parameter: distance}}}"""
        exact, columns = {}, {step: {} for step in steps}
        for step in steps:
            for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                reference = self.of_autograd(directory, step, dtype, torch.float64)
                got = self.of_autograd(directory, step, dtype, dtype)
                columns[step][f"{precision}, one process"] = relative(got, reference)
                exact[precision, step] = got if precision == "bf16" else reference
        for name, flags in LAYOUTS.items():
            for precision, step in exact:
                got = self.of_layout(directory, step, *flags.split(), "--precision", precision)
                columns[step][f"{precision}, {name}"] = relative(got, exact[precision, step])
        return columns


def table(columns):
    """Lines of a table in Markdown."""
    titles = sorted(columns, key=lambda title: title[:4], reverse=True)
    yield f"| | {' | '.join(titles)} |"
    yield "|---" * (1 + len(titles)) + "|"
    for kind, parts in KINDS.items():
        of_kind = [[d for name, d in columns[title].items() if any(part in name for part in parts)] for title in titles]
        cells = [f"{statistics.median(distances):.1e}, {max(distances):.1e}" for distances in of_kind]
        yield f"| {kind} | {' | '.join(cells)} |".replace("e-0", "e-")


def relative(got, expected):
    return {name: ((got[name] - value).norm() / value.norm()).item() for name, value in expected.items()}


if __name__ == "__main__":
    main()
