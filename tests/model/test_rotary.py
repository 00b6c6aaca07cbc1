"""Rotary embeddings with scaled frequencies, against transformers' own."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moh_lm.checks.model import model_problems
from moh_lm.config import Config, ModelConfig
from moh_lm.model.rotary import inverse_frequencies, magnitude, rotary_of, rotary_table

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FIELDS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_length",
}


def model(kind="default", head_dim=128, theta=5e5, **scaling):
    fields = {FIELDS[key]: value for key, value in scaling.items()}
    return ModelConfig(head_dim=head_dim, rope_theta=theta, rope_type=kind, **fields)


@pytest.mark.parametrize(
    "kind, scaling",
    [
        ("linear", {"factor": 4.0}),
        ("llama3", LLAMA3),
        ("llama3", {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 200}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}),
        ("yarn", {"factor": 32.0, "original_max_position_embeddings": 200}),
    ],
)
@pytest.mark.parametrize("head_dim", [8, 96, 128])
def test_frequencies_are_those_of_transformers_to_the_bit(kind, scaling, head_dim):
    rope = {"rope_type": kind, "rope_theta": 5e5, **scaling}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=1 << 17)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    found = inverse_frequencies(rotary_of(model(kind, head_dim, **scaling)), torch.float32)
    assert torch.equal(found, expected)
    assert magnitude(rotary_of(model(kind, head_dim, **scaling))) == pytest.approx(attention_factor, rel=1e-15)
    wide = inverse_frequencies(rotary_of(model(kind, head_dim, **scaling)), torch.float64)
    torch.testing.assert_close(wide, expected.double(), rtol=2e-6, atol=0)


def test_llama3_leaves_short_waves_slows_long_ones_and_joins_them_without_a_step():
    """By hand, from the wavelengths: the three ranges of the formula and its two borders."""
    plain = 1.0 / 5e5 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    found = inverse_frequencies(rotary_of(model("llama3", **LLAMA3)), torch.float64)
    turns = 8192 * plain / (2 * torch.pi)  # of a wave in the original length
    assert torch.equal(found[turns > 4], plain[turns > 4])
    torch.testing.assert_close(found[turns < 1], plain[turns < 1] / 8, rtol=1e-15, atol=0)
    between = (turns >= 1) & (turns <= 4)
    assert between.sum() > 5
    share = (turns[between] - 1) / 3
    torch.testing.assert_close(found[between], plain[between] * (share + (1 - share) / 8), rtol=1e-12, atol=0)


def test_linear_scaling_packs_positions_closer():
    (cos, sin), (slow_cos, slow_sin) = (
        rotary_table(33, rotary_of(model(*kind, theta=100.0, **scaling)), torch.float64, None)
        for kind, scaling in (((), {}), (("linear",), {"factor": 4.0}))
    )
    torch.testing.assert_close(slow_cos[::4], cos[:9])
    torch.testing.assert_close(slow_sin[::4], sin[:9])
    assert not torch.allclose(slow_sin, sin)


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
def test_a_scaling_that_lacks_a_number_or_has_one_too_many_is_refused_by_name(kind, scaling, named):
    assert any(named in problem for problem in model_problems(model(kind, **scaling)))


def test_a_configuration_written_before_the_scaling_is_one_without_it():
    before = {key: value for key, value in Config().to_dict().items() if key not in ("rope_type", *FIELDS.values())}
    assert Config.from_dict(before) == Config()
