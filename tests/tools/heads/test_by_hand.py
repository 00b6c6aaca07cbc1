"""tools/head_report.py: heads built by hand are recognised."""

import math

import pytest
import torch

pytest.importorskip("matplotlib")

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig
from tests.tools.heads.models import domain, nothing

VOCAB, HEAD_DIM = 64, 128
SPACE = slice(1, 1 + VOCAB), slice(1 + VOCAB, 1 + 2 * VOCAB)  # of the residual stream: this token, the one before it
SLOW = [*range(32, 64), *range(96, 128)]  # features of a head that hardly turn: one for each token


def built_by_hand(ranks):
    """Two dense layers: previous-token, offset 5, rare-token, none; and induction, offset 3, none, rare-token.

    The embedding of a token is a one and a one-hot; the first head adds the one-hot of the token before.
    """
    config = ModelConfig(
        num_layers=2, hidden_size=2 + 2 * VOCAB, intermediate_size=4, num_attention_heads=4, head_dim=HEAD_DIM,
        vocab_size=VOCAB, rope_theta=1e8, heads=HeadsConfig(head_selection="all"),
    )  # fmt: skip
    model = build_model(config)
    model.initialize(seed=0)
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in (*layer.self_attn.parameters(), *layer.mlp.parameters()):
                parameter.zero_()
        embedding = model.model.embed_tokens.weight.zero_()
        embedding[:, 0] = 1
        embedding[:, SPACE[0]] = torch.eye(VOCAB)
        first, second = (layer.self_attn for layer in model.model.layers)
        looks_back(first, 0, 1)
        copies_tokens(first, 0)
        looks_back(first, 1, 5)
        looks_for_rare(first, 2, ranks)
        query, key = head_rows(second, 0)
        query[SLOW, SPACE[0]] = key[SLOW, SPACE[1]] = 5 * torch.eye(VOCAB)
        looks_back(second, 1, 3)
        looks_for_rare(second, 3, ranks)
    return model.eval()


def head_rows(attention, head):
    """Query and key matrices of a head, [e, d] each."""
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    return attention.q_proj.weight[rows], attention.k_proj.weight[rows]


def looks_back(attention, head, offset):
    """The same query and key for all tokens, turned against each other: they agree at one distance."""
    query, key = head_rows(attention, head)
    angle = offset * 1e8 ** (-torch.arange(16) / 64.0)  # of the 16 fastest pairs
    query[:16, 0] = 4
    key[:16, 0], key[64:80, 0] = 4 * angle.cos(), 4 * angle.sin()


def looks_for_rare(attention, head, ranks):
    query, key = head_rows(attention, head)
    query[63, 0] = 10
    key[63, SPACE[0]] = ranks.float()


def copies_tokens(attention, head):
    rows = slice(head * HEAD_DIM, head * HEAD_DIM + VOCAB)
    attention.v_proj.weight[rows, SPACE[0]] = torch.eye(VOCAB)
    attention.o_proj.weight[SPACE[1], rows] = torch.eye(VOCAB)


@pytest.fixture(scope="module")
def zipf(tools):
    """A domain of 40 windows whose tokens are the rarer, the higher their id."""
    generator = torch.Generator().manual_seed(1)
    shares = 1 / torch.arange(1.0, VOCAB + 1)
    return domain(tools, "zipf", shares.expand(40, -1).multinomial(64, True, generator=generator))


def test_heads_built_by_hand_are_recognised(tools, zipf):
    measures, findings = tools["measures"], tools["findings"]
    ranks, counts = tools["text"].frequency_ranks([zipf], VOCAB)
    model = built_by_hand(ranks)
    figures = measures.measure_text(model, [zipf], nothing)
    figures["prefix"] = measures.measure_prefix(model, tools["text"].repeated_sequences(ranks, counts, start=0))
    figures["rare"], chance = measures.measure_rare(model, [zipf], ranks)
    assert findings.classes_of(figures) == [
        ["previous-token", "positional", "rare-token", "none"],
        ["induction", "positional", "none", "rare-token"],
    ]
    assert figures["offset"][0, :2].tolist() == [1, 5] and figures["offset"][1, 1] == 3
    assert figures["offset_share"][[0, 0, 1], [0, 1, 1]].tolist() == [1, 1, 1]
    assert figures["previous"][0, 0] > 0.99 and figures["prefix"][1, 0] > 0.99
    assert figures["rare"][[0, 1], [2, 3]].tolist() == [1, 1] and 0 < chance < 0.2
    assert figures["prefix"][0].max() < 0.1


def test_a_head_is_positional_by_its_largest_or_mean_weight(tools):
    nan, class_of = math.nan, tools["findings"].class_of
    assert class_of(7, 0.95, 0.1, 0.1, 0.9, 0.9) == "positional" and class_of(1, 0.95, 0.5, 0.2, 0, 0)[:4] == "prev"
    assert class_of(3, 0.4, 0.81, 0.1, 0.9, 0)[:4] == "prev" and class_of(3, 0.4, 0.1, 0.81, 0.9, 0) == "positional"
    assert class_of(2, 0.89, 0.1, 0.79, 0.9, 0) == "induction" and class_of(-1, nan, nan, nan, nan, nan) == "none"
