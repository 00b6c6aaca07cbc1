"""Llama with mixture-of-head attention (MoH, arXiv 2410.11842) as remote code for transformers 4.46 to 5.x.

A token x uses its shared heads and K of the routed heads, and the gates g weigh the heads' outputs H:

    MoH(x) = sum_i g_i H_i W_O_i                                                    (Eq. 4)

moh_attention.py computes every head, and weighs the inactive ones by zero; moh_attention_kinds.py has rarer kinds.
moh_router.py selects heads and has the balance loss (Eq. 7), moh_gates.py the gates (Eq. 5, 6, 9, 10), moh_rotary.py
the rotary embedding, moh_positions.py the positions and masks, moh_layer.py the blocks, moh_own_keys.py the heads that
keep only their own tokens, moh_checks.py what is refused, moh_serving.py what serving engines cannot compute.
moh_gates.py and moh_rotary.py are files of the trainer.

Each of these arguments adds to the outputs; the first can be set in the configuration too:

    output_router_gates   router_gates, the g_i of every layer in fp32 [b, s, h], and router_selections, the heads that
                          a token uses, bool [b, s, h]: the gate of a selected head can underflow to 0
    output_router_logits  router_logits, the scores of the routed heads [b, s, E] of every layer that has some, and
                          aux_loss, their load-balance loss L_b, the mean over the sequences and the layers

With labels and a ``balance_loss_weight`` beta in the configuration, the loss is that of training:

    L = L_task + beta * L_b                                                         (Eq. 8)

Shapes: b batch, s new tokens, k cached and new tokens, h heads, d hidden size. Names of arguments and attributes follow
the transformers interface, which vLLM's Transformers backend reads.
"""

import copy
import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm

from .configuration_moh import MoHLlamaConfig
from .moh_attention import MoHLlamaContextualPositions
from .moh_attention_kinds import attention_kind
from .moh_layer import MoHLlamaDecoderLayer
from .moh_own_keys import keep_own_keys
from .moh_positions import (
    COUNT_SLOTS,
    MoHLlamaRotaryEmbedding,
    causal_masks,
    create_causal_mask,
    of_padding,
    positions_of,
    slots_of,
)
from .moh_router import MoHLlamaRouter, load_balance_loss
from .moh_serving import continuous_batching_problem, vllm_problem

CACHE_FIELDS = {"cache", "past_key_values"}  # the names since transformers 5.24, and before
(CACHE,) = CACHE_FIELDS & {*BaseModelOutputWithPast.__dataclass_fields__}
CACHE_ARGUMENTS = inspect.signature(DynamicCache.__init__).parameters  # new versions have config, with its windows


class MoHLlamaPreTrainedModel(PreTrainedModel):
    config_class = MoHLlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ["MoHLlamaDecoderLayer"]
    _skip_keys_device_placement = [*CACHE_FIELDS]
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = _supports_flex_attn = create_causal_mask is not None  # it makes the masks that they accept
    _supports_attention_backend = True
    _supports_cache_class = True  # transformers before 4.57 reads it, and the next one
    _supports_static_cache = True
    _can_compile_fullgraph = True

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, MoHLlamaRouter):
            for weight in module.parameters(recurse=False):
                nn.init.normal_(weight, std=std) if weight.is_floating_point() else nn.init.zeros_(weight)
        elif isinstance(module, MoHLlamaContextualPositions):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, LlamaRMSNorm):
            nn.init.ones_(module.weight)


@dataclass
class MoHLlamaModelOutput(BaseModelOutputWithPast):
    router_gates: tuple[torch.FloatTensor, ...] | None = None
    router_selections: tuple[torch.BoolTensor, ...] | None = None
    router_logits: tuple[torch.FloatTensor, ...] | None = None
    aux_loss: torch.FloatTensor | None = None


@dataclass
class MoHLlamaCausalLMOutput(CausalLMOutputWithPast):
    router_gates: tuple[torch.FloatTensor, ...] | None = None
    router_selections: tuple[torch.BoolTensor, ...] | None = None
    router_logits: tuple[torch.FloatTensor, ...] | None = None
    aux_loss: torch.FloatTensor | None = None


class MoHLlamaModel(MoHLlamaPreTrainedModel):
    """The decoder without its output head."""

    def __init__(self, config):
        super().__init__(config)
        config.check()  # from_pretrained(DIR, KEY=VALUE) sets attributes of an existing configuration
        if config._attn_implementation == "vllm" and (problem := vllm_problem(config)):
            raise ValueError(problem)
        self.check_positions()
        self.config_of_masks = None
        if "cope" in config.layer_positions:  # its layers need masks
            self.config_of_masks = copy.copy(config)
            self.config_of_masks._attn_implementation = "eager"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if "learned" in config.layer_positions:
            self.embed_positions = nn.Embedding(config.learned_positions, config.hidden_size)
        attention = attention_kind(config)
        self.layers = nn.ModuleList(
            MoHLlamaDecoderLayer(config, attention(config, index)) for index in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = MoHLlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()
        if config._attn_implementation == "vllm":  # vLLM gives every parameter the dtype of the model
            self._keep_in_fp32_modules_strict = {"bias_steps"}

    def check_positions(self):
        """Refuse what cannot count positions; ``set_attn_implementation`` can choose it after the model is made."""
        given = self.config._attn_implementation
        if "cope" in self.config.layer_positions and given not in ("eager", "sdpa"):
            raise ValueError(f"attn_implementation {given}: cannot count positions (cope); choose sdpa or eager")

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def masks(self, hidden_states, attention_mask, cache, cache_position, position_ids):
        """Return {window: the mask of layers with that window}. attention_mask: the padding mask, or finished masks."""
        config = self.config_of_masks or self.config
        return causal_masks(config, hidden_states, attention_mask, cache, cache_position, position_ids)

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        use_cache=None, output_attentions=None, output_hidden_states=None, output_router_gates=None,
        output_router_logits=False, return_dict=None, cache_position=None, cache=None, **kwargs,
    ):  # fmt: skip
        """Map input_ids [b, s] or inputs_embeds [b, s, d] to the last state [b, s, d], cache and requested outputs."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if past_key_values is not None and cache is not None:
            raise ValueError("give either past_key_values or cache, its name since transformers 5.24")
        self.check_positions()
        past_key_values = past_key_values if cache is None else cache
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output_router_gates = config.output_router_gates if output_router_gates is None else output_router_gates
        use_cache = config.use_cache if use_cache is None else use_cache
        if output_attentions and config._attn_implementation != "eager":  # others would give None for them
            raise ValueError("output_attentions: load the model with attn_implementation='eager'")
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if use_cache and past_key_values is None and not recompute:  # a layer computed again would cache its keys twice
            past_key_values = DynamicCache(**({"config": config} if "config" in CACHE_ARGUMENTS else {}))

        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        padding = of_padding(attention_mask)
        if cache_position is None and (position_ids is None or COUNT_SLOTS):  # else a cache need not know its length
            cache_position = slots_of(x, past_key_values)
        if position_ids is None:
            position_ids = positions_of(cache_position, None if self.embed_positions is None else padding)
        first_stage = not isinstance(self.layers[0], nn.Identity)  # vLLM has an Identity for each layer of other stages
        if self.embed_positions is not None and first_stage:
            x = x + self.embed_positions(position_ids)
        present = None
        if config.routed_keys == "selected" and past_key_values is not None:
            padded_only = attention_mask is None or padding is not None
            keep_own_keys(past_key_values, self.layers, config._attn_implementation, padded_only, output_attentions)
        if config.routed_keys == "selected" and padding is not None:
            present = padding[:, -x.shape[1] :].bool()
        masks = self.masks(x, attention_mask, past_key_values, cache_position, position_ids)
        position_embeddings = self.rotary_emb(x, position_ids)

        output_details = output_attentions or output_router_gates or output_router_logits
        states, details = [], []
        for layer, window in zip(self.layers, config.layer_windows, strict=False):  # vLLM keeps only a stage's layers
            states.append(x)
            x = layer(
                x,
                position_embeddings=position_embeddings,
                attention_mask=masks[window],
                past_key_values=past_key_values,
                position_ids=position_ids,
                cache_position=cache_position,
                present=present,
                output_details=output_details,
                **kwargs,
            )
            if output_details:
                x, *of_layer = x
                details.append(of_layer)
        x = self.norm(x)
        weights, gates, selections, scores = zip(*details, strict=True) if details else (None,) * 4
        aux_loss = None
        if output_router_logits:
            aux_loss = load_balance_loss(config, scores, selections, padding).to(x.device)
        outputs = MoHLlamaModelOutput(
            last_hidden_state=x,
            **{CACHE: past_key_values},
            hidden_states=(*states, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
            router_gates=gates if output_router_gates else None,
            router_selections=selections if output_router_gates else None,
            router_logits=tuple(part for part in scores if part.shape[-1]) if output_router_logits else None,
            aux_loss=aux_loss,
        )
        return outputs.to_tuple() if return_dict is False else outputs


class MoHLlamaForCausalLM(MoHLlamaPreTrainedModel, GenerationMixin):
    """The language model. With ``labels`` it returns the loss of the next token; see also ``balance_loss_weight``."""

    # transformers 5 reads the mapping, transformers 4 the keys.
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = getattr(LlamaForCausalLM, "_tp_plan", {})  # every version has its own words
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config):
        super().__init__(config)
        self.model = MoHLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def create_masks_for_generate(
        self, attention_mask=None, inputs_embeds=None, input_embeds=None, cache=None, past_key_values=None,
        cache_position=None, position_ids=None, **others,
    ):  # fmt: skip
        """``MoHLlamaModel.masks`` for a cache of fixed length, whose shape no new token changes: a compiled ``forward``
        stays one graph."""
        states = input_embeds if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        return self.model.masks(states, attention_mask, cache, cache_position, position_ids)

    def init_continuous_batching(self, *args, **kwargs):
        """Raise ValueError if the paged cache, which has one shape for all layers, does not fit this model."""
        if problem := continuous_batching_problem(self.config):
            raise ValueError(problem)
        return super().init_continuous_batching(*args, **kwargs)

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        labels=None, use_cache=None, logits_to_keep=0, num_logits_to_keep=None, return_dict=None, cache=None,
        output_router_logits=False, **kwargs,
    ):  # fmt: skip
        """Map input_ids [b, s] to logits [b, s, vocab]. logits_to_keep: how many last tokens, or which indices.

        ``num_logits_to_keep`` is the name of ``logits_to_keep`` in transformers 4.46 and 4.47.
        """
        balanced = labels is not None and self.config.balance_loss_weight != 0
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits or balanced,
            **kwargs,
        )
        keep = logits_to_keep if num_logits_to_keep is None else num_logits_to_keep
        kept = slice(-keep, None) if isinstance(keep, int) else keep  # slice(0, None) keeps every token
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if balanced:
            loss = loss + self.config.balance_loss_weight * share_of_batch(labels, **kwargs) * outputs.aux_loss
        outputs = MoHLlamaCausalLMOutput(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_gates=outputs.router_gates,
            router_selections=outputs.router_selections,
            router_logits=outputs.router_logits if output_router_logits else None,
            aux_loss=outputs.aux_loss if output_router_logits else None,
        )
        return outputs.to_tuple() if return_dict is False else outputs


def share_of_batch(labels, num_items_in_batch=None, **kwargs):
    """Return this batch's share of the tokens over which Trainer's gradient accumulation takes the mean."""
    return 1 if num_items_in_batch is None else (labels[:, 1:] != -100).sum() / num_items_in_batch


class MoHLlamaForSequenceClassification(MoHLlamaPreTrainedModel):
    """Predicts a label for each sequence from the state of its last token. With ``labels`` it returns the mean loss;
    see also ``balance_loss_weight``."""

    accepts_loss_kwargs = False  # Trainer takes the mean over micro-batches and ranks

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MoHLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=None, **kwargs):
        """Map input_ids [b, s] to logits [b, num_labels], from the last token in the mask, or before padding."""
        balanced = labels is not None and self.config.balance_loss_weight != 0
        kwargs["output_router_logits"] = kwargs.get("output_router_logits") or balanced
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        logits = self.score(outputs.last_hidden_state)  # [b, s, num_labels]
        batch, length = logits.shape[:2]
        present = attention_mask
        if present is None and input_ids is not None and self.config.pad_token_id is not None:
            present = input_ids != self.config.pad_token_id
        if present is None and batch > 1:
            raise ValueError("give an attention_mask, or set pad_token_id: where does each sequence of the batch end?")
        index = torch.arange(length, device=logits.device)
        last = length - 1 if present is None else (index * present.to(index)).argmax(-1)
        pooled = logits[torch.arange(batch, device=logits.device), last]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled, config=self.config)
        if balanced:
            loss = loss + self.config.balance_loss_weight * outputs.aux_loss
        outputs = SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return outputs.to_tuple() if return_dict is False else outputs


# Trainer's label smoothing shifts labels only for the classes that it finds here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("moh_llama", "MoHLlamaForCausalLM")

# Then save_pretrained writes these files beside the weights in every version; transformers 4.46 does not by itself.
MoHLlamaModel.register_for_auto_class("AutoModel")
MoHLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
MoHLlamaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
