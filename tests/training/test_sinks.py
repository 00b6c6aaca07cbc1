"""Attention to the first token in the log: against the weights of the equations, and the same in every layout."""

import json

import numpy as np
import pytest
import torch

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.parallel.groups import ParallelGroups
from moh_lm.training.sinks import Sinks
from tests.distributed import run_ranks
from tests.layers import named, reference_layer
from tests.models import make_model
from tests.reference import attention_layer
from tests.training.runs import arguments, run

SMALL = dict(num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, head_dim=8, vocab_size=80)
LATENT = dict(attention="latent", kv_lora_rank=12, qk_rope_head_dim=4)
LENGTH, DOCUMENTS = 12, [[0, 5], [0, 1, 9], [0]]  # tokens; where documents of three sequences begin, filler the third


@torch.no_grad()
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    "heads, sizes",
    [
        (dict(num_shared_heads=(2,), num_active_routed_heads=(3,)), dict(window=(5, 0))),
        (dict(routing="query_norm", num_shared_heads=(4,)), dict(num_key_value_heads=4)),
        (dict(num_shared_heads=(4,), routed_keys="selected"), dict(num_key_value_heads=4)),
        (dict(num_shared_heads=(4,), routed_keys="selected", routed_positions="head"), {}),
        (dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(3,)), {}),
        (dict(head_selection="gated"), LATENT),
        (dict(head_selection="all"), dict(qk_norm=True, post_norm=True)),
    ],
)
def test_a_sink_is_the_mean_weight_of_the_first_token(heads, sizes, resets):
    config = ModelConfig(**(SMALL | sizes), heads=HeadsConfig(**heads))
    model, inputs = make_model(config, scale=10, seed=5).eval(), []
    tokens = torch.randint(80, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens[2] = 0
    starts = torch.tensor([[max(begin for begin in row if begin <= t) for t in range(LENGTH)] for row in DOCUMENTS])
    starts = starts if resets else torch.zeros_like(starts)
    positions = torch.arange(LENGTH) - starts if resets else None
    sinks = Sinks(model, 2, ParallelGroups(), torch.device("cpu"))
    model.batch.feed([positions, positions], [None, torch.tensor([0, 0, -1])])
    plain = model(tokens)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with sinks.measured():
        assert torch.equal(model(tokens), plain)
    for index, layer in enumerate(model.model.layers):
        shape, weights, found = reference_layer(config, index), named(layer.self_attn.state_dict().items()), []
        for row in range(2):
            first = starts[row].tolist()
            _, routes, maps = attention_layer(shape, weights, inputs[index][:, row].numpy(), first)
            asking = [(t, head) for t, head in np.ndindex(LENGTH, 8) if t > first[t] and routes[t].used[head]]
            found += [maps[head, t, first[t]] for t, head in asking]
        assert sinks.means()[index] == pytest.approx(np.mean(found), rel=1e-9)


def sinks_of(directory):
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["sink"] for row in rows if "sink" in row}


MORE = "--train-iters 2 --eval-interval 2 --reset-at-documents --learning-rate 0.1".split()


@pytest.fixture(scope="module")
def alone(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(run, 1, arguments(data_dir, folder, *MORE))
    return sinks_of(folder)


@pytest.mark.parametrize(
    "more",
    [
        "--tensor-parallel-size 2",
        "--context-parallel-size 2 --recompute",
        "--pipeline-parallel-size 2",
    ],
)
def test_every_layout_has_the_same_sinks(data_dir, tmp_path, alone, more):
    run_ranks(run, 2, arguments(data_dir, tmp_path, *MORE, *more.split()))
    found = sinks_of(tmp_path)
    assert found.keys() == alone.keys() == {0, 2}
    for step, of_sources in alone.items():
        assert of_sources.keys() == found[step].keys() == {"even", "odd"}
        for name, layers in of_sources.items():
            assert 0 < layers[0] < 1 and layers[0] != layers[1]
            assert found[step][name] == pytest.approx(layers, rel=1e-3), (step, name)
