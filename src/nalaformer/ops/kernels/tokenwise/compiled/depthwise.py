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
def neighbour(x_ptr, here, row, column, inside, height, width, x_token, down, right):
    """What lies `down` and `right` of each token; zeros outside of the grid."""
    is_seen = (row + down >= 0) & (row + down < height) & (column + right >= 0) & (column + right < width)
    at = x_ptr + (here + (down * width + right) * x_token)
    return tl.load(at, mask=is_seen[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def depthwise_weight_kernel(
    x_ptr,  # [B, N, C]
    dout_ptr,  # [B, N, C]
    partial_ptr,  # [splits, SIZE * SIZE + 1, C] float32: of each tap, then of the bias
    batches,
    height,
    width,
    channels,
    stretch,  # tiles of tokens per program
    x_batch,
    x_token,
    dout_batch,
    dout_token,
    SIZE: tl.constexpr,  # 3 or 5
    BN: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over tokens of dout times a neighbour, for one row of taps; the middle row sums dout for the bias as well."""
    num_tokens = height * width
    tiles = tl.cdiv(num_tokens, BN)
    tap_row = tl.program_id(0)
    split = tl.program_id(1)
    down = tap_row - SIZE // 2
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    bias = tl.zeros((BN, BC), tl.float32)
    tap0 = tl.zeros((BN, BC), tl.float32)
    tap1 = tl.zeros((BN, BC), tl.float32)
    tap2 = tl.zeros((BN, BC), tl.float32)
    if SIZE == 5:
        tap3 = tl.zeros((BN, BC), tl.float32)
        tap4 = tl.zeros((BN, BC), tl.float32)
    last = tl.minimum((split + 1) * stretch, batches * tiles)
    # the stages of the loop are asked for here: without a matrix product Triton would not prefetch
    for tile in tl.range(split * stretch, last, num_stages=STAGES):
        batch = (tile // tiles).to(tl.int64)
        token = (tile % tiles) * BN + tl.arange(0, BN)
        row = token // width
        column = token % width
        inside = (token < num_tokens)[:, None] & is_channel[None, :]
        at = dout_ptr + batch * dout_batch + (token[:, None] * dout_token + channel[None, :])
        dout = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        x = x_ptr + batch * x_batch
        here = token[:, None] * x_token + channel[None, :]
        bias += dout
        first = -(SIZE // 2)
        tap0 += dout * neighbour(x, here, row, column, inside, height, width, x_token, down, first)
        tap1 += dout * neighbour(x, here, row, column, inside, height, width, x_token, down, first + 1)
        tap2 += dout * neighbour(x, here, row, column, inside, height, width, x_token, down, first + 2)
        if SIZE == 5:
            tap3 += dout * neighbour(x, here, row, column, inside, height, width, x_token, down, first + 3)
            tap4 += dout * neighbour(x, here, row, column, inside, height, width, x_token, down, first + 4)
    out = partial_ptr + split.to(tl.int64) * (SIZE * SIZE + 1) * channels + channel
    taps = out + tap_row * SIZE * channels
    tl.store(taps, tl.sum(tap0, axis=0), mask=is_channel)
    tl.store(taps + channels, tl.sum(tap1, axis=0), mask=is_channel)
    tl.store(taps + 2 * channels, tl.sum(tap2, axis=0), mask=is_channel)
    if SIZE == 5:
        tl.store(taps + 3 * channels, tl.sum(tap3, axis=0), mask=is_channel)
        tl.store(taps + 4 * channels, tl.sum(tap4, axis=0), mask=is_channel)
    if tap_row == SIZE // 2:
        tl.store(out + SIZE * SIZE * channels, tl.sum(bias, axis=0), mask=is_channel)
