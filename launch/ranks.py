"""One rank of a launch script per device, started by the deepspeed launcher, whose own messages are hidden.

    [HOSTFILE=hosts] [MASTER_ADDR=node1-ib0] [MASTER_PORT=29500] [DEEPSPEED_LOG_LEVEL=info] \\
        python launch/ranks.py SCRIPT [FLAGS]

The last line therefore comes from a rank and says what is wrong. This program only reports what a rank cannot: that a
signal ended it. Ctrl-C, or a terminal that hangs up, is meant for the ranks, which save. This program and the launcher
block these signals and wait for the ranks' exit code; scripts unblock them, since ignored signals would stay ignored in
the ranks. SIGTERM to this program alone is passed on to the ranks. A launcher for several nodes must get Ctrl-C to pass
it on. It ignores hang-ups, and gets SIGTERM instead.
"""

import contextlib
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time

given = {word.split("=")[0] for word in sys.argv}
if "--help" in given or {"--dry-run", "--devices"} <= given:  # at once, without a launcher and its devices
    os.execvpe("bash", ["bash", *sys.argv[1:]], os.environ | {"RANK_PYTHON": sys.executable})

signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the launcher is imported
signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # process 1 would ignore it
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the root of the checkout

from moh_lm.cli.command import import_problems  # noqa: E402

if problems := import_problems():
    print("\n".join(f"{sys.argv[1]}: {problem}" for problem in problems), file=sys.stderr)
    sys.exit(2)

import psutil  # noqa: E402 - DeepSpeed needs it, too
from deepspeed.launcher import runner  # noqa: E402

SECRET = "MOH_LM_SECRET"  # the secret of this launch; see moh_lm/supervise/secret.py


class PDSHRunner(runner.PDSHRunner):
    """DeepSpeed's start of the nodes by pdsh, with arguments that arrive unchanged.

    pdsh fills in %h, %u and %n, and joins the words for the shell of each node. DeepSpeed quotes spaces only.
    """

    def __init__(self, args, world_info):
        super().__init__(args, world_info)
        self.user_script = f"-- {quoted(args.user_script)}"
        self.add_export(SECRET, os.environ.get(SECRET) or secrets.token_hex(16))

    def parse_user_args(self):
        return [quoted(word) for word in self.args.user_args]

    def add_export(self, key, var):
        self.exports[key.strip()] = quoted(var.strip())

    def get_cmd(self, environment, active_resources):
        command, kill, environment = super().get_cmd(environment, active_resources)
        here, python = os.path.abspath("."), sys.executable
        paths = {f"cd {here};": f"cd {quoted(here)};", python: quoted(python)}
        return [paths.get(word, word) for word in command], kill, environment


def quoted(word):
    return shlex.quote(word).replace("%", "%%")


def main(script, *flags):
    hostfile, level = os.environ.get("HOSTFILE"), os.environ.get("DEEPSPEED_LOG_LEVEL", "critical")
    port, devices = os.environ.get("MASTER_PORT"), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    several = bool(hostfile) or os.path.isfile(runner.DLTS_HOSTFILE)
    launcher, local, start = [], [], subprocess.Popen

    def launch(words, *more, **named):
        if words[0] != sys.executable:  # pdsh, or a question by ssh
            launcher.append(start(words, *more, **named))
        else:  # the launcher of this machine's ranks
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
            signal.signal(signal.SIGTERM, lambda *_: stop_ranks(local))
            place = len(words) - len(flags) - 1  # of the script; DeepSpeed may not complete flags after "--"
            launcher.append(start([*words[:place], "--", *words[place:]], *more, **named))
            local.append(launcher[-1])
        return launcher[-1]

    runner.PDSHRunner, subprocess.Popen = PDSHRunner, launch
    try:
        if hostfile and not os.path.isfile(hostfile):  # the launcher would continue with this machine only
            raise ValueError("there is no such file; name one with a line `NODE slots=DEVICES` for each node")
        if not several:
            if re.search("[^-0-9, ]", devices):
                raise ValueError(f"CUDA_VISIBLE_DEVICES {devices}: write numbers, such as 0,1; or start with torchrun")
            port = port or str(free_port())
        else:
            with open(hostfile or runner.DLTS_HOSTFILE, encoding="utf-8") as lines:
                options = [line.split()[0] for line in lines if line.lstrip().startswith("-")]
            if options:
                raise ValueError(f"{options[0]}: is an option of ssh, not the name of a node; fix this line")
            # pdsh would wait forever for a lost machine; ssh ends after three unanswered requests
            given = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
            os.environ["PDSH_SSH_ARGS_APPEND"] = f"{given} -o ServerAliveInterval=60"
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as by nohup
                signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        address = os.environ.get("MASTER_ADDR") if several else None  # of the network between the nodes
        places = {"--hostfile": hostfile, "--master_addr": address, "--master_port": port}
        given = [word for flag, value in places.items() if value for word in (flag, value)]
        runner.main([*given, "--log_level", level, "--", script, *flags])
        if launcher and launcher[-1].returncode < 0:  # the runner does not report this
            name = signal.Signals(-launcher[-1].returncode).name
            print(f"{script}: {name} ended the launcher; its ranks may still run; check for them", file=sys.stderr)
            return 128 - launcher[-1].returncode
    except IndexError:  # the launcher reads the address of the first node from `hostname -I`
        remedy = "set MASTER_ADDR to its address"
        print(f"{script}: the first node has no address: `hostname -I` prints none there; {remedy}", file=sys.stderr)
        return 2
    except (FileNotFoundError, subprocess.CalledProcessError) as error:  # the launcher asks the first node by ssh
        if not isinstance(error, subprocess.CalledProcessError) and error.filename != "ssh":
            raise
        remedy = "ssh must reach the first node, and `hostname -I` work there; or start with torchrun"
        print(f"{script}: {hostfile or runner.DLTS_HOSTFILE}: {error}; {remedy}", file=sys.stderr)
        return 2
    except (RuntimeError, ValueError, OverflowError) as error:  # an invalid line, or a node that does not answer
        print(f"{script}: {f'HOSTFILE {hostfile}: ' if hostfile else ''}{error}{advice(error)}", file=sys.stderr)
        return 2
    except SystemExit as end:
        if 256 - (end.code or 0) in set(signal.Signals) - {signal.SIGPIPE}:  # -9 leaves as 247
            name = signal.Signals(256 - end.code).name
            if name == "SIGHUP" and not local:  # 255 is what ssh leaves with
                print(f"{script}: ssh to a node failed or broke: a line above names the node", file=sys.stderr)
                return end.code
            if name == "SIGINT":
                print(f"{script}: interrupted before the training began", file=sys.stderr)
                return 130
            print(f"{script}: {name} ended a rank (SIGKILL: perhaps memory ran out)", file=sys.stderr)
        return end.code


def stop_ranks(launcher):
    """Ask the ranks of this machine to save and end. DeepSpeed's launcher would give them 30 seconds, and exit with 1.
    Process 1 of a container gets SIGTERM when the container is stopped."""
    if not launcher:
        sys.exit(128 + signal.SIGTERM)
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher[-1].pid)
        while not (ranks := process.children()) and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.1)  # it is still importing
        for rank in ranks:
            rank.terminate()


def advice(error):
    """What to do about a message of the launcher that names no remedy."""
    return " Install pdsh on this machine, or start with torchrun." if "not installed" in str(error) else ""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
