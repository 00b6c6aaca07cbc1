"""The output of tools/checkpoint.py: a row for each entry of checkpoints/, the facts of a step, differences of two
steps."""

import contextlib
import time

from moh_lm.checkpoint.directory import STEP_NAME
from moh_lm.checkpoint.manifest import read_entries
from moh_lm.config import Config, ConfigError
from moh_lm.cost.summary import describe_configuration
from moh_lm.vision.config import kind_of_run
from tools.checkpoints import read
from tools.checkpoints.read import KINDS


def describe_entry(entry, latest):
    """A row of the table for any entry of checkpoints/, with 0 bytes if it cannot be entered. Raises FileNotFoundError
    if it is gone."""
    size, written = 0, when(entry)
    with contextlib.suppress(OSError):  # the state says why
        files = [path for path in entry.rglob("*") if path.is_file()] if entry.is_dir() else [entry]
        size = sum(path.stat().st_size for path in files)
        written = when(entry / "manifest.json" if (entry / "manifest.json").exists() else entry)
    return {
        "name": entry.name,
        "bytes": size,
        "written": written,
        "layout": layout_of(entry),
        "latest": entry.name == latest,
        "state": describe_state(entry) + (", latest" if entry.name == latest else ""),
    }


def describe_state(entry):
    if entry.name.endswith(".tmp"):
        return "left over from an interrupted save or removal"
    aside = "" if STEP_NAME.fullmatch(entry.name) else "set aside; "
    try:
        if entry.is_symlink() and not entry.exists():
            return "a link whose target does not exist"
        if not entry.is_dir():
            return "does not belong here"
        expected = {name: content["bytes"] for name, content in read_entries(entry).items()}
        files = [path for path in entry.iterdir() if not path.name.startswith(".") and path.name != "manifest.json"]
        present = {path.name: path.stat().st_size if path.is_file() else None for path in files}
    except ValueError as error:
        return f"{aside}{str(error).removeprefix(f'{entry}/')}"
    except OSError as error:
        return f"{aside}cannot be read ({error.strerror})"
    wrong = sorted(name for name in present.keys() | expected if present.get(name) != expected.get(name))
    return aside + (f"wrong size, missing or foreign: {', '.join(wrong)}" if wrong else "sizes are right")


def layout_of(step):
    """``layout``, or None if it is unknown."""
    try:
        return read.layout(kind_of_run(step).load(step / "config.json"), [path.name for path in step.iterdir()])
    except (ConfigError, OSError, TypeError, AttributeError):
        return None


def words(found):
    if found is None:
        return "-"
    tp, pp, cp, dp, zero_stage = found.values()
    return f"tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "") + f" x dp {dp}, ZeRO-{zero_stage}"


def when(path):
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(path.lstat().st_mtime))


def describe_step(step, content):
    """Lines for the facts that ``run_show`` gathered."""
    yield from describe_configuration(step.config)
    skipped = f"; {content['skipped_steps']} skipped"
    if content["recently_skipped"]:
        skipped += f", lately {', '.join(map(str, content['recently_skipped']))}"
    yield f"checkpoint        {step.path}"
    begins = content["imported"] and content["step"] == 0
    tool = "tools/import_hf.py" if type(step.config) is Config else "tools/import_vision.py"
    writer = tool if begins else f"{words(content['layout'])}, {step.config.run.precision}"
    yield f"written           {content['written']} UTC by {writer}"
    budget = step.config.run.train_iters
    yield f"step              {content['step']:,}" + (f" of {budget:,}" if budget is not None else "")
    if content["imported"]:
        yield f"imported from     {content['imported']['source']}" + ("; no moments yet" if begins else "")
    yield f"consumed          {content['consumed_samples']:,} samples, {content['tokens']:,} tokens"
    yield f"optimizer steps   {content['optimizer_steps']:,}{skipped}"
    yield from (f"data              {describe_segment(segment)}" for segment in step.segments)
    yield f"files             {len(content['files'])}, {sum(content['files'].values()):,} bytes"
    yield from (f"  {name:<32}{size:>18,}" for name, size in content["files"].items())
    yield f"parameters        {content['num_parameters']}, {content['elements']:,} elements"
    for name, facts in content.get("parameters", {}).items():
        shape = " x ".join(map(str, facts["shape"]))
        yield f"  {name:<56}{shape:>18}" + "".join(f"  {kind} {facts[kind]:<10.4g}" for kind in KINDS if kind in facts)
    if "state_sha256" in content:
        yield f"state hash        {content['state_sha256']}"


def describe_segment(segment):
    if "images" in segment:
        return f"{segment['images']:,} images of {segment['classes']:,} classes"
    total = sum(segment["weights"].values())
    shares = ", ".join(f"{name} {weight / total:.2%}" for name, weight in segment["weights"].items())
    return f"from sample {segment['first_sample']:,}: {shares}; seed {segment['seed']}"


def is_equal(row):
    return all(row[kind]["equal"] for kind in KINDS if kind in row)


def describe_difference(content, top):
    """Lines for the differences that ``run_diff`` gathered."""
    yield f"a  {content['a']}"
    yield f"b  {content['b']}"
    for title, key in (("configuration (not counted as a difference)", "config"), ("position", "position")):
        if content[key]:
            yield title
        for name, (a, b) in content[key].items():
            shown = f"{a} -> {b}"
            yield f"  {name}: {shown if len(shown) < 200 else 'differs'}"
    for name, (a, b) in content["shapes"].items():
        yield f"{name}: " + (f"shape {list(a)} -> {list(b)}" if a and b else f"only in {'a' if a else 'b'}")
    a, b = content["averages"]
    if a != b:
        yield f"a has moving averages of {a} parameters, b of {b}"
    changed = [row for row in content["parameters"] if not is_equal(row)]
    kinds = [kind for kind in KINDS if any(kind in row for row in changed)]
    if changed:
        yield "largest change; in parentheses, relative to the largest element of a"
        yield f"  {'parameter':<56}" + "".join(f"{kind:<24}" for kind in kinds).rstrip()
    for row in changed[: top or None]:
        yield f"  {row['name']:<56}" + "".join(f"{describe_change(row[kind]):<24}" for kind in kinds).rstrip()
    if len(changed) > top > 0:
        yield f"  and {len(changed) - top} more changed parameters"
    if len(content["parameters"]) > len(changed):
        yield f"parameters that are equal to the bit: {len(content['parameters']) - len(changed)}"
    yield "equal" if content["equal"] else "different"


def describe_change(found):
    if found["equal"]:
        return "equal to the bit"
    if found["absolute"] is None:
        return "not finite"
    relative = "from zero" if found["relative"] is None else f"{found['relative']:.3g}"
    return f"{found['absolute']:.3g} ({relative})"
