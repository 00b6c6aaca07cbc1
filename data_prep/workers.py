"""Worker processes: each one takes a unit, writes its shard, reports it, and takes the next.

Every worker has its own pipe to the parent. A unit that fails is reported, and the worker continues. If a worker dies,
its pipe closes, only its unit fails, and another worker takes its place. If the parent dies for any reason, the workers
die with it.
"""

import errno
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from data_prep.containers import InputError
from data_prep.encoding import Options, Tokenizer
from data_prep.report import QUIET
from data_prep.units import Unit
from data_prep.writing import tokenize_unit
from moh_lm.data.files import ShardError

PARENT_IS_GONE = (EOFError, BrokenPipeError, ConnectionResetError)
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # disk, quota or largest file size


def run_units(
    units: list[Unit],
    num_workers: int,
    tokenizer_path: str,
    options: Options,
    output: str,
    max_bad_fraction: float | None = None,
) -> Iterator[tuple[Unit | None, str, object]]:
    """Make the shards of ``units``, the largest first. Yields, as they happen, (unit, event, value):

    "progress", (bytes of input, tokens) since the last report; "done", the sidecar; "failed", the reason; "no room",
    the reason, after which no further unit starts; "waiting", without a unit, if nothing happened for ten seconds.
    """
    context = multiprocessing.get_context("spawn")  # not fork: threads of libraries may hold locks
    waiting = deque(sorted(units, key=lambda unit: -unit.num_bytes))
    idle, busy = [], {}  # connections, and their processes and units
    processes = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < num_workers:
                if not idle:
                    connection, theirs = context.Pipe()
                    arguments = (theirs, tokenizer_path, options, output, max_bad_fraction)
                    processes[connection] = context.Process(target=work, args=arguments, daemon=True)
                    processes[connection].start()
                    theirs.close()
                    idle.append(connection)
                connection = idle.pop()
                busy[connection] = waiting.popleft()
                with suppress(*PARENT_IS_GONE):  # the worker may just have died: receiving will show it
                    connection.send(busy[connection])
            ready = wait(list(busy), QUIET)
            if not ready:
                yield None, "waiting", None
            for connection in ready:
                unit = busy[connection]
                try:
                    event, value = connection.recv()
                    if event != "progress":
                        idle.append(connection)
                except PARENT_IS_GONE:
                    processes[connection].join()
                    code = processes[connection].exitcode
                    likely = ", probably out of memory; use fewer --workers" if code == -signal.SIGKILL else ""
                    event, value = "failed", f"its worker process died (exit code {code}{likely})"
                if event != "progress":
                    del busy[connection]
                if event == "no room":
                    waiting.clear()
                yield unit, event, value
    finally:
        for connection in busy:
            processes[connection].terminate()
        for connection, process in processes.items():
            connection.close()
            process.join()


def work(connection: Connection, tokenizer_path: str, options: Options, output: str, max_bad_fraction: float | None):
    """Run a worker: units arrive through ``connection``, and events leave through it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=die_with_the_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker has a core
    tokenizer = Tokenizer(tokenizer_path, options.bos, options.engine)

    def report(num_bytes, num_tokens):
        connection.send(("progress", (num_bytes, num_tokens)))

    with suppress(*PARENT_IS_GONE):
        while True:
            unit = connection.recv()
            try:
                event = "done", tokenize_unit(unit, tokenizer, options, output, max_bad_fraction, report)
            except PARENT_IS_GONE:
                raise
            except (InputError, ShardError) as error:
                event = "failed", str(error)
            except MemoryError:
                event = "failed", "out of memory; use fewer --workers"
            except OSError as error:
                event = ("no room", error.strerror) if error.errno in NO_ROOM else ("failed", str(error))
            connection.send(event)


def die_with_the_parent():
    """Make this process die with its parent: an orphan could write to a directory that another run now owns."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
