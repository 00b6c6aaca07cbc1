"""Runs of moh_lm.pretrain for a table: several at a time, each with its own directory and log.

Nothing but the directories records what was trained. A run is complete if its metrics.jsonl has an evaluation after the
last iteration; one that was stopped resumes from its last checkpoint. DIRECTORY.log beside the directory begins with
the flags of the run and a hash of its inputs, so that no run resumes with others, and with everything else that affects
its speed. If the log is missing, the run's own files show what it trained (``contradiction``).
Simultaneous runs have their own GPUs or threads.
"""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from moh_lm.checkpoint.directory import list_steps
from moh_lm.config import Config, ConfigError, flag
from moh_lm.data.files import publish, read_json, refuse_foreign
from moh_lm.flags import parse_config
from moh_lm.monitor.events import complete_rows
from moh_lm.monitor.surroundings import commit
from moh_lm.run.state import read_state
from moh_lm.run.text import open_data
from moh_lm.supervise.run_directory import lock_run_directory
from studies.results import events, final_evaluation, has_diverged, metrics

ROOT = Path(__file__).resolve().parents[1]
DIVERGED = 70  # exit code of moh_lm.pretrain: too many steps had to be skipped
STOPPED = 75  # it was asked to stop, and has saved
INPUTS, CONTENT = b"\nreads: sha256 ", "tokens: sha256 "
PLACES = ("data_dir", "checkpoint_dir")  # settings that may change when OUT moves
OF_BRANCHES = ("train_iters", "train_tokens", "decay_iters")  # settings of a branch that its stable run lacks
OF_EVENTS = {"failed": DIVERGED, "stopped": STOPPED}  # torchrun turns either into 1; the run's last event shows which


class Run(NamedTuple):
    """A run of the table: its name, directory, number of iterations, and flags."""

    name: str
    directory: Path
    iterations: int
    arguments: list[str]

    @property
    def log(self):
        return self.directory.with_name(self.directory.name + ".log")

    def is_complete(self):
        return bool(final_evaluation(self.directory, self.iterations))

    def has_ended(self):
        """Whether it is complete or has diverged, and is therefore not trained again."""
        return self.is_complete() or has_diverged(self.directory)


def as_flags(values):
    """Return {name: value} as --name value."""
    return [text for name, value in values.items() for text in (flag(name), str(value))]


def check_flags(runs, out):
    """Raise ConfigError if one of ``runs`` was started with other flags, or other text, than it would have now."""
    for run in runs:
        if not run.log.exists() and (found := contradiction(run)):
            advice = "restore the log, move the run away, or choose another OUT"
            raise ConfigError([f"{run.directory}: its .log is missing, and {found}; {advice}"])
        if differs(run, out):
            advice = "as its first line says; choose another OUT"
            raise ConfigError([f"{run.log}: its run has other flags, {advice}"])
        if run.log.exists() and inputs(run) not in run.log.read_bytes():
            changed = "what --data-dir or --config names has changed since its run began"
            raise ConfigError([f"{run.log}: {changed}; choose another OUT"])


def contradiction(run):
    """Return why a run without a log differs from the one that would be trained now (settings, data, code), or None.

    It is None for a run that has not started, and for a branch of a ladder with a checkpoint of its stable run.
    """
    steps = list_steps(run.directory / "checkpoints")
    recorded = next((path for path in (run.directory, *steps[:1]) if (path / "config.json").exists()), None)
    if recorded is None:
        return "it has no config.json" if metrics(run.directory) else None
    try:
        was = Config.load(recorded / "config.json").to_dict()
        now = parse_config([*run.arguments, "--checkpoint-dir", str(run.log)])[0]  # where no run lends its model
        ignored = {*PLACES, *now.moving, *(OF_BRANCHES if recorded != run.directory else ())}
        if other := [name for name, value in now.to_dict().items() if name not in ignored and was[name] != value]:
            return f"its config.json has another {', '.join(other)}"
        if steps:
            state = read_state(steps[0])
            if changes := open_data(now, [], False)[1].changes(state["data"], state["consumed_samples"]):
                return f"it has read other data: {changes[0]}"
    except (ConfigError, OSError) as error:
        return f"its settings cannot be compared ({error})"
    if run.is_complete() and not steps:
        return "no checkpoint says which data it has read"
    if run.is_complete() and not (run.directory / "events.jsonl").exists():
        return "no events.jsonl says which code trained it"
    starts = [row.get("commit") for _, row in complete_rows(run.directory / "events.jsonl")]
    known, now = [text for text in starts if isinstance(text, str)], commit()
    if known and now and not now.startswith(known[-1]):  # git may shorten it
        return f"it was trained by commit {known[-1][:12]}, while this is {now[:12]}"
    return None


def inputs(run):
    """A line with a hash of what the run reads: the files of --config, and the manifest of its text."""
    files = [*paths(run, "--config"), *(path / "manifest.json" for path in paths(run, "--data-dir"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists()))
    return INPUTS + digest.hexdigest().encode() + b"\n"


def paths(run, flag):
    """The paths that a flag of the run names."""
    texts = [part for text in run.arguments for part in text.split("=", 1)]
    return [Path(value) for name, value in pairwise(texts) if name == flag]


def content(run):
    """A line with a hash of the tokens that the run reads, of their tokenizer and of the files of --config, equal
    wherever they were made."""
    found = hashlib.sha256()
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # a run will say what is wrong
        found.update(b"".join(file.read_bytes() for file in paths(run, "--config")))
        manifest = read_json(paths(run, "--data-dir")[-1] / "manifest.json")
        sources = sorted(manifest["sources"].items())
        units = [(name, unit["content"]) for name, source in sources for unit in source["units"].values()]
        found.update(json.dumps([manifest["tokenizer"]["sha256"], units]).encode())
    return CONTENT.encode() + found.hexdigest().encode() + b"\n"


def differs(run, out):
    """Return whether the run was started with other flags than it would have now.

    The directory ``out`` may have been moved or copied since then: the flags of a run end with its own directory.
    """
    flags = (" ".join(run.arguments) + "\n").encode()
    own = f"/{run.directory.relative_to(out)}\n".encode()
    begun = run.log.read_bytes() if run.log.exists() else flags
    given, found, _ = begun.partition(own)
    before = given.rpartition(b"--checkpoint-dir ")[2]
    now_here = (given + found).replace(before + b"/", f"{out}/".encode())
    return now_here != flags


def lock_directory(out):
    """Lock OUT until this program ends. Raises ConfigError if another command trains there, or a REPORT.md is not ours.

    Two commands would empty the logs of each other's runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    refuse_foreign(out, ("REPORT.md", "WIDTHS.md", "runs.jsonl"))
    return lock_run_directory(out, "OUT")


def jobs_of(flags):
    """Return --jobs, or as many runs as there are GPUs for; one on a CPU."""
    return flags.jobs or max(1, torch.cuda.device_count() // flags.ranks)


def shares(jobs, ranks):
    """Return each job's own environment: GPUs, or on a CPU one thread unless OMP_NUM_THREADS is given.

    With too few GPUs for all jobs, some share theirs. A single job has everything."""
    count = torch.cuda.device_count()
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]
    parts = [",".join(names[first : first + ranks]) for first in range(0, count - ranks + 1, ranks)]
    if parts and jobs > 1:
        return [{"CUDA_VISIBLE_DEVICES": parts[job % len(parts)]} for job in range(jobs)]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if jobs > 1 and count == 0 else {}
    return [threads] * jobs


def place(ranks, share):
    """Return what affects the speed of a run besides its flags: the second line of its log."""
    threads = (os.environ | share).get("OMP_NUM_THREADS")
    return f"processes: {ranks}; {f'OMP_NUM_THREADS={threads}' if threads else 'threads as torch has them'}"


def train_all(next_run, jobs, ranks=1):
    """Train the runs from ``next_run``, ``jobs`` at a time with ``ranks`` processes. Returns {directory: exit code}.

    next_run(busy, codes): the next ``Run``, or None if there is none now; busy: the directories that are being trained,
    codes: {directory: exit code} of those that ended. Training ends when it returns None and no directory is busy.
    """
    busy, codes, free = {}, {}, shares(jobs, ranks)
    try:
        while True:
            while free and (run := next_run({run.directory for _, run, *_ in busy.values()}, codes)):
                share, before = free.pop(0), len(events(run.directory))
                process = start(run, ranks, share)
                busy[process.pid] = process, run, share, before
                print(f"started {run.name}", flush=True)
            if not busy:
                return codes
            pid, status = os.wait()
            if pid not in busy:  # process 1 of a container inherits the orphans of runs
                continue
            process, run, share, before = busy.pop(pid)
            free.append(share)
            code = os.waitstatus_to_exitcode(status)
            if ranks > 1 and code == 1:
                code = OF_EVENTS.get(next(reversed(events(run.directory)[before:]), None), code)
            process.returncode = codes[run.directory] = code
            words = {0: f"finished {run.name}", STOPPED: f"stopped {run.name}: run the same command again to resume"}
            print(words.get(process.returncode, f"failed {run.name} (exit code {process.returncode})"), flush=True)
    finally:
        for process, *_ in busy.values():  # this program was interrupted; a run saves before it ends
            process.terminate()
        for process, *_ in busy.values():
            process.wait()


def exit_code(codes):
    """The table's exit code, from {directory: exit code}: ``STOPPED`` if runs only stopped; failed runs are named."""
    for directory, code in codes.items():
        if code not in (0, STOPPED):
            print(f"{directory} failed with exit code {code}: see {directory}.log", file=sys.stderr)
    return 1 if {*codes.values()} - {0, STOPPED} else max(codes.values(), default=0)


def start(run, ranks, share):
    """Start the process of one run with its ``share`` of the machine. Its output follows its flags in its log."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "moh_lm.pretrain"]
    if ranks > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        program = [*torchrun, str(ranks), "-m", "moh_lm.pretrain"]
    publish(run.log, opening(run, ranks, share))  # whole at every moment: without its hashes, a run cannot resume
    with open(run.log, "ab") as file:
        program, own = [*program, *run.arguments], os.environ | share
        return subprocess.Popen(program, cwd=ROOT, env=own, stdout=file, stderr=subprocess.STDOUT)


def opening(run, ranks, share):
    """Return the lines with which the log of a run begins."""
    return f"{' '.join(run.arguments)}\n{place(ranks, share)}".encode() + inputs(run) + content(run)
