"""The space that a checkpoint takes, and whether the disk has it before a run begins.

A run that found its disk full only at its first save would lose the steps before it.
"""

import tempfile
from pathlib import Path

import torch.distributed as dist

from moh_lm.checkpoint.directory import list_steps
from moh_lm.checkpoint.writing import free_bytes, tokenizer_contents
from moh_lm.config import ConfigError
from moh_lm.parallel.consensus import all_ranks_or_raise, from_all_ranks, on_rank_zero
from moh_lm.units import binary_size, counted

FILE_OVERHEAD = 1 << 20  # generous limit for a rank's bytes besides its tensors and the tokenizer


def needed_bytes(fragments, tokenizer):
    """Return an upper limit for the bytes of a checkpoint: the files of all ranks, and the tokenizer of rank 0."""
    owned = [tensor for fragment in fragments if not fragment.is_copy for tensor in fragment.tensors.values()]
    files = tokenizer_contents(tokenizer) if dist.get_rank() == 0 else {}
    sizes = [*map(len, files.values()), *(tensor.nbytes for tensor in owned)]
    return sum(from_all_ranks(FILE_OVERHEAD + sum(sizes)))


def check_space(directory, fragments, tokenizer):
    """Raise ConfigError unless every rank can write there and there is room for two more checkpoints, or for one more
    if one exists."""
    need = needed_bytes(fragments, tokenizer)
    steps, free = on_rank_zero(lambda: ([step.name for step in list_steps(directory)], free_bytes(directory)))
    copies = 1 if any(step != "step-0" for step in steps) else 2  # step 0 stays
    if free < copies * need:
        given, left = f"--checkpoint-dir {Path(directory).parent}", f"no space left: {binary_size(free)} are free"
        must_fit = f"{counted(copies, 'checkpoint')} of {binary_size(need)} must fit"
        raise ConfigError([f"{given}: {left}, and {must_fit}; make room, or give a directory on a larger disk"])
    on_rank_zero(lambda: Path(directory).mkdir(parents=True, exist_ok=True))
    all_ranks_or_raise(lambda: write_a_byte(directory))


def write_a_byte(directory):
    """Raise OSError, with the path, if no file can be written in ``directory``. Leaves no file."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(b"0")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
