"""A run from its configuration to its last step: checks, data, processes, the loop. moh_lm/pretrain.py calls it."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import torch.distributed as dist

from moh_lm.checkpoint.saver import CheckpointError, NonFiniteState
from moh_lm.checks import config_problems, plan_warnings
from moh_lm.cli.output import Output
from moh_lm.config import ConfigError, raise_any
from moh_lm.cost.summary import describe_configuration, describe_run, memory_warnings
from moh_lm.data.dataset import Dataset
from moh_lm.data.files import ShardError
from moh_lm.flags import config_of, idle_flags, save_config
from moh_lm.monitor.samples import Samples
from moh_lm.monitor.tasks import Tasks
from moh_lm.run.loop import Run, run_steps
from moh_lm.run.resume import contradictions
from moh_lm.supervise.errors import report_errors, report_to_torchrun
from moh_lm.supervise.processes import exit_process, refuse_foreign_launcher, start_process_group
from moh_lm.supervise.rendezvous import RendezvousError, refuse
from moh_lm.supervise.run_directory import lock_run_directory, make_run_directory
from moh_lm.supervise.stop import INTERRUPTED, StopRequest
from moh_lm.supervise.watchdog import MARGIN_S, UNAVAILABLE, Watchdog
from moh_lm.training.guard import BadNumbers
from moh_lm.units import wrapped

COMPLETE, WRONG, BROKEN, NOT_WRITTEN, STOPPED = 0, 2, 70, 74, 75  # 70, 74, 75: EX_SOFTWARE, EX_IOERR, EX_TEMPFAIL


class Work(NamedTuple):
    """What a kind of model needs to be trained. problems: (config, world_size) -> sentences. open_data: (config,
    problems, dry_run) -> the configuration and the data set, or None in a dry run without data; raises ConfigError.
    described: (config, dataset, world_size) -> lines. warned: (config, dataset, world_size) -> sentences. run: ``Run``,
    or a subclass."""

    problems: Callable
    open_data: Callable
    described: Callable
    warned: Callable
    run: type


def main(given, work=None):
    """Run what ``parse_flags`` gave, and exit. work: by default that of language models."""
    with redirect_stdout(Output(sys.stdout, is_log=True)), redirect_stderr(Output(sys.stderr, is_log=True)):
        work_on(given, work or LANGUAGE)


def work_on(given, work):
    rank = int(os.environ.get("RANK", 0))
    is_alone = "RANK" not in os.environ and not given.dry_run  # a dry run says what WORLD_SIZE ranks would do
    world_size = 1 if is_alone else int(os.environ.get("WORLD_SIZE", 1))
    code, problems, speaker, alone = COMPLETE, [], 0, False
    try:
        config, dry_run = config_of(given), given.dry_run
        problems = work.problems(config, world_size) + contradictions(config, dry_run)
        config, dataset = work.open_data(config, problems, dry_run)
        if rank == 0 or not dry_run:  # not by several ranks that remove what others have just made
            make_run_directory(config.run.checkpoint_dir, keep=not dry_run)
        if not dry_run:
            refuse_foreign_launcher()
        if rank == 0:
            describe(work, given, config, dataset, world_size)
        if given.save_config and rank == 0:
            save_config(given, given.save_config)
            print(f"wrote {given.save_config}", flush=True)
        if not dry_run:
            lock = lock_run_directory(config.run.checkpoint_dir) if rank == 0 else None  # noqa: F841 - held to the end
            device = start_process_group(config.reliability.hang_timeout + MARGIN_S)
            code = COMPLETE if train(work.run, config, dataset, device) else STOPPED
    except ConfigError as error:
        code, problems, speaker = WRONG, error.problems, error.local_rank
        alone = not (given.dry_run or dist.is_initialized() or isinstance(error, RendezvousError))
    except (NonFiniteState, BadNumbers) as error:
        code, problems = BROKEN, str(error).splitlines()
    except CheckpointError as error:
        code, problems = NOT_WRITTEN, error.problems
    except KeyboardInterrupt:  # before the training, which stops by itself
        code = INTERRUPTED
    report_errors(problems, speaker, given.kind.program)
    if alone:
        refuse()
    if code == STOPPED:
        report_to_torchrun(["stopped as asked; the same command goes on"])
    exit_process(code, together=code in (COMPLETE, STOPPED))


def describe(work, given, config, dataset, world_size):
    """Print warnings of what is hardly meant, and what the run is; of a dry run all settings too."""
    lines = [*idle_flags(given, config), *work.described(config, dataset, world_size)]
    if given.dry_run:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may have seen enough
        lines = [*given.changes(), "", *lines, *describe_configuration(config)]
    warnings = (*work.warned(config, dataset, world_size), *contradictions(config))
    shown = [wrapped(f"warning: {text}", 9) for text in warnings]
    print("\n".join([*shown, *([""] if shown else []), *lines]), flush=True)


def open_text(config, problems, dry_run):
    """The configuration and the shards. Raises ConfigError with every problem of both together."""
    dataset = None
    absent = config.data.data_dir and not os.path.exists(config.data.data_dir)
    if config.data.data_dir and config.run.seq_length > 0 and not (dry_run and absent):
        try:
            dataset = Dataset.open(
                config.data,
                seq_length=config.run.seq_length,
                seed=config.run.seed,
                vocab_size=config.model.vocab_size,
                decay_begins=config.decay_begins(),
            )
        except ConfigError as error:
            problems = problems + error.problems
    raise_any(list(dict.fromkeys(problems)))
    if dataset:
        for read in (Tasks, Samples):  # so that what is wrong with them is said now
            read(config, dataset.tokenizer_path)
    return config, dataset


def train(run, config, dataset, device):
    """The whole run under a watchdog; False if it was asked to stop before its last step."""
    stop = StopRequest(config.reliability.exit_after, config.program)
    watchdog = Watchdog(config.reliability.hang_timeout, config.program)
    try:
        return run_steps(run, config, dataset, device, stop, watchdog)
    except (ConfigError, CheckpointError, BadNumbers):
        raise
    except ShardError as error:  # found by the rank that reads there; the others see it leave
        remedy = "" if "; " in str(error) else "; restore the file"
        print(f"{config.program}: rank {dist.get_rank()}: {error}{remedy}", file=sys.stderr, flush=True)
        exit_process(WRONG)
    except Exception:
        trace = traceback.format_exc()
        if watchdog.report_unresponsive():  # then the trace would only show where this rank was waiting
            exit_process(UNAVAILABLE)
        print(trace, file=sys.stderr, end="")
        exit_process(1)
    finally:
        watchdog.stop()


def language_warnings(config, dataset, world_size):
    return [*plan_warnings(config, dataset), *memory_warnings(config, world_size)]


LANGUAGE = Work(config_problems, open_text, describe_run, language_warnings, Run)
