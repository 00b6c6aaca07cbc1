"""Tokenizing side by side: MB of text per CPU-second of whole processes, and wall-clock time by number of workers.

    python benchmarks/tokenize.py [--megabytes 64] [--rounds 3] [--workers 1 2] [--tokenizer M.model]
                                  [--datatrove PYTHON] [--corpus GLOB] [DIRECTORY]

DIRECTORY is filled on the first use and kept: the corpus, which is the source code and the text files of this Python
and its packages, a file a document; and a SentencePiece model of 32,000 pieces with LLaMA's options, trained on it. The
contestants take turns, each with one worker: data_prep/tokenize.py; the same without the segment cache; and the
DocumentTokenizer of datatrove, if PYTHON (default: this one) has it. Shown are the median over the rounds after the
first one, and the median, least and largest ratio within a round.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, not this folder, whose tokenize.py hides a standard module
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import gzip
import hashlib
import json
import resource
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median

from tools.hf.tokenizer_json import read_model, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
FILE_BYTES, LONGEST = 4_000_000, 400_000
PLAIN = """
import sys
from data_prep.encoding import Options, Tokenizer
from data_prep.units import plan_units
from data_prep.writing import tokenize_unit
model, pattern, output = sys.argv[1:]
tokenizer = Tokenizer(model)
tokenizer.cache, options = None, Options()
identity = {"tokenizer": tokenizer.description["sha256"], **vars(options)}
for unit in plan_units("", "text", [pattern], text_key="text", unit_size=2**27, identity=identity)[0]:
    tokenize_unit(unit, tokenizer, options, output, None, lambda *progress: None)
"""
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
tokenizer, folder, pattern, output = sys.argv[1:]
folders = dict(output_folder=output + "/tokens", local_working_dir=output + "/work")
read = JsonlReader(folder, glob_pattern=pattern)
steps = [read, DocumentTokenizer(tokenizer_name_or_path=tokenizer, eos_token="</s>", **folders)]
LocalPipelineExecutor(steps, tasks=1, logging_dir=output + "/log").run()
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("directory", nargs="?", help="for corpus and model, kept between uses (default: a temporary one)")
    add("--megabytes", type=int, default=64, help="text in the corpus, if there is so much (default: 64)")
    add("--rounds", type=int, default=3, help="that count (default: 3)")
    add("--workers", type=int, nargs="+", default=[], metavar="N", help="also measure with so many workers")
    add("--tokenizer", metavar="MODEL", help="SentencePiece model (default: one that is trained here)")
    add("--datatrove", metavar="PYTHON", default=sys.executable, help="interpreter that has datatrove")
    add("--corpus", metavar="GLOB", help="JSON lines with the key text (default: a corpus that is made here)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(arguments.directory or scratch)
        corpus = arguments.corpus or make_corpus(directory / "corpus", arguments.megabytes * 1_000_000)
        model = arguments.tokenizer or make_model(directory / "tokenizer.model", corpus)
        measure(corpus, model, arguments, Path(scratch, "out"))


def make_corpus(directory: Path, size: int) -> str:
    """The pattern of the corpus of about ``size`` bytes of text, which is made unless it is there."""
    pattern = f"{directory}/*.jsonl.gz"
    if directory.exists():
        return pattern
    partial = directory.with_name("corpus.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    lines, num_bytes, number, left = [], 0, 0, size
    for text in texts_of_this_python():
        lines.append(json.dumps({"id": f"{number}-{len(lines)}", "text": text}) + "\n")
        num_bytes += len(text.encode())
        if num_bytes >= min(FILE_BYTES, left):
            (partial / f"{number:03}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
            lines, num_bytes, number, left = [], 0, number + 1, left - num_bytes
            if left <= 0:
                break
    partial.rename(directory)
    return pattern


def texts_of_this_python():
    """The contents of source and text files, each once, in an order that mixes packages."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    paths = {path for root in roots for path in Path(root).rglob("*") if path.suffix in (".py", ".md", ".rst", ".txt")}
    seen = set()
    for path in sorted(filter(Path.is_file, paths), key=lambda path: hashlib.sha256(bytes(path)).digest()):
        content = path.read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if 100 < len(content) < LONGEST and content not in seen:
            seen.add(content)
            yield text


def make_model(path: Path, corpus: str) -> str:
    if not path.exists():
        command = ["train", "--input", corpus, "--vocab-size", "32000", "--sample-bytes", "24M", "--output", str(path)]
        subprocess.run([sys.executable, ROOT / "data_prep/tokenize.py", *command], check=True)
    return str(path)


def measure(corpus, model, arguments, scratch: Path):
    contestants = {"data_prep/tokenize.py": ours(model, corpus, 1), "without the cache": plain(model, corpus)}
    if subprocess.run([arguments.datatrove, "-c", "import datatrove"], capture_output=True).returncode == 0:
        write_tokenizer(read_model(model), scratch.parent, max_length=1 << 30)
        contestants["datatrove"] = datatrove(arguments.datatrove, scratch.parent / "tokenizer.json", corpus)
    else:
        print(f"{arguments.datatrove} has no datatrove: left out")
    contestants |= {f"{workers} workers": ours(model, corpus, workers) for workers in arguments.workers if workers > 1}

    times, shards, size = {name: [] for name in contestants}, {}, 0
    for round in range(arguments.rounds + 1):
        for name, command in contestants.items():
            shutil.rmtree(scratch, ignore_errors=True)
            (scratch / "text").mkdir(parents=True)
            times[name].append(run(command(str(scratch))))
            shards[name] = {path.name: path.read_bytes() for path in (scratch / "text").glob("*.bin")}
            sidecars = [json.loads(path.read_bytes()) for path in (scratch / "text").glob("*.json")]
            size = sum(sidecar["text_bytes"] for sidecar in sidecars) / 1e6 or size
            print(f"round {round}, {name}: {times[name][-1][0]:.2f} CPU-seconds", file=sys.stderr)
    first, *_ = contestants
    for name in contestants:
        if name != "datatrove" and shards[name] != shards[first]:
            sys.exit(f"{name}: the shards differ from those of {first}")

    print(f"{size:.1f} MB of text, {corpus}; {model}")
    print(f"{'':24}{'MB per CPU-second':>18}{'MB per second':>15}    CPU time, in that of the first")
    for name, rounds in times.items():
        cpu, wall = (median(seconds) for seconds in zip(*rounds[1:], strict=True))
        ratios = sorted(mine / theirs for (mine, _), (theirs, _) in zip(rounds[1:], times[first][1:], strict=True))
        print(
            f"{name:24}{size / cpu:18.2f}{size / wall:15.2f}    "
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    walls = {name: median(wall for _, wall in rounds[1:]) for name, rounds in times.items()}
    for workers in arguments.workers:
        if workers > 1:
            share = walls[first] / walls[f"{workers} workers"] / workers
            print(f"{workers} workers: each as fast as {share:.2f} of one alone")


def ours(model, corpus, workers):
    command = [sys.executable, str(ROOT / "data_prep/tokenize.py"), "--tokenizer", model, "--source", f"text={corpus}"]
    return lambda output: [*command, "--workers", str(workers), "--output", output]


def plain(model, corpus):
    return lambda output: [sys.executable, "-c", PLAIN, model, corpus, output]


def datatrove(python, tokenizer, corpus):
    folder, pattern = os.path.split(corpus)
    return lambda output: [python, "-c", DATATROVE, str(tokenizer), folder, pattern, output]


def run(command) -> tuple[float, float]:
    """CPU-seconds of the command and all its processes, and seconds from start to end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode:
        sys.exit(f"{' '.join(command)}: exit code {result.returncode}\n{result.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


if __name__ == "__main__":
    main()
