"""The program of every rank: configuration, groups, model, data, and the loop.

    python -m moh_lm.pretrain --help        the launch/ scripts call it with the paper's values

Exit codes: 0 the run is complete; 2 something in the configuration, the data or the checkpoint has to be mended; 75
the run was asked to stop (SIGTERM or SIGUSR1 to any rank, --exit-after) and has saved: the same command goes on; 70 too
many steps had to be skipped; 74 a checkpoint could not be written; 69 a rank died or stood still; 1 any other error.
"""

import math
import os
import socket
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from moh_lm.checkpoint.manifest import write_json
from moh_lm.checkpoint.saver import CheckpointError, NonFiniteState, Saver, check_space
from moh_lm.checks import config_problems
from moh_lm.config import ConfigError
from moh_lm.cost.summary import describe_configuration, describe_run
from moh_lm.data.dataset import Dataset
from moh_lm.data.files import ShardError
from moh_lm.data.loader import Loader
from moh_lm.flags import parse_config
from moh_lm.monitor.alarms import Alarms
from moh_lm.monitor.interval import Interval, of_ranks
from moh_lm.monitor.journal import Journal
from moh_lm.monitor.log import RunLog
from moh_lm.monitor.row import training_row
from moh_lm.monitor.tasks import Tasks
from moh_lm.parallel.agreement import of_any_rank
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.run.launch import (
    StopRequest,
    check_nodes,
    leave,
    lock_run_directory,
    make_run_directory,
    refuse_foreign_launcher,
    say,
    start_process_group,
)
from moh_lm.run.resume import contradictions, resume
from moh_lm.run.watchdog import MARGIN, UNAVAILABLE, Watchdog
from moh_lm.training.engine import make_engine
from moh_lm.training.guard import BadNumbers
from moh_lm.training.incidents import report

COMPLETE, WRONG, BROKEN, NOT_WRITTEN, STOPPED = 0, 2, 70, 74, 75  # 70, 74, 75: EX_SOFTWARE, EX_IOERR, EX_TEMPFAIL

START = 300  # seconds that the imports and the making of an engine may take besides --hang-timeout


def main():
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    code, problems, speaker = COMPLETE, [], 0
    try:
        config, dry_run = parse_config(sys.argv[1:])
        problems = config_problems(config, world_size) + contradictions(config, dry_run)
        dataset = open_dataset(config, problems, dry_run)
        if not dry_run:
            make_run_directory(config.run.checkpoint_dir)
            refuse_foreign_launcher()
        if rank == 0:
            lines = describe_configuration(config) if dry_run else []
            print("\n".join([*lines, *describe_run(config, dataset, world_size)]), flush=True)
        if not dry_run:
            lock = lock_run_directory(config.run.checkpoint_dir) if rank == 0 else None  # noqa: F841 - held to the end
            device = start_process_group(config.reliability.hang_timeout + MARGIN)
            code = COMPLETE if train(config, dataset, device) else STOPPED
    except ConfigError as error:
        code, problems, speaker = WRONG, error.problems, error.local_rank
    except (NonFiniteState, BadNumbers) as error:
        code, problems = BROKEN, str(error).splitlines()
    except CheckpointError as error:
        code, problems = NOT_WRITTEN, error.problems
    if int(os.environ.get("LOCAL_RANK", rank)) == speaker:  # once per node: it may be wrong on one of them only
        where = f" on {socket.gethostname()}" if rank else ""
        for text in problems:
            print(f"moh_lm.pretrain{where}: {text}", file=sys.stderr, flush=True)
    leave(code, together=code in (COMPLETE, STOPPED))


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
    if dataset:
        Tasks.open(config, dataset.tokenizer_path)  # so that what is wrong with them is said now
    return dataset


def train(config, dataset, device):
    """The whole run under a watchdog; False if it was asked to stop before its last step."""
    stop = StopRequest(config.reliability.exit_after)
    watchdog = Watchdog(config.reliability.hang_timeout)
    try:
        return run_steps(config, dataset, device, stop, watchdog)
    except (ConfigError, CheckpointError, BadNumbers):
        raise
    except ShardError as error:  # found by the rank that reads there; the others see it leave
        print(f"moh_lm.pretrain: rank {dist.get_rank()}: {error}; restore the file", file=sys.stderr, flush=True)
        leave(WRONG)
    except Exception:
        traceback.print_exc()
        leave(UNAVAILABLE if watchdog.blame() else 1)
    finally:
        watchdog.stop()


def run_steps(config, dataset, device, stop, watchdog):
    """From the last checkpoint, or the first step, to the last, or to the step after which ``stop`` is due."""
    run, parallel, reliability = config.run, config.parallel, config.reliability
    check_nodes(config, dataset)
    watchdog.progress(seconds=START)
    groups = ParallelGroups.create(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    engine = make_engine(config, groups, device, len(dataset.source_names))
    watchdog.progress()
    watchdog.limit_groups()
    interval = Interval(dataset.source_names, config.model.routed_layers(), device)
    alarms = Alarms(config.alarms, config.model.routed_layers(), dataset.shares)
    journal = Journal(run.checkpoint_dir, writes=dist.get_rank() == 0)
    step, dataset, imported = resume(config, dataset, engine, interval, alarms, journal, watchdog.progress)
    if step >= run.train_iters:
        say(f"the run is complete: {step} of {run.train_iters} steps are in {run.checkpoint_dir}")
        return True
    loader = Loader(
        dataset,
        global_batch_size=run.global_batch_size,
        micro_batch_size=run.micro_batch_size,
        data_parallel_rank=dist.get_rank(groups.data),
        data_parallel_size=dist.get_world_size(groups.data),
        reset_at_documents=config.data.reset_at_documents,
        pin_memory=device.type == "cuda",
    )
    tasks = Tasks.open(config, dataset.tokenizer_path)
    checkpoints = Path(run.checkpoint_dir) / "checkpoints"
    check_space(checkpoints, engine.fragments())
    saver = Saver(
        checkpoints,
        keep_last=reliability.keep_last,
        keep_every=reliability.keep_every,
        background=reliability.async_save,
        verified=[step] if step else [],
        on_saved=lambda step, path, facts: journal.add("saved", step, f"saved {path}", **facts),
        progress=watchdog.progress,
    )
    log = open_log(config, step)
    if step == 0:
        evaluate(engine, loader, tasks, config, log, step, watchdog)
    stopping = False
    while step < run.train_iters and not stopping:
        started = time.perf_counter()
        rate = learning_rate(step, config.optimizer, run.train_iters)
        batches = loader.train_step(step * run.global_batch_size)
        data_seconds = time.perf_counter() - started
        step += 1
        bad_sources = []
        try:
            result = engine.train_step(batches, rate, check_replicas=due(step, reliability.replica_check_interval))
            if result.verdict:
                bad_sources = report(engine, loader, batches, journal, step, result)
            engine.guard.record(step, result.loss, result.grad_norm, result.skipped)
        except BadNumbers as error:
            saver.finish()
            text = f"step {step}: {error}; {saver.newest()}"
            journal.add("failed", step, text)
            raise BadNumbers(text) from error
        interval.add(result, data_seconds, run.tokens_per_iteration, bad_sources)
        watchdog.progress()
        last = step == run.train_iters
        if due(step, run.log_interval) or last:
            ranks = of_ranks(interval, device)
            if log:
                figures = interval.head_figures(config.alarms.alarm_head_high, parallel.tensor_parallel_size)
                row = training_row(config, dataset, interval, step, rate, result.grad_norm, figures, ranks, device)
                log.training(row, figures)
                ring(alarms.check(interval, figures, ranks), journal, log, step)
            interval.clear()
        if due(step, run.eval_interval) or last:
            evaluate(engine, loader, tasks, config, log, step, watchdog)
        stopping, writing = of_any_rank([stop.due(), saver.writing()], device)
        save_started = time.perf_counter()
        if due(step, reliability.save_interval) or last or stopping:
            state = run_state(config, dataset, engine, interval, alarms, step, imported)
            saver.save(step, engine.fragments(), config, state, dataset.tokenizer_path)
        elif not writing:
            saver.finish()
        interval.seconds["save"] += time.perf_counter() - save_started
    saver.close()
    loader.close()
    if log:
        log.close()
    if stopping and step < run.train_iters:
        reason = f" ({stop.reason})" if stop.reason else ""
        text = f"stopped after step {step} of {run.train_iters}, as asked{reason}; the same command goes on"
        journal.add("stopped", step, text)
    else:
        journal.add("complete", step, f"complete: {step} steps are in {run.checkpoint_dir}")
    return step == run.train_iters


def due(step, interval):
    """Whether ``step`` ends an interval; an interval of 0 never ends."""
    return interval > 0 and step % interval == 0


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


def ring(alarms, journal, log, step):
    """Say each of ``Alarms.check`` on the console, in events.jsonl and on the boards."""
    for text, facts in alarms:
        text = f"step {step}: {text}"
        journal.add(facts.pop("event"), step, text, **facts)
        log.boards.alarm(text, step)


def evaluate(engine, loader, tasks, config, log, step, watchdog):
    """Mean loss per token of every source's held-out windows, and the scores of the tasks."""
    losses = {}
    for name in loader.dataset.source_names:
        total, tokens = engine.evaluate(loader.validation(name, config.run.eval_samples))
        watchdog.progress()
        if tokens:
            losses[name] = total / tokens
    if log and losses:
        log.evaluation(step, losses, loader.dataset.bytes_per_token())
    scores = {}
    for name in tasks.questions:
        batches, choices = tasks.micro_batches(name, config.run.micro_batch_size, loader.rank, loader.size)
        scores[name] = tasks.metrics(name, engine.evaluate_rows(batches, choices)[:, 0].tolist())
        watchdog.progress()
    if log and scores:
        log.tasks(step, scores)


def run_state(config, dataset, engine, interval, alarms, step, imported):
    """state.json: whatever a run needs to go on besides its weights, their moments and its configuration."""
    return {
        "consumed_samples": step * config.run.global_batch_size,
        "optimizer_steps": engine.optimizer.steps,
        "router_shares": [share.tolist() for share in engine.shares],
        "guard": engine.guard.state(),
        "interval": interval.state(),
        "alarms": alarms.state(),  # of rank 0, which writes this
        "data": dataset.state(),
        **({"imported": imported} if imported else {}),  # what tools/import_hf.py said of the model it began with
    }


def open_log(config, step):
    """The run directory and its log; rank 0 only."""
    if dist.get_rank() > 0:
        return None
    directory = Path(config.run.checkpoint_dir)
    write_json(directory / "config.json", config.to_dict())
    return RunLog(directory, step, config)


if __name__ == "__main__":
    main()
