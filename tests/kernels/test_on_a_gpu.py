"""What a GPU computes, against head-by-head float64 arithmetic on the CPU: ``python -m pytest -m gpu``.

Elsewhere the kernels run in Triton's interpreter. On an H200 124 such cases passed (docs/benchmarks.md).
"""

import pytest
import torch

from moh_lm.kernels.gated_attention import moh_attention
from moh_lm.kernels.measured import TRITON_HEAD_DIMS
from tests.attention_cases import (
    DOCUMENTS,
    ROUTINGS,
    assert_all_close,
    make_boundaries,
    make_inputs,
    reference,
    with_gradients,
)
from tests.inference import test_triton_decode as decoding

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 0.03}
SHAPE = (300, 2, 4, 2, 64, 2)  # length, batch, heads, key/value heads, head dimension, shared heads


def check(backend, dtype, routing, lengths=None, window=0, own_keys=False, shape=SHAPE):
    *sizes, num_shared = shape
    *tensors, upstream, selected = make_inputs(*sizes, routing, dtype)
    tensors[3] = tensors[3].float()  # gates are fp32 whatever the precision
    wide = [tensor.double() for tensor in (*tensors, upstream)]
    expected = with_gradients(lambda *t: reference(*t, selected, num_shared, lengths, window, own_keys), *wide)
    seen = make_boundaries(lengths, *sizes[:2], backend == "dense", window) if lengths or window else None
    if seen is not None:
        seen = seen._replace(**{name: part.cuda() for name, part in seen._asdict().items() if part is not None})
    more = (selected.cuda(), num_shared, seen, backend)
    tensors = [tensor.cuda() for tensor in (*tensors, upstream)]
    got = with_gradients(lambda *t: moh_attention(*t, *more, own_keys=own_keys), *tensors)
    assert_all_close([tensor.cpu() for tensor in got], expected, TOLERANCES[dtype])


@pytest.mark.parametrize("head_dim", TRITON_HEAD_DIMS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_head_dimension_and_precision(dtype, head_dim):
    check("triton", dtype, "random_routing", shape=(200, 2, 4, 2, head_dim, 2))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_routing(dtype, routing):
    check("triton", dtype, routing, shape=(300, 1, 4, 2, 64, 0))


@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("backend", ["triton", "dense"])
def test_documents(backend, lengths):
    check(backend, torch.bfloat16, "odd_routing", lengths)


@pytest.mark.parametrize("window, lengths", [(2, None), (40, None), (33, [[3, 50, 1, 1, 9, 1000]])])
@pytest.mark.parametrize("backend", ["triton", "dense"])
def test_windows(backend, window, lengths):
    check(backend, torch.bfloat16, "varying_routing", lengths, window)


@pytest.mark.parametrize("backend, own_keys", [("flex", False), ("triton", True), ("varlen", True), ("dense", True)])
def test_the_other_backends_and_own_keys(backend, own_keys):
    check(backend, torch.bfloat16, "odd_routing", own_keys=own_keys)


@pytest.mark.parametrize("shape", decoding.SHAPES.values(), ids=decoding.SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_decoding(dtype, shape):
    inputs = decoding.make_inputs(shape, dtype=dtype)
    got = decoding.decode(*(tensor.cuda() for tensor in inputs)).cpu()
    torch.testing.assert_close(got.double(), decoding.reference(*inputs), rtol=0, atol=TOLERANCES[dtype])
    assert (got[~inputs[4]] == 0).all()
