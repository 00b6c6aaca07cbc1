"""The decoding kernels in Triton's interpreter, on the CPU, against row-by-row, head-by-head float64 arithmetic."""

import math

import pytest
import torch

from moh_lm.inference.decode import decode_attention, worth_a_kernel
from moh_lm.inference.generate import generate, read_token
from moh_lm.kernels.measured import TRITON_HEAD_DIMS
from tests.inference.models import PROMPTS, TEXTS, make_model, read, whole
from tests.interpreting import multiply_bf16

pytest.importorskip("triton", reason="Triton is not installed")

EVERY_LENGTH = [1, 31, 32, 33, 64, 70, 101]  # beside the ends of tiles, odd, full
SHAPES = {  # query heads, key/value heads, head dimension
    **{f"e={head_dim}": (4, 2, head_dim) for head_dim in TRITON_HEAD_DIMS},
    "no groups": (5, 5, 16),
    "groups of three": (6, 2, 16),
    "one group": (8, 1, 32),
    "a group of more rows than tensor cores take": (18, 1, 16),
}


def make_inputs(shape, lengths=EVERY_LENGTH, dtype=torch.float64, share=0.5, room=101, seed=0):
    """(query, keys, values, lengths, active, gates); gates of either sign, kept in fp32 in lower precision."""
    (heads, kv_heads, head_dim), batch = shape, len(lengths)
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    query, gates = normal(batch, heads, head_dim), normal(batch, heads)
    keys, values = (normal(batch, kv_heads, room, head_dim).to(dtype) for _ in range(2))
    active = torch.rand(batch, heads, generator=generator) < share
    gates = gates.to(torch.promote_types(dtype, torch.float32))
    return query.to(dtype), keys, values, torch.tensor(lengths, dtype=torch.int32), active, gates


def reference(query, keys, values, lengths, active, gates):
    """g_i softmax(q_i K^T / sqrt(e)) V of what each row sees, in float64; 0 for heads that are not active."""
    (batch, heads, head_dim), kv_heads = query.shape, keys.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            if active[row, head]:
                kv, seen = head * kv_heads // heads, int(lengths[row])
                scores = keys[row, kv, :seen].double() @ query[row, head].double() / math.sqrt(head_dim)
                weights = (scores - scores.max()).exp()
                context = weights @ values[row, kv, :seen].double() / weights.sum()
                out[row, head] = context * (1 if gates is None else gates[row, head].double())
    return out


def decode(*inputs, num_splits=None):
    from moh_lm.inference.triton_decode import decode_selected_heads

    return decode_selected_heads(*inputs, num_splits=num_splits)


def check(inputs, tolerance, num_splits=None):
    if inputs[0].dtype == torch.bfloat16:
        multiply_bf16()
    got, expected = decode(*inputs, num_splits=num_splits), reference(*inputs)
    assert got.dtype == inputs[0].dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
    assert (got[~inputs[4]] == 0).all()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_selected_heads_are_the_reference_and_others_zero(interpreter, shape):
    interpreter(check, make_inputs(shape), 1e-12)


@pytest.mark.parametrize(
    "num_splits, lengths", [(1, EVERY_LENGTH), (2, EVERY_LENGTH), (3, EVERY_LENGTH), (64, [1, 64, 101])]
)
def test_any_number_of_splits_adds_up_to_the_reference(interpreter, num_splits, lengths):
    interpreter(check, make_inputs((3, 3, 48), lengths), 1e-12, num_splits)


@pytest.mark.parametrize("share", [0, 0.1, 1])
def test_nobody_active_few_and_all(interpreter, share):
    inputs = make_inputs((8, 4, 16), share=share)
    assert inputs[4].float().mean() == pytest.approx(share, abs=0.1)
    interpreter(check, inputs, 1e-12)


def test_gates_may_be_left_out(interpreter):
    interpreter(check, (*make_inputs((4, 2, 16))[:-1], None), 1e-12)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 3e-3), (torch.bfloat16, 0.02)], ids=str
)
def test_kernels_stay_near_the_reference_in_lower_precision(interpreter, dtype, tolerance):
    interpreter(check, make_inputs((4, 2, 96), dtype=dtype), tolerance, 2)


def test_large_scores_do_not_overflow(interpreter):
    query, *others = make_inputs((4, 4, 16), dtype=torch.float32)
    expected = reference(query * 300, *others)
    assert expected.isfinite().all()
    interpreter(check, (query * 300, *others), 1e-4, 3)


def poison(inputs):
    """NaN wherever no token and no head that is active has anything to read."""
    query, keys, values, lengths, active, gates = (tensor.clone() for tensor in inputs)
    groups = active.unflatten(1, (keys.shape[1], -1)).any(-1)  # [b, k]
    for tensor in (keys, values):
        for row, length in enumerate(lengths):
            tensor[row, :, length:] = math.nan
        tensor[~groups] = math.nan
    query[~active], gates[~active] = math.nan, math.nan
    return query, keys, values, lengths, active, gates


def check_poisoned(inputs, num_splits):
    """Memory that is not written would show as NaN, too."""
    torch.use_deterministic_algorithms(True)
    try:
        found = [decode(*tensors, num_splits=num_splits) for tensors in (inputs, poison(inputs))]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*found) and found[0].isfinite().all()
    torch.testing.assert_close(found[0], reference(*inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("shape", [(6, 6, 16), (8, 4, 16)])
def test_nothing_that_is_not_selected_or_not_written_has_a_say(interpreter, shape, num_splits):
    inputs = make_inputs(shape, share=0.4)
    assert inputs[4].unflatten(1, (shape[1], -1)).any(-1).logical_not().sum() > 3
    interpreter(check_poisoned, inputs, num_splits)


def count_reads(inputs, num_splits):
    """How often each number of the keys and of the values is read."""
    from triton.runtime.interpreter import InterpreterBuilder

    addresses, plain = [], InterpreterBuilder.create_masked_load

    def create_masked_load(self, pointers, mask, *others):
        addresses.append(torch.from_numpy(pointers.data[mask.data].astype("int64")))
        return plain(self, pointers, mask, *others)

    InterpreterBuilder.create_masked_load = create_masked_load
    try:
        decode(*inputs, num_splits=num_splits)
    finally:
        InterpreterBuilder.create_masked_load = plain
    addresses = torch.cat([found.flatten() for found in addresses])

    def reads(tensor):
        numbers = (addresses - tensor.data_ptr()) // tensor.element_size()
        inside = numbers[(numbers >= 0) & (numbers < tensor.numel())]
        return torch.bincount(inside, minlength=tensor.numel()).view(tensor.shape)

    return reads(inputs[1]), reads(inputs[2])


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("shape", [(6, 6, 48), (8, 2, 16)])
def test_what_an_active_group_sees_is_read_once_and_no_more(interpreter, shape, num_splits):
    inputs = make_inputs(shape, share=0.3)
    groups = inputs[4].unflatten(1, (shape[1], -1)).any(-1)  # [b, k]
    seen = torch.arange(inputs[1].shape[2]) < inputs[3][:, None]  # [b, T]
    expected = (groups[:, :, None] & seen[:, None]).long()  # [b, k, T]
    assert 0 < groups.sum() < groups.numel()
    for reads in interpreter(count_reads, inputs, num_splits):
        assert torch.equal(reads, expected[..., None].expand_as(reads))


def check_alone(inputs, num_splits):
    whole = decode(*inputs, num_splits=num_splits)
    assert torch.equal(decode(*inputs, num_splits=num_splits), whole)
    query, keys, values, *others = inputs
    wider = [torch.cat((tensor, tensor + 3), 2) for tensor in (keys, values)]
    for row in range(len(query)):
        tensors = (tensor[row : row + 1] for tensor in (query, *wider, *others))
        assert torch.equal(decode(*tensors, num_splits=num_splits)[0], whole[row])


def test_bits_repeat_in_a_row_alone_and_with_more_room(interpreter):
    interpreter(check_alone, make_inputs((6, 2, 16), dtype=torch.float32), 3)


def check_operator():
    from moh_lm.inference.triton_decode import decode_selected_heads

    for gates in (True, False):
        *inputs, given = make_inputs((4, 2, 16), [1, 33])
        torch.library.opcheck(decode_selected_heads, (*inputs, given if gates else None))


def test_the_operator_passes_the_checks_of_torch(interpreter):
    interpreter(check_operator)


def test_splits_keep_a_device_busy_and_have_a_tile_each(interpreter):
    found = interpreter(count_splits)
    assert found == {(1, 1): 1, (1, 64): 4, (1, 1024): 4, (2, 64): 2, (100, 64): 1}


def count_splits():
    from moh_lm.inference.triton_decode import choose_splits

    cases = [(1, 1), (1, 64), (1, 1024), (2, 64), (100, 64)]
    return {case: choose_splits(*case, torch.device("cpu")) for case in cases}


@pytest.mark.parametrize(
    "room, dtype, gates, head_dim, kernel",
    [
        (32768, torch.bfloat16, True, 128, True),
        (32767, torch.bfloat16, True, 128, False),  # the host takes longer than the device
        (32768, torch.float32, True, 128, False),  # not timed
        (32768, torch.bfloat16, False, 128, False),  # every head is read
        (65536, torch.float16, True, 96, True),
        (65536, torch.bfloat16, True, 112, False),  # no kernel
    ],
)
def test_auto_on_a_gpu_goes_by_what_was_measured(room, dtype, gates, head_dim, kernel):
    keys = torch.empty(1, 8, room, head_dim, dtype=dtype, device="meta")
    assert worth_a_kernel(keys, torch.ones(1, 32) if gates else None) == kernel


# --- Text ---


def check_text(name):
    model = make_model(name, head_dim=16)
    texts = [list(text) for text in (TEXTS[0], TEXTS[1][:1], TEXTS[2][:5])]
    found = {backend: list(generate(model, texts, 4, (), attention_backend=backend)) for backend in ("triton", "loops")}
    assert found["triton"] == found["loops"]
    for row, text in enumerate(texts):
        for tokens in found["triton"]:
            assert tokens[row] == whole(model, text)[-1].argmax()
            text.append(tokens[row])


@pytest.mark.parametrize("name", ["paper", "query norm, grouped", "groups", "top-p"])
def test_greedy_text_is_that_of_loops_and_of_training(interpreter, name):
    interpreter(check_text, name)


def check_logits(name):
    model = make_model(name, head_dim=16)
    cache, _ = read(model, "triton")
    tokens = torch.tensor([text[length] for text, length in zip(TEXTS, PROMPTS, strict=True)])
    logits = read_token(model, cache, tokens)
    for row, length in enumerate(PROMPTS):
        torch.testing.assert_close(logits[row], whole(model, TEXTS[row])[length], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["in groups, query norm", "top-p", "windows, groups", "query norm, groups"])
def test_logits_are_those_of_the_training_forward(interpreter, name):
    interpreter(check_logits, name)


def test_what_cannot_be_computed_here_is_said():
    inputs = make_inputs((4, 2, 16))
    with pytest.raises(RuntimeError, match="triton: the tensors are on cpu, not on a GPU; choose auto"):
        decode_attention(*inputs, backend="triton")
    with pytest.raises(RuntimeError, match="triton: cannot leave out keys of a cache; choose auto or dense"):
        decode_attention(*inputs, backend="triton", used=torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="triton: head dimension 24, only"):
        decode_attention(*make_inputs((4, 2, 24)), backend="triton")
    with pytest.raises(ValueError, match="backend fast: choose one of auto, dense, loops, triton"):
        decode_attention(*inputs, backend="fast")


def check_strides(inputs):
    query, keys, *others = inputs
    with pytest.raises(ValueError, match="strides of keys and values .*; allocate both alike"):
        decode(query, keys.transpose(1, 2).contiguous().transpose(1, 2), *others)


def check_layouts(inputs):
    from moh_lm.inference import triton_decode
    from moh_lm.kernels import triton_attention

    query, keys, values, lengths, active, gates = inputs
    expected = decode(*inputs)
    strided = [tensor.repeat_interleave(2, -1)[..., ::2] for tensor in (query, lengths, active, gates)]
    by_tokens = [tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for tensor in (keys, values)]
    assert torch.equal(decode(strided[0], *by_tokens, *strided[1:]), expected)
    types, plain = set(), triton_decode.index_type
    triton_decode.index_type = lambda tensors: types.add(plain(tensors)) or plain(tensors)
    triton_attention.LARGEST_INT32, limit = 10 * keys.shape[2] * keys.shape[3], triton_attention.LARGEST_INT32
    assert all(torch.equal(decode(query, *cache, *inputs[3:]), expected) for cache in ((keys, values), by_tokens))
    triton_decode.index_type, triton_attention.LARGEST_INT32 = plain, limit
    assert types == {triton_attention.tl.int32, triton_attention.tl.int64}


def test_inputs_may_have_any_layout_and_size(interpreter):
    interpreter(check_layouts, make_inputs((4, 2, 16), [1, 33, 70, 101, 5, 64, 9]))


def test_keys_and_values_of_different_layouts_are_refused(interpreter):
    interpreter(check_strides, make_inputs((4, 2, 16)))
