"""The rows of the CPU kernel: cut into chunks, added up, and shared by threads."""

import pytest
import torch

from moh_lm.extras.cpu_sparse import CPU_SPARSE, SelectedRows, add_up
from tests.attention_cases import ROUTINGS, SHAPES, Problem, make_inputs, make_mask, random_routing


def test_a_chunk_reads_from_its_first_document_to_its_last_row():
    *_, selected = make_inputs(1024, 2, 4, 2, 8, "varying_routing")
    documents = make_mask([[300, 1, 200, 1000], [128] * 8], 1024, 2)
    rows = SelectedRows(selected, documents.starts)
    found = [(sequence, chunk) for _, sequence, chunks in rows.chunks(2) for chunk in chunks]
    assert sum(stop - start for _, (start, stop, _) in found) == selected.sum()
    for sequence, (start, stop, (first, *_, end)) in found:
        positions = rows.position[start:stop].tolist()
        assert first == documents.starts[sequence, positions[0]]
        assert end == positions[-1] + 1


def test_own_keys_leave_a_third_of_the_scores_at_half_the_heads():
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


def test_rows_in_bfloat16_are_added_up_in_fp32():
    generator = torch.Generator().manual_seed(0)
    rows = SelectedRows(torch.ones(4, 1, 64))
    values, weight = (torch.randn(n, m, generator=generator).bfloat16() for n, m in ((4 * 64, 8), (64 * 8, 16)))
    by_head = values.unflatten(0, (64, 4)).double()  # [heads, s, e]
    exact = torch.einsum("hse,hed->sd", by_head, weight.unflatten(0, (64, 8)).double())
    error = (add_up(values, weight, rows)[:, 0] - exact).abs().max() / exact.abs().max()
    assert error < 2e-3  # products are rounded to bf16 once; with sums in bf16 it is above 1e-2


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_threads_that_share_the_heads_compute_the_reference(shape, num_threads, threads):
    torch.set_num_threads(num_threads)
    for routing in ROUTINGS:
        Problem(shape, routing).check(CPU_SPARSE, 1e-12)
        assert torch.get_num_threads() == num_threads
