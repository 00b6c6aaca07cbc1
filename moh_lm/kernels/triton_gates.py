"""The backward pass of the gates of heads that scaled dot-product attention computed, as one Triton kernel.

With dOut_i the gradient of g_i H_i it computes dH_i = g_i dOut_i and dg_i = rowsum(dOut_i * H_i) in one pass.
"""

import torch
import triton
import triton.language as tl

ROWS = 32  # rows of a program


def differentiate_gates(gradient, context, gates, dcontext, dgates):
    """Write the gradients of H_i and g_i, given that of g_i H_i [s, b, heads, e]."""
    length, batch, heads, head_dim = context.shape
    gate_kernel[(triton.cdiv(length * batch * heads, ROWS),)](
        gradient, context, gates, dcontext, dgates, *gradient.stride(), *context.stride(), *gates.stride(),
        length, batch, heads, dgates.shape[2], E=head_dim, WIDTH=triton.next_power_of_2(head_dim), ROWS=ROWS,
        WIDE=tl.float64 if context.dtype == torch.float64 else tl.float32, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def gate_kernel(
    dout, context, gates, dcontext, dgates, stride_ds, stride_db, stride_dh, stride_de,
    stride_cs, stride_cb, stride_ch, stride_ce, stride_gs, stride_gb, stride_gh, seq, batch, num_heads, width,
    E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute dH and dg for ROWS of the rows of s, b and heads; dcontext has the strides of context."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = row % num_heads
    b = row // num_heads % batch
    s = row // num_heads // batch
    column = tl.arange(0, WIDTH)[None, :]
    inside = (s < seq)[:, None] & (column < E)
    at = (s * stride_ds + b * stride_db + h * stride_dh)[:, None] + column * stride_de
    d = tl.load(dout + at, mask=inside, other=0.0).to(WIDE)
    at = (s * stride_cs + b * stride_cb + h * stride_ch)[:, None] + column * stride_ce
    head = tl.load(context + at, mask=inside, other=0.0).to(WIDE)
    gate = tl.load(gates + s * stride_gs + b * stride_gb + h * stride_gh, mask=s < seq, other=0.0)
    tl.store(dcontext + at, (d * gate[:, None]).to(dcontext.dtype.element_ty), mask=inside)
    tl.store(dgates + (s * batch + b) * width + h, tl.sum(d * head, 1), mask=s < seq)
