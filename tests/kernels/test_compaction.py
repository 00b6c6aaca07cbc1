"""Where the queries of a head are moved to, and the tiles that a kernel of blocks executes for them."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from moh_lm.kernels.masks import apply_window, mean_keys
from tests.attention_cases import ROUTINGS, everything, make_inputs, make_mask
from tests.kernels import flex
from tests.kernels.blocks import compact, key_blocks, slot_blocks

FLEX_DOCUMENTS = [[[1000]], [[100, 300, 1000], [1, 140, 200, 1000]], [[128, 256, 1000], [127, 2, 1000]], [[3] * 200]]


def test_slots_are_the_selected_tokens_from_the_last_back():
    """And then the others."""
    for routing in ROUTINGS:
        *_, selected = make_inputs(75, 2, 4, 4, 8, routing)
        positions, after = compact(selected)
        for b in range(2):
            for h in range(4):
                chosen = [t for t in range(75) if selected[t, b, h]]
                assert positions[b, h].tolist() == chosen[::-1] + [t for t in range(75) if t not in chosen]
                assert after[b, h].tolist() == [sum(c >= t for c in chosen) for t in range(76)]


@pytest.mark.parametrize(
    "lengths, window", [(None, 0), *((lengths, 0) for lengths in FLEX_DOCUMENTS), (None, 200), (FLEX_DOCUMENTS[1], 129)]
)
@pytest.mark.parametrize("length", [128, 384, 512])
def test_key_blocks_are_those_that_torch_finds_by_every_pair(length, lengths, window):
    routings = ("random_routing", "odd_routing")
    selected = torch.cat([make_inputs(length, 1, 4, 4, 8, routing)[-1] for routing in routings], dim=1)
    compaction = compact(selected)
    mask = make_mask(lengths, length, 2, window=window)
    ours = flex.block_mask(compaction, mask and mask.starts)
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
    starts, ends, _ = apply_window(None, window, selected, False) or (None,) * 3
    begin, _, _, end = key_blocks(compaction, block_m, block_n, starts)
    query, key = (end - begin).sum().item(), slot_blocks(compaction, block_m, block_n, ends).sum().item()
    return query * block_m * block_n / dense, key * block_m * block_n / dense


@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("shared, active", [(4, 4), (8, 4)])
@pytest.mark.parametrize("routing", ["random_routing", "bursty_routing"])
def test_executed_tiles_are_near_the_share_of_active_heads(length, shared, active, routing):
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
