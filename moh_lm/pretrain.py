"""The program of every rank: configuration, groups, model, data, and the loop.

    python -m moh_lm.pretrain --help        the launch/ scripts call it with the paper's values

Exit codes: 0 the run is complete; 2 something in the configuration, the data or the checkpoint has to be mended; 75
the run was asked to stop (SIGTERM or SIGUSR1 to any rank) and has saved: the same command goes on.
"""

import math
import os
import socket
import sys
import time
from pathlib import Path

import torch.distributed as dist

from moh_lm.checkpoint import list_steps, load_fragments, read_json, save_checkpoint, verify
from moh_lm.checks import config_problems
from moh_lm.config import Config, ConfigError, walk
from moh_lm.data.loader import Dataset, Loader
from moh_lm.engine import make_engine
from moh_lm.flags import parse_config
from moh_lm.metrics import Interval, RunLog
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.processes import (
    StopRequest,
    check_nodes,
    from_rank_0,
    leave,
    make_run_directory,
    of_all_ranks,
    refuse_foreign_launcher,
    say,
    start_process_group,
)
from moh_lm.summary import describe_configuration, describe_run

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again


def main():
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        config, dry_run = parse_config(sys.argv[1:])
        problems = config_problems(config, world_size)
        dataset = open_dataset(config, problems, dry_run)
        if not dry_run:
            make_run_directory(config.run.checkpoint_dir)
            refuse_foreign_launcher()
        if rank == 0:
            lines = describe_configuration(config) if dry_run else []
            print("\n".join([*lines, *describe_run(config, dataset, world_size)]), flush=True)
        complete = dry_run or train(config, dataset, start_process_group())
    except ConfigError as error:
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:  # once per node: it may be wrong on one of them only
            where = f" on {socket.gethostname()}" if rank else ""
            print("\n".join(f"moh_lm.pretrain{where}: {text}" for text in error.problems), file=sys.stderr, flush=True)
        leave(2)
    leave(0 if complete else STOPPED)


def open_dataset(config, problems, dry_run):
    """The shards of the run; raises ConfigError with every problem of configuration and data together."""
    dataset = None
    absent = config.data.data_dir and not Path(config.data.data_dir).exists()
    if config.data.data_dir and config.run.seq_length > 0 and not (dry_run and absent):
        try:
            dataset = Dataset.open(
                config.data,
                seq_length=config.run.seq_length,
                seed=config.run.seed,
                vocab_size=config.model.vocab_size,
            )
        except ConfigError as error:
            problems = problems + error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return dataset


def train(config, dataset, device):
    """The whole run: from the last checkpoint, or the first step, to the last; False if it was asked to stop before."""
    run = config.run
    stop = StopRequest(device)
    check_nodes(config, dataset)
    groups = ParallelGroups.create(config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size)
    engine = make_engine(config, groups, device, len(dataset.source_names))
    loader = Loader(
        dataset,
        global_batch_size=run.global_batch_size,
        micro_batch_size=run.micro_batch_size,
        data_parallel_rank=dist.get_rank(groups.data),
        data_parallel_size=dist.get_world_size(groups.data),
    )
    interval = Interval(len(dataset.source_names), config.model.routed_layers(), device)
    step = resume(config, dataset, engine, interval)
    if step >= run.train_iters:
        say(f"the run is complete: {step} of {run.train_iters} steps are in {run.checkpoint_dir}")
        return True
    log = open_log(config, step)
    if step == 0:
        evaluate(engine, loader, config, log, step)
    stopping = False
    while step < run.train_iters and not stopping:
        started = time.perf_counter()
        rate = learning_rate(step, config.optimizer, run.train_iters)
        result = engine.train_step(loader.train_step(step * run.global_batch_size), rate)
        step += 1
        interval.add(result, time.perf_counter() - started, run.tokens_per_iteration)
        last = step == run.train_iters
        if step % run.log_interval == 0 or last:
            if log:
                log.training(training_row(config, dataset, interval, step, rate, result), interval.head_loads())
            interval.clear()
        if last or (run.eval_interval and step % run.eval_interval == 0):
            evaluate(engine, loader, config, log, step)
        stopping = stop.of_any_rank()
        if last or stopping or (run.save_interval and step % run.save_interval == 0):
            save(config, dataset, engine, interval, step)
    if log:
        log.close()
    if stopping:
        say(f"stopped after step {step} of {run.train_iters}, as asked by a signal; the same command goes on")
    return step == run.train_iters


def learning_rate(step, optimizer, train_iters):
    """Rate of the iteration after ``step`` complete ones.

    Linear from warmup_init_lr at step 0 to learning_rate at warmup_iters, then a half cosine that reaches
    min_learning_rate at train_iters and stays there. A run shorter than its warm-up ends within it.
    """
    peak, low = optimizer.learning_rate, optimizer.min_learning_rate
    if step < optimizer.warmup_iters:
        return optimizer.warmup_init_lr + (peak - optimizer.warmup_init_lr) * step / optimizer.warmup_iters
    if step >= train_iters:
        return low
    progress = (step - optimizer.warmup_iters) / (train_iters - optimizer.warmup_iters)
    return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2


def training_row(config, dataset, interval, step, rate, result):
    """The object of metrics.jsonl for the interval that ends after ``step``."""
    run = config.run
    return {
        "step": step,
        "loss": interval.loss(),
        "load_balance_loss": interval.balance_loss(run.seq_length),
        "learning_rate": rate,
        "grad_norm": result.grad_norm,
        "tokens": step * run.tokens_per_iteration,
        "consumed_samples": step * run.global_batch_size,
        "source_loss": interval.source_losses(dataset.source_names),
        "tokens_per_second": interval.tokens_per_second(),
        "skipped_steps": interval.skipped_steps,
    }


def evaluate(engine, loader, config, log, step):
    """Mean loss per token of every source's held-out windows."""
    losses = {}
    for name in loader.dataset.source_names:
        total, tokens = engine.evaluate(loader.validation(name, config.run.eval_samples))
        if tokens:
            losses[name] = total / tokens
    if log and losses:
        log.evaluation(step, losses)


def save(config, dataset, engine, interval, step):
    state = {
        "consumed_samples": step * config.run.global_batch_size,
        "optimizer_steps": engine.optimizer.steps,
        "router_shares": [share.tolist() for share in engine.shares],
        "interval": interval.state(),
        "data": dataset.fingerprint(),
    }
    directory = Path(config.run.checkpoint_dir) / "checkpoints"
    path = save_checkpoint(directory, step, engine.fragments(), config, state, dataset.tokenizer_path)
    say(f"saved {path}")


def resume(config, dataset, engine, interval):
    """Fill the engine from the run's last sound checkpoint; returns the number of iterations done, 0 without any."""
    path = sound_step(Path(config.run.checkpoint_dir) / "checkpoints")
    if path is None:
        return 0
    state = read_json(path / "state.json")
    before, now = Config.load(path / "config.json").to_dict(), config.to_dict()
    fixed = {entry.name for _, entry in walk(config.model)}
    problems = [f"{key} was {before[key]} and is {now[key]}" for key in sorted(fixed) if before[key] != now[key]]
    if state["data"] != dataset.fingerprint():
        problems.append("the shards, the mix, the seed or the sequence length are not those that it was trained on")
    if state["consumed_samples"] != state["step"] * config.run.global_batch_size:
        problems.append(f"--batch-tokens {config.run.batch_tokens} is not that of its {state['step']} steps")
    if problems:
        raise ConfigError(
            [f"cannot go on from {path}: {text}; restore it, or choose a new --checkpoint-dir" for text in problems]
        )
    for key in now:
        if before[key] != now[key]:
            say(f"resuming with another {key}: {now[key]} instead of {before[key]}")
    load_fragments(path, engine.fragments())
    engine.adopt(state["optimizer_steps"], state["router_shares"])
    interval.restore(state["interval"])
    say(f"resumed {path}")
    return state["step"]


def sound_step(directory):
    """The newest step whose files are what its manifest says; None if there are no steps.

    Rank 0 names the steps, each rank reads a share of the files, and all of them hear the verdict. Raises ConfigError
    if no
    step is sound: a run never starts afresh beside checkpoints.
    """
    steps = from_rank_0([step.name for step in list_steps(directory)])
    found = []
    for name in steps:
        step = Path(directory) / name
        damaged = of_all_ranks(verify(step, dist.get_rank(), dist.get_world_size()))
        if not damaged:
            return step
        for problem in damaged:
            say(f"DAMAGED CHECKPOINT: {problem}")
        found += damaged
    if found:
        raise ConfigError(found)
    return None


def open_log(config, step):
    """The run directory and its log; rank 0 only."""
    if dist.get_rank() > 0:
        return None
    directory = Path(config.run.checkpoint_dir)
    config.save(directory / "config.json")
    return RunLog(directory, step, config.run.train_iters)


if __name__ == "__main__":
    main()
