"""What the quickstart's model has learned: its validation losses, and text that it writes.

    python launch/quickstart_results.py OUT

Reads OUT/run/metrics.jsonl, whose first evaluation precedes training, and the exported model in OUT/hf.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PROMPTS = ("The built-in function", "Return the", "    def __init__(self")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="directory that launch/quickstart.sh made")
    out = parser.parse_args().out
    print_losses(out / "run" / "metrics.jsonl")
    print_samples(out / "hf")


def print_losses(path):
    """The table of validation losses per source, in nats per token."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "evaluation" in row]
    first, last = rows[0], rows[-1]
    print(f"{'validation loss':<20} {'untrained':>10} {'step ' + str(last['step']):>10}")
    for source, loss in first["evaluation"].items():
        print(f"{source:<20} {loss:>10.3f} {last['evaluation'][source]:>10.3f}")


def print_samples(directory):
    """Continuations of PROMPTS, drawn with a fixed seed."""
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    torch.manual_seed(0)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=50)
        print(f"\n--- {prompt!r} continued by the model:\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
