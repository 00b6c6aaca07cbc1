"""The work of tools/run_report.py: samples of text; the page itself is made by moh_lm/monitor/report."""

from argparse import Namespace
from pathlib import Path

import torch

from moh_lm.checkpoint.directory import list_steps, step_number
from moh_lm.model.generation import generate
from moh_lm.monitor.journal import Rows, complete_rows
from moh_lm.monitor.report.page import write_page
from tools.work.generate import check_lengths, continuation, load

FAILURES = OSError


def run(arguments):
    for directory in arguments.runs if arguments.sample_prompts else ():
        sample(directory, arguments.sample_prompts, arguments.sample_tokens)
    default = arguments.runs[0] / "report.html" if len(arguments.runs) == 1 else Path("report.html")
    for path in write_page(arguments.runs, arguments.output or default, arguments.png):
        print(f"wrote {path}")


@torch.no_grad()
def sample(directory, prompts, count):
    """Add what each checkpoint makes of ``prompts``, in ``count`` tokens, to samples.jsonl, but for what is there."""
    path = directory / "samples.jsonl"
    known, rows = {(row["step"], row["prompt"]) for _, row in complete_rows(path)}, Rows(path)
    for step in reversed(list_steps(directory / "checkpoints")):
        wanted = [prompt for prompt in prompts if (step_number(step), prompt) not in known]
        if not wanted:
            continue
        model, limit, encoder = load(Namespace(model=step, device="cpu", dtype="float32"))
        tokenizer = encoder.model
        texts = [list(map(int, tokenizer.encode(prompt, out_type=int))) for prompt in wanted]
        check_lengths(Namespace(prompt=wanted, max_new_tokens=count), texts, limit)
        for prompt, tokens in zip(wanted, texts, strict=True):
            found = generate(model, [tokens], count, tokenizer.eos_id(), num_pieces=tokenizer.vocab_size())
            new = [token for (token,) in found if token is not None]
            text = continuation(tokenizer, tokens, new)
            rows.add({"step": step_number(step), "prompt": prompt, "text": text})
