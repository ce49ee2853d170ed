"""Convolve each channel causally over its last few tokens, with its SiLU; channels lie side by side."""

import triton
import triton.language as tl

from .norm import sigmoid


@triton.jit
def earlier(
    x_ptr,  # the first token of the tile, channels of the program
    sequence_ptr,  # begins at the same token
    before_ptr,  # [SIZE - 1, C], channels of the program
    token,  # [BN]
    local,  # [BN]: inside of the tile
    own,  # [BN]: the sequence of each token; not read without PACKED
    channel,
    inside,  # [BN, BC]
    num_tokens,
    x_token,
    before_token,
    BACK: tl.constexpr,  # negative for later tokens
    SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):
    """Return [BN, BC] float32: the token BACK places before each, in the same sequence; zeros where there is none."""
    place = token - BACK
    is_there = (place >= 0) & (place < num_tokens)
    if PACKED:
        other = tl.load(sequence_ptr + (local - BACK), mask=is_there, other=-1)
        is_there = is_there & (other == own)
    x = tl.load(x_ptr + ((local - BACK)[:, None] * x_token + channel[None, :]), mask=is_there[:, None] & inside, other=0.0)
    x = x.to(tl.float32)
    if HAS_BEFORE:
        row = place + (SIZE - 1)
        is_before = (place < 0) & (row >= 0)
        at = before_ptr + (row[:, None] * before_token + channel[None, :])
        x += tl.load(at, mask=is_before[:, None] & inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def short_convolution_kernel(
    x_ptr,  # [B, N, C] of a part of the channels
    weight_ptr,  # [C, SIZE]
    bias_ptr,  # [C]; not read without HAS_BIAS
    before_ptr,  # [B, SIZE - 1, C]: the tokens before the first; not read without HAS_BEFORE
    sequence_ptr,  # [B, N] integers; not read without PACKED
    out_ptr,  # [B, N, C] without gaps
    num_tokens,
    channels,
    x_batch,
    x_token,
    before_batch,
    before_token,
    SIZE: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    PACKED: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """Compute out_t = [silu](bias + sum_s weight_s x_{t-s})."""
    tiles = tl.cdiv(num_tokens, BN)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    start = ((tl.program_id(0) % tiles) * BN).to(tl.int64)
    local = tl.arange(0, BN)
    token = (tl.program_id(0) % tiles) * BN + local
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    inside = (token < num_tokens)[:, None] & is_channel[None, :]
    x_ptr += batch * x_batch + start * x_token
    before_ptr += batch * before_batch
    sequence_ptr += batch * num_tokens + start
    own = token
    if PACKED:
        own = tl.load(sequence_ptr + local, mask=token < num_tokens, other=-2)
    out = tl.zeros((BN, BC), tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(SIZE):
        x = earlier(
            *(x_ptr, sequence_ptr, before_ptr, token, local, own, channel, inside, num_tokens, x_token, before_token),
            BACK=back,
            SIZE=SIZE,
            PACKED=PACKED,
            HAS_BEFORE=HAS_BEFORE,
        )
        weight = tl.load(weight_ptr + channel * SIZE + back, mask=is_channel, other=0.0).to(tl.float32)
        out += x * weight[None, :]
    if SILU:
        out = out * sigmoid(out)
    at = out_ptr + (batch * num_tokens + start) * channels + (local[:, None] * channels + channel[None, :])
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def later_gradient(
    x_ptr,
    dout_ptr,
    weight_ptr,
    bias_ptr,
    sequence_ptr,
    token,
    local,
    own,
    channel,
    inside,
    is_channel,
    num_tokens,
    x_token,
    dout_token,
    AHEAD: tl.constexpr,
    SIZE: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """Return [BN, BC]: the gradient before the SiLU of the token AHEAD of each in its sequence; zeros where there is none."""
    gradient = earlier(
        *(dout_ptr, sequence_ptr, dout_ptr, token, local, own, channel, inside, num_tokens, dout_token, 0),
        BACK=-AHEAD,
        SIZE=SIZE,
        PACKED=PACKED,
        HAS_BEFORE=False,
    )
    if SILU:
        y = tl.zeros((BN, BC), tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for back in tl.static_range(SIZE):
            # only tokens of the same sequence count; otherwise the gradient is zero
            x = earlier(
                *(x_ptr, sequence_ptr, x_ptr, token, local, own, channel, inside, num_tokens, x_token, 0),
                BACK=back - AHEAD,
                SIZE=SIZE,
                PACKED=PACKED,
                HAS_BEFORE=False,
            )
            weight = tl.load(weight_ptr + channel * SIZE + back, mask=is_channel, other=0.0).to(tl.float32)
            y += x * weight[None, :]
        part = sigmoid(y)
        gradient *= part * (1.0 + y * (1.0 - part))
    return gradient


@triton.jit
def short_convolution_gradient_kernel(
    x_ptr,  # [B, N, C] of a part of the channels
    dout_ptr,  # [B, N, C]
    weight_ptr,  # [C, SIZE]
    bias_ptr,  # [C]; not read without HAS_BIAS
    sequence_ptr,  # [B, N]; not read without PACKED
    dx_ptr,  # [B, N, C] of the same part
    partial_ptr,  # [splits, SIZE + 1, all channels] float32: of each tap, then of the bias; the same part
    batches,
    num_tokens,
    channels,
    all_channels,
    split_size,  # tiles of tokens per program
    x_batch,
    x_token,
    dout_batch,
    dout_token,
    dx_batch,
    dx_token,
    SIZE: tl.constexpr,  # 2 to 4
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx_t = sum_s weight_s g_{t+s}, dweight_s = sum_t g_{t+s} x_t, dbias = sum_t g_t; g: gradient before the SiLU."""
    tiles = tl.cdiv(num_tokens, BN)
    split = tl.program_id(0)
    local = tl.arange(0, BN)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    dbias = tl.zeros((BN, BC), tl.float32)
    tap0 = tl.zeros((BN, BC), tl.float32)
    tap1 = tl.zeros((BN, BC), tl.float32)
    tap2 = tl.zeros((BN, BC), tl.float32)
    tap3 = tl.zeros((BN, BC), tl.float32)
    last = tl.minimum((split + 1) * split_size, batches * tiles)
    for tile in tl.range(split * split_size, last, num_stages=STAGES):
        batch = (tile // tiles).to(tl.int64)
        start = ((tile % tiles) * BN).to(tl.int64)
        token = (tile % tiles) * BN + local
        inside = (token < num_tokens)[:, None] & is_channel[None, :]
        here = x_ptr + batch * x_batch + start * x_token
        upstream = dout_ptr + batch * dout_batch + start * dout_token
        sequence = sequence_ptr + batch * num_tokens + start
        own = token
        if PACKED:
            own = tl.load(sequence + local, mask=token < num_tokens, other=-2)
        x = tl.load(here + (local[:, None] * x_token + channel[None, :]), mask=inside, other=0.0).to(tl.float32)
        dx = tl.zeros((BN, BC), tl.float32)
        for ahead in tl.static_range(SIZE):
            gradient = later_gradient(
                *(here, upstream, weight_ptr, bias_ptr, sequence, token, local, own, channel, inside, is_channel),
                *(num_tokens, x_token, dout_token),
                AHEAD=ahead,
                SIZE=SIZE,
                SILU=SILU,
                HAS_BIAS=HAS_BIAS,
                PACKED=PACKED,
                BN=BN,
                BC=BC,
            )
            weight = tl.load(weight_ptr + channel * SIZE + ahead, mask=is_channel, other=0.0).to(tl.float32)
            dx += gradient * weight[None, :]
            if ahead == 0:
                tap0 += gradient * x
                if HAS_BIAS:
                    dbias += gradient
            elif ahead == 1:
                tap1 += gradient * x
            elif ahead == 2:
                tap2 += gradient * x
            else:
                tap3 += gradient * x
        at = dx_ptr + batch * dx_batch + start * dx_token + (local[:, None] * dx_token + channel[None, :])
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    out = partial_ptr + split.to(tl.int64) * (SIZE + 1) * all_channels + channel
    tl.store(out, tl.sum(tap0, axis=0), mask=is_channel)
    tl.store(out + all_channels, tl.sum(tap1, axis=0), mask=is_channel)
    if SIZE > 2:
        tl.store(out + 2 * all_channels, tl.sum(tap2, axis=0), mask=is_channel)
    if SIZE > 3:
        tl.store(out + 3 * all_channels, tl.sum(tap3, axis=0), mask=is_channel)
    tl.store(out + SIZE * all_channels, tl.sum(dbias, axis=0), mask=is_channel)


@triton.jit
def short_convolution_step_kernel(
    x_ptr,  # [B, C]: one token
    weight_ptr,  # [C, SIZE]
    tail_ptr,  # [B, SIZE - 1, C]: the tokens before, shifted by one
    out_ptr,  # [B, C]
    channels,
    silu_from,  # channels before it have no SiLU
    x_batch,
    tail_batch,
    SIZE: tl.constexpr,
    BC: tl.constexpr,
):
    """Convolve one token, and store the tokens that the next one will see."""
    batch = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    x = tl.load(x_ptr + batch * x_batch + channel, mask=is_channel, other=0.0)
    tail_ptr += batch * tail_batch + channel
    out = x.to(tl.float32) * tl.load(weight_ptr + channel * SIZE, mask=is_channel, other=0.0).to(tl.float32)
    for row in tl.static_range(SIZE - 1):
        past = tl.load(tail_ptr + row * channels, mask=is_channel, other=0.0)
        weight = tl.load(weight_ptr + channel * SIZE + (SIZE - 1 - row), mask=is_channel, other=0.0)
        out += past.to(tl.float32) * weight.to(tl.float32)
        if row > 0:
            tl.store(tail_ptr + (row - 1) * channels, past, mask=is_channel)
    tl.store(tail_ptr + (SIZE - 2) * channels, x.to(tail_ptr.dtype.element_ty), mask=is_channel)
    out = tl.where(channel >= silu_from, out * sigmoid(out), out)
    tl.store(out_ptr + batch * channels + channel, out.to(out_ptr.dtype.element_ty), mask=is_channel)
