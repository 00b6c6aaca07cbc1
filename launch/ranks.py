"""One rank of a launch script per device, started by the deepspeed launcher, whose own messages are hidden.

    [HOSTFILE=hosts] python launch/ranks.py SCRIPT [FLAGS]

So the last line is that of a rank, which says what is wrong. DEEPSPEED_LOG_LEVEL=info shows the launcher's messages.
Said here is what a rank cannot say: that a signal ended it.
"""

import os
import signal
import sys

from deepspeed.launcher import runner


def main(script, *flags):
    hostfile = os.environ.get("HOSTFILE")
    if hostfile and not os.path.isfile(hostfile):  # the launcher would go on with this machine only
        return f"HOSTFILE {hostfile}: there is no such file; name one with a line `NODE slots=DEVICES` per node"
    places = ["--hostfile", hostfile] if hostfile else []
    try:
        runner.main([*places, "--log_level", os.environ.get("DEEPSPEED_LOG_LEVEL", "critical"), script, *flags])
    except (RuntimeError, ValueError) as error:  # a line of the file is none, or a node does not answer
        return f"HOSTFILE {hostfile}: {error}" if hostfile else str(error)
    except SystemExit as end:
        number = 256 - (end.code or 0)
        if number in set(signal.Signals):  # -9 leaves as 247
            hint = "; the system does that when memory runs out" if number == signal.SIGKILL else ""
            print(f"{script}: {signal.Signals(number).name} ended a rank{hint}", file=sys.stderr)
        raise
    return None


if __name__ == "__main__":
    problem = main(*sys.argv[1:])
    if problem:
        print(f"{sys.argv[1]}: {problem}", file=sys.stderr)
        sys.exit(2)
