"""Compute LayerNorm and RMSNorm with the sum before and the gate behind, in programs of many rows (torch: a block a row).

CENTRED is LayerNorm, with mean and bias; without it the kernels compute RMSNorm, which has neither.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def norm_kernel(
    x_ptr,  # [R, C] rows of the given stride
    y_ptr,  # [R, C]: added to x; not read without ADDS
    gate_ptr,  # [R, C]; not read without GATED
    weight_ptr,  # [C]
    bias_ptr,  # [C]; not read without CENTRED
    out_ptr,  # [R, C] side by side
    total_ptr,  # [R, C] side by side: x + y; not written without ADDS
    moments_ptr,  # [R] float32: 1 / standard deviation; [2, R], then the mean, with CENTRED
    rows,
    x_row,
    y_row,
    gate_row,
    eps,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    CENTRED: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute total = x [+ y]; out = (total [- mean]) / sqrt(mean square + eps) * weight [+ bias] [* silu(gate)]."""
    row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    channel = tl.arange(0, BC)
    is_row = row < rows
    is_channel = channel < C
    inside = is_row[:, None] & is_channel[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(y_ptr + row[:, None] * y_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        # rounded to the type that the next layers read
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row[:, None] * C + channel[None, :], total, mask=inside)
        x = total.to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=1) / C
        x = tl.where(inside, x - mean[:, None], 0.0)
        tl.store(moments_ptr + rows + row, mean, mask=is_row)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / C + eps)
    weight = tl.load(weight_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    out = x * inverse[:, None] * weight[None, :]
    if CENTRED:
        out += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate = tl.load(gate_ptr + row[:, None] * gate_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        out = out * gate * sigmoid(gate)
    tl.store(out_ptr + row[:, None] * C + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(moments_ptr + row, inverse, mask=is_row)


@triton.jit
def norm_gradient_kernel(
    x_ptr,  # [R, C]: the normalised input
    gate_ptr,  # [R, C]; not read without GATED
    weight_ptr,  # [C]
    bias_ptr,  # [C]; not read without CENTRED
    dout_ptr,  # [R, C]
    dtotal_ptr,  # [R, C]: the gradient of x itself, which is added; not read without ADDS
    moments_ptr,  # [R] or [2, R] float32
    dx_ptr,  # [R, C] side by side
    dgate_ptr,  # [R, C] side by side; not written without GATED
    partial_ptr,  # [programs, C] float32: gradient of the weight; [programs, 2, C], then of the bias, with CENTRED
    rows,
    split_size,  # steps of BR rows per program
    x_row,
    gate_row,
    dout_row,
    dtotal_row,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    CENTRED: tl.constexpr,
    ADDS: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute gradients of x and gate, and sums over the program's rows for weight and bias."""
    program = tl.program_id(0)
    channel = tl.arange(0, BC)
    is_channel = channel < C
    weight = tl.load(weight_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    dweight = tl.zeros((BR, BC), tl.float32)
    if CENTRED:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
        dbias = tl.zeros((BR, BC), tl.float32)
    last = tl.minimum((program + 1) * split_size, tl.cdiv(rows, BR))
    for step in tl.range(program * split_size, last, num_stages=STAGES):
        row = (step * BR + tl.arange(0, BR)).to(tl.int64)
        is_row = row < rows
        inside = is_row[:, None] & is_channel[None, :]
        x = tl.load(x_ptr + row[:, None] * x_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row[:, None] * dout_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(moments_ptr + row, mask=is_row, other=0.0)
        if CENTRED:
            mean = tl.load(moments_ptr + rows + row, mask=is_row, other=0.0)
            x = tl.where(inside, x - mean[:, None], 0.0)
        unit = x * inverse[:, None]
        if GATED:
            gate = tl.load(gate_ptr + row[:, None] * gate_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            part = sigmoid(gate)
            normed = unit * weight[None, :]
            if CENTRED:
                normed += bias[None, :]
            dgate = dout * normed * part * (1.0 + gate * (1.0 - part))
            tl.store(dgate_ptr + row[:, None] * C + channel[None, :], dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
            dout = dout * gate * part
        dweight += dout * unit
        dunit = dout * weight[None, :]
        along = tl.sum(dunit * unit, axis=1) / C
        if CENTRED:
            dbias += dout
            dunit -= (tl.sum(dunit, axis=1) / C)[:, None]
        dx = (dunit - unit * along[:, None]) * inverse[:, None]
        if ADDS:
            dx += tl.load(dtotal_ptr + row[:, None] * dtotal_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row[:, None] * C + channel[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    out = partial_ptr + program.to(tl.int64) * (2 * C if CENTRED else C) + channel
    tl.store(out, tl.sum(dweight, axis=0), mask=is_channel)
    if CENTRED:
        tl.store(out + C, tl.sum(dbias, axis=0), mask=is_channel)
