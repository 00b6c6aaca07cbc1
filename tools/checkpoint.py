"""Checkpoints of a run: list, verify, show, diff, copy, consolidate.

    python tools/checkpoint.py COMMAND --help

docs/checkpoints.md has an example of each. Where a step is expected, a run directory stands for its newest step. Every
command except `list` and `show --quick` reads every byte of a checkpoint and compares its hashes first.

Exit codes: 0 done, intact or equal; 1 `verify` found damage, or `diff` a difference; 2 an argument or a checkpoint must
be fixed, or a file could not be written, and then nothing was written.
"""

import contextlib
import json
import math
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.checkpoint.directory import list_steps
from moh_lm.cli.command import output_path, run_file
from moh_lm.config import ConfigError
from moh_lm.units import at_least

POSITION = (  # entries of state.json
    "step", "consumed_samples", "optimizer_steps", "rested_steps", "frozen_steps", "l1_steps", "windows",
    "router_shares", "data",
)  # fmt: skip

PATHS = {  # argument -> help
    "RUN": "run directory",
    "RUN_OR_STEP": "step directory, or a run directory for its newest step",
    "A": "the first: a step directory, or a run directory for its newest step",
    "B": "the second, in the same form",
    "STEP": "step directory, or a run directory for its newest step",
    "DEST": "run directory, which receives the step among its checkpoints, or another directory",
    "FILE": "safetensors file to write",
}


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, code=2)


def add_flags(parser):
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def add(command, help, *paths):
        added = commands.add_parser(command, help=help, description=help)
        for path in paths:
            written = path in ("DEST", "FILE")
            type = output_path if written else Path
            added.add_argument(path.lower(), metavar=path, type=type, help=PATHS[path])
        return added

    lists = add("list", "list all checkpoints of a run, also damaged and unfinished ones; checks sizes only", "RUN")
    verifies = add("verify", "read every byte, and check that the model is complete and finite", "RUN_OR_STEP")
    verifies.add_argument("--all", action="store_true", help="every step of the run (default: the newest)")
    shows = add("show", "show configuration, position, data, files, and the hash of the state", "RUN_OR_STEP")
    shows.add_argument("--parameters", action="store_true", help="also show the shape and norms of every parameter")
    shows.add_argument("--quick", action="store_true", help="skip what requires reading the large files")
    compares = add("diff", "compare configuration, position, weights and moments of two checkpoints", "A", "B")
    listed = "number of parameters to list; 0: all (default: %(default)s)"
    compares.add_argument("--top", type=at_least(0), default=20, metavar="N", help=listed)
    for command in (lists, shows, compares):
        command.add_argument("--json", action="store_true", help="print everything as one JSON object")
    add("copy", "copy a step into a run or another directory, and verify both copies", "STEP", "DEST")
    joins = add("consolidate", "write the whole parameters to one file, under their Hugging Face names", "STEP", "FILE")
    joins.add_argument("--moments", action="store_true", help="also write exp_avg/NAME and exp_avg_sq/NAME, in float32")
    dtypes = ("float32", "bfloat16")
    joins.add_argument("--dtype", default="float32", choices=dtypes, help="precision of the weights (default: "
                       "%(default)s)")  # fmt: skip


def run(arguments):
    return COMMANDS[arguments.command](arguments)


def run_list(arguments):
    from tools.checkpoints.describe import describe_entry, words

    directory = arguments.run / "checkpoints"
    if not directory.is_dir():
        raise ConfigError([f"{arguments.run}: is not a run directory, since it has no checkpoints/; give one"])
    pointer = directory / "latest"
    latest = pointer.read_text(errors="replace").strip() if pointer.is_file() else None
    rows = []
    entries = sorted(directory.iterdir(), key=lambda path: (len(path.name), path.name))
    for entry in (entry for entry in entries if entry != pointer):
        with contextlib.suppress(FileNotFoundError):  # a run in progress removes steps, and renames them
            row = describe_entry(entry, latest)
            rows += [row] if os.path.lexists(entry) else []
    steps = [step.name for step in list_steps(directory)]
    if arguments.json:
        print(json.dumps({"directory": str(directory), "latest": latest, "checkpoints": rows}, indent=1))
        return 0
    print(f"{'name':<20}{'bytes':>18}  {'written (UTC)':<21}{'layout':<28}state")
    for row in rows:
        print(f"{row['name']:<20}{row['bytes']:>18,}  {row['written']:<21}{words(row['layout']):<27} {row['state']}")
    resumes = f"a run resumes from {steps[0]} if it is sound" if steps else "there is nothing to resume from"
    if latest not in steps[:1]:
        print(f"latest names {latest}; {resumes}" if latest else f"there is no latest; {resumes}")


def run_verify(arguments):
    from tools.checkpoints import read

    steps, code = read.locate(arguments.run_or_step), 0
    for path in steps if arguments.all else steps[:1]:
        problems = read.find_damage(path)
        if problems and arguments.all and not path.exists():
            continue  # the run has removed it meanwhile
        if not problems:
            try:
                step = read.Step(path, hashed=False)
                problems = list(read.find_gaps(step))
            except ConfigError as error:
                problems = error.problems
        for problem in problems:
            print(f"DAMAGED {problem}")
        if problems:
            code = 1
        else:
            size = sum(entry["bytes"] for entry in step.entries.values())
            print(f"sound   {path}: {len(step.entries)} files, {size:,} bytes, {len(step.shapes)} parameters")
    return code


def run_show(arguments):
    from moh_lm.data.segments import tokens_read
    from tools.checkpoints import read
    from tools.checkpoints.describe import describe_step, when

    step = read.Step(read.locate(arguments.run_or_step)[0], hashed=not arguments.quick)
    state = step.state
    content = {
        "path": str(step.path),
        "step": state["step"],
        "written": when(step.path / "manifest.json"),
        "layout": read.layout(step.config, step.entries),
        "consumed_samples": state["consumed_samples"],
        "tokens": tokens_read(step.segments, state["consumed_samples"], step.config.seq_length),
        "optimizer_steps": state["optimizer_steps"],
        "skipped_steps": state["step"] - state["optimizer_steps"],
        "recently_skipped": step.skipped,
        "data": state["data"],
        "imported": state.get("imported"),
        "config": step.config.to_dict(),
        "files": {name: entry["bytes"] for name, entry in sorted(step.entries.items())},
        "num_parameters": len(step.shapes),
        "elements": sum(map(math.prod, step.shapes.values())),
    }
    if arguments.parameters:
        content["parameters"] = read.norms(step)
    if not arguments.quick:
        content["state_sha256"] = read.state_hash(step)
    if arguments.json:
        print(json.dumps(content, indent=1))
    else:
        print("\n".join(describe_step(step, content)))


def run_diff(arguments):
    from tools.checkpoints import read
    from tools.checkpoints.describe import describe_difference, is_equal

    first, second = (read.Step(read.locate(path)[0]) for path in (arguments.a, arguments.b))
    programs = first.config.program, second.config.program
    if len(set(programs)) > 1:
        others = f"was written by {programs[1]}, and A by {programs[0]}"
        raise ConfigError([f"{second.path}: {others}; give two steps of one program"])
    configs = first.config.to_dict(), second.config.to_dict()
    rows = read.changes(first, second)
    shapes = {name: [step.shapes.get(name) for step in (first, second)] for name in (*first.shapes, *second.shapes)}
    content = {
        "a": str(first.path),
        "b": str(second.path),
        "config": {key: [values, configs[1][key]] for key, values in configs[0].items() if values != configs[1][key]},
        "position": {
            key: [first.state.get(key), second.state.get(key)]
            for key in POSITION
            if first.state.get(key) != second.state.get(key)
        },
        "shapes": {name: [a, b] for name, (a, b) in shapes.items() if a != b},
        "averages": [len(step.reader.averaged) for step in (first, second)],
        "parameters": rows,
    }
    a, b = content["averages"]
    content["equal"] = not content["position"] and not content["shapes"] and a == b and all(map(is_equal, rows))
    if arguments.json:
        print(json.dumps(content, indent=1))
    else:
        print("\n".join(describe_difference(content, arguments.top)))
    return 0 if content["equal"] else 1


def run_copy(arguments):
    from tools.checkpoints.write import copy

    print(f"copied to {copy(arguments.step, arguments.dest)}; the hashes of both copies are right")


def run_consolidate(arguments):
    import torch

    from tools.checkpoints.write import consolidate

    size = consolidate(arguments.step, arguments.file, arguments.moments, getattr(torch, arguments.dtype))
    print(f"wrote {arguments.file}, {size:,} bytes")


COMMANDS = {
    "list": run_list, "verify": run_verify, "show": run_show, "diff": run_diff, "copy": run_copy,
    "consolidate": run_consolidate,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
