"""The exported model beside transformers: Llama to the bit, saving, exported graphs, and its configuration."""

import pytest

pytest.importorskip("transformers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tools.exported_code.configuration_moh import MoHLlamaConfig
from tests.tools.exported_code.modeling_moh import MoHLlamaForCausalLM
from tests.tools.exported_code.moh_attention import ALL_ATTENTION_FUNCTIONS, eager_attention_forward
from tests.tools.modeling_cases import GROUPS, LINEAR, LLAMA3, SHAPE, YARN, make_model, random_tokens
from tools.hf.convert.shipped_code import LANGUAGE


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied, rope", [(False, None), (True, None), (False, LLAMA3), (True, LINEAR), (False, YARN)])
def test_with_all_heads_the_model_is_llama_to_the_bit(attention, tied, rope):
    changes = {"head_selection": "all", "num_key_value_heads": 2, "tie_word_embeddings": tied, "head_dim": 12}
    model = make_model(kernels=attention, rope_parameters=rope, **changes)
    own = {"head_selection", "routing", "two_stage", "num_shared_heads", "num_active_routed_heads", "model_type"}
    own |= {"output_router_gates", "balance_loss_weight", "load_balance_coefficient", "rope_parameters"}
    shape = {k: v for k, v in model.config.to_dict().items() if k not in own | {"architectures", "auto_map"}}
    llama = LlamaForCausalLM._from_config(LlamaConfig(**shape, rope_scaling=rope), attn_implementation=attention).eval()
    llama.load_state_dict(model.state_dict())
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        assert model(tokens).logits.equal(llama(tokens).logits)


@torch.no_grad()
def test_labels_give_the_mean_cross_entropy():
    model, tokens = make_model(), random_tokens(2, 10)
    outputs = model(tokens, labels=tokens, output_hidden_states=True)
    rows = outputs.logits.double().log_softmax(-1)
    losses = [-rows[b, t, tokens[b, t + 1]].item() for b in range(2) for t in range(9)]
    assert outputs.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    summed = model(tokens, labels=tokens, num_items_in_batch=100).loss  # as Trainer asks with gradient accumulation
    assert summed.item() == pytest.approx(sum(losses) / 100, rel=1e-6)
    for keep in (3, torch.tensor([7, 8, 9])):
        kept = model(tokens, logits_to_keep=keep).logits
        torch.testing.assert_close(kept, outputs.logits[:, -3:], rtol=0, atol=1e-5)
    assert len(outputs.hidden_states) == 3
    assert model.lm_head(outputs.hidden_states[-1]).equal(outputs.logits)
    assert model(tokens, return_dict=False)[0].equal(outputs.logits)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "routing": "query_norm"}])
def test_a_saved_model_is_loaded_whole_with_equal_logits(changes, tmp_path):
    model, tokens = make_model(**changes), random_tokens(2, 10)
    model.save_pretrained(tmp_path)
    assert set(LANGUAGE) <= {path.name for path in tmp_path.iterdir()}
    loaded, report = MoHLlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert tied == bool(changes.get("tie_word_embeddings"))
    with torch.no_grad():
        assert loaded(tokens).logits.equal(model(tokens).logits)


@pytest.mark.parametrize(
    "changes",
    [
        GROUPS | {"routing": "released", "routing_top_p": 0.7, "routed_keys": "selected"},
        {"routing": "query_norm", "rope_parameters": LLAMA3},
    ],
)
@torch.no_grad()
def test_the_exported_graph_computes_sequences_of_other_lengths(changes):
    model, dynamic = make_model(**changes), {1: torch.export.Dim("length", min=2, max=60)}
    plain = {"use_cache": False, "return_dict": False}
    shapes = {"input_ids": dynamic, "use_cache": None, "return_dict": None}
    program = torch.export.export(model, (random_tokens(2, 9),), kwargs=plain, dynamic_shapes=shapes, strict=False)
    for length in (5, 40):
        tokens = random_tokens(2, length)
        logits = program.module()(tokens, **plain)[0]
        torch.testing.assert_close(logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_a_foreign_attention_gets_the_layer_and_its_arguments():
    """The contract of vLLM's Transformers backend, which replaces attention and passes its own objects through."""
    seen = []

    def recorder(module, query, key, value, attention_mask, scaling, marker=None, **kwargs):
        seen.append((module.layer_idx, scaling, marker))
        causal = torch.full((query.shape[2], key.shape[2]), -torch.inf).triu(1)
        return eager_attention_forward(module, query, key, value, causal, scaling)

    ALL_ATTENTION_FUNCTIONS["recorder"] = recorder
    try:
        tokens = random_tokens(1, 8)
        with torch.no_grad():
            expected = make_model()(tokens).logits
            logits = make_model(kernels="recorder")(tokens, use_cache=False, marker="mine").logits
    finally:
        del ALL_ATTENTION_FUNCTIONS["recorder"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert seen == [(0, 6**-0.5, "mine"), (1, 6**-0.5, "mine")]


def test_rotary_scalings_are_read_in_both_spellings():
    tokens = random_tokens(1, 30)
    with torch.no_grad():
        plain = make_model()(tokens).logits
        for rope in (LLAMA3, LINEAR, YARN):
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            logits = make_model(rope_parameters=rope)(tokens).logits
            assert (logits - plain).abs().max() > 0.1
            assert make_model(rope_scaling=scaling)(tokens).logits.equal(logits)
            scaling["type"] = scaling["rope_type"]  # as transformers 4 writes it
            assert make_model(rope_scaling=scaling)(tokens).logits.equal(logits)


def test_every_spelling_of_the_rotary_base_is_read_and_kept():
    spellings = (
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
    )
    for spelling in spellings:
        config = MoHLlamaConfig(**spelling)
        assert config.rope_theta == 500.0
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
)
def test_rotary_settings_of_from_pretrained_are_used_and_saved(changes, tmp_path):
    ids = random_tokens(2, 9)
    make_model().save_pretrained(tmp_path / "first")
    expected = make_model(**{"rope_theta": 100.0, **changes})(ids).logits
    model = MoHLlamaForCausalLM.from_pretrained(tmp_path / "first", **changes)
    model.save_pretrained(tmp_path / "second")
    for changed in (model, MoHLlamaForCausalLM.from_pretrained(tmp_path / "second")):
        assert torch.equal(changed(ids).logits, expected)
    with pytest.raises(ValueError, match="'linear': needs factor"):
        model.config.rope_parameters = {"rope_type": "linear"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shared_heads": [1]}, "must have 2 numbers"),
        ({"num_shared_heads": [1, 5]}, "layer 1 with 5 shared"),
        ({"num_active_routed_heads": [0, 1]}, "layer 0 with 1 shared and 0 active"),
        ({"num_active_routed_heads": [1, 3]}, "layer 1 with 2 shared and 3 active"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"routing": "other"}, "routing 'other'"),
        ({"head_selection": "other"}, "head_selection 'other'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3': needs low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0}}, "'linear': needs factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": YARN | {"beta_fast": 16.0}}, "beta_fast 16.0 of rope_type 'yarn'"),
        ({"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor 1.0 of rope_type 'yarn'"),
        ({"attention_bias": True}, "no biases"),
        ({"query_dim": 6, "head_dim": 7, "num_key_value_heads": 2}, "head_dim 7 must be at least 2 above it"),
        ({"two_stage": "no"}, "two_stage 'no': must be true or false"),
        ({"routed_keys": "own"}, "routed_keys 'own': must be one of all, selected"),
        ({"routed_positions": "head"}, "routed_positions 'head': must be one of text"),
    ],
)
def test_a_configuration_that_the_model_cannot_compute_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MoHLlamaConfig(**{**SHAPE, **changes})


class Elsewhere(torch.nn.Identity):
    """What vLLM has in place of a layer of another stage of the pipeline."""

    def forward(self, x, *_, **__):
        return x


@torch.no_grad()
def test_a_table_of_positions_is_added_on_the_first_stage_only():
    model, tokens = make_model(layer_positions=["learned"] * 2, learned_positions=12), random_tokens(2, 9)
    states = model.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    model.model.layers[0] = Elsewhere()
    second = model.model(inputs_embeds=states[1], use_cache=False).last_hidden_state
    torch.testing.assert_close(second, states[2], rtol=0, atol=0)
