"""The training loop: everything that a rank does between the first and the last step of one start of a run.

    set up      groups, engine, the last checkpoint (moh_lm.run.resume), data, checkpoints, log
    step        one iteration; then, each at its interval, a line of the log, an evaluation and a checkpoint
    close       everything is on the disk, and the log says how the run ended
"""

import math
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from moh_lm.checkpoint.saver import CheckpointError, NonFiniteState, Saver
from moh_lm.checkpoint.space import check_space
from moh_lm.compared import Differs
from moh_lm.cost.summary import describe_switch
from moh_lm.monitor.accumulator import MetricsAccumulator
from moh_lm.monitor.alarms import BALANCE, DRIFT, THROUGHPUT, Alarms, Announcer
from moh_lm.monitor.events import EventLog
from moh_lm.monitor.log import RunLog
from moh_lm.monitor.ranks import ForwardTimer, rank_figures
from moh_lm.monitor.record import training_record
from moh_lm.monitor.report import report_run
from moh_lm.monitor.surroundings import surroundings
from moh_lm.parallel.consensus import all_ranks_or_raise, on_rank_zero, set_on_any_rank
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.run.after_save import AfterSave
from moh_lm.run.nodes import check_nodes
from moh_lm.run.profile import StepProfile
from moh_lm.run.resume import resume
from moh_lm.run.state import RunState
from moh_lm.supervise.processes import log_rank0
from moh_lm.training.guard import BadNumbers
from moh_lm.training.incidents import record_incident
from moh_lm.training.schedule import learning_rate

START = 300  # seconds for imports, for building the engine, and for compiling kernels, besides --hang-timeout
STOP_S = 300  # seconds that a run which was asked to stop waits for commands of --after-save: Slurm gives 600 in all
STOP_REPORT_S = 120  # seconds that its report may read rows
REPORT = 3600  # seconds for the report of the run, for which all ranks wait, besides --hang-timeout


def run_steps(run):
    """Train from the last checkpoint, or from the start, to the last step, or to the step after which a stop is due.

    run: ``Run``. Returns whether it is complete. Every rank calls it together.
    """
    if run.complete():
        iterations, where = run.config.run.train_iters, run.config.run.checkpoint_dir
        more = ", more than --train-iters" if run.state.step > iterations else ""
        log_rank0(f"the run is complete: {run.state.step} of {iterations} steps are in {where}{more}")
        return True
    run.prepare()
    try:
        while not run.complete() and not run.stopping:
            run.step()
        run.close()
    except (CheckpointError, BadNumbers, Differs) as error:
        run.failed("failed" if isinstance(error, (BadNumbers, Differs, NonFiniteState)) else "unsaved")
        raise
    return run.complete()


class Run:
    """One start of a run on this rank. ``state`` is its position, ``stopping`` says whether it was asked to stop.

    task: ``Task``. stop: ``StopRequest``. watchdog: ``Watchdog``. Every rank makes one together.
    """

    def __init__(self, task, config, dataset, device, stop, watchdog):
        check_nodes(config, dataset)
        self.task = task
        self.config = config
        self.device = device
        self.stop = stop
        self.watchdog = watchdog
        self.stopping = False
        watchdog.progress(seconds=START)
        parallel, layers = config.parallel, config.model.gated_layers()
        self.groups = ParallelGroups.create(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.context_parallel_size
        )
        self.engine = task.make_engine(config, self.groups, device, len(dataset.source_names))
        self.engine.model.register_forward_hook(lambda *_: watchdog.progress())  # in each micro-batch
        self.timer = ForwardTimer(self.engine.model, device)
        watchdog.progress()
        self.accumulator = MetricsAccumulator(dataset.source_names, layers, device)
        self.alarms = Alarms(config.alarms, layers, dataset.shares)
        self.announcer = Announcer()
        self.event_log = EventLog(config.run.checkpoint_dir, writes=dist.get_rank() == 0)
        self.after_save = AfterSave(config.reliability.after_save, self.event_log, config.reliability.hang_timeout)
        self.state = RunState(config, dataset, self.engine, self.accumulator, self.alarms)
        resume(task, self.state, self.event_log, watchdog.progress)
        self.engine.begin(self.state.step)

    def complete(self):
        return self.state.step >= self.config.run.train_iters

    def prepare(self):
        """Open what the steps need, and evaluate the initial model, or one whose evaluation a stop has left out."""
        run, step, dataset = self.config.run, self.state.step, self.state.dataset
        self.loader = self.task.make_loader(self.config, dataset, self.groups, self.device)
        samples = run.samples_after(step)
        self.watchdog.progress(seconds=START)
        for sentence in self.engine.compare_kernels(lambda: self.loader.read_step(samples)[0]):
            log_rank0(sentence)
        self.watchdog.limit_groups()
        self.watchdog.progress()
        checkpoints = Path(run.checkpoint_dir) / "checkpoints"
        check_space(checkpoints, self.engine.fragments(), dataset.tokenizer_path)
        self.saver = Saver(
            checkpoints,
            keep_last=self.config.reliability.keep_last,
            keep_every=self.config.reliability.keep_every,
            background=self.config.reliability.async_save,
            verified=[step] if step else [],
            on_saved=self.saved,
            on_failed=self.save_failed,
            progress=self.watchdog.progress,
        )
        self.profile = StepProfile(run, self.device)
        first = dist.get_rank() == 0
        if first:
            size = self.task.parameters(self.config)
            self.event_log.add("started", step, parameters=size, **surroundings(self.device))
        self.log = all_ranks_or_raise(lambda: RunLog(run.checkpoint_dir, step, self.config) if first else None)
        self.evaluation = self.task.make_evaluation(
            self.config, self.engine, self.loader, self.log, self.watchdog.progress
        )
        if step == 0 or (due(step, run.eval_interval) and on_rank_zero(lambda: not self.log.is_evaluated)):
            self.evaluate()
            if self.log:
                self.log.restart_clock()

    def saved(self, step, path, facts):
        """Record that a checkpoint is complete. Rank 0 only."""
        self.event_log.add("saved", step, f"saved {path}", **facts)
        self.after_save.add(step, path)

    def save_failed(self, step, problems):
        """Record that the checkpoint of ``step`` could not be written; the next save tries again."""
        self.event_log.add("save failed", step, "\n".join(problems), problems=problems)

    def step(self):
        """Run one iteration, and the log line, evaluation and checkpoint that are due after it."""
        run = self.config.run
        self.profile.begin(self.state.step + 1)
        rate, result = self.train()
        self.profile.end(self.state.step)
        step, last = self.state.step, self.complete()
        self.stopping, writing = result.flags
        if due(step, run.log_interval) or last:
            self.write_log(rate, result)
        if last or (due(step, run.eval_interval) and not self.stopping):  # the next start has time for it
            self.evaluate()
            self.stopping, writing = set_on_any_rank(self.flags(), self.device)  # much may have happened meanwhile
        started = time.perf_counter()
        if due(step, self.config.reliability.save_interval) or last or self.stopping:
            self.save()
        elif not writing:
            self.saver.collect()
        self.after_save.poll()
        self.accumulator.spend("save", time.perf_counter() - started)
        if self.log:
            self.log.progress(step)

    def save(self):
        """Begin to write a checkpoint. Raises NonFiniteState, and CheckpointError at the second failure in turn."""
        engine, tokenizer = self.engine, self.state.dataset.tokenizer_path
        self.saver.save(self.state.step, engine.fragments(), engine.config_now(), self.state.capture(), tokenizer)

    def failed(self, event):
        """Record that the run cannot go on. What it died of is printed when the rank ends."""
        self.event_log.add(event, self.state.step)
        self.tell_alarms()
        self.while_others_wait(self.end_after_save)
        self.while_others_wait(lambda: self.log.close(code=1))
        self.while_others_wait(self.report)

    def while_others_wait(self, work):
        """Run ``work`` on rank 0; the others wait, because a rank that had left would be named as the cause."""
        seconds = self.after_save.patience + REPORT
        self.watchdog.progress(seconds)
        self.watchdog.limit_groups(seconds)
        on_rank_zero(work)

    def end_after_save(self):
        """Wait for commands of --after-save, less long once the run was asked to stop."""
        self.after_save.close(self.watchdog.progress, lambda: STOP_S if self.stopping or self.stop.due() else math.inf)

    def leave(self):
        """After an error of this rank alone, whose watchdog has ended: wait for commands of --after-save."""
        seconds = min(STOP_S, self.after_save.patience / 2)  # before the watchdogs of others end the run
        if self.after_save.running:
            log_rank0(f"waiting up to {seconds:.0f} s for commands of --after-save")
        self.after_save.close(lambda: None, lambda: seconds)

    def flags(self):
        """Return whether this rank was asked to stop, and whether it is still writing a checkpoint."""
        return self.stop.due(), self.saver.writing()

    def train(self):
        """Train one iteration and return (learning rate, ``StepResult``). Raises BadNumbers or Differs, with the last
        checkpoint's name."""
        config, run, state = self.config, self.config.run, self.state
        started = time.perf_counter()
        rate = learning_rate(state.step, config.optimizer, run.train_iters)
        samples = run.samples_after(state.step)
        batches = self.loader.train_step(samples)
        data_seconds = time.perf_counter() - started
        longer = config.length_at(samples) != config.length_at(run.samples_after(max(0, state.step - 1)))
        if samples == config.decay_begins() or longer:
            self.engine.guard.forget()  # losses on other data, or on longer parts, are not comparable
            self.alarms.forget(BALANCE, DRIFT, *([THROUGHPUT] if longer else []))
        if state.step == config.model.heads.dense_warmup_iters and config.model.after(0) != config.model:
            self.engine.guard.forget()  # losses with fewer heads are not comparable
            self.alarms.forget(THROUGHPUT)  # nor is the speed of layers that route
            text = f"step {state.step}: the dense warm-up is over: {describe_switch(config.model)}"
            self.event_log.add("dense warm-up over", state.step, text)
        state.advance()
        bad_sources = []
        try:
            check_replicas = due(state.step, config.reliability.replica_check_interval)
            result = self.engine.train_step(batches, rate, check_replicas=check_replicas, flags=self.flags)
            if result.code:
                bad_sources = record_incident(self.engine, self.loader, batches, self.event_log, state.step, result)
            self.engine.guard.record(state.step, result.loss, result.grad_norm, result.skipped)
        except (BadNumbers, Differs) as error:
            with suppress(CheckpointError):  # the bad numbers are the reason why the run ends
                self.saver.collect()
            raise type(error)(f"step {state.step}: {error}; {self.saver.newest()}") from error
        self.accumulator.add(result, data_seconds, self.engine.tokens, bad_sources, self.timer.take())
        self.engine.begin(state.step)
        self.watchdog.progress()
        return rate, result

    def write_log(self, rate, result):
        """Write the line of the interval that ends here, and the alarms that begin or end with it."""
        started = time.perf_counter()
        config, step, accumulator = self.engine.config_now(), self.state.step, self.accumulator
        ranks = rank_figures(accumulator, self.groups, self.device)
        if self.log:
            figures = None
            if config.model.after(accumulator.began(step, config)) == config.model:
                figures = accumulator.head_figures(config.alarms.alarm_head_high, config.parallel)
            record = training_record(
                config, self.state.dataset, accumulator, step, rate, result.grad_norm, figures, ranks, self.device,
                self.task.flops,
            )  # fmt: skip
            self.log.training(record, figures)
            found = self.alarms.check(accumulator, figures, ranks)
            for facts in found:
                self.event_log.add(step=step, **facts)
            for line in self.announcer.lines(found):
                self.log.alarm(step, line)
        accumulator.clear()
        accumulator.spend("log", time.perf_counter() - started)  # of the next interval, whose steps wait for it

    def evaluate(self):
        self.evaluation(self.state.step)

    def close(self):
        """Wait until everything is written, and record how the run ended."""
        self.profile.close()
        self.saver.close()
        self.watchdog.limit_groups(self.after_save.patience + REPORT)  # as they exit, the others wait for rank 0
        self.end_after_save()
        self.loader.close()
        self.engine.close()
        self.tell_alarms()
        if self.log:
            self.log.close()
        step, run = self.state.step, self.config.run
        if self.complete():
            self.event_log.add("complete", step, f"complete: {step} steps are in {run.checkpoint_dir}")
        else:
            reason = f" ({self.stop.reason})" if self.stop.reason else ""
            stopped = f"stopped after step {step} of {run.train_iters}, as asked{reason}"
            self.event_log.add("stopped", step, f"{stopped}; the same command resumes it")
        self.report()

    def report(self):
        """Write the run report unless --run-report is false."""
        if self.log and self.config.run.run_report:
            begun = time.monotonic()
            report_run(self.config.run.checkpoint_dir, type(self.config), partial(self.reporting, begun))

    def reporting(self, begun):
        """Note that the report, ``begun`` at this time, has read a row. Raises TimeoutError if a stop cannot wait."""
        self.watchdog.progress()
        if self.stopping and time.monotonic() - begun > STOP_REPORT_S:
            raise TimeoutError(f"it takes longer than {STOP_REPORT_S} s; tools/run_report.py writes it")

    def tell_alarms(self):
        """Log the lines about alarms that still wait for others of their kind."""
        if self.log:
            for line in self.announcer.rest():
                self.log.alarm(self.state.step, line)


def due(step, interval):
    """Return whether ``step`` ends an interval; an interval of 0 never ends."""
    return interval > 0 and step % interval == 0
