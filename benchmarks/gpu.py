"""Measures a GPU in a few minutes, the most valuable parts first. If run again, it resumes where it stopped.

    python benchmarks/gpu.py [--minutes 12] [--output gpu.jsonl] [--peak-tflops 989] [--rehearse] [--table]

    1  ceilings    copies, matrix products, operations of the host                             benchmarks/ceilings.py
    2  router      routers and gates, by torch and by --fused-router                           benchmarks/router.py
    3  loss        output head and loss, by torch and by --fused-loss                          benchmarks/loss.py
    4  layer       attention layers of LLM-S at 2,048 and 8,192 tokens: checked, tuned, saved  benchmarks/attention.py
    5  step        training steps of LLM-S at 2,048 tokens, compiled, by kind of fusion        benchmarks/step.py
    6  captured    the same steps by calls and, except for AdamW, as one CUDA graph
    7  long step   steps of LLM-B at 8,192 tokens, the paper's regime
    8  decoding    a new token against a cache, and of whole models by calls and captured      benchmarks/decode.py
    9  peers       LLM-S against Hugging Face's Llama, both compiled
    10 medium step LLM-S at 8,192 tokens, captured
    11 long graph  LLM-B at 8,192 tokens, captured
    12 8B step     four layers of the shape of LLaMA3-8B, 4,096 tokens
    13 lengths     attention layers of that shape from 4,096 to 131,072 tokens: prefill (forward), and both passes
    14 claim       the paper's own claim, which gives no shape: 512 tokens, half of the heads in 0.63 of the time
    15 save        the layers of LLM-S and LLM-B again

From 4 on ``auto`` uses the measured times (measured.json). The last lines say which targets are met (targets.py).

Each part is a separate program, so that a failure costs only its own time. Every line that it prints becomes a row of
the file at once, {"part", "line"}, and its end becomes {"part", "command", "seconds", "code"}. Parts that ended with
code 0 are skipped the next time. When its minutes are over, a part is stopped, and its rows stay.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from benchmarks.flags import checked, gpu_flags
from benchmarks.targets import met_and_missed

ROOT = Path(__file__).resolve().parents[1]
STEP = "step.py --device cuda --backend triton --rounds 5"
KINDS = "dense-compiled dense-compiled-fused moh-75-compiled-fused moh-50-compiled-fused moh-25-compiled-fused"
GRAPHS = " ".join(f"{name}-compiled-fused-captured" for name in ("dense", "moh-75", "moh-50", "moh-25"))
PARTS = {
    "ceilings": "ceilings.py",
    "router": "router.py",
    "loss": "loss.py",
    "layer": "attention.py --levels layer --shapes llm-s --lengths 2048 8192 --rounds 5 --save",
    "step": f"{STEP} --shape llm-s --seq-length 2048 --micro-batch-size 8 --contestants {KINDS} moh-50-compiled "
    "dense-compiled-fused-joined moh-50-compiled-fused-joined",
    "captured": f"{STEP} --shape llm-s --seq-length 2048 --micro-batch-size 8 --contestants {GRAPHS} "
    "dense-compiled-fused moh-50-compiled-fused",
    "long step": f"{STEP} --shape llm-b --seq-length 8192 --micro-batch-size 2 --contestants {KINDS}",
    "decoding": "decode.py --shapes llm-s llm-b --lengths 2048 8192",
    "peers": f"{STEP} --shape llm-s --seq-length 2048 --micro-batch-size 8 "
    "--contestants hf-liger-compiled dense-compiled-fused",
    "medium step": f"{STEP} --shape llm-s --seq-length 8192 --micro-batch-size 2 --contestants {GRAPHS}",
    "long graph": f"{STEP} --shape llm-b --seq-length 8192 --micro-batch-size 2 --contestants "
    "dense-compiled-fused-captured moh-50-compiled-fused-captured",
    "8B step": f"{STEP} --shape llama3-8b-4-layers --seq-length 4096 --micro-batch-size 2 --contestants {KINDS}",
    "lengths": "attention.py --levels layer --shapes llama3-8b --active 50 --rounds 3 "
    "--lengths 4096 8192 16384 32768 65536 131072",
    "claim": "attention.py --levels core layer --shapes llm-s --lengths 512 --active 50",
    "save": "attention.py --levels layer --lengths 1024 2048 4096 8192 --rounds 5 --save",
}
REHEARSED = {  # the same programs, small enough for the interpreter of Triton
    "rehearsed ceilings": "ceilings.py --divisor 128 --rounds 1",
    "rehearsed router": "router.py --shapes llm-s --routing sigmoid --tokens 8 --rounds 1",
    "rehearsed loss": "loss.py --shapes llm-s --tokens 8 --vocab-size 500 --rounds 1",
    "rehearsed layer": "attention.py --levels layer --shapes llm-s --lengths 64 --rounds 1",
    "rehearsed step": "step.py --shape tiny --seq-length 32 --rounds 1 --device cpu --contestants "
    "dense dense-fused moh-50-fused moh-25-joined hf-liger",
    "rehearsed decoding": "decode.py --shapes llm-s --lengths 64 --batches 1 --rounds 1",
}


def main(options):
    if options.table:
        return print("\n".join([*tables(options.output), *met_and_missed(rows_of(options.output))]))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, lambda *_: sys.exit(143))  # ends the part that runs, too
    deadline = time.monotonic() + 60 * options.minutes
    done = {row["part"] for row in rows_of(options.output) if row.get("code") == 0}
    for part, words in (REHEARSED if options.rehearse else PARTS).items():
        if part in done:
            print(f"{part}: is complete in {options.output}")
        elif time.monotonic() < deadline:
            program, *flags = words.split()
            if options.peak_tflops and program == "step.py":
                flags += ["--peak-tflops", str(options.peak_tflops)]
            run_part(part, [sys.executable, str(ROOT / "benchmarks" / program), *flags], options, deadline)
        else:
            print(f"{part}: no time is left; the same command resumes here")
    print("\n".join(met_and_missed(rows_of(options.output))))


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def tables(path):
    """Return lines of Markdown, a table for each part. The program that printed its columns explains them."""
    for part, rows in groupby(rows_of(path), key=lambda row: row["part"]):
        shown = [re.split(r"\s{2,}|: ", row["line"].strip()) for row in rows if "line" in row]
        width = max(map(len, shown), default=0)
        yield from (f"\n### {part}\n", f"|{' |' * width}", f"|{'---|' * width}")
        yield from (f"| {' | '.join(cells)} |{' |' * (width - len(cells))}" for cells in shown)


def run_part(part, command, options, deadline):
    """Run a program until the deadline, with its lines on the terminal and in the file as they arrive."""
    variables = os.environ | ({"TRITON_INTERPRET": "1"} if options.rehearse else {}) | {"PYTHONUNBUFFERED": "1"}
    started, lines = time.monotonic(), queue.SimpleQueue()
    with (
        options.output.open("a", encoding="utf-8") as rows,
        subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process,
    ):

        def note(**row):
            rows.write(json.dumps({"part": part, **row}) + "\n")
            rows.flush()

        threading.Thread(target=lambda: [*map(lines.put, process.stdout), lines.put(None)], daemon=True).start()
        try:
            while (line := lines.get(timeout=max(0, deadline - time.monotonic()))) is not None:
                print(f"{part}: {line}", end="", flush=True)
                if line.strip():
                    note(line=line.rstrip())
        except queue.Empty:
            print(f"{part}: stopped at the end of its minutes", flush=True)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it may have started
        code, words = process.wait(), [Path(command[1]).name, *command[2:]]
        note(command=words, seconds=round(time.monotonic() - started, 1), code=code)


if __name__ == "__main__":
    main(checked(gpu_flags, sys.argv[1:]))
