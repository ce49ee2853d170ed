"""Bidirectional attention as an operator."""

from typing import Any

import torch
from torch import Tensor

from ...kernel_spec import MapSettings
from ..common.launch import readable
from ..common.op import operator
from . import bidirectional_launch, mean_query_launch
from .call import TokenLayout, call_for, new_call, types_of

# parameters per channel of maps that treat queries and keys alike, in one stream
ROWS_OF_BOTH = {"focused": 1, "reflection": 2, "reflection_across": 2, "reflection_in_pairs": 2}


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor,
    layout: TokenLayout,
    settings: MapSettings,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output [B, N, H, V] (or [T, H, V]), sums, their scale, (if a backward pass follows) 1 / denominator per row, and the mean
    query (where it weighs keys).

    weight: float32 [B, K, M] (or [K, T]), empty where keys have none; where the mean query weighs them, the mask [B, N] of
    queries, empty if all count.
    """
    call = call_for(q, k, v, parameters, layout, settings)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=types_of(settings.name, q, k, v)[1], device=q.device)
    return out, *bidirectional_launch.forward(call, q, k, v, parameters, weight, layout, out, keep)


def shapes(q: Any, k: Any, v: Any, parameters: Any, weight: Any, layout: Any, settings: Any, keep: Any) -> Any:
    call = new_call(q, k, v, layout, settings)
    rows = call.samples * call.kv_heads
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=types_of(settings.name, q, k, v)[1])
    sums = q.new_empty(rows, *call.shape_of_sums, dtype=torch.float32)
    inverse = q.new_empty(call.per_row if keep else 0, dtype=torch.float32)
    mean = q.new_empty(mean_query_launch.shape_of_mean(call), dtype=torch.float32)
    return out, sums, q.new_empty(rows, dtype=torch.float32), inverse, mean


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor,
    layout: TokenLayout,
    settings: MapSettings,
    sums: Tensor,
    scale: Tensor,
    inverse: Tensor,
    mean: Tensor,
    is_learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradients of the parameters (empty if they are not learned) and of the weight."""
    call = call_for(q, k, v, parameters, layout, settings)
    dout = readable(dout)
    dq, dk, dv, dweight, dquery, dkey = bidirectional_launch.backward(
        call, q, k, v, dout, inverse, parameters, weight, layout, sums, scale, mean, is_learned
    )
    return dq, dk, dv, parameter_gradient(settings.name, parameters, dquery, dkey), dweight


def gradient_shapes(dout: Any, q: Any, k: Any, v: Any, parameters: Any, weight: Any, *rest: Any) -> Any:
    dparameters = torch.empty_like(parameters) if rest[-1] else parameters.new_empty(0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dparameters, weight.new_empty(weight.shape)


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


def save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, layout, ctx.settings, _ = inputs
    *of_layout, ctx.longest = layout
    ctx.save_for_backward(*tensors, *of_layout, *output[1:])


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    saved = ctx.saved_tensors
    layout = TokenLayout._make((*saved[5:11], ctx.longest))
    return run(dout, *saved[:5], layout, ctx.settings, *saved[11:], ctx.needs_input_grad[3])


with_gradients, forward, backward = operator(
    "bidirectional", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)


def attend(*inputs: Any) -> Tensor:
    """The output alone; the last input says whether a backward pass may follow."""
    return with_gradients(*inputs) if inputs[-1] or torch.compiler.is_compiling() else run_forward(*inputs)[0]
