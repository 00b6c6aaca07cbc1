"""What can be measured of a GPU in some minutes, the most valuable first; run again, it resumes where it stopped.

    python benchmarks/gpu.py [--minutes 12] [--output gpu.jsonl] [--peak-tflops 989] [--rehearse]

    1  ceilings    copies, matrix products, operations of the host                             benchmarks/ceilings.py
    2  loss        output head and loss, by torch and by --fused-loss                          benchmarks/loss.py
    3  layer       attention layers of LLM-S at 2,048 and 8,192 tokens, checked and tuned      benchmarks/attention.py
    4  step        training steps of LLM-S at 2,048 tokens, compiled, with either loss         benchmarks/step.py
    5  long step   those of LLM-B at 8,192 tokens, the paper's regime
    6  decoding    a new token against a cache                                                 benchmarks/decode.py
    7  peers       LLM-S against Hugging Face's Llama, both compiled
    8  medium step LLM-S at 8,192 tokens
    9  claim       the layer of the sources' own claim, 512 tokens
    10 save        the layers of LLM-S and LLM-B again; ``auto`` goes by them from then on (measured.json)

Each part is a program of its own, so that one that fails costs only its own time. Every line that it prints is a row
of the file at once: {"part", "line"}; and {"part", "command", "seconds", "code"} when it ends. Parts that ended with
code 0 are skipped the next time. At the end of its minutes a part is stopped; its rows stay.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, not this folder, whose tokenize.py hides a standard module
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from benchmarks.flags import checked, gpu_flags

ROOT = Path(__file__).resolve().parents[1]
STEP = "step.py --device cuda --backend auto"
KINDS = "dense-compiled dense-compiled-fused moh-75-compiled-fused moh-50-compiled-fused"
PARTS = {
    "ceilings": "ceilings.py",
    "loss": "loss.py",
    "layer": "attention.py --levels layer --shapes llm-s --lengths 2048 8192 --rounds 5",
    "step": f"{STEP} --shape llm-s --seq-length 2048 --micro-batch-size 8 --contestants {KINDS} moh-50-compiled",
    "long step": f"{STEP} --shape llm-b --seq-length 8192 --micro-batch-size 2 --contestants {KINDS}",
    "decoding": "decode.py --shapes llm-s llm-b --lengths 2048 8192",
    "peers": f"{STEP} --shape llm-s --seq-length 2048 --micro-batch-size 8 "
    "--contestants hf-compiled dense-compiled-fused",
    "medium step": f"{STEP} --shape llm-s --seq-length 8192 --micro-batch-size 2 --contestants {KINDS}",
    "claim": "attention.py --levels core --shapes llm-s --lengths 512 --active 50",
    "save": "attention.py --levels layer --lengths 1024 2048 4096 8192 --rounds 5 --save",
}
REHEARSED = {  # the same programs, small enough for the interpreter of Triton
    "ceilings": "ceilings.py --divisor 128 --rounds 1",
    "loss": "loss.py --shapes llm-s --tokens 8 --vocab-size 500 --rounds 1",
    "layer": "attention.py --levels layer --shapes llm-s --lengths 64 --rounds 1",
    "step": "step.py --shape tiny --seq-length 32 --contestants dense dense-fused moh-50 --rounds 1 --device cpu",
    "decoding": "decode.py --shapes llm-s --lengths 64 --batches 1 --rounds 1",
}


def main(options):
    deadline = time.monotonic() + 60 * options.minutes
    done = finished(options.output)
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


def finished(path):
    """The parts that ended well, by the rows of the file."""
    if not path.exists():
        return set()
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["part"] for row in rows if row.get("code") == 0}


def run_part(part, command, options, deadline):
    """Run a program, with its lines on the terminal and in the file as they come, until the deadline."""
    variables = os.environ | ({"TRITON_INTERPRET": "1"} if options.rehearse else {}) | {"PYTHONUNBUFFERED": "1"}
    started, lines = time.monotonic(), queue.SimpleQueue()
    with (
        options.output.open("a", encoding="utf-8") as rows,
        subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as process,
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
            process.kill()
            print(f"{part}: stopped at the end of its minutes", flush=True)
        code, words = process.wait(), [Path(command[1]).name, *command[2:]]
        note(command=words, seconds=round(time.monotonic() - started, 1), code=code)


if __name__ == "__main__":
    main(checked(gpu_flags, sys.argv[1:]))
