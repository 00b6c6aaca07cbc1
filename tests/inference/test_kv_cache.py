"""What a cache keeps, and what of it a token reads."""

import math

import pytest
import torch

from moh_lm.inference import decode
from moh_lm.inference.generate import read_prompt, read_token
from moh_lm.inference.kv_cache import Cache
from tests.inference.models import MODELS, PROMPTS, make_model, read

TOKENS = torch.tensor([1, 2, 3])


def test_a_cache_keeps_no_more_tokens_than_a_window_shows():
    cache = Cache(make_model("windows"), 3, max_length=12)
    rooms = [(layer.keys.shape[2], layer.values.shape[2]) for layer in cache.layers]
    assert rooms == [(5, 5), (12, 12)]


@pytest.mark.parametrize("name, share", [("own keys", 3 / 8), ("own keys, query norm, groups", 2 / 8)])
def test_heads_with_their_own_keys_keep_their_share_of_the_cache(name, share):
    model = make_model(name)
    tokens = torch.randint(37, (1500,), generator=torch.Generator().manual_seed(1))
    cache = Cache(model, 1, 1502)
    read_prompt(model, cache, 0, tokens)
    for token in (1, 2):
        read_token(model, cache, torch.tensor([token]))
    whole = 2 * 1502 * model.model.layers[1].self_attn.k_proj.weight.shape[0] * 8  # no head of this layer is shared
    kept = sum(head.data.nbytes for head in cache.layers[1].own.lists[0])  # their room included
    assert kept / whole == pytest.approx(share, rel=0.04)


@pytest.mark.parametrize("name", MODELS)
def test_what_lies_behind_the_last_token_is_not_read(name):
    model = make_model(name)
    expected = read_token(model, read(model)[0], TOKENS)
    cache, _ = read(model, "dense")
    for row, length in enumerate(PROMPTS):
        for layer in cache.layers:
            layer.keys[row, :, length:] = layer.values[row, :, length:] = 9.0
    torch.testing.assert_close(read_token(model, cache, TOKENS), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["paper", "released, budgets per layer", "static", "groups", "top-p"])
def test_a_token_reads_the_keys_of_its_selected_heads_only(name, monkeypatch):
    model = make_model(name)
    expected = read_token(model, read(model, "loops")[0], TOKENS)
    numbers = []  # of heads in each call

    def poisoned(query, keys, values, heads):
        numbers.append(len(heads))
        shared_by = 8 // len(keys)
        read = {head // shared_by for head in heads.tolist()}
        others = [key_head for key_head in range(len(keys)) if key_head not in read]
        keys, values = keys.clone(), values.clone()
        keys[others] = values[others] = math.nan
        return attend_row(query, keys, values, heads)

    attend_row = decode.attend_row
    monkeypatch.setattr(decode, "attend_row", poisoned)
    assert torch.equal(read_token(model, read(model, "loops")[0], TOKENS), expected)
    assert len(numbers) == 2 * 3  # layers and rows
    assert {"groups": numbers == [4, 4, 4, 2, 2, 2], "top-p": len(set(numbers)) > 1}.get(name, True)


def test_auto_loops_on_a_cpu_where_enough_keys_need_not_be_read(monkeypatch):
    looped = []
    attend = decode.attend_selected
    monkeypatch.setattr(decode, "attend_selected", lambda *arguments: looped.append(1) or attend(*arguments))
    query, cache = torch.ones(2, 4, 8), torch.ones(2, 2, 9, 8)
    lengths = torch.tensor([9, 3], dtype=torch.int32)
    one_off = torch.tensor([[True, True, False, False], [True, False, True, False]])  # a group of one row: 9 x 8 / 2
    for worth_it, expected in ((36, 1), (37, 0)):
        monkeypatch.setattr(decode, "WORTH_IT", worth_it)
        looped.clear()
        decode.decode_attention(query, cache, cache, lengths, one_off)
        assert len(looped) == expected
