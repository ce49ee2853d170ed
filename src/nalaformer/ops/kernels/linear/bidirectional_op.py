"""The kernels as torch.library operators: torch.compile sees their shapes and gradients, not their code."""

import torch
from torch import Tensor

from ..common.op import eager, first_order
from . import bidirectional_launch
from .call import describe, new_call, types_of

# parameters per channel of maps that treat queries and keys alike, in one stream
ROWS_OF_BOTH = {"focused": 1, "reflection": 2, "reflection_across": 2, "reflection_in_pairs": 2}


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    cos_q: Tensor | None,
    sin_q: Tensor | None,
    cos_k: Tensor | None,
    sin_k: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    longest: int,
    name: str,
    parts: int,
    streams: int,
    norm_scale: float,
    alpha: float,
    eps: float,
    is_guarded: bool,
    is_cube: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [B, N, H, V] (or [T, H, V]), sums, their scale, and (if a backward pass follows) 1 / denominator per row."""
    settings = (longest, name, parts, streams, norm_scale, alpha, eps, is_guarded, is_cube)
    call = describe(q, k, v, parameters, cos_q, cos_k, key_mask, cu_seqlens, settings)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=types_of(name, q, k, v)[1], device=q.device)
    kept = bidirectional_launch.forward(
        call, q, k, v, parameters, (cos_q, sin_q), (cos_k, sin_k), key_mask, cu_seqlens, out, keep
    )
    return out, *kept


bidirectional = torch.library.custom_op("nalaformer::bidirectional", mutates_args=())(run_forward)


@bidirectional.register_fake
def _(q, k, v, parameters, cos_q, sin_q, cos_k, sin_k, key_mask, cu_seqlens, *settings):  # type: ignore[no-untyped-def]
    call = new_call(q, k, v, cos_q, key_mask, cu_seqlens, *settings[:-1])
    rows = call.samples * call.kv_heads
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=types_of(call.name, q, k, v)[1])
    sums = q.new_empty(rows, call.parts, call.head_dim, call.value_dim + 2, dtype=torch.float32)
    inverse = q.new_empty(call.per_row if settings[-1] else 0, dtype=torch.float32)
    return out, sums, q.new_empty(rows, dtype=torch.float32), inverse


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    cos_q: Tensor | None,
    sin_q: Tensor | None,
    cos_k: Tensor | None,
    sin_k: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sums: Tensor,
    scale: Tensor,
    inverse: Tensor,
    longest: int,
    name: str,
    parts: int,
    streams: int,
    norm_scale: float,
    alpha: float,
    eps: float,
    is_guarded: bool,
    is_cube: bool,
    is_learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradient of the parameters (empty if they are not learned)."""
    settings = (longest, name, parts, streams, norm_scale, alpha, eps, is_guarded, is_cube)
    call = describe(q, k, v, parameters, cos_q, cos_k, key_mask, cu_seqlens, settings)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dq, dk, dv, dquery, dkey = bidirectional_launch.backward(
        call,
        q,
        k,
        v,
        dout,
        inverse,
        parameters,
        (cos_q, sin_q),
        (cos_k, sin_k),
        key_mask,
        cu_seqlens,
        sums,
        scale,
        is_learned,
    )
    return dq, dk, dv, parameter_gradient(name, parameters, dquery, dkey)


def parameter_gradient(name: str, parameters: Tensor, dquery: Tensor | None, dkey: Tensor | None) -> Tensor:
    """From gradients per head, of the query's [2 * streams, D] and the key's [2, D] numbers, to those of the rows."""
    if dquery is None or dkey is None:
        return parameters.new_empty(0)
    rows = parameters.shape[0]
    # heads that share a row of parameters add up
    by_query = dquery.unflatten(0, (rows, -1)).sum(1)  # [rows, 4, D]
    # fewer key heads than rows: then no key reads a parameter that is learned
    by_key = dkey.unflatten(0, (rows, -1)).sum(1) if dkey.shape[0] >= rows else torch.zeros_like(by_query[:, :2])
    if name == "polarity":
        return (by_query[:, :2] + by_query[:, 2:] + by_key).flatten(1)
    if name == "polarity_exp":
        return by_query.flatten(1)
    if name in ROWS_OF_BOTH:
        count = ROWS_OF_BOTH[name]
        return (by_query[:, :count] + by_key[:, :count]).flatten(1)
    return torch.cat((by_query[:, :2, 0], by_key[:, :1, 0]), dim=1)


bidirectional_backward = torch.library.custom_op("nalaformer::bidirectional_backward", mutates_args=())(run_backward)


@bidirectional_backward.register_fake
def _(dout, q, k, v, parameters, *rest):  # type: ignore[no-untyped-def]
    is_learned = rest[-1]
    dparameters = torch.empty_like(parameters) if is_learned else parameters.new_empty(0)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, dparameters


def attend(*inputs) -> Tensor:  # type: ignore[no-untyped-def]
    """The arguments of `bidirectional`: through the dispatcher while torch.compile traces, directly otherwise."""
    if torch.compiler.is_compiling():
        return bidirectional(*inputs)[0]
    return eager_attend(*inputs) if inputs[-1] else run_forward(*inputs)[0]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, longest, name, parts, streams, norm_scale, alpha, eps, is_guarded, is_cube, _ = inputs
    _, *kept = output
    ctx.save_for_backward(*tensors, *kept)
    ctx.settings = (longest, name, parts, streams, norm_scale, alpha, eps, is_guarded, is_cube)
    ctx.is_learned = tensors[3].requires_grad


def gradients(ctx, dout, run):  # type: ignore[no-untyped-def]
    dq, dk, dv, dparameters = run(dout, *ctx.saved_tensors, *ctx.settings, ctx.is_learned)
    return dq, dk, dv, dparameters if ctx.is_learned else None, *([None] * 16)


def _backward(ctx, dout, *unused):  # type: ignore[no-untyped-def]
    return gradients(ctx, dout, bidirectional_backward)


bidirectional.register_autograd(first_order(_backward), setup_context=_save)
eager_attend = eager(run_forward, _save, lambda ctx, dout: gradients(ctx, dout, run_backward), given=lambda output: output[0])
