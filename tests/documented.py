"""A checkout with small files under the names that README.md and docs/ use, and the execution of commands in it."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from pydoc_data.topics import topics

import zstandard

from tests.launch.running import PYTHON, environment, execute
from tests.launch.test_slurm import SCONTROL, SRUN
from tests.tokenizing import ROOT, sentencepiece_model
from tests.tools.evaluating import made_rows

STAND_INS = {
    "bin/ssh": "#!/bin/sh\necho 127.0.0.1\n",  # asked for the name and the address of the first node
    "bin/pdsh": """#!/usr/bin/env bash
        [[ $6 != pkill* ]] || exit # -S -f FANOUT -w NODES COMMAND, where %n is the number of the node
        command=${*:6}
        for node in ${5//,/ }; do
            bash -c "${command//%n/${#nodes[@]}}" &
            nodes+=($!)
        done
        for node in "${nodes[@]}"; do wait "$node" || code=$?; done
        exit "${code:-0}"
    """,
    "bin/sbatch": """#!/usr/bin/env bash
        while [[ $1 == --* ]]; do shift 2; done
        SLURM_JOB_NODELIST=here SLURM_JOB_ID=123 exec bash "$@"
    """,
    "bin/srun": SRUN,
    "bin/scontrol": SCONTROL,
    "bin/pip": "#!/bin/sh\n",
    ".venv/bin/activate": "",
}


def prepare(directory, programs):
    for name in ("benchmarks", "data_prep", "launch", "moh_lm", "studies", "tools", "tests"):
        shutil.copytree(ROOT / name, directory / name)
    for name in ("setup.py", "pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, directory)
    make_small(directory / "launch/quickstart_corpus.py", 'root.rglob("*.py")', 'root.glob("[a-c]*.py")')
    make_small(directory / "launch/quickstart_corpus.py", "SMALLEST = 200_000", "SMALLEST = 50_000")
    every, some = (f"zip(digits.images{part}, digits.target{part}, " for part in ("", "[::12]"))
    make_small(directory / "launch/quickstart_images.py", every, some)
    python = PYTHON.format(directory=directory, python=programs / "python")
    for name, text in {**STAND_INS, "venv/bin/python": python}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    for program in programs.iterdir():
        (directory / "bin" / program.name).symlink_to(program)
    write_texts(directory)
    shell("python -m compileall -q moh_lm tools data_prep launch && python -m tests.documented_models", directory)


def make_small(path, old, new):
    """Write ``new`` in place of ``old``, for less text and fewer images of this Python's own."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def write_texts(directory):
    """Corpora, a tokenizer, and rows of the tasks."""
    texts = [text[:2000] for text in topics.values()]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    pile = [json.dumps({"text": text, "meta": {"pile_set_name": "Pile-CC"}}) + "\n" for text in texts[:20]]
    for folder, content in {
        "corpus": lines, "pile": lines[:40], "new-text": lines[60:], "old-text": lines[:40], "corpora/pile": pile,
    }.items():  # fmt: skip
        (directory / folder).mkdir(parents=True)
        (directory / folder / "00.jsonl.zst").write_bytes(zstandard.compress("".join(content).encode()))
    for folder in ("dolma", "mine"):
        (directory / folder).mkdir()
        (directory / folder / "0.json.gz").write_bytes(gzip.compress("".join(lines[40:]).encode()))
    for name, rows in made_rows().items():
        path = directory / "tasks" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sentencepiece_model(directory / "tokenizer.model", " ".join(texts).split("\n"), 512)


def places(directory):
    """Variables of the environment: the stand-ins, then programs of this Python; pip's in an active environment."""
    path = os.pathsep.join([str(directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "VIRTUAL_ENV": str(directory / "venv"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def shell(command, directory, code=0):
    """Execute a command there, which must end with ``code``; an error shows what it printed."""
    got, output, _ = execute(["bash", "-c", command], directory, **places(directory))
    assert got == code, f"{command}\n{output[-3000:]}"


def serve(command, directory):
    """Start TensorBoard there on a free port; it must show the metrics of a run."""
    with subprocess.Popen(
        ["bash", "-c", f"exec timeout 900 {command} --port 0"], cwd=directory, env=environment(**places(directory)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            output = []
            while not (found := re.search(r"http://localhost:\d+/", "".join(output))):
                output.append(process.stdout.readline())
                assert output[-1], f"{command}\n{''.join(output)}"
            local = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            metrics = {}
            while not metrics:  # it reads them after it has started
                time.sleep(0.5)
                metrics = json.load(local.open(f"{found[0]}data/plugin/scalars/tags"))
            assert "loss/train" in next(iter(metrics.values()))
        finally:
            process.terminate()
