"""Resuming from the newest intact checkpoint of a run, which moh_lm.run.intact finds.

A resume may change some settings, records which of them it changed, and forgets the measurements that are no longer
comparable. It refuses another tokenizer, and unless a flag allows it other data or another model.
"""

import contextlib
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from moh_lm.checkpoint.directory import list_steps, newest_model, reading, refuse_dangling, remove_leftovers
from moh_lm.checkpoint.fragments import load_fragments
from moh_lm.checkpoint.manifest import NO_SUCH_FILE, describe, is_whole, read_entries
from moh_lm.checks.layout import uneven_batch
from moh_lm.checks.model import spread_problems
from moh_lm.config import NOT_STATIC, TRAINING_ONLY, UNNAMED, Config, ConfigError, ParallelConfig, flag, raise_any, walk
from moh_lm.cost.summary import describe_switch
from moh_lm.data.shards import TOKENIZER_FILES
from moh_lm.model.initial_gates import gates_of_one
from moh_lm.monitor.alarms import BALANCE, DRIFT, THROUGHPUT
from moh_lm.parallel.consensus import all_ranks_or_raise, on_rank_zero, together
from moh_lm.parsing import read_json
from moh_lm.run.intact import sound_step
from moh_lm.run.state import read_state, state_problems
from moh_lm.supervise.processes import log_rank0

SPEED = (  # fields that change how many tokens a device computes in a second
    *(entry.name for _, entry in walk(ParallelConfig())), "micro_batch_size", "seq_length", "precision", "recompute",
    "compile", "fused_loss", "fused_router", "fused_projections", "cuda_graph", "attention_backend", "head_selection",
    "train_only", "optimizer", "workers",
)  # fmt: skip
# Of a killed start.
LEFTOVER = re.compile(r"\.seen-\d+|((config|events|metrics|samples|wandb)\.jsonl?|latest|report\.html)\.tmp-\d+")
SET_ASIDE = "move the step out of the run directory, and the run resumes from the one before it"
SCALED = (  # how a language model whose gates are far from 1 loses its routers
    "tools/export_hf.py, then tools/import_hf.py --head-selection all --allow-routing-change scale the projections by "
    "them"
)
OF_TRAINING = (  # fields that change how a run is trained, besides those of the optimizer
    "train_iters", "train_tokens", "batch_tokens", "batch_warmup", "precision", "seed", "absurd_factor", "spike_sigmas",
    "spike_window", "on_spike", "ema_decay",
)  # fmt: skip


def resume(task, state, event_log, progress):
    """Fill ``state``, a ``RunState`` of moh_lm.run.state, from the run's newest intact checkpoint, if there is one.

    progress: called while files are read. Raises ConfigError if the run cannot resume with this configuration or these
    data.
    """
    config, directory = state.config, Path(state.config.run.checkpoint_dir)
    on_rank_zero(lambda: tidy(directory))
    step = sound_step(directory / "checkpoints", event_log, progress)
    if step is None:
        return
    saved, was, before = all_ranks_or_raise(lambda: checked_state(task, step, config, state.dataset))
    now = config.to_dict()
    chunk = config.run.micro_batch_size * config.data_parallel_size(dist.get_world_size())
    raise_any(uneven_batch(config, chunk, saved["step"]))  # the step may be older than the newest one
    begins = saved["step"] == 0
    for key in now:
        if before[key] != now[key] and not begins:
            current, former = (value if value != "" else "none" for value in (now[key], before[key]))
            log_rank0(f"resuming with another {key}: {current} instead of {former}")
    changes = differing([name for name in names_of(config.model) if name not in config.of_loss], before, now)
    losses = {} if begins else differing(config.of_loss, before, now)
    training = {} if begins else differing(of_training(config), before, now)
    fragments = list(state.engine.fragments())
    averaged = all_ranks_or_raise(lambda: together(partial(load, step, fragments), progress))
    for event, fields in (("routing changed", changes), ("loss changed", losses), ("training changed", training)):
        if fields:
            event_log.add(event, saved["step"], f"resuming with another {', '.join(fields)}", changes=fields)
    if not begins and averaged != (state.engine.ema_decay > 0):
        log_rank0(f"{'the' if averaged else 'a'} moving average of the weights {'ends' if averaged else 'begins'} here")
    changed = state.restore(saved, of_data(config, before))
    if changed:
        event_log.add("data changed", state.step, "\n".join(["resuming with other data:", *changed]), changes=changed)
    if changed or changes or losses or before["train_only"] != now["train_only"]:
        state.engine.guard.forget()  # after such changes, loss and norm are not comparable
        state.alarms.forget(BALANCE, DRIFT)
    if differing(SPEED, before, now) or all_ranks_or_raise(lambda: ranks_of(step)) != dist.get_world_size():
        state.alarms.forget(THROUGHPUT)
    if warmup_is_cut(was.model, config.model, saved["step"]):
        state.accumulator.clear()  # earlier steps have no head metrics, later ones do
        state.alarms.forget(THROUGHPUT)
        text = f"step {saved['step']}: the dense warm-up is over: {describe_switch(config.model)}"
        event_log.add("dense warm-up over", saved["step"], text)
    how = f"starting from {step}, imported from {state.imported['source']}" if begins else f"resumed {step}"
    event_log.add("resumed", state.step, how)


def differing(names, before, now):
    """Return {field: [value before, value now]} for the fields in ``names`` that differ."""
    return {name: [before[name], now[name]] for name in names if before.get(name) != now.get(name)}


def of_training(config):
    """Return the names of fields that change how the run is trained, but not its losses, model or data."""
    names = (*OF_TRAINING, *(entry.name for _, entry in walk(config.optimizer)))
    return [name for name in names if name not in config.of_loss]


def ranks_of(step):
    """Return the number of ranks of the run that wrote a step directory, since each wrote a file."""
    return sum(name.startswith("rank-") for name in read_entries(step))


def of_data(config, before):
    """Return a sentence for each field about the data that differs from ``before``, {field: value}."""
    fields = differing(config.of_data, before, config.to_dict())
    return [f"{flag(name)} was {was} and is {now}" for name, (was, now) in fields.items()]


def warmup_is_cut(was, model, step):
    """Return whether the model ``was`` in a dense warm-up at ``step`` that the current configuration ends earlier."""
    last = step - 1
    return model.heads.head_selection == "mixture" and was.after(last) != was and model.after(last) == model


def tidy(directory):
    """Remove what an earlier start that crashed left behind in a run directory."""
    remove_leftovers(directory / "checkpoints")
    for leftover in (*directory.glob("*"), *directory.glob("checkpoints/latest.tmp-*")):
        if LEFTOVER.fullmatch(leftover.name) and leftover.is_file():
            leftover.unlink(missing_ok=True)


def load(step, fragments, progress):
    """Call ``load_fragments``. Raises ConfigError if the files do not hold what they should."""
    try:
        return load_fragments(step, fragments, progress)
    except ValueError as error:
        raise ConfigError([f"{step}: {error}; {SET_ASIDE}"]) from error


def checked_state(task, step, config, dataset):
    """Return the state in the directory ``step``, the configuration that wrote it, and its {field: value}.

    Raises ConfigError if the state has values that no run of its model writes, or if ``config`` cannot resume from it.
    """
    saved, was, now = read_state(step), type(config).load(step / "config.json"), config.to_dict()
    raise_any([f"{step / 'state.json'}: {problem}; {SET_ASIDE}" for problem in state_problems(saved, was.model)])
    before = was.to_dict() | {name: now[name] for name in config.moving}  # initial values; the state has current ones
    refuse_changes(task, step, saved, before, config, dataset)
    return saved, was, before


def refuse_changes(task, step, saved, before, config, dataset):
    """Raise ConfigError if ``config`` and ``dataset`` belong to another run than the one that wrote ``step``.

    saved: the state of ``step``. before: its configuration, {field: value}.
    """
    found = model_changes(before, config)
    if not config.data.allow_data_change and saved["step"]:
        changes = [*of_data(config, before), *dataset.changes(saved["data"], saved["consumed_samples"])]
        found += [f"{change} (--allow-data-change resumes anyway)" for change in changes]
    trained_only = before["train_only"], config.optimizer.train_only
    was_muon = before["optimizer"] == "muon" and trained_only == ("all", "all")  # else moments restart at 0
    if saved["step"] and was_muon and config.optimizer.optimizer != "muon":
        found.append("--optimizer adamw needs second moments, and Muon kept none for its matrices")
    if saved["consumed_samples"] != config.run.samples_after(saved["step"]):
        found.append(f"{config.run.batch_given} differs from the batch size of its {saved['step']} steps")
    found += task.resume_problems(config, saved, before)
    found += tokenizer_changes(step, saved, dataset.tokenizer_path)
    if found:
        raise ConfigError(
            [f"cannot resume from {step}: {text}; restore it, or choose a new --checkpoint-dir" for text in found]
        )


def tokenizer_changes(step, saved, path):
    """Return a sentence if the tokenizer of the data, at ``path`` or None, is not that of ``step``.

    A step of a run holds the tokenizer of its data. An import holds none, or the one with which the data must have been
    made, or its source's tokenizer.json, which does not rule out data that were made with a tokenizer.model.
    """
    files = read_entries(step)
    name = next((name for name in TOKENIZER_FILES if name in files), None)
    written, present = files.get(name), describe(path) if path else None
    must_agree = saved["step"] or name == TOKENIZER_FILES[0] or (path and path.name == name)
    if not must_agree:
        return []
    config = path and path.with_name(TOKENIZER_FILES[2])  # it says how documents end
    if written == present and saved["step"] and config and TOKENIZER_FILES[2] in files and config.exists():
        written, present = files[TOKENIZER_FILES[2]], describe(config)
    if written == present:
        return []
    was, now_is = (entry["sha256"][0][:12] if entry else "absent" for entry in (written, present))
    hint = f" (tools/import_hf.py --tokenizer {path.parent} is for these data)" if path and not saved["step"] else ""
    where = f"{path}{hint}" if path else "the data directory has none"
    return [f"the tokenizer was {was} and is {now_is} (SHA-256): {where}"]


def model_changes(before, config):
    """Return sentences for the model's fields in which ``config`` differs from ``before``, {field: value}.

    Changes to the training of routers alone, and dropping the routers of a mixture, can be allowed by a flag.
    """
    now, found = config.to_dict(), []
    for key in names_of(config.model):
        if key in config.moving or config.may_change(key, before[key]):
            continue
        dropped = key == "head_selection" and before[key] == "mixture"
        if before[key] == now[key] or (config.run.allow_routing_change and key in TRAINING_ONLY):
            continue
        hint = " (--allow-routing-change resumes anyway)" if dropped or key in TRAINING_ONLY else ""
        if dropped and not gates_of_one(type(config).from_dict(before).model):
            hint = f", but gates of --routing {before['routing']} are far from 1"
            hint += f" ({SCALED})" * isinstance(config, Config)
        elif dropped and before.get("routing_unit") == "head_in_group" and now[key] == "static":
            hint = f": {NOT_STATIC}"
        elif dropped and config.run.allow_routing_change:
            continue
        found.append(f"{key} was {before[key]} and is {now[key]}{hint}")
    return found


def names_of(model):
    return sorted(entry.name for _, entry in walk(model))


def contradictions(config, dry_run=False):
    """Return sentences for flags that contradict the newest checkpoint of the run, or its absence."""
    directory = config.run.checkpoint_dir
    if not directory:
        return []  # moh_lm.checks says so
    program = program_of(directory)
    if program not in (None, config.program):
        return [f"--checkpoint-dir {directory}: holds a run of {program}; use that command, or choose a new directory"]
    refuse_dangling(Path(directory) / "checkpoints")
    step, model = newest_model(directory, type(config))
    if step is None:
        refused = config.reliability.require_checkpoint and not dry_run
        advice = "make the first one with tools/import_hf.py, or tools/import_vision.py"
        return [f"--require-checkpoint: --checkpoint-dir {directory} has none; {advice}"] if refused else []
    found = model_changes(replace(config, model=model).to_dict(), config)
    remedy = "leave the flag out, or choose a new --checkpoint-dir"
    return [f"cannot resume from {step}: {text}; {remedy}" for text in found]


def refuse_resume(task, config, dataset):
    """Return the step from which ``resume`` would start, or None, for a dry run on one rank. Raises ConfigError if it
    would refuse this configuration or these data."""
    checkpoints = Path(config.run.checkpoint_dir) / "checkpoints"
    try:
        step = next(filter(is_whole, list_steps(checkpoints)), None)  # a start sets others aside
        refuse_dangling(checkpoints, step)
        if step is not None:
            with reading(step):
                checked_state(task, step, config, dataset)
    except OSError as error:
        raise ConfigError([f"{error.filename}: cannot be read ({error.strerror}); make it readable"]) from error
    return step


def with_model_of_run(config):
    """Return ``config`` with the model of the run. Conflicts between a refused flag and the run's other settings, such
    as a window for each of its layers, are then not reported as mistakes of the user."""
    model = newest_model(config.run.checkpoint_dir, type(config))[1]
    return config if model is None else replace(config, model=model)


def tolerated(config):
    """Return sentences that refuse a new model, but not this run, which was begun before they did."""
    model = newest_model(config.run.checkpoint_dir)[1] if isinstance(config, Config) else None
    return spread_problems(model) if model else []


def program_of(directory):
    """Return the command of the run in a directory, or None. Raises ConfigError for a file that cannot be read."""
    path = Path(directory) / "checkpoints"
    try:
        steps = list_steps(path)
        for path in [*(step / "config.json" for step in steps), Path(directory) / "config.json"]:
            with contextlib.suppress(*NO_SUCH_FILE, ValueError, AttributeError):
                return read_json(path).get("program", UNNAMED)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); make it readable"]) from error
    return None
