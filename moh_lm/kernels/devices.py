"""Whether runs on this machine compute on a GPU, and what compiling for one needs."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch


def on_gpu():
    """Return whether runs on this machine use its GPUs; DeepSpeed's DS_ACCELERATOR=cpu keeps them off."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def missing_for_triton():
    """Return what Triton lacks here, or None. It compiles the code that launches kernels while a program runs; on a GPU
    torch.compile uses it too."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler; install gcc"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return None if header.exists() else f"{header}; install python3-dev"
