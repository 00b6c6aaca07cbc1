"""Real runs, killed at random moments and started again, must end as if nothing had happened.

    python tests/chaos/kill.py --kills 100 --seed 1
    python tests/chaos/kill.py --kills 20 --seed 1 --layout 1,2,1,1      tp, pp, dp, ZeRO stage
    python tests/chaos/kill.py --kills 20 --seed 1 --moving              every start in another layout
    python tests/chaos/kill.py --kills 20 --seed 1 --signals             SIGTERM, SIGUSR1, SIGINT: save and stop

Each case draws a configuration (cases.py), runs it once without interruption, and once with SIGKILL to one or all ranks
at random moments, half of them aimed at a part of a save or of a start. After every kill each step that has its final
name must be whole, and ``latest`` must name one that is there. At the end the log, TensorBoard, masters and moments
must be those of the uninterrupted run, bit for bit, and nothing may be left over. Under --moving the figures of the log
must agree to 1e-6, and what a resume has loaded must be what was saved, bit for bit. Under --signals all ranks must
leave with code 75, and no step may be lost.

Prints a line per case, every fault with the flags that repeat it, and the sums; exit code 1 if there is a fault.
"""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import contextlib
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.cases import Case, write_data

KILLS_PER_CASE = 6
OF_PYTHON = "sem.mp-"  # semaphores of multiprocessing: ranks have none, other tests do, also for a while after a kill


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", type=lambda text: tuple(map(int, text.split(","))), metavar="TP,PP,DP,STAGE")
    parser.add_argument("--moving", action="store_true", help="draw another layout for every start")
    parser.add_argument("--signals", action="store_true", help="SIGTERM, SIGUSR1 and SIGINT instead of SIGKILL")
    parser.add_argument("--iterations", type=int, default=40, help="length of a run")
    parser.add_argument("--case", type=int, default=0, help="number of the first case, to repeat one")
    options = parser.parse_args(arguments)
    shared_memory, begin = set(Path("/dev/shm").iterdir()), time.monotonic()
    counts, faults, number = Counter(), 0, options.case
    with tempfile.TemporaryDirectory() as folder:
        data_dir = write_data(Path(folder, "data"))
        while counts["kills"] < options.kills:
            chance = random.Random(f"{options.seed} {number}")
            case = Case(chance, Path(folder, f"case-{number}"), data_dir, options)
            case.run(min(KILLS_PER_CASE, options.kills - counts["kills"]))
            print(f"case {number}: {case.describe()}", flush=True)
            for fault in case.faults:
                print(f"FAULT (--seed {options.seed} --case {number}): {fault}", flush=True)
            if case.faults:
                print(f"kept in {shutil.copytree(case.folder, tempfile.mkdtemp(prefix='chaos-'), dirs_exist_ok=True)}")
            shutil.rmtree(case.folder)
            counts += case.counts
            faults += len(case.faults)
            number += 1
    for path in sorted(set(Path("/dev/shm").iterdir()) - shared_memory):
        if not path.name.startswith(OF_PYTHON) and not is_mapped(path):
            print(f"FAULT: {path} is left in shared memory")
            faults += 1
    print(f"{number - options.case} cases, {faults} faults, {time.monotonic() - begin:.0f} s")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return min(faults, 1)


def is_mapped(path):
    """Whether a process has the file in its memory: another test, since the ranks have ended. Names may differ."""
    try:
        entry = path.stat()
    except FileNotFoundError:
        return True  # it was another test's, which has ended
    here = f"{os.major(entry.st_dev):02x}:{os.minor(entry.st_dev):02x} {entry.st_ino} "
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if here in maps.read_text():
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())
