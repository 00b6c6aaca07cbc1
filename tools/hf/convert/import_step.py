"""Writes an imported model as ``checkpoints/step-0`` of a run: complete or absent, like every other step.

    config.json          the model; ``seq_length`` is the source's max_position_embeddings, the rest are defaults
    state.json           the state of a run before its first step, and ``imported``: what was read, and how
    TOKENIZER_FILES      those of the data to come, if they are known; else the source's, unless the vocabulary grows
    rank-N.safetensors   fp32 masters, about FILE_BYTES in each file, so that several ranks verify them at once; no
                         moments: those of Adam are zero before the first step (moh_lm.checkpoint.fragments)
"""

import json
import math

import torch

from moh_lm.checkpoint.directory import point_latest
from moh_lm.checkpoint.fragments import MOMENTS, safetensors_header
from moh_lm.checkpoint.manifest import HashedFile, write_manifest
from moh_lm.data.files import json_bytes
from moh_lm.monitor.events import EventLog
from moh_lm.run.state import first_state
from moh_lm.supervise.run_directory import lock_run_directory, make_run_directory
from tools.checkpoints.write import HEADER_BYTES, refuse_without_room, whole_or_absent
from tools.hf.convert.export_files import plan_shards

FILE_BYTES = 1 << 32


def output_problems(run):
    """Sentences for what is wrong with ``run``; none if it is absent or only holds leftovers of a failed import."""
    try:
        entries = {path.name for path in run.iterdir()} if run.exists() else set()
        steps = [path.name for path in (run / "checkpoints").iterdir()] if "checkpoints" in entries else []
    except OSError as error:
        return [f"--output {run}: is not a readable directory ({error.strerror}); give another one"]
    odd = sorted(entries - {"checkpoints", "events.jsonl", ".lock"})
    odd += sorted(f"checkpoints/{name}" for name in steps if name != "copy-step-0.tmp")
    return [f"--output {run}: has {odd[0]} already; give a new directory"] if odd else []


def write_step(run, config, parts, facts, tokenizer, progress):
    """Write step-0 of the run directory ``run`` and return its path.

    config: Config. parts: [Part] (import_weights.py). facts: JSON-able, for state.json and events.jsonl.
    tokenizer: {file name: bytes}. progress: takes the bytes of every block. Raises ConfigError or OSError, and nothing
    is left under the final name then.
    """
    refuse_without_room(run, 4 * sum(math.prod(part.shape) for part in parts) + HEADER_BYTES)
    make_run_directory(run)
    final = run / "checkpoints" / "step-0"
    with lock_run_directory(run):
        # A run that finds this event but no step does not start from random weights.
        told = {key: value for key, value in facts.items() if key != "tokenizer"}  # the tokenizer may be long
        EventLog(run, writes=True).add("import", 0, f"importing {facts['source']} as {final}", **told)
        with whole_or_absent(final) as temporary:
            entries = {}
            by_name = {part.name: part for part in parts}
            sizes = {name: 4 * math.prod(part.shape) for name, part in by_name.items()}
            for number, names in enumerate(plan_shards(sizes, FILE_BYTES)):
                name = f"rank-{number}.safetensors"
                entries[name] = write_parts(temporary / name, [by_name[n] for n in names], progress)
            texts = {"config.json": json_bytes(config.to_dict())}
            texts["state.json"] = json_bytes(first_state(config.model, facts))
            for name, content in (texts | tokenizer).items():
                with HashedFile(temporary / name) as file:
                    file.write(content)
                entries[name] = file.entry
            write_manifest(temporary, entries)
        point_latest(final)
    return final


def write_parts(path, parts, progress):
    """Write whole parameters as one rank file; returns the manifest's entry."""
    addresses = {
        part.name: {"whole_shape": part.shape, "partition": None, "start": 0, "length": math.prod(part.shape)}
        for part in parts
    }
    metadata = {"fragments": json.dumps(addresses), "zero": json.dumps(MOMENTS)}
    described = {f"master/{part.name}": (torch.float32, [math.prod(part.shape)]) for part in parts}
    with HashedFile(path) as file:
        file.write(safetensors_header(described, metadata))
        for part in parts:
            for block in part.blocks():
                file.write(block.contiguous().flatten().view(torch.uint8).numpy())
                progress(block.nbytes)
    return file.entry
