"""The files that one rank adds to a checkpoint, written by a thread while training may continue."""

import functools
import shutil
import threading
from pathlib import Path

import torch.distributed as dist

from moh_lm.checkpoint.fragments import write_safetensors
from moh_lm.checkpoint.manifest import HashedFile
from moh_lm.data.files import json_bytes
from moh_lm.data.shards import tokenizer_files
from moh_lm.units import binary_size


class Writing(threading.Thread):
    """Writes one rank's files of a step. Afterwards it has ``entries`` for the manifest, or ``problems``.

    progress: called after each of the ``blocks`` that have been written. problems: reasons to write nothing.
    """

    def __init__(self, directory, progress, problems, *work):
        super().__init__(target=self.write, args=work, daemon=True)  # a dying run does not wait for an unfinished step
        self.directory, self.progress = directory, progress
        self.entries, self.problems = {}, problems
        self.blocks = 0
        self.start()

    def advance(self):
        self.blocks += 1
        self.progress()

    def write(self, tensors, metadata, texts, need):
        if self.problems:
            return
        name = f"rank-{dist.get_rank()}.safetensors"
        try:
            self.entries[name] = write_safetensors(self.directory / name, tensors, metadata, self.advance)
            for text_name, content in texts.items():
                with HashedFile(self.directory / text_name) as file:
                    file.write(content)
                self.entries[text_name] = file.entry
        except OSError as error:
            self.problems.append(describe_failure(error, self.directory, need))
        except Exception as error:  # whatever it is, the step must not count
            self.problems.append(f"{self.directory / name}: {type(error).__name__}: {error}")


def describe_failure(error, directory, need):
    """Return a sentence with the file, the reason, and the sizes."""
    reason = (error.strerror or str(error)).lower()
    try:
        free = binary_size(free_bytes(directory))
    except OSError:  # the file system is away
        free = "an unknown number of bytes"
    return (
        f"{error.filename or directory}: {reason}: the checkpoint takes {binary_size(need)} and {free} are left; "
        "the partial one is removed"
    )


def rank_0_files(step, config, state, tokenizer):
    """Return {name: content} of the files that are the same for all ranks."""
    files = {"config.json": json_bytes(config.to_dict()), "state.json": json_bytes({"step": step, **state})}
    return files | tokenizer_contents(tokenizer)


@functools.cache
def tokenizer_contents(tokenizer):
    """Return {name: content} of the files beside a ``tokenizer``, {} for None. They are read once: at a save, the data
    may be out of reach."""
    paths = tokenizer_files(Path(tokenizer).parent) if tokenizer else ()
    return {path.name: path.read_bytes() for path in paths}


def free_bytes(directory):
    """Return the free bytes of the file system of ``directory``, which need not exist yet."""
    path = Path(directory)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
