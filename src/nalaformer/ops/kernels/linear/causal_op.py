"""Compute causal attention as an operator."""

from typing import Any

import torch
from torch import Tensor

from ...kernel_spec import MapSettings
from ..common.launch import readable
from ..common.op import operator
from . import causal_chunks_launch, causal_launch
from .bidirectional_op import parameter_gradient
from .call import Call, TokenLayout, call_for, new_call


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    initial: Tensor | None,
    log_decay: Tensor | None,
    layout: TokenLayout,
    settings: MapSettings,
    want_total: bool,
    needs_backward: bool,
    is_padded: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the output, sums of all tokens (with want_total) and before each split, and 1 / denominator if needs_backward.

    is_padded: allocate the sums of as many splits as there may be. A search over the tokens chooses the actual number, which
    would specialize a graph of torch.compile to some numbers of tokens.
    """
    call = call_for(q, k, v, parameters, layout, settings)
    out, total, before, inverse = run_known(q, k, v, parameters, initial, log_decay, layout, call, want_total, needs_backward)
    if before is None:
        # an operator returns the outputs that `shapes` promises, and its backward pass needs zeros for them
        before = call.sums(1, call.kv_heads).zero_()
    if is_padded:
        with_room = before.new_empty(call.most_causal_splits(), *before.shape[1:])
        with_room[: len(before)] = before
        before = with_room
    return out, total, before, inverse


def run_known(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    initial: Tensor | None,
    log_decay: Tensor | None,
    layout: TokenLayout,
    call: Call,
    want_total: bool,
    needs_backward: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Run a known call; a single short scan has no sums before it."""
    out = torch.empty(call.output_shape, dtype=call.output, device=call.device)
    launch = causal_chunks_launch if call.chunk else causal_launch
    total, before, inverse = launch.forward(
        call, q, k, v, parameters, layout, initial, log_decay, out, want_total, needs_backward
    )
    return out, total if want_total else None, before, inverse


def shapes(
    q: Any,
    k: Any,
    v: Any,
    parameters: Any,
    initial: Any,
    log_decay: Any,
    layout: Any,
    settings: Any,
    want_total: Any,
    needs_backward: Any,
    is_padded: Any,
) -> Any:
    call = new_call(q, k, v, layout, settings)
    if is_padded:
        count = call.most_causal_splits()
    else:
        count, _ = call.causal_splits()
    out = q.new_empty(call.output_shape, dtype=call.output)
    per_split = (count, call.samples * call.kv_heads, settings.parts, q.shape[-1], v.shape[-1] + 2)
    before = q.new_empty(per_split, dtype=torch.float32)
    inverse = before.new_empty(call.per_row if needs_backward else 0)
    return out, torch.empty_like(before[0]) if want_total else before.new_empty(0), before, inverse


def run_backward(
    dout: Tensor | None,
    dtotal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    log_decay: Tensor | None,
    layout: TokenLayout,
    settings: MapSettings,
    out: Tensor,
    before: Tensor,
    inverse: Tensor,
    is_learned: bool,
    moves_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return dq, dk, dv, the gradients of the parameters (if learned), of the initial sums (if needed), and with decay that of
    log_decay."""
    call = call_for(q, k, v, parameters, layout, settings)
    count, _ = call.causal_splits()
    # drops the padding of is_padded
    before = before[:count]
    return run_known_backward(
        dout, dtotal, q, k, v, parameters, log_decay, layout, call, out, before, inverse, is_learned, moves_initial
    )


def run_known_backward(
    dout: Tensor | None,
    dtotal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    log_decay: Tensor | None,
    layout: TokenLayout,
    call: Call,
    out: Tensor,
    before: Tensor | None,
    inverse: Tensor,
    is_learned: bool,
    moves_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Run the backward pass of a known call."""
    if dout is None:
        dout = v.new_zeros(*q.shape[:-1], v.shape[-1])
    dout = readable(dout)
    dtotal = None if dtotal is None else dtotal.contiguous()
    launch = causal_chunks_launch if call.chunk else causal_launch
    dq, dk, dv, dinitial, dquery, dkey, ddecay = launch.backward(
        call, q, k, v, out, dout, inverse, dtotal, parameters, layout, before, log_decay, is_learned, moves_initial
    )
    return dq, dk, dv, parameter_gradient(call.settings.name, parameters, dquery, dkey), dinitial, ddecay


def gradient_shapes(
    dout: Any,
    dtotal: Any,
    q: Any,
    k: Any,
    v: Any,
    parameters: Any,
    log_decay: Any,
    layout: Any,
    settings: Any,
    out: Any,
    before: Any,
    *rest: Any,
) -> Any:
    *_, is_learned, _ = rest
    dparameters = torch.empty_like(parameters) if is_learned else parameters.new_empty(0)
    ddecay = parameters.new_empty(0) if log_decay is None else torch.empty_like(log_decay)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dparameters, torch.empty_like(before[0]), ddecay


def save(ctx: Any, inputs: Any, output: Any) -> None:
    # call: the settings, if an operator runs
    q, k, v, parameters, _, log_decay, layout, ctx.call, ctx.want_total = inputs[:9]
    *of_layout, ctx.longest = layout
    out, _, before, inverse = output
    ctx.save_for_backward(q, k, v, parameters, log_decay, *of_layout, out, before, inverse)
    # a gradient that is not needed stays None instead of becoming zeros
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, run: Any, dout: Any, dtotal: Any) -> Any:
    saved = ctx.saved_tensors
    layout = TokenLayout._make((*saved[5:11], ctx.longest))
    dtotal = dtotal if ctx.want_total else None
    return run(dout, dtotal, *saved[:5], layout, ctx.call, *saved[11:], *ctx.needs_input_grad[3:5])


with_gradients, forward, backward = operator(
    "causal",
    (run_forward, shapes),
    (run_backward, gradient_shapes),
    save=save,
    gradients=gradients,
    outputs=2,
    eager=(run_known, run_known_backward),
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    initial: Tensor | None,
    log_decay: Tensor | None,
    layout: TokenLayout,
    settings: MapSettings,
    want_total: bool,
    needs_backward: bool,
) -> Any:
    """Return the output and, with want_total, the sums of all tokens; needs_backward: a backward pass may follow."""
    if torch.compiler.is_compiling():
        return with_gradients(q, k, v, parameters, initial, log_decay, layout, settings, want_total, needs_backward, True)
    call = call_for(q, k, v, parameters, layout, settings)
    return attend_as(call, q, k, v, parameters, initial, log_decay, layout, want_total, needs_backward)


def attend_as(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    initial: Tensor | None,
    log_decay: Tensor | None,
    layout: TokenLayout,
    want_total: bool,
    needs_backward: bool,
) -> Any:
    """Run a known call outside compiled programs."""
    run = with_gradients if needs_backward else run_known
    return run(q, k, v, parameters, initial, log_decay, layout, call, want_total, needs_backward)[:2]
