"""A trainer that trains nothing."""

import pytest

# Stands for moh_lm.pretrain: leaves what it was given in a file of its rank, and exits with the code asked for, or with
# 75 after Ctrl-C or SIGTERM; notes that its terminal hung up.
TRAINER = """
import json, os, signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
signal.signal(signal.SIGTERM, lambda *_: open("ended", "w").close() or sys.exit(75))
signal.signal(signal.SIGHUP, lambda *_: open("hung-up", "w").close())
call = {"arguments": sys.argv[1:], "process": os.getpid()}
call |= {"port": os.environ.get("MASTER_PORT"), "address": os.environ.get("MASTER_ADDR")}
call |= {"path": os.environ.get("PYTHONPATH", ""), "secret": os.environ.get("MOH_LM_SECRET", "")}
open(f"rank-{os.environ.get('RANK', 0)}.json", "w").write(json.dumps(call))
while "--wait" in sys.argv:
    signal.pause()
sys.exit(int(sys.argv[sys.argv.index("--exit-code") + 1]) if "--exit-code" in sys.argv else 0)
"""


@pytest.fixture
def trainer(tmp_path):
    """A working directory whose package moh_lm is the stub; "a b" in its name as a path that users have."""
    directory = tmp_path / "a b"
    (directory / "moh_lm").mkdir(parents=True)
    (directory / "moh_lm" / "__init__.py").touch()
    (directory / "moh_lm" / "pretrain.py").write_text(TRAINER)
    return directory
