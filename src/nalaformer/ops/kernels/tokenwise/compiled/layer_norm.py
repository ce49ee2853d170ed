"""Layer norm over few channels, with the gate that follows it: a program takes many rows, where torch gives each a block."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def layer_norm_kernel(
    x_ptr,  # [R, C] rows of the given stride
    gate_ptr,  # [R, C]; not read without GATED
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    out_ptr,  # [R, C] side by side
    moments_ptr,  # [2, R] float32: mean, 1 / deviation
    rows,
    x_row,
    gate_row,
    eps,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    GATED: tl.constexpr,
):
    """out = (x - mean) / deviation * weight + bias [* silu(gate)]."""
    row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    channel = tl.arange(0, BC)
    is_row = row < rows
    is_channel = channel < C
    inside = is_row[:, None] & is_channel[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / C
    apart = tl.where(inside, x - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(apart * apart, axis=1) / C + eps)
    weight = tl.load(weight_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    out = apart * inverse[:, None] * weight[None, :] + bias[None, :]
    if GATED:
        gate = tl.load(gate_ptr + row[:, None] * gate_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        out = out * gate * sigmoid(gate)
    tl.store(out_ptr + row[:, None] * C + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(moments_ptr + row, mean, mask=is_row)
    tl.store(moments_ptr + rows + row, inverse, mask=is_row)


@triton.jit
def layer_norm_gradient_kernel(
    x_ptr,  # [R, C]
    gate_ptr,  # [R, C]; not read without GATED
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    dout_ptr,  # [R, C]
    moments_ptr,  # [2, R] float32
    dx_ptr,  # [R, C] side by side
    dgate_ptr,  # [R, C] side by side; not written without GATED
    partial_ptr,  # [programs, 2, C] float32: of weight and bias
    rows,
    stretch,  # steps of BR rows per program
    x_row,
    gate_row,
    dout_row,
    C: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of x and gate, and sums over the program's rows for weight and bias."""
    program = tl.program_id(0)
    channel = tl.arange(0, BC)
    is_channel = channel < C
    weight = tl.load(weight_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    dweight = tl.zeros((BR, BC), tl.float32)
    dbias = tl.zeros((BR, BC), tl.float32)
    last = tl.minimum((program + 1) * stretch, tl.cdiv(rows, BR))
    for step in tl.range(program * stretch, last, num_stages=STAGES):
        row = (step * BR + tl.arange(0, BR)).to(tl.int64)
        is_row = row < rows
        inside = is_row[:, None] & is_channel[None, :]
        x = tl.load(x_ptr + row[:, None] * x_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row[:, None] * dout_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(moments_ptr + row, mask=is_row, other=0.0)
        inverse = tl.load(moments_ptr + rows + row, mask=is_row, other=0.0)
        unit = tl.where(inside, (x - mean[:, None]) * inverse[:, None], 0.0)
        if GATED:
            gate = tl.load(gate_ptr + row[:, None] * gate_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            part = sigmoid(gate)
            normed = unit * weight[None, :] + bias[None, :]
            dgate = dout * normed * part * (1.0 + gate * (1.0 - part))
            tl.store(dgate_ptr + row[:, None] * C + channel[None, :], dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
            dout = dout * gate * part
        dweight += dout * unit
        dbias += dout
        dunit = dout * weight[None, :]
        along = tl.sum(dunit * unit, axis=1) / C
        level = tl.sum(dunit, axis=1) / C
        dx = (dunit - level[:, None] - unit * along[:, None]) * inverse[:, None]
        tl.store(dx_ptr + row[:, None] * C + channel[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    out = partial_ptr + program.to(tl.int64) * 2 * C + channel
    tl.store(out, tl.sum(dweight, axis=0), mask=is_channel)
    tl.store(out + C, tl.sum(dbias, axis=0), mask=is_channel)
