"""What a GPU computes, against head-by-head float64 arithmetic on the CPU: ``python -m pytest -m gpu``.

Elsewhere the kernels run in Triton's interpreter. On an H200 124 such cases passed (docs/history/benchmarks.md).
"""

import pytest
import torch

from moh_lm.build import BACKENDS
from moh_lm.kernels.measured import TRITON_HEAD_DIMS
from tests.attention_cases import DOCUMENTS, ROUTINGS, Problem
from tests.inference import test_triton_decode as decoding
from tests.kernels.flex import FLEX

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 0.03}
SHAPE = (300, 2, 4, 2, 64, 2)  # length, batch, heads, key/value heads, head dimension, shared heads


def check(backend, dtype, routing, lengths=None, window=0, own_keys=False, shape=SHAPE):
    problem = Problem(shape, routing, dtype, lengths, window, own_keys)
    problem.check((BACKENDS | {"flex": FLEX})[backend], TOLERANCES[dtype], masked=backend == "dense", device="cuda")


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


@pytest.mark.parametrize("backend, own_keys", [("flex", False), ("triton", True), ("dense", True)])
def test_the_other_backends_and_own_keys(backend, own_keys):
    check(backend, torch.bfloat16, "odd_routing", own_keys=own_keys)


@pytest.mark.parametrize("shape", decoding.SHAPES.values(), ids=decoding.SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_decoding(dtype, shape):
    inputs = decoding.make_inputs(shape, dtype=dtype)
    got = decoding.decode(*(tensor.cuda() for tensor in inputs)).cpu()
    torch.testing.assert_close(got.double(), decoding.reference(*inputs), rtol=0, atol=TOLERANCES[dtype])
    assert (got[~inputs[4]] == 0).all()
