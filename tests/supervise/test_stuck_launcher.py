"""A torchrun that hangs is ended, and no other."""

import signal
import subprocess
import sys
import threading

import pytest

LAUNCHER = """
import os, subprocess, sys
leave = '''
import os, time
from moh_lm.supervise.stuck_launcher import end_stuck_launcher
end_stuck_launcher(0.1)
time.sleep(0.5)  # a process of much memory takes its time to end
os._exit(69)
'''
rank = subprocess.Popen([sys.executable, "-c", leave], env={**os.environ, "TORCHELASTIC_RUN_ID": "1"}, stderr=2)
if sys.argv[1] == "alive":
    code = rank.wait()
    os.close(1), os.close(2)
    sys.stdin.read()  # until the helper of the rank has ended
    sys.exit(code)
os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # leaves it as it is
sys.stdin.read()
"""


@pytest.mark.parametrize("state, code", [("stuck", -signal.SIGKILL), ("alive", 69)])
def test_only_a_torchrun_that_is_stuck_is_ended(state, code):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, state], **pipes)
    limit = threading.Timer(120, launcher.kill)
    limit.start()
    said = launcher.stdout.read().decode()  # to its end: the helper has it open too
    launcher.stdin.close()
    ended = launcher.wait()
    limit.cancel()
    assert ended == code
    assert ("waits for a machine that does not answer" in said) == (state == "stuck")
