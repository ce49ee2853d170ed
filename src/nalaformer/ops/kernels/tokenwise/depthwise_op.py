"""The depth-wise convolution as an operator."""

from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from ..common.op import operator
from .compiled.depthwise import depthwise_kernel, depthwise_weight_kernel

# columns and channels that a program walks down with; a thread then reads neighbouring channels at once
COLUMNS, CHANNELS, WARPS = 8, 64, 4
# programs per multiprocessor, and rows below which one is not worth its taps
PROGRAMS, LEAST_ROWS = 16, 8
# programs per multiprocessor that share the tokens of a weight's gradient; their warps by the side of the kernel, whose sums of
# all taps must leave registers for more than a few warps
WEIGHT_PROGRAMS, WEIGHT_WARPS = 6, {3: 4, 5: 8}
_launches = Launches()


def block_of(channels: int) -> int:
    return min(CHANNELS, 1 << (channels - 1).bit_length())


def convolved(
    x: Tensor, plus: Tensor | None, taps: Tensor, bias: Tensor | None, height: int, width: int, *, flip: bool
) -> Tensor:
    """x: [B, N, C]; taps: [SIZE * SIZE, W], C a multiple of W -> [B, N, C]; flip: the transposed convolution."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added, offset = x if plus is None else plus, taps if bias is None else bias
    is_residual = plus is x

    def describe() -> Description:
        batch, _, channels = x.shape
        block = block_of(channels)
        walks = batch * -(-width // COLUMNS)
        stretch = rows_of_a_walk(height, walks * -(-channels // block), x.device)
        return (
            (walks * -(-height // stretch), -(-channels // block)),
            (height, width, channels, stretch, *x.stride()[:2], *added.stride()[:2], *out.stride()[:2]),
            {
                "WEIGHTS": taps.shape[1],
                "SHARED": taps.shape[1] != channels,
                "SIZE": isqrt(taps.shape[0]),
                "FLIP": flip,
                "PLUS": plus is not None and not is_residual,
                "RESIDUAL": is_residual,
                "HAS_BIAS": bias is not None,
                "BW": COLUMNS,
                "BC": block,
                "num_warps": WARPS,
                "num_stages": 1,
            },
        )

    key = (flip, height, is_residual, kind(x, plus, taps, bias))
    start(_launches, key, depthwise_kernel, (x, added, taps, offset, out), describe)
    return out


def rows_of_a_walk(height: int, walks: int, device: torch.device) -> int:
    """Rows of the grid that a program walks down, alike for all: few enough that there are programs for the whole GPU."""
    rows = max(LEAST_ROWS, -(-height * walks // (PROGRAMS * processors(device))))
    return -(-height // -(-height // rows))


def weight_walks(x: Tensor, height: int, width: int) -> tuple[int, int, int]:
    """Rows of a walk, walks of a program, and programs that share those of some columns and channels."""
    batch, _, channels = x.shape
    places = -(-width // COLUMNS) * -(-channels // block_of(channels))
    splits = max(1, WEIGHT_PROGRAMS * processors(x.device) // places)
    rows = min(height, max(LEAST_ROWS, batch * height // splits))
    walks = batch * -(-height // rows)
    of_program = -(-walks // splits)
    return rows, of_program, -(-walks // of_program)


def gradient_of_taps(x: Tensor, dout: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    """[SIZE * SIZE + 1, W]: gradients of the taps, then of a bias."""
    batch, _, channels = x.shape
    count, kernels = taps.shape
    size = isqrt(count)
    rows, walks, splits = weight_walks(x, height, width)
    columns = -(-width // COLUMNS)
    partial = torch.empty(columns * splits, count + 1, channels, dtype=torch.float32, device=x.device)

    def describe() -> Description:
        block = block_of(channels)
        return (
            (columns, splits, -(-channels // block)),
            (batch, height, width, channels, rows, walks, *x.stride()[:2], *dout.stride()[:2]),
            {"SIZE": size, "BW": COLUMNS, "BC": block, "num_warps": WEIGHT_WARPS[size], "num_stages": 1},
        )

    start(_launches, (height, kind(x, dout, taps)), depthwise_weight_kernel, (x, dout, partial), describe)
    sums = partial.sum(0)  # [SIZE * SIZE + 1, C]
    if kernels != channels:
        # heads that share a kernel add up
        sums = sums.view(count + 1, -1, kernels).sum(1)
    return sums.to(taps.dtype)


def run_forward(
    x: Tensor, plus: Tensor | None, weight: Tensor, bias: Tensor | None, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """weight: [W, 1, SIZE, SIZE] -> the output, and the taps that it was computed with."""
    taps = weight.flatten(1).t().contiguous()
    return convolved(x, plus, taps, bias, height, width, flip=False), taps


def shapes(x: Any, plus: Any, weight: Any, bias: Any, height: Any, width: Any) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight[0].numel(), weight.shape[0])


def run_backward(
    dout: Tensor,
    x: Tensor,
    taps: Tensor,
    height: int,
    width: int,
    is_residual: bool,
    moves_input: bool,
    moves_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of taps and bias in one; empty where nobody asked."""
    plus = dout if is_residual else None
    dx = convolved(dout, plus, taps, None, height, width, flip=True) if moves_input else x.new_empty(0)
    return dx, gradient_of_taps(x, dout, taps, height, width) if moves_weight else taps.new_empty(0)


def gradient_shapes(
    dout: Any, x: Any, taps: Any, height: Any, width: Any, is_residual: Any, moves_input: Any, moves_weight: Any
) -> Any:
    count, kernels = taps.shape
    return x.new_empty(x.shape if moves_input else 0), taps.new_empty((count + 1, kernels) if moves_weight else 0)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, plus, weight, _, *ctx.grid = inputs
    # the taps have no graph: the weight stands for them where gradients are asked for gradients. plus itself is not needed
    ctx.save_for_backward(x, output[1], weight)
    ctx.is_residual = plus is x


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    x, taps, weight = ctx.saved_tensors
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    moves_input, _, *of_weight = ctx.needs_input_grad[:4]
    dx, sums = run(dout, x, taps, *ctx.grid, ctx.is_residual, moves_input, any(of_weight))
    dplus = None if ctx.is_residual else dout
    return (dx, dplus, sums[:-1].t().view(weight.shape), sums[-1]) if any(of_weight) else (dx, dplus)


convolve, forward, backward = operator(
    "depthwise", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
