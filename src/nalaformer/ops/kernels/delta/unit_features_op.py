"""Compute features of length one as an operator, on rows [R, D], for maps whose parameters are one fixed row."""

from typing import Any

import torch
from torch import Tensor

from ...kernel_spec import MapSettings
from ..common.launch import Description, Launches, kind, start
from ..common.op import operator
from .compiled.unit_features import unit_features_gradient_kernel, unit_features_kernel

# elements that a program holds at once
BLOCK = 4096
_launches = Launches()


def describe(x: Tensor, settings: MapSettings, is_query: bool, smallest: float) -> Description:
    rows, channels = x.shape
    columns = max(16, 1 << (channels - 1).bit_length())
    size = max(1, BLOCK // columns)
    # features of keys come multiplied by a power of two, so the smallest length is too
    shift = 0.0 if is_query else settings.log2_key_shift
    return (
        (-(-rows // size),),
        (rows, x.stride(0), settings.norm_scale, settings.alpha, smallest * 2.0**-shift),
        {
            "D": channels,
            "BD": columns,
            "BR": size,
            "MAP": settings.name,
            "CUBE": settings.is_cube,
            "IS_QUERY": is_query,
            "PARTS": settings.parts,
            "num_warps": 4,
            "num_stages": 1,
        },
    )


def run_forward(
    x: Tensor, parameters: Tensor, settings: MapSettings, is_query: bool, smallest: float, dtype: torch.dtype
) -> Tensor:
    """Return [R, PARTS * D] in `dtype`."""
    out = torch.empty(x.shape[0], settings.parts * x.shape[1], dtype=dtype, device=x.device)
    key = (settings, is_query, smallest, dtype, kind(x, parameters))
    start(_launches, key, unit_features_kernel, (x, parameters, out), lambda: describe(x, settings, is_query, smallest))
    return out


def shapes(x: Any, parameters: Any, settings: Any, is_query: Any, smallest: Any, dtype: Any) -> Any:
    return x.new_empty(x.shape[0], settings.parts * x.shape[1], dtype=dtype)


def run_backward(dout: Tensor, x: Tensor, parameters: Tensor, settings: MapSettings, is_query: bool, smallest: float) -> Tensor:
    dout = dout.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    key = ("gradient", settings, is_query, smallest, kind(x, parameters, dout))
    tensors = (x, dout, parameters, dx)
    start(_launches, key, unit_features_gradient_kernel, tensors, lambda: describe(x, settings, is_query, smallest))
    return dx


def gradient_shapes(dout: Any, x: Any, *rest: Any) -> Any:
    return x.new_empty(x.shape)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    x, parameters, ctx.settings, ctx.is_query, ctx.smallest, _ = inputs
    ctx.save_for_backward(x, parameters)


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    return (run(dout, *ctx.saved_tensors, ctx.settings, ctx.is_query, ctx.smallest),)


make, forward, backward = operator(
    "unit_features", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)
