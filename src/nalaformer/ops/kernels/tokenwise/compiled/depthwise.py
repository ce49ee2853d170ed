"""Depth-wise convolution of tokens that lie on a grid, channels side by side as the layers around it have them."""

import triton
import triton.language as tl


@triton.jit
def depthwise_kernel(
    x_ptr,  # [B, N, C], channels side by side
    plus_ptr,  # [B, N, C]: added to the output; not read without PLUS
    taps_ptr,  # [SIZE * SIZE, WEIGHTS]: neighbouring channels side by side, as in the tokens
    bias_ptr,  # [WEIGHTS]; not read without HAS_BIAS
    out_ptr,  # [B, N, C]
    height,
    width,
    channels,
    stretch,  # rows of the grid per program
    x_batch,
    x_token,
    plus_batch,
    plus_token,
    out_batch,
    out_token,
    WEIGHTS: tl.constexpr,  # kernels: one per channel, or fewer that the heads share
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,  # 3 or 5
    FLIP: tl.constexpr,  # the transposed convolution, for the gradient
    PLUS: tl.constexpr,
    RESIDUAL: tl.constexpr,  # x itself is added
    HAS_BIAS: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """out = convolution(x) [+ bias] [+ plus or x], zeros outside of the grid.

    A program walks down some columns. It reads a row once and adds it to the SIZE rows of outputs that see it, whose sums it
    holds: a SIZE-th of the loads that each output by itself would take.
    """
    half: tl.constexpr = SIZE // 2
    columns = tl.cdiv(width, BW)
    stretches = tl.cdiv(height, stretch)
    program = tl.program_id(0)
    column = (program % columns) * BW + tl.arange(0, BW)
    first = (program // columns) % stretches * stretch
    last = tl.minimum(first + stretch, height)
    batch = (program // (columns * stretches)).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    inside = (column < width)[:, None] & is_channel[None, :]
    # told apart here, or the compiler could not see that neighbours lie side by side
    kernel = channel % WEIGHTS if SHARED else channel
    weights = ()
    for tap in tl.static_range(SIZE * SIZE):
        place = SIZE * SIZE - 1 - tap if FLIP else tap
        weight = tl.load(taps_ptr + place * WEIGHTS + kernel, mask=is_channel, other=0.0).to(tl.float32)
        if RESIDUAL and tap == SIZE * SIZE // 2:
            weight += 1.0
        weights = weights + (weight[None, :],)  # noqa: RUF005
    # 32-bit offsets inside of a sample
    x_ptr += batch * x_batch
    x_at = column[:, None] * x_token + channel[None, :]
    out_at = out_ptr + batch * out_batch + (column[:, None] * out_token + channel[None, :])
    plus_at = plus_ptr + batch * plus_batch + (column[:, None] * plus_token + channel[None, :])
    start = tl.zeros((BW, BC), tl.float32)
    if HAS_BIAS:
        start += tl.load(bias_ptr + kernel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    sum0, sum1, sum2, sum3 = start, start, start, start
    begin, end = tl.maximum(first - half, 0), tl.minimum(last + half, height)
    x0 = beside(x_ptr, x_at, begin, end, column, width, inside, x_token, -half)
    x1 = beside(x_ptr, x_at, begin, end, column, width, inside, x_token, 1 - half)
    x2 = beside(x_ptr, x_at, begin, end, column, width, inside, x_token, 2 - half)
    x3, x4 = x2, x2
    if SIZE == 5:
        x3 = beside(x_ptr, x_at, begin, end, column, width, inside, x_token, 1)
        x4 = beside(x_ptr, x_at, begin, end, column, width, inside, x_token, 2)
    for row in tl.range(begin, last + half, num_stages=1):
        # the next row is on its way while this one is added up
        next0 = beside(x_ptr, x_at, row + 1, end, column, width, inside, x_token, -half)
        next1 = beside(x_ptr, x_at, row + 1, end, column, width, inside, x_token, 1 - half)
        next2 = beside(x_ptr, x_at, row + 1, end, column, width, inside, x_token, 2 - half)
        next3, next4 = next2, next2
        if SIZE == 5:
            next3 = beside(x_ptr, x_at, row + 1, end, column, width, inside, x_token, 1)
            next4 = beside(x_ptr, x_at, row + 1, end, column, width, inside, x_token, 2)
        # sums of the rows from row - half on, each with the row of taps that meets it
        if SIZE == 3:
            done = added3(sum0, x0, x1, x2, weights, 6)
            sum0 = added3(sum1, x0, x1, x2, weights, 3)
            sum1 = added3(start, x0, x1, x2, weights, 0)
        else:
            done = added5(sum0, x0, x1, x2, x3, x4, weights, 20)
            sum0 = added5(sum1, x0, x1, x2, x3, x4, weights, 15)
            sum1 = added5(sum2, x0, x1, x2, x3, x4, weights, 10)
            sum2 = added5(sum3, x0, x1, x2, x3, x4, weights, 5)
            sum3 = added5(start, x0, x1, x2, x3, x4, weights, 0)
        x0, x1, x2, x3, x4 = next0, next1, next2, next3, next4
        is_done = inside & ((column * 0 + row) >= first + half)[:, None]
        if PLUS:
            done += tl.load(plus_at + (row - half) * width * plus_token, mask=is_done, other=0.0).to(tl.float32)
        tl.store(out_at + (row - half) * width * out_token, done.to(out_ptr.dtype.element_ty), mask=is_done)


@triton.jit
def beside(x_ptr, x_at, row, end, column, width, inside, x_token, right):
    """What lies `right` of each column in a row; zeros outside of the grid and from the row `end` on."""
    is_seen = ((column + right >= 0) & (column + right < width) & (column * 0 + row < end))[:, None] & inside
    return tl.load(x_ptr + (x_at + (row * width + right) * x_token), mask=is_seen, other=0.0)


@triton.jit
def added3(total, x0, x1, x2, weights, first: tl.constexpr):
    """The total and a row of three tokens, each times its tap."""
    total += x0.to(tl.float32) * weights[first]
    total += x1.to(tl.float32) * weights[first + 1]
    return total + x2.to(tl.float32) * weights[first + 2]


@triton.jit
def added5(total, x0, x1, x2, x3, x4, weights, first: tl.constexpr):
    """The same of five."""
    total = added3(total, x0, x1, x2, weights, first)
    total += x3.to(tl.float32) * weights[first + 3]
    return total + x4.to(tl.float32) * weights[first + 4]


@triton.jit
def depthwise_weight_kernel(
    x_ptr,  # [B, N, C]
    dout_ptr,  # [B, N, C]
    partial_ptr,  # [programs of a channel, SIZE * SIZE + 1, C] float32: of each tap, then of the bias
    batches,
    height,
    width,
    channels,
    stretch,  # rows of dout in a walk
    walks,  # of a program
    x_batch,
    x_token,
    dout_batch,
    dout_token,
    SIZE: tl.constexpr,  # 3 or 5
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums over tokens of dout times a neighbour, for each tap, and of dout by itself for the bias.

    A program walks down some columns, as the convolution does, with the SIZE rows of dout that see a row of x.
    """
    half: tl.constexpr = SIZE // 2
    column = tl.program_id(0) * BW + tl.arange(0, BW)
    split = tl.program_id(1)
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    inside = (column < width)[:, None] & is_channel[None, :]
    x_at = column[:, None] * x_token + channel[None, :]
    dout_at = column[:, None] * dout_token + channel[None, :]
    bias = tl.zeros((BW, BC), tl.float32)
    sums = ()
    for _ in tl.static_range(SIZE * SIZE):
        sums = sums + (tl.zeros((BW, BC), tl.float32),)  # noqa: RUF005
    stretches = tl.cdiv(height, stretch)
    for walk in tl.range(split * walks, tl.minimum((split + 1) * walks, batches * stretches), num_stages=1):
        batch = (walk // stretches).to(tl.int64)
        first = walk % stretches * stretch
        last = tl.minimum(first + stretch, height)
        begin, end = tl.maximum(first - half, 0), tl.minimum(last + half, height)
        x_in, dout_in = x_ptr + batch * x_batch, dout_ptr + batch * dout_batch
        for tap in tl.static_range(SIZE):
            is_own = inside & (column * 0 + (begin + tap - half) >= first)[:, None]
            dout = beside(dout_in, dout_at, begin + tap - half, last, column, width, is_own, dout_token, 0)
            bias += dout.to(tl.float32)
            if tap == 0:
                dout0, dout1, dout2, dout3, dout4 = dout, dout, dout, dout, dout
            elif SIZE == 3:
                dout0, dout1, dout2 = dout1, dout2, dout
            else:
                dout0, dout1, dout2, dout3, dout4 = dout1, dout2, dout3, dout4, dout
        x = ()
        for tap in tl.static_range(SIZE):
            x = x + (beside(x_in, x_at, begin, end, column, width, inside, x_token, tap - half),)  # noqa: RUF005
        for row in tl.range(begin, end, num_stages=1):
            # the next rows are on their way while these are added up
            later = beside(dout_in, dout_at, row + half + 1, last, column, width, inside, dout_token, 0)
            coming, new = (), ()
            for tap in tl.static_range(SIZE):
                coming = coming + (beside(x_in, x_at, row + 1, end, column, width, inside, x_token, tap - half),)  # noqa: RUF005
            for line in tl.static_range(SIZE):
                # a line of taps meets the row of dout that lies as far above x as it looks down
                dout = dout0
                if line == SIZE - 2:
                    dout = dout1
                elif line == SIZE - 3:
                    dout = dout2
                elif line == SIZE - 4:
                    dout = dout3
                elif line == SIZE - 5:
                    dout = dout4
                for tap in tl.static_range(SIZE):
                    new = new + (sums[line * SIZE + tap] + dout.to(tl.float32) * x[tap].to(tl.float32),)  # noqa: RUF005
            sums, x = new, coming
            bias += later.to(tl.float32)
            if SIZE == 3:
                dout0, dout1, dout2 = dout1, dout2, later
            else:
                dout0, dout1, dout2, dout3, dout4 = dout1, dout2, dout3, dout4, later
    program = split * tl.num_programs(0) + tl.program_id(0)
    out = partial_ptr + program.to(tl.int64) * (SIZE * SIZE + 1) * channels + channel
    for tap in tl.static_range(SIZE * SIZE):
        tl.store(out + tap * channels, tl.sum(sums[tap], axis=0), mask=is_channel)
    tl.store(out + SIZE * SIZE * channels, tl.sum(bias, axis=0), mask=is_channel)
