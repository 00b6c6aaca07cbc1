"""The exported model as it is served by transformers: continuous batching, and generation as one compiled graph."""

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests.distributed import run_ranks
from tests.tools.exported_code.modeling_moh import MoHLlamaForCausalLM
from tests.tools.modeling_cases import GREEDY, GROUPS, SHAPE, make_model, random_tokens

LATENT = {"attention": "latent", "kv_lora_rank": 5, "qk_rope_head_dim": 4}
TWO_SIZES = {"layer_windows": [5, 2]}
TIED = {"tie_word_embeddings": True}
STOCK = {key: value for key, value in SHAPE.items() if key not in ("num_shared_heads", "num_active_routed_heads")}


def served(model, prompts):
    """The tokens that continuous batching adds to each prompt."""
    settings = pytest.importorskip("transformers", "5.24").ContinuousBatchingConfig
    paged = settings(page_size=32, num_blocks=16, max_batch_tokens=64)
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(prompts, greedy, paged)
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        GROUPS | {"routing": "query_norm", "routing_top_p": None},
        {"layer_windows": [4, 0], "routing": "sigmoid"},
        {"sliding_window": 4, "num_key_value_heads": 2},
        {"layer_positions": ["cope", "rotary"], "cope_max_position": 5},
        {"head_dims": [6, 6, 4, 2]},
        {"layer_positions": ["learned"] * 2, "learned_positions": 24, "head_selection": "static"},
    ],
)
@torch.no_grad()
def test_continuous_batching_gives_the_tokens_of_generate(changes):
    model = make_model(**changes)
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (3, 7, 12)]
    expected = [model.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in prompts]
    assert served(model, prompts) == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"routed_keys": "selected"}, "routed_keys selected: continuous batching has no room for .*; use generate"),
        (LATENT, "attention latent: continuous batching keeps keys and values of heads; use generate"),
        (TWO_SIZES, r"layer_windows \[5, 2\]: continuous batching has one window; use generate"),
        ({"layer_heads": [3, 4], "head_selection": "all"}, "layer_heads .*: continuous batching needs the same number"),
    ],
)
def test_models_that_a_paged_cache_cannot_keep_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        served(make_model(**changes), [[1, 2, 3]])


def graphs_of(model, new_tokens=GREEDY["max_new_tokens"]):
    """How often a step with a static cache is compiled while a padded batch grows, and the tokens."""
    found, tokens = [], random_tokens(2, 7)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    greedy = GREEDY | {"max_new_tokens": new_tokens}
    expected = model.generate(tokens, attention_mask=mask, use_cache=False, **greedy)
    torch._dynamo.reset()
    count = {"backend": lambda graph, inputs, **options: found.append(graph) or graph}
    compiled = transformers.CompileConfig(fullgraph=True, dynamic=False, **count)
    compiled._compile_all_devices = True
    compiled = {"cache_implementation": "static", "compile_config": compiled}
    assert model.generate(tokens, attention_mask=mask, **compiled, **greedy).equal(expected)
    return len(found)


@pytest.mark.parametrize("changes", [{}, {"routed_keys": "selected"}, {"routing": "query_norm"}, LATENT])
@torch.no_grad()
def test_a_padded_batch_with_a_static_cache_is_one_graph(changes):
    assert graphs_of(make_model(**changes)) == 1


@torch.no_grad()
def test_llama_has_one_graph_too():
    assert graphs_of(LlamaForCausalLM(LlamaConfig(**STOCK)).eval()) == 1


@torch.no_grad()
def test_windows_are_compiled_as_often_as_those_of_mistral():
    """Once more with each token, by transformers' own cache of windows."""
    mistral = MistralForCausalLM(MistralConfig(**STOCK, num_key_value_heads=4, sliding_window=5)).eval()
    assert 1 < graphs_of(make_model(**TWO_SIZES), 3) <= graphs_of(mistral, 3)


@pytest.mark.parametrize("changes", [{}, TWO_SIZES, {"routed_keys": "selected"}, {"layer_positions": ["cope", "none"]}])
@torch.no_grad()
def test_packed_texts_do_not_see_each_other(changes):
    """Where positions begin anew, as trainers pack them without a mask."""
    pytest.importorskip("transformers", "4.53")
    model, texts = make_model(**changes), [random_tokens(1, length, seed=length) for length in (6, 9)]
    places = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    packed = model(torch.cat(texts, 1), position_ids=places, use_cache=False).logits
    expected = torch.cat([model(text, use_cache=False).logits for text in texts], 1)
    torch.testing.assert_close(packed, expected, rtol=0, atol=3e-6 * expected.abs().max().item())


@torch.no_grad()
def split(directory, tokens):
    """Of this rank: the logits of a model that is split over the ranks, and the text that it generates."""
    model = MoHLlamaForCausalLM.from_pretrained(directory, tp_plan="auto")
    return model(tokens).logits, model.generate(tokens, **GREEDY)


@pytest.mark.parametrize("changes", [{}, TIED, TIED | {"vocab_size": 20, "num_key_value_heads": 2}])
@torch.no_grad()
def test_a_model_split_over_two_ranks_gives_its_logits(changes, tmp_path):
    """Also where the output head is the embedding."""
    pytest.importorskip("transformers", "5.23")
    model, tokens = make_model(**changes), random_tokens(1, 6)
    model.save_pretrained(tmp_path)
    expected = model(tokens).logits
    for logits, text in run_ranks(split, 2, tmp_path, tokens):
        torch.testing.assert_close(logits, expected, rtol=0, atol=3e-6 * expected.abs().max().item())
        assert text.equal(model.generate(tokens, **GREEDY))
