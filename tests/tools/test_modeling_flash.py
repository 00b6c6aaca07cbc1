"""tools/hf/remote_code/modeling_moh.py on the road that transformers takes to FlashAttention.

The package needs a GPU. Here its two functions are their definition, written out; what leads to them, the layout of the
tensors, masks and lengths, is transformers' own code.
"""

import pytest

pytest.importorskip("transformers")

import torch
from transformers import modeling_flash_attention_utils as road

from tests.tools.modeling_cases import CASES, GREEDY, make_model, random_tokens

CALLS = {"whole": 0, "varlen": 0}


def attend(q, k, v, scale):
    """Of one sequence: q [n, h, e], k and v [m, kv, e] -> [n, h, e]; the last query sees all keys."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("nhe,mhe->hnm", q, k) * scale
    visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return torch.einsum("hnm,mhe->nhe", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    assert causal
    assert dropout_p == 0
    CALLS["whole"] += 1
    return torch.stack([attend(*parts, softmax_scale) for parts in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    assert causal or max_seqlen_q == 1
    assert dropout_p == 0
    CALLS["varlen"] += 1
    queries, keys = (lengths.diff().tolist() for lengths in (cu_seqlens_q, cu_seqlens_k))
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([attend(*part, softmax_scale) for part in parts])


@pytest.fixture
def make_flash_model(monkeypatch):
    """``make_model`` with FlashAttention."""
    values = {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": flash_attn_func,
        "_flash_varlen_fn": flash_attn_varlen_func,
        "_pad_fn": road._pad_input,
        "_unpad_fn": road._unpad_input,
        "_process_flash_kwargs_fn": road._lazy_define_process_function(flash_attn_varlen_func),
    }
    for name, value in values.items():
        monkeypatch.setattr(road, name, value, raising=False)  # the first is new in transformers 5

    def make(**changes):
        model = make_model(**changes)
        model.config._attn_implementation = "flash_attention_2"  # the public way asks for the package
        CALLS.update(whole=0, varlen=0)
        return model

    return make


@pytest.mark.parametrize("changes", CASES)
@torch.no_grad()
def test_logits_are_those_of_sdpa_whole_in_chunks_and_padded(changes, make_flash_model):
    tokens = random_tokens(2, 12)
    expected = make_model(**changes)(tokens, use_cache=False).logits
    tolerance = 3e-6 * expected.abs().max().item()
    model = make_flash_model(**changes)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=0, atol=tolerance)
    assert CALLS == {"whole": 2, "varlen": 0}

    cache, pieces = None, []
    for part in tokens.split([5, 4, 1, 1, 1], dim=1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=tolerance)

    padded, mask = torch.zeros(2, 15, dtype=torch.long), torch.zeros(2, 15, dtype=torch.long)
    for row, length in enumerate((12, 9)):
        padded[row, -length:], mask[row, -length:] = tokens[row, :length], 1
    CALLS.update(varlen=0)
    logits = model(padded, attention_mask=mask).logits
    assert CALLS["varlen"] == 2
    for row, length in enumerate((12, 9)):
        torch.testing.assert_close(logits[row, -length:], expected[row, :length], rtol=0, atol=tolerance)


@pytest.mark.parametrize("changes", CASES)
@torch.no_grad()
def test_greedy_generation_of_a_padded_batch_is_that_of_sdpa(changes, make_flash_model):
    tokens = random_tokens(2, 7)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = make_model(**changes).generate(tokens, attention_mask=mask, **GREEDY)
    model = make_flash_model(**changes)
    assert model.generate(tokens, attention_mask=mask, **GREEDY).equal(expected)
    assert CALLS["varlen"] == 2 * GREEDY["max_new_tokens"]


def test_gradients_are_those_of_sdpa(make_flash_model):
    tokens = random_tokens(2, 12)
    gradients = []
    for make in (make_model, make_flash_model):
        model = make(num_key_value_heads=2, num_shared_heads=[0, 2], num_active_routed_heads=[2, 1]).train()
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert CALLS["whole"] == 2
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item() + 1e-9)
