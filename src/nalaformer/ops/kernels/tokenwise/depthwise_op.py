"""The depth-wise convolution as torch.library operators."""

from math import isqrt

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from ..common.op import eager, first_order
from .compiled.depthwise import depthwise_kernel, depthwise_weight_kernel

# tokens and channels per step; a thread then reads 16 bytes of neighbouring channels at once
TOKENS, CHANNELS, WARPS = 32, 64, 4
# programs per multiprocessor that share the tokens of a weight's gradient, and how far ahead they read
WEIGHT_PROGRAMS, WEIGHT_STAGES = 4, 3
_launches: Launches = {}


def block_of(channels: int) -> int:
    return min(CHANNELS, 1 << (channels - 1).bit_length())


def run_forward(
    x: Tensor, plus: Tensor | None, taps: Tensor, bias: Tensor | None, height: int, width: int, flip: bool
) -> Tensor:
    """x: [B, N, C]; taps: [SIZE * SIZE, W], C a multiple of W -> [B, N, C]; flip: the transposed convolution."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added, offset = x if plus is None else plus, taps if bias is None else bias

    def describe() -> Description:
        batch, tokens, channels = x.shape
        block = block_of(channels)
        return (
            (batch * -(-tokens // TOKENS), -(-channels // block)),
            (height, width, channels, *x.stride()[:2], *added.stride()[:2], *out.stride()[:2]),
            {
                "WEIGHTS": taps.shape[1],
                "SHARED": taps.shape[1] != channels,
                "SIZE": isqrt(taps.shape[0]),
                "FLIP": flip,
                "PLUS": plus is not None,
                "HAS_BIAS": bias is not None,
                "BN": TOKENS,
                "BC": block,
                "num_warps": WARPS,
                "num_stages": 1,
            },
        )

    key = (flip, height, kind(x, plus, taps, bias))
    start(_launches, key, depthwise_kernel, (x, added, taps, offset, out), describe)
    return out


def weight_programs(x: Tensor, size: int) -> tuple[int, int]:
    """Tiles of tokens per program, and programs that share them."""
    batch, tokens, channels = x.shape
    tiles = batch * -(-tokens // TOKENS)
    programs = tiles * size * -(-channels // block_of(channels))
    stretch = max(4, -(-programs // (WEIGHT_PROGRAMS * processors(x.device))))
    return stretch, -(-tiles // stretch)


def run_taps_gradient(x: Tensor, dout: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    """[SIZE * SIZE + 1, W]: gradients of the taps, then of a bias."""
    batch, _, channels = x.shape
    count, kernels = taps.shape
    size = isqrt(count)
    stretch, splits = weight_programs(x, size)
    partial = torch.empty(splits, count + 1, channels, dtype=torch.float32, device=x.device)

    def describe() -> Description:
        block = block_of(channels)
        return (
            # the rows of taps first: they read the same tokens while these are still on chip
            (size, splits, -(-channels // block)),
            (batch, height, width, channels, stretch, *x.stride()[:2], *dout.stride()[:2]),
            {"SIZE": size, "BN": TOKENS, "BC": block, "STAGES": WEIGHT_STAGES, "num_warps": WARPS},
        )

    start(_launches, (height, kind(x, dout, taps)), depthwise_weight_kernel, (x, dout, partial), describe)
    sums = partial.sum(0)  # [SIZE * SIZE + 1, C]
    if kernels != channels:
        # heads that share a kernel add up
        sums = sums.view(count + 1, -1, kernels).sum(1)
    return sums.to(taps.dtype)


forward = torch.library.custom_op("nalaformer::depthwise", mutates_args=())(run_forward)
taps_gradient = torch.library.custom_op("nalaformer::depthwise_taps_gradient", mutates_args=())(run_taps_gradient)


@forward.register_fake
def _(x, plus, taps, bias, height, width, flip):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@taps_gradient.register_fake
def _(x, dout, taps, height, width):  # type: ignore[no-untyped-def]
    return taps.new_empty(taps.shape[0] + 1, taps.shape[1])


def taps_of(weight: Tensor) -> Tensor:
    """[W, 1, SIZE, SIZE] -> [SIZE * SIZE, W]."""
    return weight.flatten(1).t().contiguous()


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, plus, taps, bias, height, width, flip = inputs
    # a convolution that is flipped is the gradient of another one
    assert not flip
    _keep(ctx, x, plus, bias, (height, width), taps)


def _keep(ctx, x, plus, bias, grid, *weights) -> None:  # type: ignore[no-untyped-def]
    # plus itself is not needed, only whether it is x
    ctx.save_for_backward(x, *weights)
    ctx.grid, ctx.has_bias, ctx.is_residual = grid, bias is not None, plus is x


def gradients(ctx, dout, convolve, weigh):  # type: ignore[no-untyped-def]
    """Of x, plus, the taps and the bias."""
    x, taps, *_ = ctx.saved_tensors
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dx = dtaps = dbias = None
    if ctx.needs_input_grad[0]:
        dx = convolve(dout, dout if ctx.is_residual else None, taps, None, *ctx.grid, True)
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        sums = weigh(x, dout, taps, *ctx.grid)
        dtaps, dbias = sums[:-1], sums[-1]
    dplus = None if ctx.is_residual or not ctx.needs_input_grad[1] else dout
    return dx, dplus, dtaps, dbias if ctx.has_bias else None


def _backward(ctx, dout):  # type: ignore[no-untyped-def]
    return *gradients(ctx, dout, forward, taps_gradient), None, None, None


forward.register_autograd(first_order(_backward), setup_context=_save)


def _run(x, plus, weight, bias, height, width):  # type: ignore[no-untyped-def]
    """The output and the taps: what turns a weight into them needs no gradient of its own then."""
    taps = taps_of(weight)
    return run_forward(x, plus, taps, bias, height, width, False), taps


def _save_weight(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, plus, weight, bias, *grid = inputs
    # the taps have no graph: the weight stands for them where gradients are asked for gradients
    _keep(ctx, x, plus, bias, grid, output[1], weight)


def _gradients_of_weight(ctx, dout):  # type: ignore[no-untyped-def]
    dx, dplus, dtaps, dbias = gradients(ctx, dout, run_forward, run_taps_gradient)
    shape = ctx.saved_tensors[2].shape
    return dx, dplus, None if dtaps is None else dtaps.t().view(shape), dbias, None, None


eager_convolve = eager(_run, _save_weight, _gradients_of_weight, given=lambda output: output[0])


def convolve(x: Tensor, plus: Tensor | None, weight: Tensor, bias: Tensor | None, height: int, width: int) -> Tensor:
    """Through the dispatcher while torch.compile traces, directly otherwise."""
    if torch.compiler.is_compiling():
        return forward(x, plus, taps_of(weight), bias, height, width, False)
    return eager_convolve(x, plus, weight, bias, height, width)
