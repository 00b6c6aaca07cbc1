"""FlexAttention: its graphs and lists of blocks, and the tiles that a kernel of blocks executes."""

import pytest
import torch
import torch._dynamo as dynamo
from torch.nn.attention.flex_attention import create_block_mask

from moh_lm.extras.cpu_sparse import SelectedRows
from moh_lm.kernels import flex
from moh_lm.kernels.compaction import compact, key_blocks, slot_blocks
from moh_lm.kernels.masks import mean_keys, narrow
from tests.attention_cases import ROUTINGS, everything, make_boundaries, make_inputs, random_routing

FLEX_DOCUMENTS = [[[1000]], [[100, 300, 1000], [1, 140, 200, 1000]], [[128, 256, 1000], [127, 2, 1000]], [[3] * 200]]


def test_flex_has_a_graph_for_each_of_many_shapes(monkeypatch):
    graphs = []

    def run_as_it_is(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = flex.compiled(run_as_it_is)
    monkeypatch.setattr(flex, "compiled", lambda: compiled)
    dynamo.reset()
    for blocks in range(1, 11):
        query = torch.randn(blocks * flex.BLOCK, 1, 2, 16)
        flex.flex_heads(query, query, query, torch.ones(query.shape[:3]), torch.ones(query.shape[:3]))
    assert len(graphs) == 10


@pytest.mark.parametrize(
    "lengths, window", [(None, 0), *((lengths, 0) for lengths in FLEX_DOCUMENTS), (None, 200), (FLEX_DOCUMENTS[1], 129)]
)
@pytest.mark.parametrize("length", [128, 384, 512])
def test_flex_lists_of_blocks_are_those_that_torch_finds_by_looking_at_every_pair(length, lengths, window):
    routings = ("random_routing", "odd_routing")
    selected = torch.cat([make_inputs(length, 1, 4, 4, 8, routing)[-1] for routing in routings], dim=1)
    compaction = compact(selected)
    seen_by = make_boundaries(lengths, length, 2, window=window) if lengths or window else None
    ours = flex.block_mask(compaction, seen_by and seen_by.starts)
    count = compaction.after[..., :1]
    seen = (torch.arange(length) // flex.BLOCK < (count + flex.BLOCK - 1) // flex.BLOCK)  # blocks with selected slots
    theirs = create_block_mask(
        lambda b, h, q, k: seen[b, h, q] & ours.mask_mod(b, h, q, k), 2, 4, length, length, "cpu", flex.BLOCK
    )
    for kind in ("kv", "full_kv", "q", "full_q"):
        number, indices = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        assert torch.equal(number, getattr(theirs, f"{kind}_num_blocks")), kind
        live = torch.arange(indices.shape[-1]) < number.unsqueeze(-1)
        assert torch.equal(indices[live], getattr(theirs, f"{kind}_indices")[live]), kind


def area(selected, block_m, block_n, window=0):
    """Scores computed by forward and dQ, and by dK/dV, over those of a dense causal kernel with tiles of 128 x 128."""
    compaction = compact(selected)
    length, batch, heads = selected.shape
    dense = batch * heads * 128 * 128 * sum(range(1, length // 128 + 1))
    starts, ends, _ = narrow(None, window, selected, False) or (None,) * 3
    begin, _, _, end = key_blocks(compaction, block_m, block_n, starts)
    query, key = (end - begin).sum().item(), slot_blocks(compaction, block_m, block_n, ends).sum().item()
    return query * block_m * block_n / dense, key * block_m * block_n / dense


@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("shared, active", [(4, 4), (8, 4)])
@pytest.mark.parametrize("routing", ["random_routing", "bursty_routing"])
def test_executed_tiles_are_within_a_tenth_of_the_activation_rate(length, shared, active, routing):
    heads = 16
    selected = ROUTINGS[routing](length, 2, heads - shared, active, torch.Generator().manual_seed(0))
    rate = (shared + active) / heads
    for routed in (*area(selected, 64, 64), area(selected, 128, 64)[0]):
        assert rate < (shared + (heads - shared) * routed) / heads <= 1.10 * rate
    assert area(everything(length, 1, 1, 1, None), 128, 128) == (1, 1)
    in_window = area(selected, 64, 64, window=1024)
    share = mean_keys(length, 1024) / mean_keys(length, 0)
    for whole, windowed in zip(area(selected, 64, 64), in_window, strict=True):
        assert share * whole < windowed <= (share + 0.1) * whole  # the window and the heads both save


def test_own_keys_leave_a_third_of_the_dense_scores_at_half_of_the_heads():
    for shared, active, most in ((4, 4, 0.36), (0, 8, 0.27)):
        selected = torch.ones(2048, 1, 16)
        selected[..., shared:] = random_routing(2048, 1, 16 - shared, active, torch.Generator().manual_seed(0))
        area = {}
        for own in (True, False):
            rows = SelectedRows(selected, own_keys=own)
            chunks = [chunk for *_, chunks in rows.chunks(1) for chunk in chunks]
            area[own] = sum((stop - start) * (end - first) for start, stop, (first, *_, end) in chunks)
        dense = 16 * 64 * 64 * sum(range(1, 2048 // 64 + 1))
        assert area[True] / dense <= most < 0.5 <= area[False] / dense <= 0.53
