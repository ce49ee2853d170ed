"""Compute the depth-wise convolution as an operator."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from ..common.op import operator
from .compiled.depthwise import depthwise_gradient_kernel, depthwise_kernel

# channels side by side in a tile, warps that share it, and elements of it that a thread holds
CHANNELS, WARPS, NUMBERS = 64, 4, 2
# columns of a strip by the side of the kernel: many avoid reading neighbours twice, few leave registers for sums
STRIPS, GRADIENT_STRIPS = {3: (4, 7, 8), 5: (4, 7)}, {3: (4, 7, 8), 5: (4,)}
# programs per multiprocessor, and the rows below which a program costs more than its taps
PROGRAMS, GRADIENT_PROGRAMS, LEAST_ROWS = 16, 4, 8
_launches = Launches()


class Tiling(NamedTuple):
    """Describe how a grid is split: columns of a strip, strips of all samples, strips and channels of a tile, and tiles."""

    columns: int
    groups: int
    strips: int
    channels: int
    tiles: int
    blocks: int
    is_even: bool


def choose_tiling(x: Tensor, width: int, size: int, choices: tuple[int, ...]) -> Tiling:
    """Choose strips for tokens [B, N, C] in rows of `width`: those that read the fewest columns, neighbours included."""
    batch, _, channels = x.shape
    columns = min(choices, key=lambda count: (-(-width // count) * (count + size - 1), -count))
    block = min(CHANNELS, 1 << (channels - 1).bit_length())
    strips = 32 * WARPS * NUMBERS // block
    groups = batch * -(-width // columns)
    is_even = width % columns == 0 and groups % strips == 0 and channels % block == 0
    return Tiling(columns, groups, strips, block, -(-groups // strips), -(-channels // block), is_even)


def tiling_constants(cut: Tiling, weight: Tensor, channels: int) -> dict[str, Any]:
    return {
        # without it one compiled kernel serves all channels
        "WEIGHTS": weight.shape[0] if weight.shape[0] != channels else 0,
        "SIZE": weight.shape[-1],
        "EVEN": cut.is_even,
        "BW": cut.columns,
        "BG": cut.strips,
        "BC": cut.channels,
        "num_warps": WARPS,
        "num_stages": 1,
    }


def run_forward(
    x: Tensor,
    plus: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    height: int,
    width: int,
    is_residual: bool,
    is_activated: bool,
) -> Tensor:
    """Convolve y, which is x, or gelu(x) if is_activated; is_residual adds y. weight: [W, 1, SIZE, SIZE] without gaps."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added, offset = x if plus is None else plus, weight if bias is None else bias

    def describe() -> Description:
        size, channels = weight.shape[-1], x.shape[2]
        cut = choose_tiling(x, width, size, STRIPS[size])
        split_size = rows_per_scan(height, cut.tiles * cut.blocks, PROGRAMS * processors(x.device))
        strides = (*x.stride()[:2], *added.stride()[:2], *out.stride()[:2])
        parts = {"PLUS": plus is not None, "RESIDUAL": is_residual, "GELU": is_activated, "HAS_BIAS": bias is not None}
        return (
            (cut.tiles * -(-height // split_size), cut.blocks),
            (cut.groups, height, width, channels, split_size, *strides),
            tiling_constants(cut, weight, channels) | parts,
        )

    key = (height, is_residual, is_activated, kind(x, plus, weight, bias))
    start(_launches, key, depthwise_kernel, (x, added, weight, offset, out), describe)
    return out


def rows_per_scan(height: int, tiles: int, programs: int) -> int:
    """Return the rows of the grid that each program scans: few enough for `programs` programs."""
    rows = max(LEAST_ROWS, -(-height * tiles // programs))
    return -(-height // -(-height // rows))


class Shares(NamedTuple):
    """Describe how programs share the tokens of a gradient: rows of a scan, scans of a program, programs of a channel tile."""

    cut: Tiling
    rows: int
    scans: int
    programs: int


def shares(x: Tensor, height: int, width: int, size: int) -> Shares:
    cut = choose_tiling(x, width, size, GRADIENT_STRIPS[size])
    most = max(1, GRADIENT_PROGRAMS * processors(x.device) // cut.blocks)
    rows = rows_per_scan(height, cut.tiles, most)
    scans = cut.tiles * -(-height // rows)
    of_program = -(-scans // most)
    return Shares(cut, rows, of_program, -(-scans // of_program))


def shapes(x: Any, plus: Any, weight: Any, bias: Any, height: Any, width: Any, is_residual: Any, is_activated: Any) -> Any:
    return x.new_empty(x.shape)


def run_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    height: int,
    width: int,
    is_residual: bool,
    is_activated: bool,
    moves_input: bool,
    moves_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of each tap and the bias in one, [SIZE * SIZE + 1, W]; empty where not needed."""
    channels, kernels, count = x.shape[2], weight.shape[0], weight.shape[-1] ** 2
    place = ("shares", height, width, count, x.shape, x.device)
    shared = _launches.get(place)
    if shared is None:
        shared = _launches[place] = shares(x, height, width, weight.shape[-1])
    dx = torch.empty(x.shape if moves_input else 0, dtype=x.dtype, device=x.device)
    partial = torch.empty(shared.programs if moves_weight else 0, count + 1, channels, dtype=torch.float32, device=x.device)

    def describe() -> Description:
        cut, rows, scans, programs = shared
        strides = (*x.stride()[:2], *dout.stride()[:2], *(dx.stride()[:2] if moves_input else (0, 0)))
        asked = {"MOVES_INPUT": moves_input, "MOVES_WEIGHT": moves_weight}
        return (
            (programs, cut.blocks),
            (cut.groups, height, width, channels, rows, scans, *strides),
            tiling_constants(cut, weight, channels) | {"RESIDUAL": is_residual, "GELU": is_activated, **asked},
        )

    key = ("gradient", height, is_residual, is_activated, moves_input, moves_weight, kind(x, dout, weight))
    start(_launches, key, depthwise_gradient_kernel, (x, dout, weight, dx, partial), describe)
    if not moves_weight:
        return dx, weight.new_empty(0)
    sums = partial.sum(0)  # [SIZE * SIZE + 1, C]
    if kernels != channels:
        # the gradients of heads that share a kernel are added up
        sums = sums.view(count + 1, -1, kernels).sum(1)
    return dx, sums.to(weight.dtype)


def gradient_shapes(dout: Any, x: Any, weight: Any, *rest: Any) -> Any:
    moves_input, moves_weight = rest[-2:]
    of_taps = (weight.shape[-1] ** 2 + 1, weight.shape[0]) if moves_weight else 0
    return x.new_empty(x.shape if moves_input else 0), weight.new_empty(of_taps)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, weight, _, *ctx.settings = inputs
    # plus itself is not needed
    ctx.save_for_backward(x, weight)


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    x, weight = ctx.saved_tensors
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    moves_input, _, *of_weight = ctx.needs_input_grad[:4]
    dx, sums = run(dout, x, weight, *ctx.settings, moves_input, any(of_weight))
    return (dx, dout, sums[:-1].t().view(weight.shape), sums[-1]) if any(of_weight) else (dx, dout)


convolve, forward, backward = operator(
    "depthwise", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
