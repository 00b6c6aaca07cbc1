"""transformers' own tests of a model, on exports: test_transformers_suite.py runs a copy of this file beside them.

``NOT_OURS`` are those that ask for what an export does not have, with the reason.
"""

import unittest

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto import modeling_auto

from tests.tools.exported_code.configuration_moh import MoHLlamaConfig
from tests.tools.exported_code.modeling_moh import (
    MoHLlamaForCausalLM,
    MoHLlamaForSequenceClassification,
    MoHLlamaModel,
)

from .test_modeling_common import ModelTesterMixin, ids_tensor

MODELS = {
    AutoModel: MoHLlamaModel,
    AutoModelForCausalLM: MoHLlamaForCausalLM,
    AutoModelForSequenceClassification: MoHLlamaForSequenceClassification,
}
AutoConfig.register("moh_llama", MoHLlamaConfig)
for auto, model in MODELS.items():
    auto.register(MoHLlamaConfig, model)
modeling_auto.MODEL_MAPPING_NAMES["moh_llama"] = "MoHLlamaModel"  # by which the tests know what labels a model takes
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["moh_llama"] = "MoHLlamaForSequenceClassification"

NOT_OURS = {
    "test_bc_cache_name_forward": "both names of a cache are taken, without a warning, for all versions",
    "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": "sdpa has no weights and would give None",
    "test_generation_tester_mixin_inheritance": "the tests of generate are not in the source distribution",
    "test_model_outputs_equivalence": "asks sdpa for attention weights, which would be None",
    "test_model_rope_scaling_frequencies": "the table of cos and sin has one dimension more than Llama's",
    "test_model_rope_scaling_from_config_1_dynamic": "the trainer has no dynamic scaling",
}
SHAPE = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_shared_heads": [1, 2], "num_active_routed_heads": [2, 1],
}  # fmt: skip


class Inputs:
    """What the tests ask for a small model and a batch."""

    batch_size, seq_length, is_training, num_labels = 3, 7, True, 3
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = (
        SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    )

    def __init__(self, changes):
        self.changes = changes

    def get_config(self):
        return MoHLlamaConfig(**SHAPE, num_labels=self.num_labels, **self.changes)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class MixtureTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = tuple(MODELS.values())
    changes = {"routing": "sigmoid"}

    def setUp(self):
        self.model_tester = Inputs(self.changes)


class OwnKeysTest(MixtureTest):
    changes = {"routing": "paper", "routed_keys": "selected", "tie_word_embeddings": True, "qk_norm": True}


for case in (MixtureTest, OwnKeysTest):
    for name, reason in NOT_OURS.items():
        setattr(case, name, unittest.skip(reason)(getattr(case, name)))
del case  # which would be collected once more
