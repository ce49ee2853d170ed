"""Compute features of maps whose rows are all heads of a token together (focus and reflections across heads), or whose
parameters differ from sample to sample.

The attention kernels own one head and read one row of parameters for it, so these features are written out first. One pass
reads the tensor and writes its features, with the map of common/compiled/maps.py on a row of all channels.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from ...kernel_spec import KernelSpec
from ..common.launch import processors, readable, strides, use_device
from ..common.op import operator
from .bidirectional_op import parameter_gradient
from .compiled.cross_head import features_gradient_kernel, features_kernel

TILE_CHANNELS = 4096  # numbers in a tile: 32 per thread
WARPS = 4
PROGRAMS_PER_PROCESSOR = 8


def features(x: Tensor, spec: KernelSpec) -> Tensor:
    """Return features of x [B, N, H, D] or [T, H, D], in its type: `spec`'s map over the channels of all heads of a token."""
    assert spec.parameters is not None
    heads, head_dim = x.shape[-2:]
    rows = spec.parameters if spec.parameters.dim() == 3 else spec.parameters[None]  # [B or 1, heads of the map, P * D]
    # from a row per head to one row: each parameter of all heads side by side
    rows = rows.unflatten(2, (-1, head_dim)).repeat_interleave(heads // rows.shape[1], dim=1).transpose(1, 2).flatten(1)
    return map_across_heads(readable(x), rows, spec.name, spec.alpha)


def run_forward(x: Tensor, parameters: Tensor, name: str, alpha: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    samples, tiles, constants = tile_sizes(x)
    with use_device(x):
        features_kernel[(tiles, samples)](
            x, parameters, out, *numbers(x, parameters, alpha), **constants, MAP=name, num_warps=WARPS
        )
    return out


def run_backward(
    dout: Tensor, x: Tensor, parameters: Tensor, name: str, alpha: float, is_learned: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dx and the gradient of the parameters (if they are learned)."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    samples, tiles, constants = tile_sizes(x)
    # few programs with long scans: each adds up its own part of the parameters' gradient
    programs = min(tiles, max(1, PROGRAMS_PER_PROCESSOR * processors(x.device) // samples))
    shape = (programs, samples, 2, constants["C"]) if is_learned else (0,)
    partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    with use_device(x):
        features_gradient_kernel[(programs, samples)](
            *(x, dout.contiguous(), parameters, dx, partial),
            *numbers(x, parameters, alpha),
            **constants,
            MAP=name,
            LEARNED=is_learned,
            num_warps=WARPS,
        )
    if not is_learned:
        return dx, None
    total = partial.sum(0)
    return dx, parameter_gradient(name, parameters, total, torch.zeros_like(total))


def tile_sizes(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Return samples, tiles of tokens in each, and the sizes that the kernels are compiled for."""
    tokens, heads, head_dim = x.shape[-3:]
    channels = heads * head_dim
    padded = triton.next_power_of_2(channels)
    tile = max(1, TILE_CHANNELS // padded)
    constants = {"D": head_dim, "C": channels, "BC": padded, "BN": tile}
    return 1 if x.dim() == 3 else x.shape[0], triton.cdiv(tokens, tile), constants


def numbers(x: Tensor, parameters: Tensor, alpha: float) -> tuple[int | float, ...]:
    return x.shape[-3], *strides(x), 0 if parameters.shape[0] == 1 else parameters.stride(0), alpha


def shapes(x: Any, *rest: Any) -> Any:
    return x.new_empty(x.shape)


def gradient_shapes(dout: Any, x: Any, parameters: Any, name: Any, alpha: Any, is_learned: Any) -> Any:
    return x.new_empty(x.shape), torch.empty_like(parameters) if is_learned else parameters.new_empty(0)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, parameters, *ctx.settings = inputs
    ctx.save_for_backward(x, parameters)


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    return run(dout, *ctx.saved_tensors, *ctx.settings, ctx.needs_input_grad[1])


map_across_heads, forward, backward = operator(
    "map_across_heads", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
