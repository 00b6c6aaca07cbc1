"""Small models of transformers that are imported, and the logits that they must have afterwards."""

import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moh_lm.build import build_model
from moh_lm.checkpoint.fragments import full_parameters
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config
from moh_lm.model.transformer import saved_tensors
from tests.tokenizing import sentencepiece_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHAPE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "rope_parameters": LLAMA3,
}  # fmt: skip
BASE_ONLY = {"rope_type": "default", "rope_theta": 500.0}
MIXTURE = "--head-selection mixture --num-shared-heads 4 --num-active-routed-heads 2".split()


def make_llama(directory, seed=0, dtype=torch.float32, shard="5GB", kind=(LlamaForCausalLM, LlamaConfig), **changes):
    """A Llama, or another ``kind``, whose every weight shows in its logits, saved by transformers."""
    torch.manual_seed(seed)
    model = kind[0](kind[1](**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1.25)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return kind[0].from_pretrained(directory, dtype=torch.float32).eval()


def trainer_logits(run_directory, tokens):
    """Logits [b, s, vocab] of the trainer's model with the weights of the newest step."""
    step = find_step(run_directory)
    model = build_model(Config.load(step / "config.json").model)
    parameters = dict(saved_tensors(model))
    for name, values in full_parameters(step):
        parameters.pop(name).copy_(values)
    assert not parameters
    return torch.stack([model(row[None])[:, 0] for row in tokens])


@torch.no_grad()
def assert_same_logits(run_directory, model):
    tokens = torch.randint(model.config.vocab_size, (3, 50), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([model(row[None]).logits[0] for row in tokens])
    found = trainer_logits(run_directory, tokens)[..., : model.config.vocab_size]
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def rewrite(source, target, absent=(), **changes):
    """A copy of a model with another config.json; keys in ``absent``, or changed to None, are left out."""
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text())
    values = {key: value for key, value in values.items() if key not in absent} | changes
    (target / "config.json").write_text(json.dumps(values))


def small_model(path, lines, vocab_size, **kind):
    """As LLaMA's."""
    return sentencepiece_model(Path(f"{path}.model"), lines, vocab_size, remove_extra_whitespaces=False, **kind)
