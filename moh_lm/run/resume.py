"""Going on from the last sound checkpoint of a run.

All ranks verify the files together and hear one verdict before any of them loads. A damaged step is set aside under
another name, loudly, and the one before it is used. A run directory whose checkpoints are all damaged or gone never
starts afresh by itself.
"""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from moh_lm.checkpoint.directory import list_steps, newest_model, point_latest, remove_leftovers
from moh_lm.checkpoint.fragments import load_fragments
from moh_lm.checkpoint.manifest import describe, read_json, read_manifest, verify
from moh_lm.config import Config, ConfigError, walk
from moh_lm.data.shards import TOKENIZER_FILES
from moh_lm.monitor.row import last_step
from moh_lm.parallel.agreement import from_rank_0, of_all_ranks
from moh_lm.run.launch import say


def resume(config, dataset, engine, interval, alarms, journal, progress):
    """Fill the engine from the run's last sound checkpoint.

    Returns the number of iterations done, 0 without a checkpoint; the dataset as it goes on from there; and where the
    model that the run began with was imported from, or None. progress: called as it goes. Raises ConfigError if the run
    cannot go on with this configuration or these data.
    """
    directory = Path(config.run.checkpoint_dir)
    if dist.get_rank() == 0:
        remove_leftovers(directory / "checkpoints")
        for pattern in (".seen-*", "*.json*.tmp", "checkpoints/latest.tmp"):
            for leftover in directory.glob(pattern):
                leftover.unlink(missing_ok=True)
    step = sound_step(directory / "checkpoints", journal, progress)
    if step is None:
        return 0, dataset, None
    state = read_state(step)
    begins, imported = state["step"] == 0, state.get("imported")
    problems = of_all_ranks(changes(step, state, config, dataset))
    if problems:
        raise ConfigError(
            [f"cannot go on from {step}: {text}; restore it, or choose a new --checkpoint-dir" for text in problems]
        )
    before, now = Config.load(step / "config.json").to_dict(), config.to_dict()
    for key in now:
        if before[key] != now[key] and not begins:
            say(f"resuming with another {key}: {now[key]} instead of {before[key]}")
    problems = []
    try:
        load_fragments(step, engine.fragments(), progress)
    except (ValueError, OSError) as error:
        problems = [f"{step}: {error}; set it aside by hand, and the run goes on from the one before it"]
    problems = of_all_ranks(problems)
    if problems:
        raise ConfigError(problems)
    engine.adopt(state["optimizer_steps"], state["router_shares"])
    if begins:
        journal.add("resumed", 0, f"beginning with {step}, imported from {imported['source']}")
        return 0, dataset, imported
    engine.guard.restore(state["guard"])
    changed = dataset.changes(state["data"])
    if changed:
        journal.add("data changed", state["step"], "\n".join(["resuming with other data:", *changed]), changes=changed)
    else:
        interval.restore(state["interval"])
    alarms.restore(state["alarms"], same_data=not changed)
    journal.add("resumed", state["step"], f"resumed {step}")
    return state["step"], dataset.continue_from(state["data"], state["consumed_samples"]), imported


def read_state(step):
    """What ``run_state`` of moh_lm.pretrain wrote. Raises ConfigError if it is not that."""
    path = step / "state.json"
    keys = {"step", "consumed_samples", "optimizer_steps", "router_shares", "guard", "interval", "alarms", "data"}
    try:
        state = read_json(path)
        missing = keys - state.keys()
    except (ValueError, AttributeError) as error:
        raise ConfigError([f"{path}: not the state of a run ({error})"]) from error
    if missing:
        raise ConfigError([f"{path}: has no {', '.join(sorted(missing))}; it was written by another version"])
    return state


def changes(step, state, config, dataset):
    """Sentences for what makes ``config`` and ``dataset`` another run than the one that wrote ``step``."""
    before, now = Config.load(step / "config.json").to_dict(), config.to_dict()
    found = model_changes(before, now, config.model)
    if not config.data.allow_data_change and state["step"]:
        found += [f"{change} (--allow-data-change goes on all the same)" for change in dataset.changes(state["data"])]
    if state["consumed_samples"] != state["step"] * config.run.global_batch_size:
        found.append(f"--batch-tokens {config.run.batch_tokens} is not that of its {state['step']} steps")
    files = read_manifest(step)
    written = next((files[name] for name in TOKENIZER_FILES if name in files), None)
    present = describe(dataset.tokenizer_path) if dataset.tokenizer_path else None
    if written != present and (written or state["step"]):  # an import need not have one
        was, now_is = (entry["sha256"][0][:12] if entry else "absent" for entry in (written, present))
        found.append(f"the tokenizer was {was} and is {now_is} (SHA-256): {dataset.tokenizer_path}")
    return found


def model_changes(before, now, model):
    """Sentences for the fields of ``model`` in which the configurations ``before`` and ``now`` differ."""
    fixed = sorted(entry.name for _, entry in walk(model))
    return [f"{key} was {before[key]} and is {now[key]}" for key in fixed if before[key] != now[key]]


def contradictions(config, dry_run=False):
    """Sentences for flags that contradict the newest checkpoint of the run, or its absence."""
    directory = config.run.checkpoint_dir
    step, model = newest_model(directory) if directory else (None, None)
    if step is None:
        refused = directory and config.reliability.require_checkpoint and not dry_run
        advice = "make the first one with tools/import_hf.py"
        return [f"--require-checkpoint: --checkpoint-dir {directory} has none; {advice}"] if refused else []
    found = model_changes(replace(config, model=model).to_dict(), config.to_dict(), model)
    return [f"cannot go on from {step}: {text}; leave the flag out, or choose a new --checkpoint-dir" for text in found]


def sound_step(directory, journal, progress):
    """The newest step whose files are what its manifest says; None if this run has never saved one.

    Rank 0 names the steps, each rank reads a share of the files, and all of them hear the verdict. Raises ConfigError
    if there were checkpoints and none is sound.
    """
    names = from_rank_0([step.name for step in list_steps(directory)])
    damaged = {}
    for name in names:
        step = Path(directory) / name
        problems = of_all_ranks(verify(step, dist.get_rank(), dist.get_world_size(), progress))
        problems = problems or of_all_ranks(foreign(step))
        if not problems:
            settle(step, damaged, journal)
            return step
        damaged[step] = problems
        for problem in problems:
            say(f"DAMAGED CHECKPOINT: {problem}")
    if damaged:
        advice = "no checkpoint of this run is sound: restore one, or choose a new --checkpoint-dir"
        raise ConfigError([*(problem for problems in damaged.values() for problem in problems), advice])
    lost = from_rank_0(trace_of_checkpoints(directory, journal))
    if lost:
        raise ConfigError([f"{lost}: restore it, or choose a new --checkpoint-dir; this one is not started afresh"])
    return None


def foreign(step):
    """A sentence, or none, if the directory holds another step than its name says."""
    number = step.name.removeprefix("step-")
    try:
        inside = str(read_json(step / "state.json")["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # said by ``read_state``
    return [] if inside == number else [f"{step}: holds step {inside}"]


def settle(sound, damaged, journal):
    """Give the ``damaged`` steps names that no run goes on from, and let ``latest`` name the ``sound`` one."""
    if dist.get_rank() == 0:
        for step, problems in damaged.items():
            aside = free_name(step.with_name(f"damaged-{step.name}"))
            step.rename(aside)
            number = int(step.name.split("-")[1])
            journal.add("damaged", number, f"{step} is set aside as {aside}", problems=problems)
        point_latest(sound)
    dist.barrier()


def free_name(path):
    """``path``, or with a number after it if it is taken."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def trace_of_checkpoints(directory, journal):
    """What shows that there once were checkpoints, where there are none; or None."""
    saved = journal.last("saved")
    begun = journal.last("import")
    if begun and not saved:
        return f"{directory}: the model that was to be imported from {begun['source']} (events.jsonl) is not there"
    if saved:
        return f"{directory}: step {saved['step']} was saved (events.jsonl) and is not there"
    remains = sorted(Path(directory).iterdir()) if Path(directory).is_dir() else []
    if remains:
        return f"{remains[0]}: is all that is left of the run's checkpoints"
    run = Path(directory).parent
    logged, interval = last_step(run / "metrics.jsonl"), saved_every(run / "config.json")
    if interval and logged > 2 * interval:  # the second save waited for the first
        return f"{directory}: empty, though metrics.jsonl knows step {logged} and saves were due every {interval}"
    return None


def saved_every(path):
    try:
        return Config.load(path).reliability.save_interval
    except ConfigError:
        return 0
