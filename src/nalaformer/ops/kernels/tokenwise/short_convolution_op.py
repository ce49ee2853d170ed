"""Compute the short convolution of a joint projection as an operator that reads [B, N, Q + K + V] and writes q, k and v."""

from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start
from ..common.op import custom_op, operator
from .compiled.short_convolution import (
    short_convolution_gradient_kernel,
    short_convolution_kernel,
    short_convolution_step_kernel,
)

# tokens and channels of a tile
TOKENS, CHANNELS, WARPS = 32, 128, 4
GRADIENT_TOKENS, GRADIENT_CHANNELS = 32, 64
# programs per multiprocessor that share the tokens of a weight's gradient, and their pipeline stages
GRADIENT_PROGRAMS, GRADIENT_STAGES = 6, 2
STEP_CHANNELS = 256
_launches = Launches()


def part_bounds(channels: int, q_size: int, k_size: int) -> list[tuple[int, int]]:
    """Return the first and last channel of q, k and v."""
    return [(0, q_size), (q_size, q_size + k_size), (q_size + k_size, channels)]


def block_size(channels: int, most: int) -> int:
    return min(most, 1 << (channels - 1).bit_length())


def run_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Tensor | None,
    sequence: Tensor | None,
    q_size: int,
    k_size: int,
    silu_from: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, N, .]. Parts that begin at silu_from or later pass through SiLU."""
    made = []
    batch, tokens, channels = x.shape
    size = weight.shape[1]
    for first, last in part_bounds(channels, q_size, k_size):
        out = torch.empty(batch, tokens, last - first, dtype=x.dtype, device=x.device)
        made.append(out)
        if first == last:
            continue
        part, taps = x[..., first:last], weight[first:last]
        offset = taps if bias is None else bias[first:last]
        past = part if before is None else before[..., first:last]
        numbers = part if sequence is None else sequence

        def describe(
            part: Tensor = part, past: Tensor = past, channels: int = last - first, has_silu: bool = first >= silu_from
        ) -> Description:
            block = block_size(channels, CHANNELS)
            return (
                (batch * -(-tokens // TOKENS), -(-channels // block)),
                (tokens, channels, *part.stride()[:2], *past.stride()[:2]),
                {
                    "SIZE": size,
                    "SILU": has_silu,
                    "HAS_BIAS": bias is not None,
                    "HAS_BEFORE": before is not None,
                    "PACKED": sequence is not None,
                    "BN": TOKENS,
                    "BC": block,
                    "num_warps": WARPS,
                    "num_stages": 1,
                },
            )

        key = (first >= silu_from, before is None, kind(part, taps, offset, past, numbers), bias is None, sequence is None)
        start(_launches, key, short_convolution_kernel, (part, taps, offset, past, numbers, out), describe)
    return made[0], made[1], made[2]


def shapes(x: Any, weight: Any, bias: Any, before: Any, sequence: Any, q_size: Any, k_size: Any, silu_from: Any) -> Any:
    return tuple(x.new_empty(*x.shape[:2], last - first) for first, last in part_bounds(x.shape[2], q_size, k_size))


def run_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequence: Tensor | None,
    silu_from: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [B, N, C], and of weight and bias in one [SIZE + 1, C]."""
    batch, tokens, channels = x.shape
    size = weight.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = batch * -(-tokens // GRADIENT_TOKENS)
    blocks = -(-channels // GRADIENT_CHANNELS)
    split_size = -(-tiles * blocks // (GRADIENT_PROGRAMS * processors(x.device)))
    splits = -(-tiles // split_size)
    partial = torch.empty(splits, size + 1, channels, dtype=torch.float32, device=x.device)
    parts = part_bounds(channels, dq.shape[2], dk.shape[2])
    for (first, last), dout in zip(parts, (dq, dk, dv), strict=True):
        if first == last:
            continue
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        part, taps, into, sums = x[..., first:last], weight[first:last], dx[..., first:last], partial[..., first:last]
        offset = taps if bias is None else bias[first:last]
        numbers = part if sequence is None else sequence

        def describe(
            part: Tensor = part,
            dout: Tensor = dout,
            into: Tensor = into,
            own: int = last - first,
            has_silu: bool = first >= silu_from,
        ) -> Description:
            block = block_size(own, GRADIENT_CHANNELS)
            return (
                (splits, -(-own // block)),
                (batch, tokens, own, channels, split_size, *part.stride()[:2], *dout.stride()[:2], *into.stride()[:2]),
                {
                    "SIZE": size,
                    "SILU": has_silu,
                    "HAS_BIAS": bias is not None,
                    "PACKED": sequence is not None,
                    "BN": GRADIENT_TOKENS,
                    "BC": block,
                    "STAGES": GRADIENT_STAGES,
                    "num_warps": WARPS,
                },
            )

        of_inputs = kind(part, dout, taps, offset, numbers, into, sums)
        key = ("gradient", first >= silu_from, of_inputs, bias is None, sequence is None)
        tensors = (part, dout, taps, offset, numbers, into, sums)
        start(_launches, key, short_convolution_gradient_kernel, tensors, describe)
    return dx, partial.sum(0).to(weight.dtype)


def gradient_shapes(dq: Any, dk: Any, dv: Any, x: Any, weight: Any, bias: Any, sequence: Any, silu_from: Any) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape[1] + 1, weight.shape[0])


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, sequence, _, _, ctx.silu_from = inputs
    ctx.save_for_backward(x, weight, bias, sequence)


def gradients(ctx: Any, run: Any, dq: Any, dk: Any, dv: Any) -> Any:
    bias = ctx.saved_tensors[2]
    dx, sums = run(dq, dk, dv, *ctx.saved_tensors, ctx.silu_from)
    # a copy: torch.compile must know the layout, and others read it row by row
    return dx, sums[:-1].t().contiguous(), None if bias is None else sums[-1].to(bias.dtype)


convolve, forward, backward = operator(
    "short_convolution", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients, outputs=3
)


def run_step(x: Tensor, weight: Tensor, tail: Tensor, silu_from: int) -> Tensor:
    """Convolve one token x [B, 1, C] after tail [B, SIZE - 1, C], which is shifted by it -> [B, 1, C]."""
    batch, _, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def describe() -> Description:
        block = block_size(channels, STEP_CHANNELS)
        return (
            (batch, -(-channels // block)),
            (channels, silu_from, x.stride(0), tail.stride(0)),
            {"SIZE": weight.shape[1], "BC": block, "num_warps": 2, "num_stages": 1},
        )

    start(
        _launches, ("step", silu_from, kind(x, weight, tail)), short_convolution_step_kernel, (x, weight, tail, out), describe
    )
    return out


step_op = custom_op("short_convolution_step", run_step, lambda x, *rest: x.new_empty(x.shape), mutates=("tail",))


def step(*inputs: Any) -> Tensor:
    """Run run_step, without torch's dispatcher unless torch.compile traces."""
    return step_op(*inputs) if torch.compiler.is_compiling() else run_step(*inputs)
