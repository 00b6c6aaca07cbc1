"""What a checkpoint costs: DeepSpeed's own save, ours, and ours in the background, side by side in one run.

    python benchmarks/checkpoint.py [--ranks 2] [--repeats 5] [--directory DIR] [flags of moh_lm.pretrain]

The model is LLM-S unless flags say otherwise; the samples are random. It starts its ranks by itself; under torchrun it
takes those that there are. Each repetition does all of the following, in an order that rotates, and deletes what it
wrote:

    DeepSpeed   engine.save_checkpoint, which does not wait for the disk; then an fsync of each of its files
    full        --async-save false: every byte is hashed and on the disk when the save returns
    background  --async-save true: the loop stands still for the snapshot, and trains while threads write

"stall" is how long no step can run; "on the disk" how long until every file is; MB/s are over the latter. Files are
read back from the page cache. Times are those of the slowest rank.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, not this folder, whose tokenize.py hides a standard module
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import platform
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from moh_lm.checkpoint.fragments import load_fragments
from moh_lm.checkpoint.manifest import verify
from moh_lm.checkpoint.saver import Saver
from moh_lm.checks import layout_problems, model_problems
from moh_lm.config import ConfigError
from moh_lm.cost.summary import describe_batches, describe_layout, describe_model
from moh_lm.data.files import flush
from moh_lm.data.loader import MicroBatch
from moh_lm.flags import parse_config
from moh_lm.parallel.agreement import from_rank_0, set_on_any_rank
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.parser import Parser
from moh_lm.run.launch import leave, say, start_process_group
from moh_lm.training.engine import make_engine

STATE = {"consumed_samples": 0}
RATE = 1e-4


def main():
    try:
        arguments, flags = parse_arguments(sys.argv[1:])
        world_size = int(os.environ.get("WORLD_SIZE", arguments.ranks))
        small = f"--seq-length 256 --batch-tokens {256 * world_size} --train-iters 1"
        config, _ = parse_config([*small.split(), *flags])
        problems = [*model_problems(config.model), *layout_problems(config, world_size)]
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        print("\n".join(f"benchmark: {problem}" for problem in error.problems), file=sys.stderr)
        sys.exit(2)
    if "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])
    benchmark = Benchmark(config, arguments.directory)
    say("\n".join(describe_machine(benchmark)))
    try:
        for repeat in range(arguments.repeats):
            benchmark.repeat(repeat)
        benchmark.deepspeed_load(arguments.repeats)
    finally:
        benchmark.remove(benchmark.directory)
    say("\n".join(benchmark.report()))
    leave(0, together=True)


def parse_arguments(texts):
    parser = Parser(prog="python benchmarks/checkpoint.py", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="ranks to start (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where to write (default: where temporary files go)")
    arguments, flags = parser.parse_known_args(texts)
    least = {"ranks": 1, "repeats": 2}  # the first background save is shown by itself
    few = {name: value for name, value in vars(arguments).items() if name in least and value < least[name]}
    if few:
        raise ConfigError([f"--{name} {value}: must be at least {least[name]}" for name, value in few.items()])
    return arguments, flags


class Benchmark:
    """The engine of one rank, and the seconds and bytes of each repetition under the name of what was measured."""

    def __init__(self, config, directory):
        self.config = config
        self.device = start_process_group(600)
        parallel = config.parallel
        groups = ParallelGroups.create(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self.engine = make_engine(config, groups, self.device, 1)
        self.batches = self.random_batches()
        self.directory = Path(from_rank_0(tempfile.mkdtemp(dir=directory) if dist.get_rank() == 0 else None))
        self.saver = Saver(self.directory / "background", background=True)
        self.found = {}
        for _ in range(3):
            self.train()

    def random_batches(self):
        run = self.config.run
        generator = torch.Generator().manual_seed(run.seed)
        shape = (run.micro_batch_size, run.seq_length)
        sources = torch.zeros(run.micro_batch_size, dtype=torch.int64)
        batches = []
        for _ in range(self.engine.micro_batches):
            tokens, labels = torch.randint(self.config.model.vocab_size, (2, *shape), generator=generator)
            batches.append(MicroBatch(tokens, labels, sources))
        return batches

    def train(self):
        self.engine.train_step(self.batches, RATE)

    def seconds(self, work, *arguments, **more):
        """Seconds of the slowest rank."""
        self.synchronize()
        dist.barrier()
        started = time.perf_counter()
        work(*arguments, **more)
        self.synchronize()
        return self.slowest(time.perf_counter() - started)

    def slowest(self, seconds):
        seconds = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def add(self, name, value):
        self.found.setdefault(name, []).append(value)

    def repeat(self, number):
        self.add("step", self.seconds(self.train))
        methods = [self.deepspeed, self.full, self.background]
        first = number % len(methods)
        for method in methods[first:] + methods[:first]:
            method()

    def deepspeed(self):
        path, engine = self.directory / "deepspeed", self.engine.engine
        stall = self.seconds(engine.save_checkpoint, str(path), tag="x", client_state=STATE)
        self.add("DeepSpeed stall", stall)
        self.add("DeepSpeed disk", stall + self.seconds(self.flush_all, path))
        self.add("DeepSpeed bytes", total_size(path))
        self.remove(path)

    def flush_all(self, path):
        for file in sorted(path.rglob("*"))[dist.get_rank() :: dist.get_world_size()]:
            flush(file)

    def full(self):
        path = self.directory / "full"
        saver = Saver(path)
        seconds = self.seconds(saver.save, 1, self.engine.fragments(), self.config, STATE, None)
        self.add("full stall", seconds)
        self.add("full disk", seconds)
        self.add("full bytes", total_size(path))
        self.add("verify", self.seconds(verify, path / "step-1", dist.get_rank(), dist.get_world_size()))
        self.add("load", self.seconds(load_fragments, path / "step-1", self.engine.fragments()))
        self.remove(path)

    def background(self):
        path, ended = self.directory / "background", []
        stall = self.seconds(self.saver.save, 1, self.engine.fragments(), self.config, STATE, None)
        # The first snapshot also takes the memory that the later ones use again.
        self.add("background stall" if "background disk" in self.found else "first background stall", stall)
        started, pending = time.perf_counter(), self.saver.pending
        watcher = threading.Thread(target=lambda: ended.append(pending.join() or time.perf_counter() - started))
        watcher.start()
        while set_on_any_rank([self.saver.writing()], self.device)[0]:
            self.add("step while writing", self.seconds(self.train))
        watcher.join()
        self.add("background disk", stall + self.slowest(ended[0]) + self.seconds(self.saver.finish))
        self.add("background bytes", total_size(path))
        self.remove(path)

    def deepspeed_load(self, repeats):
        """To be measured last: it replaces the tensors that our saves write."""
        path, engine = str(self.directory / "deepspeed"), self.engine.engine
        engine.save_checkpoint(path, tag="x", client_state=STATE)
        for _ in range(repeats):
            self.add("DeepSpeed load", self.seconds(engine.load_checkpoint, path, tag="x"))

    def remove(self, path):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()

    def report(self):
        """Lines of the tables; rank 0."""
        found = {name: (min(values), statistics.median(values)) for name, values in self.found.items()}
        whole = found["DeepSpeed stall"][1]
        titles = f"{'stall s':>16}{'on the disk s':>18}{'MB':>8}{'MB/s':>8}{'stall / DeepSpeed':>20}"
        yield f"\n{'minimum / median':<24}{titles}"
        for name in ("DeepSpeed", "full", "background"):
            size, stall, disk = found[f"{name} bytes"][0] / 1e6, found[f"{name} stall"], found[f"{name} disk"]
            figures = f"{size:>8,.0f}{size / disk[1]:>8,.0f}{stall[1] / whole:>20.3f}"
            yield f"{name:<24}{pair(stall):>16}{pair(disk):>18}{figures}"
        yield f"{'first background save':<24}{self.found['first background stall'][0]:>16.3f}"
        yield f"\n{'minimum / median':<24}{'s':>16}{'MB/s':>26}{'s / DeepSpeed save':>28}"
        for name in ("DeepSpeed load", "verify", "load"):
            size, seconds = found["DeepSpeed bytes" if "Deep" in name else "full bytes"][0] / 1e6, found[name]
            yield f"{name:<24}{pair(seconds):>16}{size / seconds[1]:>26,.0f}{seconds[1] / whole:>28.3f}"
        yield f"\n{'step':<24}{pair(found['step']):>16}"
        if "step while writing" in found:
            slower = found["step while writing"][1] / found["step"][1]
            steps = f"{slower:.2f} times as long ({len(self.found['step while writing'])} steps)"
            yield f"{'step while writing':<24}{pair(found['step while writing']):>16}  {steps}"


def total_size(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def pair(values):
    return "{:.3f} / {:.3f}".format(*values)


def describe_machine(benchmark):
    config, device = benchmark.config, benchmark.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    yield f"machine    {os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}, device {name}, {platform.system()}"
    yield f"versions   Python {platform.python_version()}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}"
    yield f"files      {file_system(benchmark.directory)}"
    yield from describe_model(config.model)
    yield describe_layout(config, dist.get_world_size())
    yield next(describe_batches(config))


def file_system(path):
    """Its type and device, where /proc tells them."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    around = [mount for mount in mounts if path.resolve().is_relative_to(mount[1])]
    device, point, kind = max(around, key=lambda mount: len(mount[1]))[:3]
    return f"{kind} on {device} at {point}"


if __name__ == "__main__":
    main()
