"""The causal kernels as torch.library operators."""

import torch
from torch import Tensor

from ..common.op import eager, first_order
from . import causal_launch
from .bidirectional_op import parameter_gradient
from .call import describe, new_call, types_of

Settings = tuple[int, str, int, int, float, float, float, bool, bool]


def all_settings(longest: int, name: str, parts: int, norm_scale: float, alpha: float, eps: float, is_cube: bool) -> Settings:
    """Those of a Call: one stream, no guard."""
    return longest, name, parts, 1, norm_scale, alpha, eps, False, is_cube


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
    initial: Tensor | None,
    longest: int,
    name: str,
    parts: int,
    norm_scale: float,
    alpha: float,
    eps: float,
    is_cube: bool,
    want_total: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, the sums of all tokens (empty unless wanted), those before each stretch and, if kept, 1 / denominator."""
    settings = all_settings(longest, name, parts, norm_scale, alpha, eps, is_cube)
    call = describe(q, k, v, parameters, cos_q, cos_k, key_mask, cu_seqlens, settings)
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=types_of(name, q, k, v)[1], device=q.device)
    total, before, inverse = causal_launch.forward(
        call, q, k, v, parameters, (cos_q, sin_q), (cos_k, sin_k), key_mask, cu_seqlens, initial, out, want_total, keep
    )
    # an operator may not return two views of one tensor
    return out, total if want_total else total.new_empty(0), before, inverse


causal = torch.library.custom_op("nalaformer::causal", mutates_args=())(run_forward)


@causal.register_fake
def _(q, k, v, parameters, cos_q, sin_q, cos_k, sin_k, key_mask, cu_seqlens, initial, *rest):  # type: ignore[no-untyped-def]
    *settings, want_total, keep = rest
    call = new_call(q, k, v, cos_q, key_mask, cu_seqlens, *all_settings(*settings))
    parts = call.parts
    count, _ = call.splits("causal", call.num_queries, call.heads)
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=types_of(call.name, q, k, v)[1])
    before = q.new_empty(count, call.samples * call.kv_heads, parts, q.shape[-1], v.shape[-1] + 2, dtype=torch.float32)
    inverse = before.new_empty(call.per_row if keep else 0)
    return out, torch.empty_like(before[0]) if want_total else before.new_empty(0), before, inverse


def run_backward(
    dout: Tensor,
    dtotal: Tensor | None,
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
    out: Tensor,
    before: Tensor,
    inverse: Tensor,
    longest: int,
    name: str,
    parts: int,
    norm_scale: float,
    alpha: float,
    eps: float,
    is_cube: bool,
    is_learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, the gradient of the initial sums and that of the parameters (empty if they are not learned)."""
    settings = all_settings(longest, name, parts, norm_scale, alpha, eps, is_cube)
    call = describe(q, k, v, parameters, cos_q, cos_k, key_mask, cu_seqlens, settings)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dq, dk, dv, dinitial, dquery, dkey = causal_launch.backward(
        call,
        q,
        k,
        v,
        out,
        dout,
        inverse,
        None if dtotal is None else dtotal.contiguous(),
        parameters,
        (cos_q, sin_q),
        (cos_k, sin_k),
        key_mask,
        cu_seqlens,
        before,
        is_learned,
    )
    return dq, dk, dv, dinitial, parameter_gradient(name, parameters, dquery, dkey)


causal_backward = torch.library.custom_op("nalaformer::causal_backward", mutates_args=())(run_backward)


@causal_backward.register_fake
def _(dout, dtotal, q, k, v, parameters, *rest):  # type: ignore[no-untyped-def]
    before, is_learned = rest[7], rest[-1]
    dparameters = torch.empty_like(parameters) if is_learned else parameters.new_empty(0)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(before[0]), dparameters


def attend(*arguments) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """The arguments of `causal` -> output and the sums of all tokens."""
    if torch.compiler.is_compiling():
        return causal(*arguments)[:2]
    return eager_attend(*arguments) if arguments[-1] else run_forward(*arguments)[:2]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, initial, longest, name, parts, norm_scale, alpha, eps, is_cube, want_total, _ = inputs
    out, _, before, inverse = output
    ctx.save_for_backward(*tensors, out, before, inverse)
    ctx.settings = (longest, name, parts, norm_scale, alpha, eps, is_cube)
    ctx.is_learned = tensors[3].requires_grad
    ctx.want_total, ctx.has_initial = want_total, initial is not None
    # a gradient that nobody asked for stays None instead of becoming zeros
    ctx.set_materialize_grads(False)


def gradients(ctx, dout, dtotal, run):  # type: ignore[no-untyped-def]
    q, _, v = ctx.saved_tensors[:3]
    if dout is None:
        dout = v.new_zeros(*q.shape[:-1], v.shape[-1])
    dtotal = dtotal if ctx.want_total else None
    dq, dk, dv, dinitial, dparameters = run(dout, dtotal, *ctx.saved_tensors, *ctx.settings, ctx.is_learned)
    learned = dparameters if ctx.is_learned else None
    return dq, dk, dv, learned, *([None] * 6), dinitial if ctx.has_initial else None, *([None] * 9)


def _backward(ctx, dout, dtotal, *unused):  # type: ignore[no-untyped-def]
    return gradients(ctx, dout, dtotal, causal_backward)


causal.register_autograd(first_order(_backward), setup_context=_save)
eager_attend = eager(
    run_forward,
    _save,
    lambda ctx, dout, dtotal: gradients(ctx, dout, dtotal, run_backward),
    given=lambda output: output[:2],
)
