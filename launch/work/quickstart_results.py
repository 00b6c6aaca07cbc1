"""The work of launch/quickstart_results.py: a table of losses, and text."""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PROMPTS = ("The built-in function", "Return the", "    def __init__(self")
FAILURES = OSError


def run(arguments):
    print_losses(arguments.out / "run" / "metrics.jsonl")
    print_samples(arguments.out / "hf")


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
