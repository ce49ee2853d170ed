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
    x_batch,
    x_token,
    plus_batch,
    plus_token,
    out_batch,
    out_token,
    WEIGHTS: tl.constexpr,  # kernels: one per channel, or fewer that the heads share
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    FLIP: tl.constexpr,  # the transposed convolution, for the gradient
    PLUS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """out = convolution(x) [+ bias] [+ plus], zeros outside of the grid."""
    num_tokens = height * width
    tiles = tl.cdiv(num_tokens, BN)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    row = token // width
    column = token % width
    is_channel = channel < channels
    is_token = token < num_tokens
    inside = is_token[:, None] & is_channel[None, :]
    # told apart here, or the compiler could not see that neighbours lie side by side
    kernel = channel % WEIGHTS if SHARED else channel
    out = tl.zeros((BN, BC), tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + kernel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if PLUS:
        at = plus_ptr + batch * plus_batch + (token[:, None] * plus_token + channel[None, :])
        out += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    # 32-bit offsets inside of a sample: half the registers for addresses, so more loads are under way
    here = token[:, None] * x_token + channel[None, :]
    x_ptr += batch * x_batch
    # a 5x5 kernel unrolled whole would ask for more registers than there are
    for tap_row in tl.range(0, SIZE, loop_unroll_factor=3 if SIZE == 3 else 1):
        for tap_column in tl.static_range(SIZE):
            down, right = tap_row - SIZE // 2, tap_column - SIZE // 2
            x = neighbour(x_ptr, here, row, column, inside, height, width, x_token, down, right)
            tap = tap_row * SIZE + tap_column
            place = SIZE * SIZE - 1 - tap if FLIP else tap
            weight = tl.load(taps_ptr + place * WEIGHTS + kernel, mask=is_channel, other=0.0)
            out += x * weight.to(tl.float32)[None, :]
    at = out_ptr + batch * out_batch + (token[:, None] * out_token + channel[None, :])
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)


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
