"""Features of maps whose rows are all heads of a token together (focus and reflections across heads).

The attention kernels own one head, so with several heads these features are written out first: one pass that reads the
tensor and writes its features, with the map of maps.py on a row of all channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_spec import KernelSpec
from .launch import parameter_row, processors, strides
from .library import parameter_gradient
from .maps import phi_key, phi_key_gradient

TILE_CHANNELS = 4096  # numbers in a tile: 32 per thread
WARPS = 4
PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def places_of(tile, num_rows, num_tokens, stride_b, stride_n, stride_h, D: tl.constexpr, C: tl.constexpr, BC, BN):
    """Offsets of a tile of tokens and of its channels in a [B, N, H, D] view and in a contiguous one, and what exists."""
    rows = tile * BN + tl.arange(0, BN)
    channels = tl.arange(0, BC)
    wide = rows.to(tl.int64)
    here = (wide // num_tokens * stride_b + wide % num_tokens * stride_n)[:, None]
    here += (channels // D * stride_h + channels % D)[None, :]
    there = (wide * C)[:, None] + channels[None, :]
    ok = rows < num_rows
    return here, there, channels, ok, ok[:, None] & (channels < C)[None, :]


@triton.jit
def features_kernel(
    x_ptr,  # [B, N, H, D]
    param_ptr,  # [P * C]
    out_ptr,  # [B, N, H, D], contiguous
    num_rows,  # B * N
    num_tokens,
    stride_b,
    stride_n,
    stride_h,
    alpha,
    D: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
):
    here, there, channels, ok, inside = places_of(
        tl.program_id(0), num_rows, num_tokens, stride_b, stride_n, stride_h, D, C, BC, BN
    )
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    a, b = phi_key(x, ok, param_ptr, channels, 0.0, alpha, C, MAP, False)
    tl.store(out_ptr + there, a.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def features_gradient_kernel(
    x_ptr,  # [B, N, H, D]
    dout_ptr,  # [B, N, H, D], contiguous
    param_ptr,  # [P * C]
    dx_ptr,  # [B, N, H, D], contiguous
    dparam_ptr,  # [programs, 2, C]
    num_rows,
    num_tokens,
    stride_b,
    stride_n,
    stride_h,
    alpha,
    D: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
    MAP: tl.constexpr,
    LEARNED: tl.constexpr,
):
    p0 = tl.zeros([BC], tl.float32)
    p1 = tl.zeros([BC], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, BN), tl.num_programs(0)):
        here, there, channels, ok, inside = places_of(tile, num_rows, num_tokens, stride_b, stride_n, stride_h, D, C, BC, BN)
        x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(dout_ptr + there, mask=inside, other=0.0).to(tl.float32)
        dx, g0, g1 = phi_key_gradient(x, da, da, param_ptr, channels, 0.0, alpha, C, MAP, False)
        tl.store(dx_ptr + there, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if LEARNED:
            p0 += tl.sum(tl.where(inside, g0, 0.0), axis=0)
            p1 += tl.sum(tl.where(inside, g1, 0.0), axis=0)
    if LEARNED:
        channels = tl.arange(0, BC)
        dparam_ptr += tl.program_id(0) * (2 * C)
        tl.store(dparam_ptr + channels, p0, mask=channels < C)
        tl.store(dparam_ptr + C + channels, p1, mask=channels < C)


def features(x: Tensor, spec: KernelSpec) -> Tensor:
    """Features of x [B, N, H, D] or [T, H, D], in its type: the map of `spec` over the channels of all heads of a token."""
    assert spec.parameters is not None
    heads, head_dim = x.shape[-2:]
    per_row, _ = parameter_row(heads, spec.parameters)
    # from a row per head to one row: the same number of all heads side by side
    row = spec.parameters.unflatten(1, (-1, head_dim)).repeat_interleave(per_row, dim=0).transpose(0, 1).reshape(1, -1)
    if torch.compiler.is_compiling():
        return map_over_heads(x, row, spec.name, spec.alpha)
    return Eager.apply(x, row, spec.name, spec.alpha)


def run_forward(x: Tensor, parameters: Tensor, name: str, alpha: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, tile = rows_and_tile(x)
    features_kernel[(triton.cdiv(rows, tile),)](
        x, parameters, out, *numbers(x, alpha), **constants(x, tile), MAP=name, num_warps=WARPS
    )
    return out


def run_backward(
    dout: Tensor, x: Tensor, parameters: Tensor, name: str, alpha: float, is_learned: bool
) -> tuple[Tensor, Tensor]:
    """dx and the gradient of the parameters (empty if they are not learned)."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, tile = rows_and_tile(x)
    # few programs that walk far: each adds up its own part of the gradient of the parameters
    programs = min(triton.cdiv(rows, tile), PROGRAMS_PER_PROCESSOR * processors(x.device))
    channels = x.shape[-2] * x.shape[-1]
    partial = torch.empty(programs if is_learned else 0, 2, channels, dtype=torch.float32, device=x.device)
    features_gradient_kernel[(programs,)](
        *(x, dout.contiguous(), parameters, dx, partial),
        *numbers(x, alpha),
        **constants(x, tile),
        MAP=name,
        LEARNED=is_learned,
        num_warps=WARPS,
    )
    if not is_learned:
        return dx, parameters.new_empty(0)
    total = partial.sum(0, keepdim=True)
    return dx, parameter_gradient(name, parameters, total, torch.zeros_like(total))


def rows_and_tile(x: Tensor) -> tuple[int, int]:
    """Tokens of all samples, and how many of them a program takes at once."""
    channels = x.shape[-2] * x.shape[-1]
    return x.numel() // channels, max(1, TILE_CHANNELS // triton.next_power_of_2(channels))


def numbers(x: Tensor, alpha: float) -> tuple[int | float, ...]:
    rows, _ = rows_and_tile(x)
    return rows, x.shape[-3], *strides(x), alpha


def constants(x: Tensor, tile: int) -> dict[str, int]:
    channels = x.shape[-2] * x.shape[-1]
    return {"D": x.shape[-1], "C": channels, "BC": triton.next_power_of_2(channels), "BN": tile}


map_over_heads = torch.library.custom_op("nalaformer::map_over_heads", mutates_args=())(run_forward)
map_over_heads_backward = torch.library.custom_op("nalaformer::map_over_heads_backward", mutates_args=())(run_backward)


@map_over_heads.register_fake
def _(x, *rest):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@map_over_heads_backward.register_fake
def _(dout, x, parameters, name, alpha, is_learned):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), torch.empty_like(parameters) if is_learned else parameters.new_empty(0)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, parameters, *ctx.settings = inputs
    ctx.save_for_backward(x, parameters)
    ctx.is_learned = parameters.requires_grad


def gradients(ctx, dout, run):  # type: ignore[no-untyped-def]
    dx, dparameters = run(dout, *ctx.saved_tensors, *ctx.settings, ctx.is_learned)
    return dx, dparameters if ctx.is_learned else None, None, None


class Eager(torch.autograd.Function):
    """The same without the dispatcher; library.py says why."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        output = run_forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        return gradients(ctx, dout, run_backward)


map_over_heads.register_autograd(lambda ctx, dout: gradients(ctx, dout, map_over_heads_backward), setup_context=_save)
