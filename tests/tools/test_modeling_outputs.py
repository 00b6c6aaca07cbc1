"""What the exported model returns beside logits, its classifier, and what transformers' Trainer makes of it."""

import math

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from transformers import DynamicCache, Trainer, TrainingArguments

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig
from tests.tools.exported_code.configuration_moh import MoHLlamaConfig
from tests.tools.exported_code.modeling_moh import MoHLlamaForCausalLM, MoHLlamaForSequenceClassification
from tests.tools.exported_code.moh_own_keys import QuantizedLayer
from tests.tools.exported_code.moh_rotary import rotate
from tests.tools.modeling_cases import SHAPE, make_model, random_tokens
from tests.tools.modeling_reference import assert_router_outputs, reference_balance


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 2, "num_shared_heads": [0, 4], "num_active_routed_heads": [2, 0]},
        {"routing": "released"},
        {"routing": "query_norm", "num_shared_heads": [1, 4], "num_active_routed_heads": [2, 0]},
        {"head_selection": "static"},
        {"head_selection": "all"},
    ],
)
@torch.no_grad()
def test_router_outputs_are_gates_and_selections_of_all_layers(changes):
    model, tokens = make_model(**changes), random_tokens(2, 6)
    plain = model(tokens)
    assert plain.router_gates is None and plain.router_selections is None
    for outputs in (model(tokens, output_router_gates=True), model.model(tokens, output_router_gates=True)):
        assert_router_outputs(outputs, model, tokens)
    model.config.output_router_gates = True
    outputs = model(tokens)
    assert outputs.logits.equal(plain.logits)
    assert_router_outputs(outputs, model, tokens)


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu", "softplus"])
@torch.no_grad()
def test_the_load_balance_loss_is_added_if_it_has_a_weight(routing):
    changes = {"num_hidden_layers": 3, "num_shared_heads": [1, 4, 0], "num_active_routed_heads": [2, 0, 3]}
    model, tokens = make_model(routing=routing, **changes), random_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    plain = model(tokens, attention_mask=mask, labels=tokens, output_hidden_states=True)
    outputs = model(tokens, attention_mask=mask, labels=tokens, output_router_logits=True)
    expected = reference_balance(model, plain.hidden_states, mask)
    assert plain.aux_loss is None and plain.router_logits is None
    assert outputs.aux_loss.item() == pytest.approx(expected, rel=1e-5)
    assert [scores.shape[-1] for scores in outputs.router_logits] == [3, 4]
    assert outputs.loss.equal(plain.loss)
    # Trainer sums micro-batches whose mean is over all of their tokens: each counts by its share of them.
    asked = {"attention_mask": mask, "labels": tokens}
    parts = [model(tokens, **asked, num_items_in_batch=64).loss]
    model.config.balance_loss_weight = 0.5
    parts.append(model(tokens, **asked, num_items_in_batch=64).loss)
    assert (parts[1] - parts[0]).item() == pytest.approx(0.5 * expected * 16 / 64, rel=1e-3)
    weighed = model(tokens, **asked)
    assert weighed.loss.item() == pytest.approx(plain.loss.item() + 0.5 * expected, rel=1e-6)
    assert weighed.aux_loss is None and weighed.router_logits is None


def test_no_key_says_that_the_model_is_a_mixture_of_experts(tmp_path):
    """TRL and others take a model with these keys of Mixtral for one, and add a loss of their own."""
    make_model().save_pretrained(tmp_path)
    for config in (MoHLlamaConfig(), MoHLlamaConfig.from_pretrained(tmp_path)):
        text = config.get_text_config()
        assert not hasattr(text, "output_router_logits") and not hasattr(text, "router_aux_loss_coef")
        assert text.balance_loss_weight == 0


@torch.no_grad()
def test_attention_weights_are_returned_by_eager_attention_only():
    model, tokens = make_model(kernels="eager", num_key_value_heads=2), random_tokens(2, 7)
    outputs = model(tokens, output_attentions=True)
    assert len(outputs.attentions) == 2 and outputs.logits.equal(model(tokens).logits)
    layer, x = model.model.layers[0], model(tokens, output_hidden_states=True).hidden_states[0]
    x = layer.input_layernorm(x)
    projections = layer.self_attn.q_proj, layer.self_attn.k_proj
    query, key = (projection(x).unflatten(-1, (-1, 6)).transpose(1, 2) for projection in projections)
    places = model.model.rotary_emb(x, torch.arange(7)[None])
    query, key = rotate(query, places), rotate(key, places)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) / math.sqrt(6)
    expected = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(outputs.attentions[0], expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        make_model()(tokens, output_attentions=True)


@torch.no_grad()
def test_attention_weights_of_own_keys_are_in_their_places():
    model, tokens = make_model(kernels="eager", routed_keys="selected"), random_tokens(1, 10)
    expected = model(tokens, use_cache=False, output_attentions=True).attentions
    cache = model(tokens[:, :9], output_attentions=True).past_key_values
    found = model(tokens[:, 9:], past_key_values=cache, output_attentions=True).attentions
    for mine, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, whole[:, :, -1:], rtol=0, atol=1e-5)
    cache = model(tokens[:, :9]).past_key_values
    with pytest.raises(ValueError, match="output_attentions: the cache has left out keys"):
        model(tokens[:, 9:], past_key_values=cache, output_attentions=True)


@torch.no_grad()
def test_a_quantized_cache_is_refused_with_own_keys():
    cache, made = DynamicCache(), {"_quantize": None, "_dequantize": None, "get_seq_length": lambda self: 0}
    cache.layers.append(type("Quantized", (QuantizedLayer,), made)())
    with pytest.raises(ValueError, match="a quantized cache cannot keep its marks"):
        make_model(routed_keys="selected")(random_tokens(1, 4), past_key_values=cache)


@torch.no_grad()
def test_sequence_classification_reads_the_last_real_token():
    config = MoHLlamaConfig(**SHAPE, num_labels=3, pad_token_id=0)
    torch.manual_seed(0)
    model, tokens = MoHLlamaForSequenceClassification(config).eval(), random_tokens(2, 8)
    one = [model(tokens[:1]).logits, model(tokens[1:, :5]).logits]
    expected = model.score(model.model(tokens[:1]).last_hidden_state[:, -1])
    torch.testing.assert_close(one[0], expected, rtol=0, atol=1e-6)
    for pads in (slice(5, 8), slice(0, 3)):  # behind, before
        batch, mask = tokens.clone(), torch.ones_like(tokens)
        batch[1, pads], mask[1, pads] = 0, 0
        batch[1][mask[1].bool()] = tokens[1, :5]
        outputs = model(batch, attention_mask=mask, labels=torch.tensor([2, 0]))
        torch.testing.assert_close(outputs.logits, torch.cat(one), rtol=0, atol=1e-6)
        assert outputs.loss.item() == pytest.approx(F.cross_entropy(torch.cat(one), torch.tensor([2, 0])).item())
        balance = model.model(batch, attention_mask=mask, output_router_logits=True).aux_loss
        config.balance_loss_weight = 0.1
        more = model(batch, attention_mask=mask, labels=torch.tensor([2, 0])).loss
        config.balance_loss_weight = 0.0
        assert (more - outputs.loss).item() == pytest.approx(0.1 * balance.item(), rel=1e-3)
    config.pad_token_id = None
    with pytest.raises(ValueError, match="attention_mask"):
        model(tokens)


def test_trainer_averages_classification_over_micro_batches(tmp_path):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": torch.tensor(n % 3)} for n, row in enumerate(random_tokens(4, 8))]
    losses = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = MoHLlamaForSequenceClassification(MoHLlamaConfig(**SHAPE, num_labels=3, pad_token_id=0))
        batch = {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts, "max_steps": 1}
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        losses.append(Trainer(model, TrainingArguments(tmp_path, **batch, **quiet), train_dataset=rows).train())
    assert losses[1].training_loss == pytest.approx(losses[0].training_loss, rel=1e-5)


@torch.no_grad()
def test_trainers_label_smoothing_asks_for_the_next_token(tmp_path):
    pytest.importorskip("accelerate")
    model, ids = make_model(), random_tokens(2, 9)
    quiet = {"report_to": [], "use_cpu": True}
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.1, **quiet), train_dataset=[])
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1).item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_selection": "all"}, "head_selection all: num_shared_heads must be"),
        ({"sliding_window": 3}, "sliding_window 3: give layer_windows"),
        ({"hidden_act": "gelu"}, "moh_llama has SiLU"),
        ({"num_active_routed_heads": [0, 0]}, "layer 0 with"),
    ],
)
def test_from_pretrained_refuses_what_the_model_cannot_compute(changes, message, tmp_path):
    make_model(layer_windows=[5, 5]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        MoHLlamaForCausalLM.from_pretrained(tmp_path, **changes)


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_selected_heads_are_those_of_the_trainers_router(routing, dtype):
    shape = {"num_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 19}
    heads = HeadsConfig(num_shared_heads=(2, 0), num_active_routed_heads=(2, 3), routing=routing)
    trainer = build_model(ModelConfig(hidden_size=16, intermediate_size=24, rope_theta=100.0, heads=heads, **shape))
    trainer.initialize(seed=1)
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_shared_heads": [2, 0], "routing": routing}
    model = make_model(num_active_routed_heads=[2, 3], **changes)
    for name, parameter in trainer.named_parameters():
        parameter.mul_(1 if parameter.ndim == 1 else 8)
        model.get_parameter(name).copy_(parameter)
    trainer, model, tokens = trainer.to(dtype), model.to(dtype), random_tokens(1, 200)
    taken = []
    for layer in trainer.model.layers:
        router, select = layer.self_attn.router, layer.self_attn.router.select
        router.select = lambda *arguments, select=select: taken.append(select(*arguments)) or taken[-1]
    trainer(tokens)
    for selected, trained, shared in zip(
        model(tokens, output_router_gates=True).router_selections, taken, (2, 0), strict=True
    ):
        assert selected[0, :, :shared].all()
        assert selected[0, :, shared:].equal(trained[:, 0].bool())


@pytest.mark.parametrize("changes", [{}, {"routing": "query_norm"}])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(changes):
    tokens, seen = random_tokens(2, 10), []
    for checkpointing in (False, True):
        model = make_model(**changes).train()
        calls = []
        model.model.layers[0].input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outputs = model(tokens, labels=tokens, output_router_gates=True)
        (outputs.loss + sum(gates.square().sum() for gates in outputs.router_gates)).backward()
        assert len(calls) == 1 + checkpointing
        assert outputs.past_key_values is None or not checkpointing
        seen.append((outputs.loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    assert seen[0][0] == seen[1][0]
    for name, gradient in seen[0][1].items():
        assert gradient.abs().max() > 0 or "w_" in name
        assert seen[1][1][name].equal(gradient)


@pytest.mark.parametrize("changes", [{}, {"routed_keys": "selected"}])
@torch.no_grad()
def test_a_model_in_training_caches_where_nothing_has_gradients(changes):
    model, tokens = make_model(**changes).train(), random_tokens(2, 10)
    model.gradient_checkpointing_enable()
    expected = model(tokens, use_cache=False).logits[:, 6:]
    cache = model(tokens[:, :6]).past_key_values
    assert cache.get_seq_length() == 6
    logits = model(tokens[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=3e-6 * expected.abs().max().item())
    with torch.enable_grad():
        assert model(tokens).past_key_values is None


def test_blocks_are_the_layers_that_transformers_recomputes():
    layers = pytest.importorskip("transformers.modeling_layers").GradientCheckpointingLayer
    if not hasattr(layers, "_can_checkpoint_with_cache"):
        pytest.skip("transformers before 5.24 drops caches in them without gradients too")
    assert isinstance(make_model().model.layers[0], layers)


@torch.no_grad()
def test_an_activation_that_is_not_a_number_gives_such_logits_and_no_error():
    model, tokens = make_model(layer_positions=["cope", "rotary"], cope_max_position=3), random_tokens(2, 6)
    model.model.embed_tokens.weight.fill_(math.nan)
    assert model(tokens).logits.isnan().all()
