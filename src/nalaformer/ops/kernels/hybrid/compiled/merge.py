"""Merge the two branches of hybrid attention in one pass, and compute the gradients in another. Rows are queries.

    out = (c w + d g w') / (c t + d t' + c eps)      c = exp(m - max(m, 0)), d = exp(-max(m, 0))

with w, t and m of the exact branch (m in powers of two), w' and t' of the linear one, g the gate; c = d = 1 if RELEASED.
If BOUNDED, d is multiplied by a factor that rows_per_share rows have in common.
Without a linear branch out = w / (t + eps).

t and w hold exp(s - m). The gradient of m includes everything that depends on it: if RELEASED m is a factor of the exact
branch, otherwise m cancels but for eps.
"""

import triton
import triton.language as tl

from ...common.compiled.fastmath import exp2


@triton.jit
def load_parts(
    weighted_ptr,
    total_ptr,
    max_ptr,
    linear_ptr,
    linear_total_ptr,
    gate_ptr,
    share_ptr,
    rows,
    rows_per_share,
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    GATE: tl.constexpr,  # numbers per row: 0, 1 or V
    RELEASED: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Load places, masks, scaled sums of both branches (the linear one without gate), gate, both scales, 1 / denominator."""
    row = tl.cast(tl.program_id(0), tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BV)
    inside = (row < rows)[:, None] & (column < V)[None, :]
    at = row[:, None] * V + column[None, :]
    exact = tl.load(weighted_ptr + at, mask=inside, other=0.0)
    total = tl.load(total_ptr + row, mask=row < rows, other=1.0) + eps
    scale = tl.full([BR], 1.0, tl.float32)
    linear_scale = tl.full([BR], 1.0, tl.float32)
    linear = tl.zeros([BR, BV], tl.float32)
    gate = tl.full([BR, BV], 1.0, tl.float32)
    if HAS_LINEAR:
        if not RELEASED:
            row_max = tl.load(max_ptr + row, mask=row < rows, other=0.0)
            top = tl.maximum(row_max, 0.0)
            scale = exp2(row_max - top)
            linear_scale = exp2(-top)
        if BOUNDED:
            linear_scale *= tl.load(share_ptr + row // rows_per_share, mask=row < rows, other=0.0)
        linear = tl.load(linear_ptr + at, mask=inside, other=0.0) * linear_scale[:, None]
        linear_total = tl.load(linear_total_ptr + row, mask=row < rows, other=0.0)
        total = total * scale + linear_total * linear_scale
        exact *= scale[:, None]
        if GATE == 1:
            gate = tl.load(gate_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None] + tl.zeros([BR, BV], tl.float32)
        elif GATE > 1:
            gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return row, at, inside, exact, linear, gate, scale, linear_scale, 1.0 / total


@triton.jit(do_not_specialize=["rows", "rows_per_share"])
def merge_branches_kernel(
    weighted_ptr,  # [rows, V] float32
    total_ptr,  # [rows] float32
    max_ptr,  # [rows] float32
    linear_ptr,  # [rows, V] float32
    linear_total_ptr,  # [rows] float32
    gate_ptr,  # [rows, GATE]
    share_ptr,  # [rows / rows_per_share] float32
    out_ptr,  # [rows, V]
    rows,
    rows_per_share,
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    GATE: tl.constexpr,
    RELEASED: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    _, at, inside, exact, linear, gate, _, _, inverse = load_parts(
        *(weighted_ptr, total_ptr, max_ptr, linear_ptr, linear_total_ptr, gate_ptr, share_ptr),
        *(rows, rows_per_share, eps, V, BR, BV, HAS_LINEAR, GATE, RELEASED, BOUNDED),
    )
    out = (exact + gate * linear) * inverse[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "rows_per_share"])
def merge_gradient_kernel(
    weighted_ptr,  # [rows, V] float32
    total_ptr,  # [rows] float32
    max_ptr,  # [rows] float32
    linear_ptr,  # [rows, V] float32
    linear_total_ptr,  # [rows] float32
    gate_ptr,  # [rows, GATE]
    share_ptr,  # [rows / rows_per_share] float32
    dout_ptr,  # [rows, V]
    dweighted_ptr,  # [rows, V] float32
    dtotal_ptr,  # [rows] float32
    dlinear_ptr,  # [rows, V] float32
    dlinear_total_ptr,  # [rows] float32
    dgate_ptr,  # [rows, GATE]
    dmax_ptr,  # [rows] float32
    rows,
    rows_per_share,
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    HAS_LINEAR: tl.constexpr,
    GATE: tl.constexpr,
    RELEASED: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    row, at, inside, exact, linear, gate, scale, linear_scale, inverse = load_parts(
        *(weighted_ptr, total_ptr, max_ptr, linear_ptr, linear_total_ptr, gate_ptr, share_ptr),
        *(rows, rows_per_share, eps, V, BR, BV, HAS_LINEAR, GATE, RELEASED, BOUNDED),
    )
    is_row = row < rows
    dabove = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse[:, None]
    dbelow = -tl.sum(dabove * (exact + gate * linear), axis=1) * inverse
    tl.store(dweighted_ptr + at, dabove * scale[:, None], mask=inside)
    tl.store(dtotal_ptr + row, dbelow * scale, mask=is_row)
    dmax = dbelow * scale * eps
    if RELEASED:
        total = tl.load(total_ptr + row, mask=is_row, other=0.0)
        dmax = -tl.sum(dabove * exact, axis=1) - dbelow * total
    tl.store(dmax_ptr + row, dmax, mask=is_row)
    if HAS_LINEAR:
        tl.store(dlinear_ptr + at, dabove * gate * linear_scale[:, None], mask=inside)
        tl.store(dlinear_total_ptr + row, dbelow * linear_scale, mask=is_row)
        dgate = dabove * linear
        if GATE == 1:
            tl.store(dgate_ptr + row, tl.sum(dgate, axis=1).to(dgate_ptr.dtype.element_ty), mask=is_row)
        elif GATE > 1:
            tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
