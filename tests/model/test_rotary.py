"""Rotary embeddings and their scalings, against transformers' own and against tests/reference.py."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moh_lm.checks.model import model_problems
from moh_lm.config import Config, ModelConfig
from moh_lm.model.rotary import inverse_frequencies, magnitude, rotary_of, rotary_table
from tests.layers import reference_layer
from tests.reference import rotate

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FIELDS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_length",
}


SCALINGS = [
    ("linear", {"factor": 4.0}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 200}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}),
    ("yarn", {"factor": 32.0, "original_max_position_embeddings": 200}),
]


def model(kind="default", head_dim=128, share=1.0, **scaling):
    fields = {FIELDS[key]: value for key, value in scaling.items()}
    return ModelConfig(head_dim=head_dim, rope_theta=5e5, rotary_fraction=share, rope_type=kind, **fields)


@pytest.mark.parametrize("kind, scaling", SCALINGS)
@pytest.mark.parametrize("head_dim, share", [(8, 1.0), (96, 1.0), (96, 0.4), (128, 1.0)])
def test_frequencies_are_those_of_transformers_to_the_bit(kind, scaling, head_dim, share):
    rope = {"rope_type": kind, "rope_theta": 5e5, "partial_rotary_factor": share, **scaling}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=1 << 17)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    rotary = rotary_of(model(kind, head_dim, share, **scaling))
    assert torch.equal(inverse_frequencies(rotary, torch.float32), expected)
    assert len(expected) == int(head_dim * share) // 2
    assert magnitude(rotary) == pytest.approx(attention_factor, rel=1e-15)


@pytest.mark.parametrize("kind, scaling", [("default", {}), *SCALINGS])
@pytest.mark.parametrize("head_dim, share", [(8, 1.0), (96, 0.4), (128, 1.0)])
def test_queries_turn_as_in_the_equations(kind, scaling, head_dim, share):
    config = model(kind, head_dim, share, **scaling)
    x = torch.randn(300, 1, 2, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    found = rotary_of(config).apply_rotary(x, rotary_of(config).table(300, torch.float64, None))
    equations = reference_layer(config).rotary
    for t, head in np.ndindex(300, 2):
        expected = rotate(equations, x[t, 0, head].numpy(), t)
        np.testing.assert_allclose(found[t, 0, head], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "kind, scaling, named",
    [
        ("linear", {}, "--rope-factor is missing"),
        ("linear", {"factor": 0.5}, "--rope-factor 0.5: must be 1 or above"),
        ("default", {"factor": 8.0}, "--rope-factor 8: has no meaning with --rope-type default"),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0}, "--rope-original-length is missing"),
        ("llama3", {**LLAMA3, "high_freq_factor": 1.0}, "the first below the second"),
    ],
)
def test_a_scaling_without_its_numbers_is_refused_by_name(kind, scaling, named):
    assert any(named in problem for problem in model_problems(model(kind, **scaling)))


def test_a_table_made_for_inference_serves_training():
    rotary, device = rotary_of(ModelConfig(), 8), torch.device("cpu")
    with torch.inference_mode():
        rotary_table(37, rotary, torch.float32, device)
    x = torch.ones(40, 1, 1, 1, requires_grad=True)
    (x * rotary_table(40, rotary, torch.float32, device)[0]).sum().backward()
    assert x.grad.isfinite().all()


def test_a_configuration_without_the_scaling_has_none():
    before = {key: value for key, value in Config().to_dict().items() if key not in ("rope_type", *FIELDS.values())}
    assert Config.from_dict(before) == Config()
