"""One case of tests/chaos/kill.py: a configuration, its uninterrupted run, its killed run, and the comparison."""

import math
import shutil
import signal
import time
from collections import Counter

import numpy as np

from moh_lm.data.shards import ShardWriter, write_manifest
from tests.chaos import evidence
from tests.chaos.program import Job, save_again, slow_files

VOCAB_SIZE = 64
MODEL = f"""
    --num-layers 2 --hidden-size 32 --intermediate-size 64 --num-attention-heads 8 --vocab-size {VOCAB_SIZE}
    --seq-length 16 --batch-tokens 128 --warmup-iters 5 --learning-rate 2e-3 --min-learning-rate 1e-4
    --data-mix even=2.5 odd=1 --validation-fraction 0.1 --eval-samples 4 --hang-timeout 60
""".split()
LAYOUTS = (  # tp, pp, dp, ZeRO stage
    (1, 1, 1, 1),
    (1, 1, 1, 2),
    (1, 1, 1, 3),
    (1, 1, 2, 1),
    (1, 1, 2, 2),
    (1, 1, 2, 3),
    (2, 1, 1, 1),
    (2, 1, 1, 2),
    (2, 1, 1, 3),
    (1, 2, 1, 1),
)
AIMS = ("save", "commit", "write", "removal", "evaluation", "resume", "engine")
START = 300  # seconds in which a start must come to its first step, also on a busy machine
END = 120  # seconds in which the other ranks must be gone after one was killed
ALONE = 15  # the same, where they may wait for ever because they did not know each other yet
STOPPED = 75  # exit code of a run that was asked to stop
RUN = 600  # seconds in which an undisturbed run must end


def write_data(directory):
    """A data directory of two sources of random documents; returns it."""
    generator = np.random.default_rng(0)
    for source in ("even", "odd"):
        (directory / source).mkdir(parents=True)
        with ShardWriter(directory / source / "unit-0", VOCAB_SIZE) as shard:
            for _ in range(120):
                shard.add([*generator.integers(3, VOCAB_SIZE, generator.integers(20, 60)).tolist(), 2])
            shard.commit({"tokenizer": {"sha256": "none", "vocab_size": VOCAB_SIZE, "eos_id": 2}, "inputs": []})
    write_manifest(directory)
    return directory


class Case:
    """A configuration drawn from ``chance``, and what became of it: ``counts`` and ``faults``, one sentence each.

    folder: of its files. options: of the command line.
    """

    def __init__(self, chance, folder, data_dir, options):
        self.chance = chance
        self.folder = folder
        folder.mkdir()
        self.reference, self.directory = folder / "reference", folder / "killed"
        self.again = folder / "again"  # where a start saves what it has loaded
        self.moving, self.signals = options.moving, options.signals
        self.layouts = LAYOUTS if options.moving else [options.layout or chance.choice(LAYOUTS)]
        self.iterations = options.iterations
        self.drawn = self.draw()
        self.flags = [*MODEL, *self.drawn, "--train-iters", str(self.iterations), "--data-dir", str(data_dir)]
        self.counts, self.faults = Counter(), []

    def draw(self):
        draw = self.chance.choice
        self.keep_last = draw([0, 1, 1, 2, 3]) * (not self.moving)  # what was saved is compared with what was loaded
        self.keep_every = draw([0, 5]) if self.keep_last else 0
        drawn = {
            "precision": "fp32" if self.moving else draw(["fp32", "bf16"]),
            "save-interval": draw([1, 2, 3, 4]),
            "keep-last": self.keep_last,
            "keep-every": self.keep_every,
            "async-save": draw(["true", "false"]),
            "micro-batch-size": draw([1, 2, 4]),
            "log-interval": draw([1, 3]),
            "eval-interval": draw([5, 7]),
            "load-balance-scope": draw(["sequence", "global_batch"]),
            "replica-check-interval": draw([1, 4]),
        }
        flags = [part for name, value in drawn.items() for part in (f"--{name}", str(value))]
        return flags + draw([[], [], ["--recompute"]]) + draw([[], [], ["--tie-embeddings"]])

    def describe(self):
        layout = "moving" if self.moving else "tp{}-pp{}-dp{}-zero{}".format(*self.layouts[0])
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{layout} {' '.join(self.drawn)}: {counts}, {len(self.faults)} faults"

    def run(self, kills):
        self.finish(self.start(self.reference, self.layouts[0]), "the uninterrupted run")
        complete = False
        while not complete and not self.faults:
            if self.counts["kills"] < kills:
                complete = self.start_and_stop()
            else:
                complete = self.finish(self.start_again(slow=False), "the last start")
        if not self.faults:
            self.compare()

    # --- Starts ---

    def start(self, directory, layout, *hooks):
        tp, pp, dp, stage = map(str, layout)
        parallel = f"--tensor-parallel-size {tp} --pipeline-parallel-size {pp} --zero-stage {stage}".split()
        flags = [*self.flags, *parallel, "--run-report", "false", "--checkpoint-dir", str(directory)]
        self.counts["starts"] += 1
        return Job(flags, math.prod(layout[:3]), self.folder / f"output-{self.counts['starts']}", hooks)

    def start_again(self, slow=True):
        hooks = [(slow_files, self.chance.random())] if slow else []
        if self.moving:
            hooks.append((save_again, self.again))
        return self.start(self.directory, self.chance.choice(self.layouts), *hooks)

    def finish(self, job, name):
        """Wait for the end of a job that nobody disturbs; returns True, or adds a fault."""
        if not job.wait(RUN):
            job.end()
            self.faults.append(f"{name} hangs:\n{job.said()[-6000:]}")
        elif any(job.codes()):
            self.faults.append(f"{name} left with {job.codes()}:\n{job.said()[-3000:]}")
        return True

    def start_and_stop(self):
        """One start and at most one kill, or signal; returns whether the run is complete."""
        job = self.start_again()
        if self.chance.random() < 0.15:
            time.sleep(self.chance.uniform(0, 3))
        elif not self.reach(job):
            job.end()
            self.faults.append(f"no step within {START} s:\n{job.said()[-6000:]}")
            return True
        if job.over():
            return self.finish(job, "a start that was not killed")
        victims = self.chance.choice([list(range(job.world_size)), [self.chance.randrange(job.world_size)]])
        doing = job.doing() or ["start-up"]
        polite = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
        job.send(self.chance.choice(polite) if self.signals else signal.SIGKILL, victims)
        self.counts["kills"] += 1
        self.counts.update(f"in {name}" for name in doing)
        if len(victims) < job.world_size:
            self.counts["kills of one rank"] += 1
        if self.signals:
            self.all_save_and_stop(job, doing)
        else:
            self.others_end(job, victims, doing)
        self.look()
        return self.signals and not any(job.codes())

    def reach(self, job):
        """Wait for the moment of a kill, or the end of the job: after a first step, or in a part of a save or start."""
        aim = self.chance.choice([None, self.chance.choice(AIMS)])
        delay = self.chance.uniform(0, 0.1 if aim else 1.2)
        begin, patience = time.monotonic(), 5  # seconds; not every run comes to every part
        while not job.over():
            waited = time.monotonic() - begin
            if aim in job.doing() or (job.steps() and (aim is None or waited > patience)):
                time.sleep(delay)
                return True
            if waited > START:
                return False
            time.sleep(0.001)
        return True

    def others_end(self, job, victims, doing):
        """The ranks that were not killed must end by themselves, with a code that says so.

        Before the ranks know each other only a launcher can see that one is dead, and here is none.
        """
        early = doing == ["start-up"] and not job.steps()
        if not job.wait(ALONE if early else END):
            codes = job.codes()
            job.end()
            if early:
                self.counts["ends left to the launcher"] += 1
            else:
                self.faults.append(f"{END} s after ranks {victims} were killed: {codes}\n{job.said()[-6000:]}")
            return
        others = [code for rank, code in enumerate(job.codes()) if rank not in victims]
        said = job.said()
        finished = all(code == 0 for code in others) and "complete" in said
        if not all(others) and not finished:
            self.faults.append(f"ranks {victims} were killed and the others left with {others}:\n{said[-3000:]}")
        if others and not finished and not all(f"rank {victim} (process" in said for victim in victims):
            self.counts["ends that do not name the dead rank"] += 1

    def all_save_and_stop(self, job, doing):
        """After a signal all ranks must leave with 75, and every step that they took must be saved.

        A signal ends a process that has just been started; then nothing is lost either.
        """
        if not job.wait(START):
            codes = job.codes()
            job.end()
            if doing == ["start-up"] and any(codes):
                self.counts["ends left to the launcher"] += 1
            else:
                self.faults.append(f"{START} s after a signal in {doing}: {codes}\n{job.said()[-6000:]}")
            return
        codes = set(job.codes())
        if codes == {STOPPED}:
            events = evidence.events(self.directory)
            before = max((event["step"] for event in events if event["event"] == "resumed"), default=0)
            saved = max(evidence.steps_of(self.directory / "checkpoints"))
            stopped = events[-1]["step"] if events[-1]["event"] == "stopped" else None
            if not stopped == saved == before + job.steps():
                self.faults.append(f"{job.steps()} steps after {before}: stopped at {stopped}, saved {saved}")
        elif codes != {0} and (doing != ["start-up"] or job.steps()):
            self.faults.append(f"after a signal in {doing} the ranks left with {job.codes()}:\n{job.said()[-3000:]}")

    # --- Looks ---

    def look(self):
        """After a kill: is every step that counts whole, does ``latest`` name one, was the right state loaded?"""
        steps = evidence.steps_of(self.directory / "checkpoints")
        for step in steps.values():
            self.faults += evidence.damage(step)
        self.faults += evidence.pointer_faults(self.directory)
        for number, again in evidence.steps_of(self.again).items():
            self.counts["resumes compared"] += 1
            if evidence.state_hash(again) != evidence.state_hash(steps[number]):
                self.faults.append(f"step {number} is another state after it was loaded in another layout")
            shutil.rmtree(again)

    def compare(self):
        self.look()
        ours, theirs = (evidence.rows(directory) for directory in (self.directory, self.reference))
        self.faults += rows_missing(theirs, self.flags, self.iterations)
        self.differ("metrics.jsonl", flat(ours), flat(theirs))
        ours, theirs = (evidence.scalars(directory) for directory in (self.directory, self.reference))
        self.differ("TensorBoard", flat(ours), flat(theirs))
        ours, theirs = (
            evidence.steps_of(directory / "checkpoints")[self.iterations]
            for directory in (self.directory, self.reference)
        )
        if not self.moving and evidence.state_hash(ours) != evidence.state_hash(theirs):
            self.faults.append(f"the last steps differ by {evidence.difference(ours, theirs)} (masters, moments)")
        self.faults += [f"{path} is left over" for path in evidence.leftovers(self.directory)]
        self.faults += self.wrongly_kept()

    def differ(self, name, ours, theirs):
        """Add a fault where two mappings of numbers differ."""
        if self.moving:  # some layouts have figures that others have not
            ours, theirs = ({key: value for key, value in part.items() if "tensor_parallel_imbalance" not in str(key)}
                            for part in (ours, theirs))  # fmt: skip
        if ours.keys() != theirs.keys():
            missing, extra = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
            self.faults.append(f"{name} lacks {missing[:5]} and has {extra[:5]} too much")
            return
        rounded = name == "metrics.jsonl"  # to five digits, of heads; TensorBoard has all digits
        bad = [key for key, value in ours.items() if not self.equal(value, theirs[key], rounded and "heads" in key)]
        if bad:
            first = f"{bad[0]}: {ours[bad[0]]!r} instead of {theirs[bad[0]]!r}"
            self.faults.append(f"{name}: {len(bad)} of {len(ours)} figures differ, first {first}")

    def equal(self, ours, theirs, rounded=False):
        """rounded: to five digits, of which the last may differ by one in another layout."""
        if not self.moving or isinstance(ours, str | None):
            return ours == theirs
        return math.isclose(ours, theirs, rel_tol=1.01e-4 if rounded else 1e-6)

    def wrongly_kept(self):
        """Sentences if the steps that are there are not those that --keep-last and --keep-every say."""
        events = evidence.events(self.directory)
        present = evidence.steps_of(self.directory / "checkpoints").keys()
        start = max((at for at, event in enumerate(events) if event["event"] == "resumed"), default=0)
        verified = sorted({event["step"] for event in events[start:] if event["event"] in ("resumed", "saved")})
        saved = {event["step"] for event in events if event["event"] in ("saved", "resumed")}  # or a kill came between
        for_ever = {step for step in saved if self.keep_every and step % self.keep_every == 0}
        expected = for_ever | (set(verified[-self.keep_last :]) if self.keep_last else saved)
        found = []
        if expected - present:
            found.append(f"steps {sorted(expected - present)} should be kept; there are {sorted(present)}")
        if self.keep_last and len(verified) >= self.keep_last and present - expected:
            found.append(f"steps {sorted(present - expected)} should be removed; there are {sorted(present)}")
        return found


def rows_missing(rows, flags, iterations):
    """Sentences if a log does not hold each interval and each evaluation once, in order."""
    log, evaluation = (int(flags[flags.index(name) + 1]) for name in ("--log-interval", "--eval-interval"))
    steps = range(iterations + 1)
    expected = {
        "loss": [step for step in steps[1:] if step % log == 0 or step == iterations],
        "evaluation": [step for step in steps if step % evaluation == 0 or step == iterations],
    }
    found = {key: [row["step"] for row in rows if key in row] for key in expected}
    return [f"{key} is logged at {found[key]}, not {expected[key]}" for key in found if found[key] != expected[key]]


def flat(value, path=()):
    """{path: leaf} of nested lists, tuples and mappings."""
    if not isinstance(value, dict | list | tuple):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: leaf for name, item in items for key, leaf in flat(item, (*path, str(name))).items()}
