"""Compute bidirectional attention as an operator."""

from typing import Any

import torch
from torch import Tensor

from ...kernel_spec import MapSettings
from ..common.launch import readable
from ..common.op import operator
from . import bidirectional_launch, mean_query_launch
from .call import Call, TokenLayout, call_for, new_call

# parameters per channel of maps that treat queries and keys alike, in one stream
ROWS_OF_BOTH = {"focused": 1, "reflection": 2, "reflection_across": 2, "reflection_in_pairs": 2}


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor | None,
    layout: TokenLayout,
    settings: MapSettings,
    needs_backward: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the output [B, N, H, V] (or [T, H, V]), and for a backward pass: sums, their scale (where they have one),
    1 / denominator per row, and the mean query (where it weighs keys).

    weight: float32 [B, K, M] (or [K, T]), or None where keys have no weights. Where the mean query weighs them, the mask [B, N]
    of queries, None if all count.
    """
    call = call_for(q, k, v, parameters, layout, settings)
    return bidirectional_launch.forward(q, k, v, parameters, weight, layout, call, needs_backward)


def shapes(q: Any, k: Any, v: Any, parameters: Any, weight: Any, layout: Any, settings: Any, needs_backward: Any) -> Any:
    call = new_call(q, k, v, layout, settings)
    sums, of_mean = call.all_sums_shape, mean_query_launch.mean_shape(call)
    kept = (sums, sums[0] if call.has_scale else 0, call.per_row, of_mean) if needs_backward else (0,) * 4
    return q.new_empty(call.output_shape, dtype=call.output), *(q.new_empty(x, dtype=torch.float32) for x in kept)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor | None,
    layout: TokenLayout,
    settings: MapSettings,
    sums: Tensor,
    scale: Tensor | None,
    inverse: Tensor,
    mean: Tensor | None,
    is_learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return dq, dk, dv and the gradients of the parameters (if they are learned) and of the weight (if keys have one)."""
    call = call_for(q, k, v, parameters, layout, settings)
    return run_known_backward(dout, q, k, v, parameters, weight, layout, call, sums, scale, inverse, mean, is_learned)


def run_known_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor | None,
    layout: TokenLayout,
    call: Call,
    sums: Tensor,
    scale: Tensor | None,
    inverse: Tensor,
    mean: Tensor | None,
    is_learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the backward pass of a known call."""
    dq, dk, dv, dweight, dquery, dkey = bidirectional_launch.backward(
        call, q, k, v, readable(dout), inverse, parameters, weight, layout, sums, scale, mean, is_learned
    )
    return dq, dk, dv, parameter_gradient(call.settings.name, parameters, dquery, dkey), dweight


def gradient_shapes(
    dout: Any, q: Any, k: Any, v: Any, parameters: Any, weight: Any, layout: Any, settings: Any, *rest: Any
) -> Any:
    dparameters = torch.empty_like(parameters) if rest[-1] else parameters.new_empty(0)
    dweight = torch.empty_like(weight) if settings.has_weight else parameters.new_empty(0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dparameters, dweight


def parameter_gradient(name: str, parameters: Tensor, dquery: Tensor | None, dkey: Tensor | None) -> Tensor | None:
    """Convert gradients per head, of the query's [2 * streams, D] and the key's [2, D] numbers, to those of the rows."""
    if dquery is None or dkey is None:
        return None
    rows = parameters.shape[0]
    # the gradients of heads that share a row of parameters are added up
    by_query = dquery.unflatten(0, (rows, -1)).sum(1)  # [rows, 4, D]
    # with fewer key heads than rows no key reads a learned parameter
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
    # call: the settings, if an operator runs
    *tensors, layout, ctx.call, _ = inputs
    *of_layout, ctx.longest = layout
    ctx.save_for_backward(*tensors, *of_layout, *output[1:])


def gradients(ctx: Any, run: Any, dout: Any) -> Any:
    saved = ctx.saved_tensors
    layout = TokenLayout._make((*saved[5:11], ctx.longest))
    return run(dout, *saved[:5], layout, ctx.call, *saved[11:], ctx.needs_input_grad[3])


with_gradients, forward, backward = operator(
    "bidirectional",
    (run_forward, shapes),
    (run_backward, gradient_shapes),
    save=save,
    gradients=gradients,
    eager=(bidirectional_launch.forward, run_known_backward),
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor | None,
    layout: TokenLayout,
    settings: MapSettings,
    needs_backward: bool,
) -> Tensor:
    """Return the output alone; needs_backward: a backward pass may follow."""
    if torch.compiler.is_compiling():
        return with_gradients(q, k, v, parameters, weight, layout, settings, needs_backward)
    return attend_as(call_for(q, k, v, parameters, layout, settings), q, k, v, parameters, weight, layout, needs_backward)


def attend_as(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor | None,
    layout: TokenLayout,
    needs_backward: bool,
) -> Tensor:
    """Run a known call outside compiled programs."""
    run = with_gradients if needs_backward else first_output
    return run(q, k, v, parameters, weight, layout, call, needs_backward)


def first_output(*inputs: Any) -> Any:
    return bidirectional_launch.forward(*inputs)[0]
