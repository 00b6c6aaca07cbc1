"""state.json of a checkpoint: what a run needs to resume besides its weights, their moments and its configuration.

    step, consumed_samples    iterations done, and the samples that they read
    optimizer_steps           iterations whose gradients were applied
    rested_steps              how many of these were in a dense warm-up: Adam does not count them for routers
    frozen_steps              how many came before the end of --train-only: Adam counts them for routers only
    router_shares             for each layer with routed heads, the share of a step's tokens that selected each of them
    l1_steps                  with routing relu: n of the coefficient that holds its gates down
    windows                   with --window-strategy entropy: windows and entropies of the layers
    guard                     the skipped steps, and the window in which spikes are detected (moh_lm.training.guard)
    interval                  sums since the last line of the log (moh_lm.monitor.accumulator)
    alarms                    alarms that have fired (moh_lm.monitor.alarms)
    data                      how much of each shard was read (moh_lm.data.segments); bos_id if documents begin with one
    imported                  only in a run that began with an imported model: what the import recorded about it

``RunState`` writes and reads it; other code only knows the keys that it reads itself.
"""

import math
import textwrap

from moh_lm.config import ConfigError, ReliabilityConfig
from moh_lm.parsing import read_json
from moh_lm.training.guard import Guard

KEYS = {"step", "consumed_samples", "optimizer_steps", "router_shares", "guard", "interval", "alarms", "data"}
LARGEST = 3.4028235e38  # largest float32; losses and norms are float32


class RunState:
    """Everything that the steps of a run change: the given parts, ``step`` (iterations done) and ``imported``."""

    def __init__(self, config, dataset, engine, accumulator, alarms):
        self.config = config
        self.dataset = dataset
        self.engine = engine
        self.accumulator = accumulator
        self.alarms = alarms
        self.step = 0
        self.imported = None

    def advance(self):
        """Count one more iteration."""
        self.step += 1

    def capture(self):
        """Return the state, JSON-able. It is the same on every rank except for the alarms; rank 0 writes it."""
        consumed, routers = self.config.run.samples_after(self.step), self.engine.router_sums
        optimizer = self.engine.optimizer
        frozen = optimizer.frozen if self.config.optimizer.train_only == "all" else optimizer.steps
        return {
            "step": self.step,
            "consumed_samples": consumed,
            "optimizer_steps": optimizer.steps,
            "router_shares": [share.tolist() for share in routers.shares],
            "guard": self.engine.guard.state(),
            "interval": self.accumulator.state(),
            "alarms": self.alarms.state(),
            "data": self.dataset.state(consumed),
            **({"rested_steps": optimizer.rested} if optimizer.rested else {}),
            **({"frozen_steps": frozen} if frozen else {}),
            **({"imported": self.imported} if self.imported else {}),
            **self.engine.state(),
            **({"l1_steps": int(routers.l1_steps)} if self.config.model.heads.routing == "relu" else {}),
        }

    def restore(self, saved, changes=()):
        """Restore what ``capture`` returned. Returns a sentence for each way in which the data have changed.

        changes: more such sentences, about changes that the data set does not know.
        """
        self.step, self.imported = saved["step"], saved.get("imported")
        layers = len(self.engine.router_sums.shares)  # 0 if a mixture resumes without routers
        shares = saved["router_shares"][:layers]
        steps = [saved.get(name, 0) for name in ("l1_steps", "rested_steps", "frozen_steps")]
        self.engine.adopt(saved["optimizer_steps"], shares, *steps)
        self.engine.restore(saved)
        if self.step == 0:  # an imported model has read nothing yet
            return []
        self.engine.guard.restore(saved["guard"])
        changes = [*changes, *self.dataset.changes(saved["data"], saved["consumed_samples"])]
        same_data = not changes and sorted(self.dataset.shares) == sorted(saved["alarms"]["unseen"])
        if same_data:
            self.accumulator.restore(saved["interval"])
        self.alarms.restore(saved["alarms"], same_data)
        self.dataset = self.dataset.continue_from(saved["data"], saved["consumed_samples"])
        return changes


def first_state(model, imported):
    """Return the state of a run that begins with an imported ``model`` (``ModelConfig``). imported: JSON-able."""
    layers = model.routed_layers()
    return {
        "step": 0,
        "consumed_samples": 0,
        "optimizer_steps": 0,
        "router_shares": [[layer.uniform_load] * layer.num_routed for layer in layers],
        "guard": Guard(ReliabilityConfig()).state(),
        "interval": None,
        "alarms": None,
        "data": {"segments": [], "units": {}},
        "imported": imported,
    }


def read_state(step):
    """Return the state in the step directory ``step``. Raises ConfigError if it is not a state."""
    path = step / "state.json"
    try:
        state = read_json(path)
        missing = KEYS - state.keys()
    except (ValueError, AttributeError) as error:
        raise ConfigError([f"{path}: is not the state of a run ({error})"]) from error
    if missing:
        raise ConfigError([f"{path}: has no {', '.join(sorted(missing))}; it was written by another version"])
    return state


def is_count(value, most=2**53):
    return type(value) is int and 0 <= value <= most


def are_numbers(values, least=-math.inf, most=math.inf):
    return all(type(value) in (int, float) and math.isfinite(value) and least <= value <= most for value in values)


def shares_fit(state, model):
    shares = state["router_shares"]
    fits = [len(share) for share in shares] == [layer.num_routed for layer in model.routed_layers()]
    return fits and all(are_numbers(share, 0, 1 + 1e-9) for share in shares)


def windows_fit(state, model):
    if "windows" not in state:
        return True
    widths, entropies = state["windows"]
    sizes = {len(widths), len(entropies)} == {model.num_layers}
    return sizes and all(map(is_count, widths)) and are_numbers((value or 0 for value in entropies), 0)


def guard_fits(state, model):
    losses, norms = state["guard"]["history"]["loss"], state["guard"]["history"]["gradient norm"]
    skipped = state["guard"]["skipped"]
    ascends = all(is_count(step, state["step"]) for step in skipped) and skipped == sorted({*skipped})
    in_range = are_numbers(losses, -LARGEST, LARGEST) and are_numbers(norms, 0, LARGEST)
    return ascends and len(losses) == len(norms) and in_range


def interval_fits(state, model):
    sums = state["interval"]
    if sums is None:
        return state["step"] == 0
    sources = len(state["alarms"]["unseen"]) or len(sums["losses"])  # images have no shares of sources
    rows = {len(sums[name]) for name in ("losses", "routers", "skipped_sequences")} == {sources}
    counts = [sums["tokens"], sums["skipped_steps"], *sums["not_finite"].values()]
    return (
        rows and {len(row) for row in sums["losses"]} == {3} and len({len(row) for row in sums["routers"]}) == 1
        and all(map(are_numbers, sums["losses"])) and all(map(is_count, counts))
        and all(type(value) in (int, float) for row in sums["routers"] for value in row)  # NaN: unknown
        and are_numbers(sums["skipped_sequences"], 0)
    )  # fmt: skip


def alarms_fit(state, model):
    alarms = state["alarms"]
    if alarms is None:
        return state["step"] == 0
    conditions = [*alarms["streaks"], *alarms["ringing"]]
    lists = alarms["streaks"], alarms["ringing"], alarms["history"]
    return (
        all(len({tuple(entry[:-1]) for entry in entries}) == len(entries) for entries in lists)  # each only once
        and all(len(condition) == 4 and is_count(condition[3]) for condition in conditions)
        and all(len(entry) == 3 and are_numbers(entry[2]) for entry in alarms["history"])
        and are_numbers(alarms["unseen"].values(), 0)
    )


def data_fits(state, model):
    segments, units = state["data"]["segments"], state["data"]["units"]
    if "bos_id" in state["data"] and not is_count(state["data"]["bos_id"], model.vocab_size - 1):
        return False
    if not segments or "images" in segments[0]:  # an import has none, and those of images have other entries
        return len(segments) == (state["step"] > 0) and isinstance(units, dict)
    firsts = [segment["first_sample"] for segment in segments]
    hashes = [*units.values(), *(segment["shards"] for segment in segments)]
    if not all(isinstance(value, str) for named in hashes for value in named.values()):
        return False
    in_order = firsts == sorted({0, *firsts}) and is_count(firsts[-1], state["consumed_samples"])
    known = units.keys() >= segments[-1]["weights"].keys()  # the other mix of a decay may have more sources
    return in_order and known and all(map(segment_fits, segments))


def segment_fits(segment):
    weights, consumed = segment["weights"], segment["consumed"]
    return (
        segment["seq_length"] > 0 and all(map(is_count, [segment["seq_length"], *weights.values(), *consumed.values()]))
        and any(weights.values()) and weights.keys() == consumed.keys() == segment["shards"].keys()
        and type(segment["seed"]) is int and are_numbers([segment["validation_fraction"]], 0, 1)
    )  # fmt: skip


RULES = {  # key -> (whether its value fits a state and the model, what the value must be)
    "step": (lambda state, model: is_count(state["step"]), "a number of iterations"),
    "consumed_samples": (lambda state, model: is_count(state["consumed_samples"]), "a number of samples"),
    **{
        key: (lambda state, model, key=key: is_count(state.get(key, 0), state["step"]), "between 0 and step")
        for key in ("optimizer_steps", "rested_steps", "frozen_steps")
    },
    # Runs before 2026-11-28 did not clamp the number at 0; the first step after a resume does.
    "l1_steps": (lambda state, model: is_count(abs(state.get("l1_steps", 0)), state["step"]), "at most step"),
    "router_shares": (shares_fit, "a share of 0 to 1 for each routed head of each layer that has some"),
    "windows": (windows_fit, "a window and an entropy for each layer"),
    "guard": (guard_fits, "losses and norms of equally many steps, and skipped steps in order"),
    "interval": (interval_fits, "sums for each source"),
    "alarms": (alarms_fit, "alarms with their counts"),
    "data": (data_fits, "segments in order, with counts for each source, and bos_id, if any, in the vocabulary"),
}


def state_problems(state, model):
    """Return sentences for values of a state, as returned by ``read_state``, that no run of ``model`` writes."""
    found = []
    for key, (fits, rule) in RULES.items():
        try:
            fine = fits(state, model)
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError):
            fine = False
        if not fine:
            found.append(f"{key} {textwrap.shorten(str(state.get(key)), 60)}: must be {rule}")
    return found
