"""Which version of this code is running."""

import functools
import subprocess
from pathlib import Path


@functools.cache
def commit():
    """The commit that this checkout is at; None where git does not tell. Changes beside it are not seen."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
