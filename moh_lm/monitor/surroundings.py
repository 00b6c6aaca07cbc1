"""The environment of a run: its devices and the versions of its libraries, for events.jsonl and the run report."""

import contextlib
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

from moh_lm.kernels.measured import machine
from moh_lm.training.deepspeed import PACKAGE

ROOT = Path(__file__).resolve().parents[2]


def surroundings(device):
    """Return {"device": name, "ranks": number, "versions": {package: version}}, and "commit" in a git checkout."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", PACKAGE)}}
    facts, found = {"device": machine(device), "ranks": dist.get_world_size(), "versions": versions}, commit()
    return facts | ({"commit": found} if found else {})


def commit():
    """Return the commit of this checkout, None if git does not know it. Uncommitted changes are not noticed."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (ROOT / ".git").exists():
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return None
