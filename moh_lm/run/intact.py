"""The newest intact checkpoint of a run, which all ranks look for before any of them loads a file.

All ranks verify the files together and agree on the result. A damaged step is reported and set aside under another
name, and the one before it is used. A file that cannot be read does not count as damaged: it ends the run and changes
nothing. If all checkpoints are damaged, or if they are gone but left a trace, the run never silently starts over.
"""

from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from moh_lm.checkpoint.directory import list_steps, point_latest, refuse_dangling, set_aside, step_number
from moh_lm.checkpoint.manifest import NO_SUCH_FILE, is_whole, verify
from moh_lm.config import ConfigError
from moh_lm.monitor.record import last_step
from moh_lm.monitor.writers import first_drawn
from moh_lm.parallel.consensus import all_ranks_or_raise, from_all_ranks, on_rank_zero, problems_of_all_ranks, together
from moh_lm.parsing import read_json
from moh_lm.supervise.processes import log_rank0
from moh_lm.supervise.rendezvous import Unreachable


def sound_step(directory, event_log, progress):
    """Return the newest step whose files match its manifest, or None if this run has never saved one.

    Rank 0 names the steps, each rank reads a share of the files, and all ranks learn the result. Raises ConfigError if
    there were checkpoints and none is intact, or if a file cannot be read; Unreachable if nodes see different files.
    """
    damaged = {}
    for step in on_rank_zero(lambda: list_steps(directory)):
        whole = is_whole(step)  # now, because a late file may be there after the verification
        problems = all_ranks_or_raise(lambda step=step: together(partial(damage, step), progress))
        problems = problems_of_all_ranks(problems)
        if not problems:
            on_rank_zero(lambda step=step: refuse_dangling(directory, step))
            on_rank_zero(lambda step=step: settle(step, damaged, event_log))
            return step
        if len(set(from_all_ranks(whole))) > 1:
            late = "some nodes see all of its files, others do not yet; start the run again"
            raise Unreachable([f"{step}: {late}"])
        damaged[step] = problems
        for problem in problems:
            log_rank0(f"DAMAGED CHECKPOINT: {problem}")
    on_rank_zero(lambda: refuse_dangling(directory))
    if damaged:
        advice = "no checkpoint of this run is intact: restore one, or choose a new --checkpoint-dir"
        raise ConfigError([*chain(*damaged.values()), advice])
    lost = on_rank_zero(lambda: trace_of_checkpoints(directory, event_log))
    if lost:
        raise ConfigError([f"{lost}: restore it, or choose a new --checkpoint-dir; a run never starts over silently"])
    return None


def damage(step, progress):
    """Return sentences for damage in this rank's share of a step, or if the directory holds a different step."""
    found = verify(step, dist.get_rank(), dist.get_world_size(), progress)
    if found:
        return found
    try:
        inside = read_json(step / "state.json")["step"]
    except (*NO_SUCH_FILE, ValueError, KeyError, TypeError):
        return []  # reported by the rank that verifies it, or by ``read_state``
    return [] if step.name == f"step-{inside}" else [f"{step}: holds step {inside}"]


def settle(sound, damaged, event_log):
    """Rename the ``damaged`` steps so that no run resumes from them, and let ``latest`` name the ``sound`` one."""
    for step, problems in damaged.items():
        aside = set_aside(step)
        event_log.add("damaged", step_number(step), f"{step} is set aside as {aside}", problems=problems)
    point_latest(sound)
    with suppress(OSError):  # the run goes on without this remark
        saved, aside = event_log.last("saved"), event_log.last("damaged") or {"step": 0}
        if saved and saved["step"] > max(step_number(sound), aside["step"]):
            log_rank0(f"step {saved['step']} was saved (events.jsonl), but is missing; the run goes back to {sound}")


def trace_of_checkpoints(directory, event_log):
    """Return evidence that a run directory without checkpoints once had some, or that files were removed, or None."""
    saved = event_log.last("saved")
    begun = event_log.last("import")
    if begun and not saved:
        return f"{directory}: the import of {begun['source']} (events.jsonl) is missing"
    if saved:
        return f"{directory}: step {saved['step']} was saved (events.jsonl) but is missing"
    remains = sorted(Path(directory).iterdir()) if Path(directory).is_dir() else []
    remains = [path for path in remains if path.name != "lost+found" and not path.name.startswith(".")]  # of the disk
    if remains:
        return f"{remains[0]}: is all that is left of the run's checkpoints"
    if event_log.last("save failed"):  # the first saves, so nothing is missing
        return None
    run = Path(directory).parent
    logged, interval = last_step(run / "metrics.jsonl"), saved_every(run / "config.json")
    if interval and logged > 2 * interval:  # the second save waited for the first
        return f"{directory}: empty, although metrics.jsonl reaches step {logged} and saves were due every {interval}"
    drawn = first_drawn(run)
    if drawn and not (run / "metrics.jsonl").exists():  # the row is written before the drawing
        return f"{run / 'metrics.jsonl'}: is missing, like all checkpoints, although tensorboard/ reaches step {drawn}"
    return None


def saved_every(path):
    try:
        return int(read_json(path)["save_interval"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
