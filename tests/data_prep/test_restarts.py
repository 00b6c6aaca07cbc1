"""Kills, restarts and full disks: whatever happened before, the data directory ends with the same bytes."""

import contextlib
import glob
import gzip
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from data_prep import tokenization
from data_prep import units as units_module
from data_prep.encoding import Options
from data_prep.units import Unit, plan_units
from data_prep.workers import run_units
from moh_lm.config import DataConfig
from moh_lm.data.dataset import Dataset
from tests.tokenizing import ROOT, TEXTS, command, decoded, files, json_lines, run, shards, tokenize

# --- Determinism, restarts ---


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    texts = [f"{number}: " + TEXTS[number % len(TEXTS)] for number in range(1500)]
    (directory / "a.jsonl").write_bytes(json_lines(texts))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(texts[:300]) + b"{broken\n"))
    (directory / "c.txt").write_text("one document")
    return directory


@pytest.fixture(scope="module")
def reference(corpus, model, tmp_path_factory):
    """The data directory that one worker makes in one run."""
    output = tmp_path_factory.mktemp("reference") / "out"
    tokenize(model, output, f"x={corpus}/a*", f"y={corpus}/[bc].*", unit_size="32k")
    return output


def test_any_number_of_workers_writes_the_same_bytes(corpus, model, reference, tmp_path):
    tokenize(model, tmp_path / "out", f"x={corpus}/a*", f"y={corpus}/[bc].*", workers=3, unit_size="32k")
    assert files(tmp_path / "out") == files(reference)


def test_sources_may_be_added_by_a_later_run(corpus, model, reference, tmp_path):
    tokenize(model, tmp_path / "out", f"y={corpus}/[bc].*", unit_size="32k")
    times = modified(tmp_path / "out" / "y")
    tokenize(model, tmp_path / "out", f"x={corpus}/a*", unit_size="32k")
    assert files(tmp_path / "out") == files(reference)
    assert modified(tmp_path / "out" / "y") == times


def test_a_file_that_is_damaged_later_leaves_its_shard(model, tmp_path):
    path, random_bytes = tmp_path / "b.jsonl.gz", random.Random(0).randbytes
    path.write_bytes(gzip.compress(json_lines([random_bytes(200).hex() for _ in range(3000)])))
    tokenize(model, tmp_path / "out", f"y={path}")
    before, damaged = files(tmp_path / "out"), bytearray(path.read_bytes())
    damaged[-70_000] ^= 255  # of the same size, and beyond what is looked at before the shard is begun
    path.write_bytes(damaged)
    os.utime(path, (2e9, 2e9))
    tokenize(model, tmp_path / "out", f"y={path}", code=1)
    assert files(tmp_path / "out") == before


def modified(directory):
    return {path: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.mark.parametrize("many", [1, 1000])
def test_files_that_come_later_leave_other_shards_untouched(many, model, tmp_path, monkeypatch):
    monkeypatch.setattr(units_module, "MANY", many)
    (tmp_path / "in").mkdir()
    for number in range(4, 8):
        (tmp_path / f"in/{number}.txt").write_text(f"text {number}")
        (tmp_path / f"in/{number}.jsonl").write_bytes(json_lines([f"line {number}"]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    before, times = files(tmp_path / "out/a"), modified(tmp_path / "out/a")
    for number in (1, 5.5, 9):
        (tmp_path / f"in/{number}.txt").write_text(f"text {number}")
        (tmp_path / f"in/{number}.jsonl").write_bytes(json_lines([f"line {number}"]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    after, later = files(tmp_path / "out/a"), modified(tmp_path / "out/a")
    for path in times.keys() - {tmp_path / "out/a/groups.jsonl"}:
        assert (after[path.name], later[path]) == (before[path.name], times[path])
    numbers = [1, 4, 5, 5.5, 6, 7, 9]
    expected = [f"text {number}" for number in numbers] + [f"line {number}" for number in numbers]
    assert sorted(decoded(tmp_path / "out", "a", model)) == sorted(expected)


def write_texts(directory, number):
    """Files too small for shards of their own: 00.txt holds "text 00", and so on."""
    directory.mkdir()
    for index in range(number):
        (directory / f"{index:02d}.txt").write_text(f"text {index:02d}")


def test_part_of_the_files_of_a_shared_shard_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(units_module, "MANY", 1)
    write_texts(tmp_path / "in", 12)
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    before = files(tmp_path / "out")
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/in/0*", code=2)
    assert f"from 2 others, such as {tmp_path}/in/10.txt; name all" in stderr
    assert files(tmp_path / "out") == before
    (tmp_path / "in/10.txt").unlink()
    (tmp_path / "in/11.txt").unlink()
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/0*")
    assert sorted(decoded(tmp_path / "out", "a", model)) == [f"text {number:02d}" for number in range(10)]


def test_a_damaged_file_of_a_shared_shard_fails_alone(model, tmp_path):
    write_texts(tmp_path / "in", 18)
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    before = files(tmp_path / "out")
    (tmp_path / "in/07.txt").write_bytes(b"%PDF-")
    (tmp_path / "in/18.txt").write_text("text 18")
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*", code=1)
    assert f"failed: {tmp_path}/in/07.txt: a PDF file" in stderr
    after = files(tmp_path / "out")
    assert {name for name in before if after[name] != before[name]} == {"a/groups.jsonl"}  # the manifest stays too
    (tmp_path / "in/07.txt").write_text("text 07")
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    assert sorted(decoded(tmp_path / "out", "a", model)) == [f"text {number:02d}" for number in range(19)]


def test_a_file_with_the_text_of_one_in_a_shared_shard_is_named(model, tmp_path):
    write_texts(tmp_path / "in", 18)
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    (tmp_path / "x.txt").write_text("text 07")
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/x.txt", code=2)
    assert f"such as {tmp_path}/x.txt, and from 17 others, such as {tmp_path}/in/00.txt; name all of them" in stderr


def test_texts_with_shards_of_their_own_keep_them(model, tmp_path, monkeypatch):
    """As shards of earlier versions: a training that reads them goes on."""
    (tmp_path / "in").mkdir()
    for number in range(20):
        (tmp_path / f"in/{number:02d}.txt").write_text(f"text {number:02d}" * 9)
    with monkeypatch.context() as earlier:
        earlier.setattr(tokenization, "MANY_TEXTS", 1000)
        tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    before = files(tmp_path / "out")
    for path in tmp_path.glob("in/*"):
        os.utime(path, (time.time() + 5, time.time() + 5))  # they are made again
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    assert files(tmp_path / "out") == before
    tokenize(model, tmp_path / "new", f"a={tmp_path}/in/*")
    data = DataConfig(str(tmp_path / "new"), validation_fraction=0.1)
    opened = Dataset.open(data, seq_length=8, seed=1, vocab_size=1000)
    (source,) = opened.sources
    assert not opened.notes and len(source.training.document_starts(0, source.training.num_tokens)) > 15


def test_the_shuffle_changes_the_order_and_nothing_else(corpus, model, reference, tmp_path):
    tokenize(model, tmp_path / "out", f"x={corpus}/a*", unit_size="32k", no_shuffle=True)
    in_order, shuffled = decoded(tmp_path / "out", "x", model), decoded(reference, "x", model)
    numbers = [int(text.split(":")[0]) for text in in_order[: shards(tmp_path / "out", "x")[0].num_documents]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert in_order != shuffled
    assert sorted(in_order) == sorted(shuffled)
    positions = np.array([int(text.split(":")[0]) for text in shuffled[: shards(reference, "x")[0].num_documents]])
    assert abs(np.corrcoef(positions[:-1], positions[1:])[0, 1]) < 0.2


def flags_of(corpus, model, output):
    sources = ["--source", f"x={corpus}/a*", "--source", f"y={corpus}/[bc].*"]
    return ["--tokenizer", model, "--output", output, *sources, "--workers", 2, "--unit-size", "32k"]


def test_a_run_killed_again_and_again_ends_with_the_same_bytes(corpus, model, reference, tmp_path):
    output, expected = tmp_path / "out", files(reference)
    line, environment = command(*flags_of(corpus, model, output))
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    generator = random.Random(0)
    for kill in range(5):
        before = sidecar_times(output)
        process = subprocess.Popen(line, cwd=ROOT, env=environment, **nowhere)
        while len(sidecar_times(output)) <= len(before) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.03))
        if kill % 2:
            process.kill()  # and its workers have to notice
        else:
            with contextlib.suppress(ProcessLookupError):  # a fast machine may have made the last shard by now
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        after = sidecar_times(output)
        assert {path: after[path] for path in before} == before, "a complete shard was made again"
        for sidecar in after:
            for path in (sidecar, sidecar.with_suffix(".bin"), sidecar.with_suffix(".idx")):
                assert path.read_bytes() == expected[str(path.relative_to(output))]
    result = run(*flags_of(corpus, model, output)).stdout.decode()
    complete = map(int, re.findall(r"(\d+) of them already complete", result))
    assert len(expected) / 3 > sum(complete) >= len(after) >= 5
    assert files(output) == expected


def sidecar_times(output):
    """Of a directory that may be changing: glob.glob, unlike Path.glob, forgives that."""
    return {Path(path): os.stat(path).st_mtime_ns for path in glob.glob(f"{output}/*/*.json")}


def test_a_restart_redoes_only_what_is_missing_or_damaged(corpus, model, reference, tmp_path):
    output = tmp_path / "out"
    sources = (f"x={corpus}/a*", f"y={corpus}/[bc].*")
    tokenize(model, output, *sources, unit_size="32k")
    missing, damaged, *rest = sorted((output / "x").glob("*.json"))
    missing.unlink()
    with open(damaged.with_suffix(".bin"), "ab") as file:
        file.write(b"\0\0")
    times = {path: path.stat().st_mtime_ns for path in rest}
    stdout, _ = tokenize(model, output, *sources, unit_size="32k")
    assert f"x: {len(rest) + 2} shards from 1 file, {len(rest)} of them already complete" in stdout
    assert {path: path.stat().st_mtime_ns for path in rest} == times
    assert files(output) == files(reference)


def test_leftovers_of_a_killed_run_are_swept_and_others_stay(model, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out/a").mkdir(parents=True)
    unit = "x-0123456789abcdef"
    left = [f"a/{unit}.bin", f"a/{unit}.idx", f"a/{unit}.rejects.jsonl", f"a/{unit}.bin.tmp-77", "a/stdin.tmp-77"]
    left += ["manifest.json.tmp-77", "tokenizer.model.tmp-77", "a/groups.jsonl.tmp-77"]
    for name in [*left, "a/notes.txt", "notes.bin", f"{unit}.bin"]:
        (tmp_path / "out" / name).write_text("left over")
    tokenize(model, tmp_path / "out", f"a={tmp_path}/a.txt")
    (sidecar,) = sidecar_times(tmp_path / "out")
    left.append(f"a/{sidecar.stem}.bin.tmp-77")  # of a shard that is complete all the same
    (tmp_path / "out" / left[-1]).write_text("left over")
    tokenize(model, tmp_path / "out", f"a={tmp_path}/a.txt")
    kept = files(tmp_path / "out")
    assert not set(left) & set(kept)
    assert {"a/notes.txt", "notes.bin", f"{unit}.bin"} <= set(kept)


def test_an_input_that_changed_replaces_its_shard(model, tmp_path):
    text = tmp_path / "in.txt"
    text.write_text("old")
    tokenize(model, tmp_path / "out", f"a={text}")
    text.write_text("new")  # the same size
    os.utime(text, (time.time() + 5, time.time() + 5))
    tokenize(model, tmp_path / "out", f"a={text}")
    assert decoded(tmp_path / "out", "a", model) == ["new"]
    text.write_text("longer than before")
    tokenize(model, tmp_path / "out", f"a={text}")
    assert decoded(tmp_path / "out", "a", model) == ["longer than before"]
    assert len(list((tmp_path / "out" / "a").iterdir())) == 3


def test_a_run_that_fails_keeps_the_shards_to_be_replaced(model, tmp_path):
    text = tmp_path / "in.jsonl.gz"
    text.write_bytes(gzip.compress(json_lines(["old"])))
    tokenize(model, tmp_path / "out", f"a={text}")
    text.write_bytes(gzip.compress(json_lines(["new"]))[:-9])
    tokenize(model, tmp_path / "out", f"a={text}", code=1)
    assert decoded(tmp_path / "out", "a", model) == ["old"]


def test_a_worker_that_is_killed_fails_its_unit_only(model, tmp_path):
    (tmp_path / "large.jsonl").write_bytes(json_lines(["many words " * 10_000] * 200))
    (tmp_path / "small.jsonl").write_bytes(json_lines(["few words"]))
    patterns = [f"{tmp_path}/large.jsonl", f"{tmp_path}/small.jsonl"]
    units = plan_units("--source a=", "a", patterns, text_key="text", unit_size=2**30)
    units = [Unit("a", piece.name, (piece,)) for unit in units for piece in unit.pieces]
    (tmp_path / "out" / "a").mkdir(parents=True)
    outcome, others = {}, set(multiprocessing.active_children())
    for unit, event, value in run_units(units, 1, str(model), Options(), str(tmp_path / "out")):
        if event == "progress" and not outcome:
            for worker in {*multiprocessing.active_children()} - others:
                worker.kill()
        elif event != "progress":
            outcome[unit.name] = (event, value)
    said = "its worker process died (exit code -9, probably out of memory; use fewer --workers)"
    assert outcome["large.jsonl"] == ("failed", said)
    assert outcome["small.jsonl"][0] == "done"


def test_workers_die_with_the_command(corpus, model, tmp_path):
    """Within its one long document a worker reports nothing: only at the end would a broken pipe have it clean up."""
    (tmp_path / "long.txt").write_text("\n".join(os.urandom(20).hex() for _ in range(2_000_000)))
    source = f"a={tmp_path}/long.txt"
    line, environment = command("--tokenizer", model, "--source", source, "--output", tmp_path / "out", "--workers", 1)
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while not (worker := writer_of(tmp_path / "out")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(worker, 0)
            time.sleep(0.01)
    assert writer_of(tmp_path / "out") == worker


def writer_of(output):
    """The process id in the name of a temporary file."""
    return next((int(path.name.rsplit("-", 1)[1]) for path in output.glob("a/*.tmp-*")), None)


# --- No room ---


def largest_files(limit):
    """The largest file size of a process stands in for the disk: both end in the same kind of error.

    Python would cut the files off that it compiles (-B), and later processes would fail to import them.
    """
    return {
        "interpreter": ("-B",),
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    }


def test_a_full_disk_stops_the_run_with_one_line_of_sizes(corpus, model, reference, tmp_path):
    output, expected = tmp_path / "out", files(reference)
    largest = max(len(data) for name, data in expected.items() if name.endswith(".bin"))
    result = run(*flags_of(corpus, model, output), code=1, **largest_files(largest - 1))
    (message,) = [line for line in result.stderr.decode().splitlines() if "failed" in line]
    assert f"{output}/y/b-" in message
    complete = sidecar_times(output)
    told = re.search(r"File too large, [\d.,]+ MB of [\d.,]+ MB are free; (\d+) of 11 shards are complete", message)
    assert 11 > int(told[1]) == len(complete) > 0
    assert not [path for path in output.rglob("*") if ".tmp-" in path.name]
    run(*flags_of(corpus, model, output), **largest_files(largest))
    assert {path: path.stat().st_mtime_ns for path in complete} == complete
    assert files(output) == expected


def test_when_a_shard_found_no_room_no_other_is_begun(corpus, model, reference, tmp_path):
    limit = min(path.stat().st_size for path in (reference / "x").glob("*.bin")) - 1
    result = run(*flags_of(corpus, model, tmp_path / "out"), code=1, **largest_files(limit))
    assert result.stderr.count(b"failed") == 1
    assert b"0 of 11 shards are complete" in result.stderr  # though c.txt would have had room


def test_a_disk_that_is_full_from_the_start_is_named(corpus, model, tmp_path):
    result = run(*flags_of(corpus, model, tmp_path / "out"), code=1, **largest_files(100))
    told = rb"failed: \S*/out/tokenizer.model: File too large, [\d.,]+ MB of [\d.,]+ MB are free: make room"
    assert re.search(told, result.stderr)


def test_no_room_for_a_model_is_one_line_and_leaves_nothing(corpus, tmp_path):
    output = tmp_path / "models/tokenizer.model"
    flags = ("--input", f"{corpus}/a*", "--vocab-size", 320, "--output", output)
    result = run("train", *flags, code=1, **largest_files(100))
    assert result.stderr.decode().splitlines()[-1].endswith(f" {output}: file too large; nothing was written")
    assert not list(output.parent.iterdir())
