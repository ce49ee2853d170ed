"""Convolve tokens that lie on a grid depth-wise, channels side by side as in the layers around it.

A tile is [BG, BC]: channels of BG strips, each BW columns wide. A program scans down its strips and holds the tokens of a row
as one tile per column, so a token is read (and its GELU computed) once for all the outputs of its strip that see it.
"""

import triton
import triton.language as tl

from .gelu import gelu, gelu_and_slope


@triton.jit(do_not_specialize=["groups", "height", "width", "split_size"])
def depthwise_kernel(
    x_ptr,  # [B, N, C], channels side by side
    plus_ptr,  # [B, N, C]: added to the output; not read without PLUS
    weight_ptr,  # [kernels, SIZE * SIZE]
    bias_ptr,  # [kernels]; not read without HAS_BIAS
    out_ptr,  # [B, N, C]
    groups,  # strips of all samples
    height,
    width,
    channels,
    split_size,  # rows of the grid per program
    x_batch,
    x_token,
    plus_batch,
    plus_token,
    out_batch,
    out_token,
    WEIGHTS: tl.constexpr,  # kernels that heads share; 0: one per channel
    SIZE: tl.constexpr,  # 3 or 5
    PLUS: tl.constexpr,
    RESIDUAL: tl.constexpr,  # y itself is added
    GELU: tl.constexpr,  # y = gelu(x) instead of x
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # strips and tiles divide the grid evenly, so only its edges need a mask
    BW: tl.constexpr,
    BG: tl.constexpr,
    BC: tl.constexpr,
):
    """Compute out = convolution(y) [+ bias] [+ plus or y], zeros outside of the grid.

    A program adds each row to the SIZE rows of outputs that see it, whose sums it holds.
    """
    half: tl.constexpr = SIZE // 2
    strips = tl.cdiv(width, BW)
    splits = tl.cdiv(height, split_size)
    program = tl.program_id(0)
    group = program // splits * BG + tl.arange(0, BG)
    first = program % splits * split_size
    last = tl.minimum(first + split_size, height)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    inside = (group < groups)[:, None] & is_channel[None, :]
    batch = (group // strips).to(tl.int64)[:, None]
    column = group % strips * BW
    # separate cases, or the compiler would not see that neighbours lie side by side
    kernel = channel % WEIGHTS if WEIGHTS else channel
    weights = ()
    for tap in tl.static_range(SIZE * SIZE):
        weight = tl.load(weight_ptr + kernel * (SIZE * SIZE) + tap, mask=is_channel, other=0.0).to(tl.float32)
        if RESIDUAL and tap == SIZE * SIZE // 2:
            weight += 1.0
        weights = weights + (weight[None, :],)  # noqa: RUF005
    # 32-bit offsets inside of a sample
    x_at = x_ptr + batch * x_batch + (column[:, None] * x_token + channel[None, :])
    plus_at = plus_ptr + batch * plus_batch + (column[:, None] * plus_token + channel[None, :])
    out_at = out_ptr + batch * out_batch + (column[:, None] * out_token + channel[None, :])
    start = tl.zeros((BG, BC), tl.float32)
    if HAS_BIAS:
        start += tl.load(bias_ptr + kernel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    sums = ()
    for _ in tl.static_range((SIZE - 1) * BW):
        sums = sums + (start,)  # noqa: RUF005
    begin, end = tl.maximum(first - half, 0), tl.minimum(last + half, height)
    x = load_row(x_at, begin, end, column, width, inside, x_token, half, BW, EVEN)
    for row in tl.range(begin, last + half, num_stages=1):
        # the next row is loaded while this one is added up
        coming = load_row(x_at, row + 1, end, column, width, inside, x_token, half, BW, EVEN)
        is_done = (column * 0 + row) >= first + half
        if PLUS:
            # there is no row before the first
            until = tl.where(row >= first + half, last, row - half)
            plus = load_row(plus_at, row - half, until, column, width, inside, plus_token, 0, BW, EVEN)
        y = ()
        for place in tl.static_range(BW + 2 * half):
            seen = x[place].to(tl.float32)
            if GELU:
                seen = gelu(seen)
            y = y + (seen,)  # noqa: RUF005
        for place in tl.static_range(BW):
            done = add_taps(sums[place], y, weights, place, SIZE * (SIZE - 1), SIZE)
            if PLUS:
                done += plus[place].to(tl.float32)
            at = out_at + ((row - half) * width + place) * out_token
            is_written = is_done[:, None] if EVEN else is_done[:, None] & inside & (column + place < width)[:, None]
            tl.store(at, done.to(out_ptr.dtype.element_ty), mask=is_written)
        new = ()
        for line in tl.static_range(1, SIZE - 1):
            for place in tl.static_range(BW):
                new = new + (add_taps(sums[line * BW + place], y, weights, place, SIZE * (SIZE - 1 - line), SIZE),)  # noqa: RUF005
        for place in tl.static_range(BW):
            new = new + (add_taps(start, y, weights, place, 0, SIZE),)  # noqa: RUF005
        sums, x = new, coming


@triton.jit
def load_row(at, row, end, column, width, inside, token, beyond: tl.constexpr, BW: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile per column of the strips and `beyond` more on both sides; zeros outside of the grid and from row `end` on."""
    tiles = ()
    is_row = (column * 0 + row) < end
    for place in tl.static_range(BW + 2 * beyond):
        is_seen = is_row
        if place < beyond:
            is_seen = is_seen & (column >= beyond - place)
        if place >= beyond + BW or not EVEN:
            is_seen = is_seen & (column + (place - beyond) < width)
        is_read = is_seen[:, None] if EVEN else is_seen[:, None] & inside
        tile = tl.load(at + (row * width + (place - beyond)) * token, mask=is_read, other=0.0)
        tiles = tiles + (tile,)  # noqa: RUF005
    return tiles


@triton.jit
def add_taps(total, y, weights, place: tl.constexpr, first: tl.constexpr, SIZE: tl.constexpr):
    """Return the total plus SIZE tokens of a row, each times its tap."""
    for tap in tl.static_range(SIZE):
        total += y[place + tap] * weights[first + tap]
    return total


@triton.jit(do_not_specialize=["groups", "height", "width", "split_size", "scans"])
def depthwise_gradient_kernel(
    x_ptr,  # [B, N, C]
    dout_ptr,  # [B, N, C]
    weight_ptr,  # [kernels, SIZE * SIZE]
    dx_ptr,  # [B, N, C]; not written without MOVES_INPUT
    partial_ptr,  # [programs of a channel, SIZE * SIZE + 1, C] float32: of each tap, then of the bias; not without MOVES_WEIGHT
    groups,  # strips of all samples
    height,
    width,
    channels,
    split_size,  # rows in a scan
    scans,  # scans of a program
    x_batch,
    x_token,
    dout_batch,
    dout_token,
    dx_batch,
    dx_token,
    WEIGHTS: tl.constexpr,
    SIZE: tl.constexpr,  # 3 or 5
    RESIDUAL: tl.constexpr,
    GELU: tl.constexpr,
    MOVES_INPUT: tl.constexpr,
    MOVES_WEIGHT: tl.constexpr,
    EVEN: tl.constexpr,
    BW: tl.constexpr,
    BG: tl.constexpr,
    BC: tl.constexpr,
):
    """Compute dx_q = gelu'(x_q) sum_t weight_t dout_(q - t), sums over tokens q of y_q dout_(q - t) per tap t, and of dout_q.

    All of them need the neighbours of dout and the token itself, so they share a pass.
    """
    half: tl.constexpr = SIZE // 2
    columns: tl.constexpr = BW + 2 * half
    strips = tl.cdiv(width, BW)
    splits = tl.cdiv(height, split_size)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    kernel = channel % WEIGHTS if WEIGHTS else channel
    # backwards, in the order of the neighbours of dout
    weights = ()
    for tap in tl.static_range(SIZE * SIZE):
        weight = tl.load(weight_ptr + kernel * (SIZE * SIZE) + (SIZE * SIZE - 1 - tap), mask=is_channel, other=0.0).to(
            tl.float32
        )
        if RESIDUAL and tap == SIZE * SIZE // 2:
            weight += 1.0
        weights = weights + (weight[None, :],)  # noqa: RUF005
    bias = tl.zeros((BG, BC), tl.float32)
    sums = ()
    for _ in tl.static_range(SIZE * SIZE):
        sums = sums + (tl.zeros((BG, BC), tl.float32),)  # noqa: RUF005
    most = tl.cdiv(groups, BG) * splits
    for scan in tl.range(tl.program_id(0) * scans, tl.minimum((tl.program_id(0) + 1) * scans, most), num_stages=1):
        group = scan // splits * BG + tl.arange(0, BG)
        first = scan % splits * split_size
        last = tl.minimum(first + split_size, height)
        inside = (group < groups)[:, None] & is_channel[None, :]
        batch = (group // strips).to(tl.int64)[:, None]
        column = group % strips * BW
        x_at = x_ptr + batch * x_batch + (column[:, None] * x_token + channel[None, :])
        dout_at = dout_ptr + batch * dout_batch + (column[:, None] * dout_token + channel[None, :])
        dx_at = dx_ptr + batch * dx_batch + (column[:, None] * dx_token + channel[None, :])
        lines = ()
        for line in tl.static_range(SIZE - 1):
            # a row above the grid is not read
            above = first + line - half
            found = load_row(
                dout_at, above, tl.where(above >= 0, height, above), column, width, inside, dout_token, half, BW, EVEN
            )
            for place in tl.static_range(columns):
                lines = lines + (found[place].to(tl.float32),)  # noqa: RUF005
        below = load_row(dout_at, first + half, height, column, width, inside, dout_token, half, BW, EVEN)
        x = load_row(x_at, first, last, column, width, inside, x_token, 0, BW, EVEN)
        for row in tl.range(first, last, num_stages=1):
            # the next rows are loaded while these are added up
            below_next = load_row(dout_at, row + half + 1, height, column, width, inside, dout_token, half, BW, EVEN)
            coming = load_row(x_at, row + 1, last, column, width, inside, x_token, 0, BW, EVEN)
            for place in tl.static_range(columns):
                lines = lines + (below[place].to(tl.float32),)  # noqa: RUF005
            y = ()
            for place in tl.static_range(BW):
                token = x[place].to(tl.float32)
                if GELU:
                    token, slope = gelu_and_slope(token)
                y = y + (token,)  # noqa: RUF005
                if MOVES_INPUT:
                    dx = lines[place] * weights[0]
                    for tap in tl.static_range(1, SIZE * SIZE):
                        dx += lines[tap // SIZE * columns + place + tap % SIZE] * weights[tap]
                    if GELU:
                        dx *= slope
                    at = dx_at + (row * width + place) * dx_token
                    if EVEN:
                        tl.store(at, dx.to(dx_ptr.dtype.element_ty))
                    else:
                        is_written = inside & (column + place < width)[:, None]
                        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=is_written)
            if MOVES_WEIGHT:
                new = ()
                for tap in tl.static_range(SIZE * SIZE):
                    total = sums[tap]
                    for place in tl.static_range(BW):
                        total += lines[tap // SIZE * columns + place + tap % SIZE] * y[place]
                    new = new + (total,)  # noqa: RUF005
                sums = new
                for place in tl.static_range(BW):
                    bias += lines[half * columns + half + place]
            rest = ()
            for place in tl.static_range((SIZE - 1) * columns):
                rest = rest + (lines[columns + place],)  # noqa: RUF005
            lines, below, x = rest, below_next, coming
    if MOVES_WEIGHT:
        out = partial_ptr + tl.program_id(0).to(tl.int64) * (SIZE * SIZE + 1) * channels + channel
        for tap in tl.static_range(SIZE * SIZE):
            tl.store(out + (SIZE * SIZE - 1 - tap) * channels, tl.sum(sums[tap], axis=0), mask=is_channel)
        tl.store(out + SIZE * SIZE * channels, tl.sum(bias, axis=0), mask=is_channel)
