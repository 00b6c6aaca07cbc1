"""The check of an export before it is published: the same logits as the checkpoint's, from the files as written.

Three models compute the logits of the same random tokens in fp32, one after the other: the trainer's model with the
weights of the checkpoint, rounded to the dtype of the export; the trainer's model made from the export's config.json
and safetensors; and transformers with the export's remote code. transformers works in a process of its own,

    python tools/export_check.py EXPORT SCRATCH

since a process keeps the remote code of the first of two directories with the same name. It reads SCRATCH/tokens.npy
[b, s] and writes SCRATCH/logits.npy [b, s, vocab]. It also compares the tokenizer with SentencePiece on ``TEXTS``.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from sentencepiece import SentencePieceProcessor

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.fragments import full_parameters
from moh_lm.manifest import read_json
from moh_lm.model.transformer import CausalLM

try:
    import transformers
except ImportError:  # an export can be made without it
    transformers = None

TOLERANCE = 1e-5  # relative to the largest logit where that is above 1
TEXTS = (  # without runs of a character, which a unigram model may split in two ways of equal score
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n\treturn x ** 2 # 1234567890\n",
    " two  spaces ",
    "Zürich, naïve café, Ελληνικά, русский, العربية, हिन्दी, 한국어, 日本語",
    "\U0001f642 \U0001d54f \u00a0 \u200b \ufffd",
)


class ExportError(Exception):
    """The export could not be written, or does not compute what the checkpoint computes."""


def check_export(step, config, directory):
    """Compare the logits of the export in ``directory`` with those of the checkpoint ``step``.

    Returns lines that say how they differ. Raises ExportError if they differ by more than ``TOLERANCE``.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (2, min(config.run.seq_length, 128)), generator=generator)
    values = read_json(directory / "config.json")
    dtype = getattr(torch, values["torch_dtype"])
    rounded = ((name, tensor.to(dtype)) for name, tensor in full_parameters(step))
    expected = trainer_logits(config.model, rounded, tokens)
    logits = trainer_logits(model_config(values), exported_parameters(directory), tokens)
    lines = [compare("the trainer's model", expected, logits)]
    if transformers is None:
        remedy = "pip install transformers, and repeat with --overwrite"
        return [*lines, f"not checked with transformers, which is not installed: {remedy}"]
    logits = hugging_face_logits(directory, tokens)
    return [*lines, compare(f"transformers {transformers.__version__}", expected, logits)]


def compare(what, expected, logits):
    difference = np.abs(expected - logits).max().item()
    allowed = TOLERANCE * max(1.0, np.abs(expected).max().item())
    if not difference <= allowed:  # also if it is not a number
        raise ExportError(
            f"{what} differs from the checkpoint by {difference:.1e} in its logits; allowed is {allowed:.1e}"
        )
    return f"checked: logits of {what} differ from the checkpoint's by at most {difference:.1e}"


# --- The trainer's model ---


@torch.no_grad()
def trainer_logits(config, parameters, tokens):
    """Logits of the trainer's model, fp32, numpy [b, s, vocab].

    config: ModelConfig. parameters: (name, tensor) pairs. tokens: int64 [b, s].
    """
    with torch.device("meta"):
        model = CausalLM(config)
    model.to_empty(device="cpu")
    wanted = dict(model.named_parameters())
    for name, tensor in parameters:
        wanted.pop(name).copy_(tensor)
    if wanted:
        raise ExportError(f"parameters {', '.join(wanted)} are missing")
    # Sequences go one by one, as through transformers: equal shapes give equal rounding, and so equal routing.
    return np.stack([model(row[None])[:, 0].numpy() for row in tokens])


def exported_parameters(directory):
    """(name, tensor) of every parameter in the safetensors files of ``directory``."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)


def model_config(values):
    """The ModelConfig that a config.json of an export describes."""
    heads = HeadsConfig(
        head_selection=values["head_selection"],
        num_shared_heads=tuple(values["num_shared_heads"]),
        num_active_routed_heads=tuple(values["num_active_routed_heads"]),
        routing=values["routing"],
        two_stage=values["two_stage"],
    )
    return ModelConfig(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        vocab_size=values["vocab_size"],
        rope_theta=values["rope_theta"],
        rms_norm_eps=values["rms_norm_eps"],
        tie_embeddings=values["tie_word_embeddings"],
        heads=heads,
    )


# --- transformers ---


def hugging_face_logits(directory, tokens):
    """The same from this file in a process of its own, without network; raises ExportError with its last line."""
    with tempfile.TemporaryDirectory() as scratch:
        np.save(f"{scratch}/tokens.npy", tokens.numpy())
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": scratch, "HF_MODULES_CACHE": f"{scratch}/modules"}
        finished = subprocess.run(
            [sys.executable, __file__, str(directory), scratch],
            env={**os.environ, **offline},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if finished.returncode:
            lines = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
            raise ExportError(f"transformers does not load the export: {lines[-1]}")
        return np.load(f"{scratch}/logits.npy")


def main():
    export, scratch = map(Path, sys.argv[1:])
    transformers.logging.set_verbosity_error()
    check_tokenizer(export)
    np.save(scratch / "logits.npy", compute_logits(export, torch.from_numpy(np.load(scratch / "tokens.npy"))))


def check_tokenizer(export):
    """Exit with a message if the tokenizer gives other ids than SentencePiece."""
    if not (export / "tokenizer.model").is_file():
        return
    original = SentencePieceProcessor(model_file=str(export / "tokenizer.model"))
    converted = transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=True)
    for text in TEXTS:
        ids = converted(text)["input_ids"]
        if ids != original.encode(text):
            sys.exit(f"tokenizer.json gives {text!r} the ids {ids}, tokenizer.model {original.encode(text)}")


@torch.no_grad()
def compute_logits(export, tokens):
    """Logits as of ``trainer_logits``; exits with a message unless the weights are exactly those of the model."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        export, trust_remote_code=True, output_loading_info=True
    )
    problems = {key: value for key, value in report.items() if value}
    if problems:
        sys.exit(f"the loading report is not empty: {problems}")
    model = model.float().eval()
    return np.stack([model(row[None]).logits[0].numpy() for row in tokens])


if __name__ == "__main__":
    main()
