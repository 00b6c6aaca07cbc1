"""The exported model with a cache, in chunks, in padded batches and beams: nothing may change."""

import copy
import math

import pytest

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, StaticCache

from tests.tools.exported_code.moh_own_keys import OwnKeysStaticLayer
from tests.tools.modeling_cases import CASES, GREEDY, GROUPS, OWN_KEYS, make_model, random_tokens
from tests.tools.modeling_reference import assert_equals_reference

COUNTED = {"num_key_value_heads": 2, "layer_positions": ["cope", "none"], "cope_max_position": 5}
LEARNED = {"layer_positions": ["learned"] * 2, "learned_positions": 24}


def test_positions_are_counted_only_where_all_scores_are_made():
    with pytest.raises(ValueError, match="attn_implementation flex_attention: .* choose sdpa or eager"):
        make_model(kernels="flex_attention", **COUNTED)
    model = make_model(**COUNTED)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attn_implementation flex_attention: .* choose sdpa or eager"):
        model(random_tokens(1, 4))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", [*CASES, COUNTED, LEARNED])
@torch.no_grad()
def test_a_cache_chunks_and_left_padding_do_not_change_logits(changes, attention):
    model, tokens = make_model(kernels=attention, **changes), random_tokens(2, 12)
    whole = model(tokens, use_cache=False).logits
    tolerance = 3e-6 * whole.abs().max().item()

    for stops in ([12], [5, 12], [5, *range(6, 13)]):
        cache, start, pieces = None, 0, []
        for stop in stops:
            outputs = model(tokens[:, start:stop], past_key_values=cache, use_cache=True)
            cache, start = outputs.past_key_values, stop
            pieces.append(outputs.logits)
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=tolerance)

    padded, mask = torch.zeros(2, 15, dtype=torch.long), torch.zeros(2, 15, dtype=torch.long)
    for row, length in enumerate((12, 9)):
        padded[row, -length:], mask[row, -length:] = tokens[row, :length], 1
    logits = model(padded, attention_mask=mask).logits
    for row, length in enumerate((12, 9)):
        torch.testing.assert_close(logits[row, -length:], whole[row, :length], rtol=0, atol=tolerance)

    if changes is LEARNED:  # a mask as long as a static cache
        cache, mask = StaticCache(config=model.config, max_cache_len=16), torch.zeros(2, 16, dtype=torch.long)
        mask[:, :12] = 1
        logits = model(tokens, attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(logits, whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize("changes", [*CASES, COUNTED])
@torch.no_grad()
def test_greedy_text_is_the_same_for_every_cache_and_padding(changes):
    model, tokens = make_model(**changes), random_tokens(2, 7)
    expected = tokens
    for _ in range(GREEDY["max_new_tokens"]):  # generation without generate()
        following = model(expected, use_cache=False).logits[:, -1].argmax(-1)
        expected = torch.cat((expected, following[:, None]), dim=1)
    assert model.generate(tokens, use_cache=False, **GREEDY).equal(expected)
    assert model.generate(tokens, **GREEDY).equal(expected)
    assert model.generate(tokens, cache_implementation="static", **GREEDY).equal(expected)
    short = model.generate(tokens[:1, :4], **GREEDY)[0, 4:]
    padded, mask = tokens.clone(), torch.ones_like(tokens)
    padded[0], mask[0, :3] = torch.cat((torch.zeros(3, dtype=torch.long), tokens[0, :4])), 0
    generated = model.generate(padded, attention_mask=mask, **GREEDY)[:, 7:]
    assert generated[0].equal(short) and generated[1].equal(expected[1, 7:])


@pytest.mark.parametrize("changes", OWN_KEYS)
@torch.no_grad()
def test_heads_with_their_own_keys_equal_the_equations(changes):
    model, tokens = make_model(**changes), random_tokens(2, 7)
    assert_equals_reference(model, random_tokens(1, 14)[0])
    beams = GREEDY | {"num_beams": 3}
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    expected = model.generate(tokens, attention_mask=mask, use_cache=False, **beams)
    assert model.generate(tokens, attention_mask=mask, **beams).equal(expected)
    assert model.generate(tokens, attention_mask=mask, cache_implementation="static", **beams).equal(expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_later_mask_holds_for_heads_with_their_own_keys(attention):
    model, tokens = make_model(kernels=attention, routed_keys="selected"), random_tokens(1, 10)
    visible = torch.ones(10, 10, dtype=torch.bool).tril()
    visible[6:, 1:3] = False
    lowest = torch.finfo(torch.float32).min
    mask = visible[None, None] if attention == "sdpa" else torch.zeros(1, 1, 10, 10).masked_fill(~visible, lowest)
    whole = model(tokens, attention_mask=mask, use_cache=False).logits[:, 6:]
    hidden = torch.ones(1, 10, dtype=torch.long)
    hidden[:, 1:3] = 0
    for later in (mask[..., 6:, :], hidden):
        cache = model(tokens[:, :6]).past_key_values
        places = torch.arange(6, 10)[None]
        logits = model(tokens[:, 6:], past_key_values=cache, attention_mask=later, position_ids=places).logits
        torch.testing.assert_close(logits, whole, rtol=0, atol=3e-6 * whole.abs().max().item())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_heads_with_their_own_keys_run_in_fp16_autocast(attention):
    model, tokens = make_model(kernels=attention, routed_keys="selected", num_key_value_heads=2), random_tokens(2, 9)
    expected = model(tokens, use_cache=False).logits
    with torch.autocast("cpu", dtype=torch.float16):
        begun = model(tokens[:, :6])
        after = model(tokens[:, 6:], past_key_values=begun.past_key_values)
    found = torch.cat((begun.logits, after.logits), 1).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


@torch.no_grad()
def test_positions_in_heads_go_on_where_a_window_forgets_keys():
    model = make_model(routed_keys="selected", routed_positions="head", layer_windows=[0, 4], num_shared_heads=[1, 0])
    tokens, cache = random_tokens(1, 12), DynamicCache(config=model.config)
    expected = model(tokens, use_cache=False).logits
    for _ in range(2):  # the cache is empty again after its reset
        stops = ((0, 7), (7, 9), (9, 10), (10, 12))
        pieces = [model(tokens[:, start:stop], past_key_values=cache).logits for start, stop in stops]
        torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=3e-6 * expected.abs().max().item())
        cache.reset()
    assert_equals_reference(model, tokens[0])
    mask = torch.ones_like(tokens)
    mask[0, 5] = 0  # what is masked is not counted, wherever it stands
    texts = [model.generate(tokens, attention_mask=mask, use_cache=use_cache, **GREEDY) for use_cache in (False, True)]
    assert texts[0].equal(texts[1])
    with pytest.raises(ValueError, match="routed_positions head: .*choose a DynamicCache"):
        model(tokens, past_key_values=StaticCache(model.config, max_cache_len=12))


@torch.no_grad()
def test_a_cache_is_taken_by_its_old_and_its_new_name():
    model, tokens = make_model(), random_tokens(2, 9)
    expected = model(tokens, use_cache=False).logits[:, 6:]
    for name in ("past_key_values", "cache"):
        after = model(tokens[:, 6:], **{name: model(tokens[:, :6]).past_key_values})
        torch.testing.assert_close(after.logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="either past_key_values or cache"):
        model(tokens, past_key_values=DynamicCache(), cache=DynamicCache())


@torch.no_grad()
def test_a_dynamic_cache_keeps_the_heads_only_that_tokens_use():
    model, tokens = make_model(routed_keys="selected", num_shared_heads=[0, 0]), random_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    cache = model(tokens, attention_mask=mask, output_router_gates=True).past_key_values
    assert [layer.keys.shape for layer in cache.layers] == [(20 * 2, 6), (20 * 1, 6)]
    expected = model(tokens[:, :10], attention_mask=mask[:, :10]).past_key_values
    cache.crop(-2)
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        assert mine.get_seq_length() == 10
        assert all(map(torch.equal, mine.parts()[2:], theirs.parts()[2:]))
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=0, atol=1e-5)
    before = [layer.keys for layer in cache.layers]
    cache.batch_repeat_interleave(2)
    assert [layer.keys.shape[0] for layer in cache.layers] == [2 * len(keys) for keys in before]
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert all(layer.keys.equal(keys) for layer, keys in zip(cache.layers, before, strict=True))


MANY = GROUPS | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_shared_heads": [0, 2], "routing_top_p": 0.8}


@pytest.mark.parametrize(
    "changes, kept",
    [
        ({"num_shared_heads": [0, 0]}, [2, 1]),
        ({"num_shared_heads": [0, 0], "num_key_value_heads": 2}, [2, 1]),
        ({"num_shared_heads": [0, 0], "routing": "relu"}, [4, 4]),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "num_shared_heads": [2, 3]}, [3, 3]),
        ({"num_shared_heads": [0, 0], "num_active_routed_heads": [1, 1]}, [1, 1]),
        (MANY, [2, 2]),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_static_cache_keeps_as_many_heads_as_a_token_uses(changes, kept, attention):
    model = make_model(kernels=attention, routed_keys="selected", **changes)
    tokens, empty = random_tokens(3, 12), StaticCache(model.config, max_cache_len=16)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    whole = model(tokens, attention_mask=mask, position_ids=places, use_cache=False).logits
    for order in ([0, 1, 2], [1, 1, 0]):  # of beams, after 8 tokens
        cache, pieces = copy.deepcopy(empty), []
        for start, stop in ((0, 5), (5, 8), *((t, t + 1) for t in range(8, 12))):
            rows = order if start >= 8 else [0, 1, 2]
            if start == 8:
                cache.reorder_cache(torch.tensor(order))
            asked = {"attention_mask": mask[rows, :stop], "position_ids": places[rows, start:stop]}
            logits = model(tokens[rows, start:stop], past_key_values=cache, **asked).logits
            pieces.append(logits if start >= 8 else logits[order])
        found = torch.cat(pieces, 1)
        seen = mask[order].bool()
        torch.testing.assert_close(found[seen], whole[order][seen], rtol=0, atol=3e-6 * whole.abs().max().item())
        assert [layer.keys.shape for layer in cache.layers] == [(3, heads, 16, 6) for heads in kept]
        assert [layer.members.nbytes for layer in cache.layers] == [3 * model.config.num_attention_heads * 16] * 2
    cache.reset()
    assert not any(layer.members.any() for layer in cache.layers)
    again = model(tokens, attention_mask=mask, position_ids=places, past_key_values=cache).logits
    torch.testing.assert_close(again[mask.bool()], whole[mask.bool()], rtol=0, atol=3e-6 * whole.abs().max().item())


@pytest.mark.skipif(not hasattr(StaticCache, "crop"), reason="this transformers cannot take back tokens")
@pytest.mark.parametrize("changes", OWN_KEYS)
@torch.no_grad()
def test_tokens_that_a_static_cache_takes_back_leave_nothing(changes):
    """As assisted decoding does with tokens that the model would not have chosen."""
    model, tokens = make_model(**changes), random_tokens(2, 12)
    whole, cache = model(tokens, use_cache=False).logits, StaticCache(model.config, max_cache_len=16)
    model(torch.cat([tokens[:, :7], random_tokens(2, 4, seed=1)], 1), past_key_values=cache)
    cache.crop(-4)
    again = model(tokens[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(again, whole[:, 7:], rtol=0, atol=3e-6 * whole.abs().max().item())


@torch.no_grad()
def test_a_step_with_a_static_cache_of_own_keys_is_one_graph():
    model, tokens = make_model(routed_keys="selected", num_shared_heads=[0, 0]), random_tokens(2, 12)
    cache = StaticCache(model.config, max_cache_len=16)
    model(tokens[:, :10], past_key_values=cache)
    assert all(type(layer) is OwnKeysStaticLayer for layer in cache.layers)
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    for t in (10, 11):
        place = torch.tensor([t])
        logits = step(tokens[:, t : t + 1], past_key_values=cache, cache_position=place).logits
        expected = model(tokens[:, : t + 1], use_cache=False).logits[:, -1:]
        torch.testing.assert_close(logits, expected, rtol=0, atol=3e-6 * expected.abs().max().item())


@pytest.mark.parametrize("changes", OWN_KEYS)
@torch.no_grad()
def test_a_prefill_in_chunks_fills_a_static_cache(changes):
    model, tokens = make_model(**changes), random_tokens(2, 7)
    chunks = GREEDY | {"prefill_chunk_size": 2, "return_dict_in_generate": True}
    found = model.generate(tokens, cache_implementation="static", **chunks)
    assert found.sequences.equal(model.generate(tokens, use_cache=False, **GREEDY))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_number_that_is_none_stays_one_in_a_static_cache(attention):
    model = make_model(kernels=attention, routed_keys="selected", num_shared_heads=[0, 0])
    cache, inputs = StaticCache(model.config, max_cache_len=8), torch.ones(1, 4, 16)
    inputs[0, 2] = math.nan
    assert model(inputs_embeds=inputs, past_key_values=cache).logits[0, 2:].isnan().all()
    assert model(random_tokens(1, 1), past_key_values=cache).logits.isnan().any()
