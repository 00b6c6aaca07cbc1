"""Small models and texts whose heads are measured, and their attention in plain loops."""

import math
from collections import Counter

import pytest
import torch

pytest.importorskip("matplotlib")

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig


def domain(tools, name, windows):
    return tools["text"].Domain(name, list(windows), Counter())


def nothing(*_):
    pass


SMALL = dict(num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, head_dim=8, vocab_size=80)
MODELS = {
    "paper, window": (dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(3,)), dict(window=(9, 0))),
    "query norm, grouped": (dict(routing="query_norm", num_shared_heads=(4,)), dict(num_key_value_heads=4)),
    "own keys, grouped": (dict(num_shared_heads=(4,), routed_keys="selected"), dict(num_key_value_heads=4)),
    "static": (dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(3,)), {}),
    "dense, tied": (dict(head_selection="all"), dict(tie_embeddings=True)),
}


def random_model(name):
    heads, sizes = MODELS[name]
    model = build_model(ModelConfig(**(SMALL | sizes), heads=HeadsConfig(**heads)))
    model.initialize(seed=5)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter *= 10
    return model.eval()


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


def attended(model, tokens):
    """[(weights [h, s, s], used [s, h])] of each layer for tokens [s], from what the layers are given and compute."""
    inputs, gates, handles = [], {}, []
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        handles.append(attention.register_forward_pre_hook(lambda _, given: inputs.append(given[0])))
        if attention.router is not None:
            handles.append(
                attention.router.register_forward_hook(lambda _, __, out, index=index: gates.__setitem__(index, out[0]))
            )
    with torch.no_grad():
        model(tokens[None])
        found = []
        for index, (layer, x) in enumerate(zip(model.model.layers, inputs, strict=True)):
            query, key = layer.self_attn.project(x)[:2]
            key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
            scores = torch.einsum("qhe,khe->hqk", query[:, 0], key[:, 0]) / math.sqrt(query.shape[-1])
            scores += torch.full(scores.shape[1:], -math.inf).triu(1)
            scores += torch.full(scores.shape[1:], -math.inf).tril(-(layer.self_attn.window or len(tokens)))
            used = gates[index][:, 0] != 0 if index in gates else torch.ones(len(tokens), query.shape[2]).bool()
            if layer.self_attn.selection == "static":
                used[:, 5:] = False
            if layer.self_attn.own_keys:
                scores.masked_fill_(~used.t()[:, None] & ~torch.eye(len(x)).bool(), -math.inf)
            found.append((scores.softmax(-1), used))
    for handle in handles:
        handle.remove()
    return found
