"""A run from its configuration to its last step: checks, data, processes, the loop. moh_lm/pretrain.py calls it."""

import os
import signal
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout

import torch.distributed as dist

from moh_lm.checkpoint.saver import CheckpointError, NonFiniteState
from moh_lm.checks.idle import idle_flags
from moh_lm.cli.output import Output
from moh_lm.compared import Differs
from moh_lm.config import ConfigError
from moh_lm.cost.summary import describe_configuration
from moh_lm.data.files import ShardError
from moh_lm.flags import config_of, save_config
from moh_lm.kernels import devices
from moh_lm.kernels.measured import machine
from moh_lm.monitor.console import styled
from moh_lm.run.loop import Run, run_steps
from moh_lm.run.resume import contradictions, refuse_resume, tolerated, with_model_of_run
from moh_lm.supervise.errors import INTERRUPTED, report_errors, report_to_torchrun
from moh_lm.supervise.processes import exit_process, log_rank0, refuse_foreign_launcher, start_process_group
from moh_lm.supervise.rendezvous import RendezvousError, Unreachable, refuse
from moh_lm.supervise.run_directory import lock_run_directory, make_run_directory
from moh_lm.supervise.stop import StopRequest
from moh_lm.supervise.watchdog import MARGIN_S, UNAVAILABLE, Watchdog
from moh_lm.training.guard import BadNumbers
from moh_lm.units import wrapped

COMPLETE, WRONG, BROKEN, NOT_WRITTEN, STOPPED = 0, 2, 70, 74, 75  # 70, 74, 75: EX_SOFTWARE, EX_IOERR, EX_TEMPFAIL


def main(given, task):
    """Run the configuration that ``parse_flags`` returned, and exit. task: ``Task``."""
    with redirect_stdout(Output(sys.stdout, is_log=True)), redirect_stderr(Output(sys.stderr, is_log=True)):
        run_task(given, task)


def run_task(given, task):
    rank = int(os.environ.get("RANK", 0))
    is_alone = "RANK" not in os.environ and not given.dry_run  # a dry run describes what WORLD_SIZE ranks would do
    world_size = given.devices or (1 if is_alone else int(os.environ.get("WORLD_SIZE", 1)))
    code, problems, speaker, alone, step = COMPLETE, [], 0, False, None
    try:
        config, dry_run = config_of(given), given.dry_run
        refused = contradictions(config, dry_run)
        checked = with_model_of_run(config) if refused else config
        on_gpu = bool(given.device_name) or devices.on_gpu()
        older = tolerated(config)
        problems = [text for text in task.problems(checked, world_size, on_gpu) if text not in older] + refused
        config, dataset = task.open_data(checked, problems, dry_run)
        if rank == 0 or not dry_run:  # not on several ranks, which would remove what others have just made
            make_run_directory(config.run.checkpoint_dir, keep=not dry_run)
        if not dry_run:
            refuse_foreign_launcher()
        elif dataset is not None and config.run.checkpoint_dir:
            step = refuse_resume(task, config, dataset)
        if rank == 0:
            describe(task, given, config, dataset, world_size, step)
        if given.save_config and rank == 0:
            save_config(given, given.save_config)
            print(f"wrote {given.save_config}", flush=True)
        if not dry_run:
            lock = lock_run_directory(config.run.checkpoint_dir) if rank == 0 else None  # noqa: F841 - held to the end
            device = start_process_group(config.reliability.hang_timeout + MARGIN_S)
            code = COMPLETE if train(task, config, dataset, device) else STOPPED
    except ConfigError as error:
        code, problems, speaker = WRONG, error.problems, error.local_rank
        code = UNAVAILABLE if isinstance(error, Unreachable) else code
        alone = not (given.dry_run or dist.is_initialized() or isinstance(error, RendezvousError))
    except (NonFiniteState, BadNumbers, Differs) as error:
        code, problems = BROKEN, str(error).splitlines()
    except CheckpointError as error:
        code, problems = NOT_WRITTEN, error.problems
    except KeyboardInterrupt:  # before training starts, which handles it itself
        code = INTERRUPTED
    report_errors(problems, speaker, task.config_type.program)
    if alone:
        refuse()
    if code == STOPPED:
        report_to_torchrun(["stopped as asked; run the same command again to resume"])
    exit_process(code, together=code in (COMPLETE, STOPPED))


def describe(task, given, config, dataset, world_size, step):
    """Print warnings about suspicious settings and a summary of the run; for a dry run also the settings, and the
    ``step`` from which the run resumes, or None."""
    planned = config, dataset, world_size, given.device_name
    lines = [*idle_flags(given, config), *task.describe(*planned)]
    if given.dry_run:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may have seen enough
        resumes = [f"resumes    from {step}"] if step else []
        lines = [*given.changes(), "", *lines, *resumes, *describe_configuration(config)]
    warnings = (*task.warnings(*planned), *contradictions(config))
    shown = [styled(wrapped(f"warning: {text}", 9), "warning") for text in warnings]
    print("\n".join([*shown, *([""] if shown else []), *lines]), flush=True)


def train(task, config, dataset, device):
    """Run the training under a watchdog. Returns False if it was asked to stop before its last step."""
    log_rank0(f"device     {device.type}: {machine(device)}")
    stop = StopRequest(config.reliability.exit_after, config.program)
    watchdog, run = Watchdog(config.reliability.hang_timeout, config.program), None
    try:
        run = Run(task, config, dataset, device, stop, watchdog)
        return run_steps(run)
    except (ConfigError, CheckpointError, BadNumbers, Differs):
        raise
    except ShardError as error:  # found by the rank that reads the shard; the others see that rank leave
        remedy = "" if "; " in str(error) else "; restore the file"
        print(f"{config.program}: rank {dist.get_rank()}: {error}{remedy}", file=sys.stderr, flush=True)
        leave(run, watchdog, WRONG)
    except Exception:
        trace = traceback.format_exc()
        if watchdog.report_unresponsive():  # then the trace would only show where this rank was waiting
            leave(run, watchdog, UNAVAILABLE)
        print(trace, file=sys.stderr, end="", flush=True)
        leave(run, watchdog, 1)
    finally:
        watchdog.stop()


def leave(run, watchdog, code):
    """Exit alone after an error. run: None if it had not begun."""
    watchdog.stop()  # which would end this rank because others have left
    if run:
        run.leave()
    exit_process(code)
