"""Small models and texts whose heads are measured, and their attention by tests/reference.py."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from moh_lm.config import HeadsConfig, ModelConfig
from tests.layers import named, reference_layer
from tests.models import draw_zeros, make_model
from tests.reference import attention_layer


def domain(tools, name, windows):
    return tools["text"].Domain(name, list(windows), Counter())


def ends_of_documents(*bos_ids):
    """What a report reads of a tokenizer."""
    return SimpleNamespace(eos_id=0, bos_ids=np.array(bos_ids, np.int32))


def nothing(*_):
    pass


SMALL = dict(num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, head_dim=8, vocab_size=80)
HALF_SHARED = dict(num_shared_heads=(4,), num_active_routed_heads=(2,))
MODELS = {
    "paper, window": (dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(3,)), dict(window=(9, 0))),
    "query norm, grouped": (dict(routing="query_norm", **HALF_SHARED), dict(num_key_value_heads=4)),
    "own keys, grouped": (dict(routed_keys="selected", **HALF_SHARED), dict(num_key_value_heads=4)),
    "static": (dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(3,)), {}),
    "element gates, tied": (dict(head_selection="all"), dict(element_gates=True, tie_embeddings=True)),
}


def random_model(name):
    heads, sizes = MODELS[name]
    return draw_zeros(make_model(ModelConfig(**(SMALL | sizes), heads=HeadsConfig(**heads)), scale=10, seed=5)).eval()


SENTENCES = [f"The quick brown fox number {number} jumps over the lazy dog.\n" for number in range(30)]
TREES = """# text = The dog's friend can't see.
1	The	the	DET	_	_	2	det	_	_
2	dog	dog	NOUN	_	_	4	nmod:poss	_	SpaceAfter=No
3	's	's	PART	_	_	2	case	_	_
4	friend	friend	NOUN	_	_	7	nsubj	_	_
5-6	can't	_	_	_	_	_	_	_	_
5	ca	can	AUX	_	_	7	aux	_	SpaceAfter=No
6	n't	not	PART	_	_	7	advmod	_	_
7	see	see	VERB	_	_	0	root	_	SpaceAfter=No
7.1	it	it	PRON	_	_	_	_	7:obj	_
8	.	.	PUNCT	_	_	7	punct	_	_

# text = del el
1	de	de	ADP	_	_	2	case	_	_
2	el	el	PRON	_	_	0	root	_	_

1	Dogs	dog	NOUN	_	_	2	nsubj	_	_
2	bark	bark	VERB	_	_	0	root	_	_
"""


@torch.no_grad()
def attended(model, tokens):
    """[(weights [h, s, s], used [s, h])] of each layer for tokens [s]: the equations, of what the layer reads."""
    found, inputs = [], []
    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for layer in layers]
    model(tokens[None])
    for index, (layer, hook) in enumerate(zip(layers, hooks, strict=True)):
        hook.remove()
        weights, x = named(layer.state_dict().items()), inputs[index][:, 0].numpy()
        _, routes, maps = attention_layer(reference_layer(model.config, index), weights, x)
        found.append((torch.from_numpy(maps), torch.tensor(np.array([route.used for route in routes]))))
    return found
