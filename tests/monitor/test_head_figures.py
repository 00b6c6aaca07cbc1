"""What a run says about its heads, against the raw gates, and how a head map shows it."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from moh_lm.config import HeadsConfig, ModelConfig, ParallelConfig
from moh_lm.model.router import Gates
from moh_lm.monitor.head_load import head_figures
from moh_lm.monitor.head_map import head_map
from moh_lm.training.engine import Engine
from moh_lm.units import rounded
from tests.distributed import run_ranks
from tests.monitor.logged import NAMES, SHORT, cells, events_of, read_rows
from tests.training.runs import arguments, run


def run_recorded(flags):
    """Run; returns for each step ([sources [b] of each micro-batch], {layer: [(x, gates, w_routed) of each]}).

    w_routed: [0, d] of a layer without routed heads.
    """
    steps, train_step = [], Engine.train_step

    def recorded(engine, batches, *others, **more):
        steps.append(([batch.sources for batch in batches], {}))
        return train_step(engine, batches, *others, **more)

    def record(module, inputs, outputs):
        in_backward = torch._C._current_graph_task_id() != -1  # recomputation
        if isinstance(module, Gates) and torch.is_grad_enabled() and not in_backward:
            weight = getattr(module, "w_routed", None)
            weight = inputs[0].new_zeros(0, inputs[0].shape[-1]) if weight is None else weight
            call = tuple(part.detach().clone() for part in (inputs[0], outputs[0], weight))
            steps[-1][1].setdefault(module.layer.index, []).append(call)

    Engine.train_step = recorded
    torch.nn.modules.module.register_module_forward_hook(record)
    run(flags)
    return steps


def in_canonical_order(parts, own):
    """The gates of all heads from those of each tensor-parallel rank, whose ``own`` shared heads come first."""
    return torch.cat([part[..., :own] for part in parts] + [part[..., own:] for part in parts], -1)


def sequences_of(ranks, layout, step, layer, shared):
    """(source, x [s, d], gates [s, h], w_routed) of every sequence of a step, from what the ranks recorded."""
    if layout in ("tensor", "context"):
        join = torch.cat
        if layout == "tensor":
            join = partial(in_canonical_order, own=shared // len(ranks))
        sources, calls = ranks[0][step][0], [rank[step][1][layer] for rank in ranks]
        joined = [
            (torch.cat([x for x, _, _ in parts]), join([gates for _, gates, _ in parts]), parts[0][2])
            for parts in zip(*calls, strict=True)
        ]
        recorded = [(sources, joined)]
    else:
        recorded = [(rank[step][0], rank[step][1][layer]) for rank in ranks if layer in rank[step][1]]
    for sources, calls in recorded:
        for of_batch, (x, gates, weight) in zip(sources, calls, strict=True):
            for row, source in enumerate(of_batch.tolist()):
                yield source, x[:, row].double(), gates[:, row].double(), weight.double()


def by_hand(ranks, layout, steps, layer, shared):
    """The figures of a layer over ``steps``."""
    count, tokens, a1, losses, used = {0: 0, 1: 0}, {0: 0, 1: 0}, 0.0, [], {0: [], 1: []}
    for step in steps:
        for source, x, gates, weight in sequences_of(ranks, layout, step, layer, shared):
            selected = (gates[:, shared:] > 0).double()
            count[source] = count[source] + selected.sum(0)
            tokens[source] += len(x)
            used[source] += gates[gates > 0].tolist()
            a1 += gates[:, :shared].sum().item()  # a1 times a softmax
            losses.append((selected.mean(0) * torch.softmax(x @ weight.T, -1).mean(0)).sum().item())
    counts, total = count[0] + count[1], tokens[0] + tokens[1]
    share = [n / counts.sum().item() for n in counts.tolist() if n]
    return {
        "load": (counts / total).tolist(),
        "entropy": -sum(p * math.log(p) for p in share) / math.log(len(counts)),
        "unused": sum(n == 0 for n in counts.tolist()) / len(counts),
        "overused": sum(n / total > 0.95 for n in counts.tolist()) / len(counts),
        "a1": a1 / total,
        "balance_loss": sum(losses) / len(losses),
        "gate_mean": sum(used[0] + used[1]) / len(used[0] + used[1]),
        "gate_rms": math.sqrt(sum(gate**2 for gate in used[0] + used[1]) / len(used[0] + used[1])),
        "even_rms": math.sqrt(sum(gate**2 for gate in used[0]) / len(used[0])),
        "odd_rms": math.sqrt(sum(gate**2 for gate in used[1]) / len(used[1])),
        "even": (count[0] / tokens[0]).tolist(),
        "odd": (count[1] / tokens[1]).tolist(),
        f"{layout}_parallel_imbalance": max(counts[:2].sum(), counts[2:].sum()).item() / (counts.sum().item() / 2),
    }


@pytest.mark.parametrize(
    "layout, world_size, more",
    [
        ("data", 2, ("--micro-batch-size", "1", "--recompute")),
        ("tensor", 2, ("--tensor-parallel-size", "2")),
        ("context", 2, ("--context-parallel-size", "2")),
        ("pipeline", 2, ("--pipeline-parallel-size", "2", "--recompute")),
    ],
)
def test_figures_of_heads_are_those_of_the_raw_gates(data_dir, tmp_path, layout, world_size, more):
    uneven = "--learning-rate 0.3 --routing paper --num-shared-heads 4".split()  # the rate is large, so they are uneven
    flags = arguments(data_dir, tmp_path, *SHORT, "--head-curves", *uneven, *more)
    ranks = run_ranks(run_recorded, world_size, flags)
    logged = {row["step"]: row for row in read_rows(tmp_path) if "loss" in row}
    board = events_of(tmp_path)
    for last in (2, 4):
        heads = logged[last]["heads"]
        assert heads["layer"] == [0, 1]
        for layer in range(2):
            expected = by_hand(ranks, layout, (last - 2, last - 1), layer, shared=4)
            got = {key: values[layer] for key, values in heads.items() if not key.startswith(("layer", "source"))}
            got |= {name: heads["source_load"][name][layer] for name in NAMES}
            got |= {f"{name}_rms": heads["source_gate_rms"][name][layer] for name in NAMES}
            if layout not in ("tensor", "context"):
                expected.pop(f"{layout}_parallel_imbalance")
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (last, layer, key)
            tag = f"routed_heads/layer_{layer:02d}"
            shown = {f"{tag}/load_head_{head:02d}": load for head, load in enumerate(expected["load"], 4)}
            shown |= {f"{tag}/{key}": expected[key] for key in expected if not key.startswith(("load", "even", "odd"))}
            for name, value in shown.items():
                (scalar,) = [scalar for scalar in board.Scalars(name) if scalar.step == last]
                assert scalar.value == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert max(abs(a - b) for a, b in zip(expected["even"], expected["odd"], strict=True)) > 0.01  # they differ at all


@pytest.mark.parametrize(
    "layout, more",
    [
        ("tensor", ("--head-selection", "gated", "--tensor-parallel-size", "2")),
        ("pipeline", ("--num-shared-heads", "8", "4", "--num-active-routed-heads", "0", "2",
                      "--pipeline-parallel-size", "2", "--routing", "paper", "--routing-top-p", "0.6")),
        ("queries", ("--num-shared-heads", "8", "--num-active-routed-heads", "0", "--routing", "query_norm",
                     "--tensor-parallel-size", "2")),
    ],
)  # fmt: skip
def test_gates_of_layers_of_shared_heads_are_logged_too(data_dir, tmp_path, layout, more):
    flags = arguments(data_dir, tmp_path, *SHORT, "--learning-rate", "0.3", "--num-attention-heads", "8", *more)
    ranks = run_ranks(run_recorded, 2, flags)
    row = [row for row in read_rows(tmp_path) if "loss" in row][-1]
    heads, board = row["heads"], events_of(tmp_path)
    assert heads["layer"] == [0, 1]
    if layout == "queries":  # every rank has the gates of all tokens, each of them 1
        assert heads["gate_mean"] == heads["gate_rms"] == heads["source_gate_rms"]["odd"] == [1, 1]
        return
    gates = {0: [], 1: []}
    for step in (2, 3):
        for source, _, of_sequence, _ in sequences_of(ranks, layout, step, 0, 8):
            gates[source] += of_sequence.flatten().tolist()
    both = gates[0] + gates[1]
    expected = {"gate_mean": sum(both) / len(both), "gate_rms": math.sqrt(sum(gate**2 for gate in both) / len(both))}
    for key, value in expected.items():
        assert heads[key][0] == pytest.approx(value, rel=1e-4), key
        assert board.Scalars(f"routed_heads/layer_00/{key}")[-1].value == pytest.approx(value, rel=1e-4)
    for name, of_source in zip(NAMES, gates.values(), strict=True):
        rms = math.sqrt(sum(gate**2 for gate in of_source) / len(of_source))
        assert heads["source_gate_rms"][name][0] == pytest.approx(rms, rel=1e-4), name
        assert heads["source_load"][name][0] == []
    unknown = ("entropy", "unused", "overused", "balance_loss", "a1")
    assert heads["load"][0] == [] and [heads[key][0] for key in unknown] == [None] * 5
    if layout == "pipeline":
        assert len(heads["load"][1]) == 4 and rounded(row["load_balance_loss"]) == heads["balance_loss"][1]
        assert heads["active_heads"][0] == 8 and heads["active_heads"][1] < 6
    else:
        assert row["load_balance_loss"] == 0 and len(set(heads["gate_rms"])) == 2


def test_a_head_that_is_never_selected_and_one_that_always_is():
    model = ModelConfig(num_layers=1, heads=HeadsConfig("mixture", (6,), (3,)))  # of 12
    sums = np.array([[0.0, 5.0, 45, 90, 10, 9, 8, 3, 0, 0], [0.0, 5.0, 45, 0, 10, 10, 10, 0, 0, 0]])
    figures = head_figures(model.routed_layers(), sums, NAMES, [2, 2], 5, 3.0, ParallelConfig())
    assert figures["load"] == [[1, 0.95, 0.9, 0.15, 0, 0]]
    assert figures["unused"] == [2 / 6] and figures["overused"] == [1 / 6]  # 0.95 is the limit itself
    unlimited = head_figures(model.routed_layers(), sums, NAMES, [2, 2], 5, 0.0, ParallelConfig())
    assert unlimited == {**figures, "overused": [0]}
    assert figures["source_load"]["odd"] == [[1, 1, 1, 0, 0, 0]]
    assert figures["gate_mean"] == [0.5] and figures["gate_rms"] == [pytest.approx(0.5**0.5)]
    collapsed = head_figures(model.routed_layers(), sums[1:], ["odd"], [2], 5, 3.0, ParallelConfig())
    assert collapsed["entropy"] == [pytest.approx(math.log(3) / math.log(6))]


@pytest.mark.filterwarnings("error")
def test_a_layer_that_no_token_uses_has_no_mean_gate():
    model = ModelConfig(num_layers=1, num_attention_heads=4, heads=HeadsConfig("mixture", (0,), (2,), routing="relu"))
    sums = np.zeros((1, 8))
    figures = head_figures(model.routed_layers(), sums, ["even"], [2], 5, 3.0, ParallelConfig(tensor_parallel_size=2))
    assert figures["load"] == [[0, 0, 0, 0]] and figures["unused"] == [1]
    gates = figures["gate_mean"] + figures["gate_rms"] + figures["source_gate_rms"]["even"]
    assert np.isnan([*gates, *figures["tensor_parallel_imbalance"]]).all()


def test_a_head_map_has_a_square_for_every_head():
    model = ModelConfig(num_layers=3, num_attention_heads=4, heads=HeadsConfig("mixture", (2,), (1,)))
    loads = [[0.0, 1.0], [0.25, 0.75], [0.5, 0.5]]
    picture = cells(head_map(model.routed_layers(), loads, 3, 4), 3, 4)
    assert np.abs(picture[:, 2:] / 255 - cividis(loads)).max() < 0.005
    assert (picture[:, :2] == 204).all()  # shared heads


def test_a_head_map_has_the_colours_of_the_run_report():
    layers = ModelConfig(num_layers=1, heads=HeadsConfig("mixture", (6,), (3,))).routed_layers()
    picture = head_map(layers, [np.linspace(0, 1, 6)], 1, 12)
    bar = picture[-18, 120:220]
    assert np.abs(bar / 255 - cividis(np.linspace(0, 1, 100))).max() < 0.1


def cividis(shares):
    return pytest.importorskip("matplotlib").colormaps["cividis"](np.array(shares))[..., :3]
