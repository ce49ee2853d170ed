"""The delta rule as an operator: pieces of tokens are joined by matrix products, and a kernel carries the state along.

Inside a piece, with G the running sum of log_decay, D_ij = exp(G_i - G_j) for i >= j, s_i = exp(G_i), e_j = exp(G_last - G_j):

    A_ij = beta_i (k_i . k_j) D_ij below the diagonal,  T = (I + A)^-1,  u0 = T (beta v),  w = T (beta s k)
    from piece to piece:  u = u0 - w S,  S' = s_last S + (e k)^T u
    out = scale ((s q) S + M u),  M_ij = (q_i . k_j) D_ij up to the diagonal

What the backward pass needs of T, w and M it computes again; the states before the pieces and u are kept.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..common.launch import PRECISION, Description, Launches, kind, start
from ..common.op import operator
from .compiled.pieces import lower_inverse_kernel, scan_gradient_kernel, scan_kernel

SIZE = 64  # tokens of a piece
VALUES = 16  # columns of the state that a program carries along: few, since programs are few
_launches = Launches()


class Decays(NamedTuple):
    """Of the tokens of each piece [heads, pieces, SIZE]; all None where nothing fades."""

    between: Tensor | None
    """D [heads, pieces, SIZE, SIZE]."""
    since_start: Tensor | None
    """s, with a dimension of one behind."""
    to_end: Tensor | None
    """e, with a dimension of one behind."""

    @property
    def whole(self) -> Tensor | None:
        """Of a piece, [heads, pieces]."""
        return None if self.since_start is None else self.since_start[:, :, -1, 0].contiguous()


def in_pieces(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, N, H, *] -> [B * H, pieces, SIZE, *]; tokens of zeros at the end change nothing."""
    missing = -x.shape[1] % SIZE
    x = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, missing)) if missing else x
    # [B, H, N, *]
    return x.transpose(1, 2).to(dtype).reshape(x.shape[0] * x.shape[2], -1, SIZE, *x.shape[3:]).contiguous()


def in_tokens(x: Tensor, like: Tensor) -> Tensor:
    """Back to [B, N, H, *] of the shape and type of `like`."""
    batch, tokens, heads = like.shape[:3]
    x = x.reshape(batch, heads, -1, *x.shape[3:])[:, :, :tokens]
    return x.transpose(1, 2).to(like.dtype).contiguous()


def decays_of(log_decay: Tensor | None) -> Decays:
    if log_decay is None:
        return Decays(None, None, None)
    steps = in_pieces(log_decay, torch.float32)
    lower = torch.ones(SIZE, SIZE, dtype=torch.bool, device=steps.device).tril()
    # a difference of running sums would lose the digits of small decays after a large one
    between = torch.where(lower.tril(-1), steps[..., :, None], 0).cumsum(-2)
    between = torch.where(lower, between.exp(), 0)
    return Decays(between, steps.cumsum(-1).exp()[..., None], between[..., -1, :, None])


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def product(a: Tensor, b: Tensor) -> Tensor:
    """Of matrices, in float32."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])


def inverse_of(among_keys: Tensor, dtype: torch.dtype) -> Tensor:
    """(I + what lies below the diagonal)^-1."""
    out = torch.empty(among_keys.shape, dtype=dtype, device=among_keys.device)
    matrices = among_keys.shape[0] * among_keys.shape[1]
    start(
        _launches,
        ("inverse", dtype, kind(among_keys)),
        lower_inverse_kernel,
        (among_keys, out),
        lambda: ((matrices,), (), {"SIZE": SIZE, "num_warps": 4, "num_stages": 1}),
    )
    return out


def describe_scan(keys: Tensor, values: Tensor, fades: bool, has_state: str, is_there: bool) -> Description:
    heads, pieces, _, features = keys.shape
    width = values.shape[-1]
    constants = {
        "F": features,
        "V": width,
        "SIZE": SIZE,
        "BF": max(16, triton.next_power_of_2(features)),
        "BV": VALUES,
        "FADES": fades,
        has_state: is_there,
        "PRECISION": PRECISION[keys.dtype],
        "num_warps": 4,
        "num_stages": 2,
    }
    return (heads, triton.cdiv(width, VALUES)), (pieces,), constants


def scan(u: Tensor, w: Tensor, keys: Tensor, whole: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each piece [heads, pieces, F, V] and after the last, float32; u is overwritten."""
    heads, pieces, _, features = keys.shape
    states = torch.empty(heads, pieces, features, u.shape[-1], dtype=keys.dtype, device=keys.device)
    final = torch.empty(heads, features, u.shape[-1], dtype=torch.float32, device=keys.device)
    fade, initial = final if whole is None else whole, final if state is None else state
    start(
        _launches,
        ("scan", whole is None, state is None, kind(u, w, keys)),
        scan_kernel,
        (u, w, keys, fade, initial, states, final),
        lambda: describe_scan(keys, u, whole is not None, "HAS_INITIAL", state is not None),
    )
    return states, final


def scan_gradient(
    du: Tensor, w: Tensor, keys: Tensor, queries: Tensor, dout: Tensor, whole: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the states after each piece and before the first; du is overwritten by the whole gradient of u."""
    heads, pieces, _, features = keys.shape
    dstates = torch.empty(heads, pieces, features, du.shape[-1], dtype=keys.dtype, device=keys.device)
    dinitial = torch.empty(heads, features, du.shape[-1], dtype=torch.float32, device=keys.device)
    fade, last = dinitial if whole is None else whole, dinitial if dfinal is None else dfinal
    start(
        _launches,
        ("scan gradient", whole is None, dfinal is None, kind(du, w, keys, queries, dout)),
        scan_gradient_kernel,
        (du, w, keys, queries, dout, fade, last, dstates, dinitial),
        lambda: describe_scan(keys, du, whole is not None, "HAS_FINAL", dfinal is not None),
    )
    return dstates, dinitial


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output [B, N, H, V], the last state [B, H, F, V] in float32, and what gradients need: the states and u."""
    dtype, shape = v.dtype, (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    queries, keys, values = (in_pieces(x, dtype) for x in (q, k, v))
    amount, decays = in_pieces(beta, torch.float32)[..., None], decays_of(log_decay)
    among_keys = times(amount * product(keys, keys.mT), decays.between)
    inverse = inverse_of(among_keys, dtype)
    u = product(inverse, (amount * values).to(dtype)).to(dtype)
    w = product(inverse, times(amount * keys, decays.since_start).to(dtype)).to(dtype)
    initial = None if state is None else state.float().flatten(0, 1).contiguous()
    states, final = scan(u, w, times(keys, decays.to_end).to(dtype), decays.whole, initial)
    weights = times(product(queries, keys.mT), decays.between).tril().to(dtype)
    out = product(times(queries, decays.since_start).to(dtype), states) + product(weights, u)
    return in_tokens(scale * out, v), final.view(shape), states, u


def shapes(q: Any, k: Any, v: Any, beta: Any, log_decay: Any, state: Any, scale: Any) -> Any:
    batch, tokens, heads, features = q.shape
    width, pieces = v.shape[3], (tokens + SIZE - 1) // SIZE
    final = q.new_empty(batch, heads, features, width, dtype=torch.float32)
    states = v.new_empty(batch * heads, pieces, features, width)
    return v.new_empty(v.shape), final, states, v.new_empty(batch * heads, pieces, SIZE, width)


def run_backward(
    dout: Tensor | None,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    states: Tensor,
    u: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, log_decay (empty without one) and the state."""
    dtype = v.dtype
    queries, keys, values = (in_pieces(x, dtype) for x in (q, k, v))
    amount, decays = in_pieces(beta, torch.float32)[..., None], decays_of(log_decay)
    similar = product(keys, keys.mT)
    inverse = inverse_of(times(amount * similar, decays.between), dtype)
    u0 = product(inverse, (amount * values).to(dtype)).to(dtype)
    w = product(inverse, times(amount * keys, decays.since_start).to(dtype)).to(dtype)
    upstream = torch.zeros_like(u) if dout is None else in_pieces(scale * dout.float(), dtype)
    scores = product(queries, keys.mT)
    weights = times(scores, decays.between).tril().to(dtype)
    du = product(weights.mT, upstream).to(dtype)
    last = None if dfinal is None else dfinal.float().flatten(0, 1).contiguous()
    faded_keys, faded_queries = (times(x, y).to(dtype) for x, y in ((keys, decays.to_end), (queries, decays.since_start)))
    dstates, dinitial = scan_gradient(du, w, faded_keys, faded_queries, upstream, decays.whole, last)
    # of s q, e k and w
    of_queries, of_keys = product(upstream, states.mT), product(u, dstates.mT)
    dw = -product(du, states.mT)
    # of beta v and beta s k
    of_values, of_w = product(inverse.mT, du), product(inverse.mT, dw.to(dtype))
    # dA = -T^T (du u0^T + dw w^T) below the diagonal
    damong = -(product(of_values.to(dtype), u0.mT) + product(of_w.to(dtype), w.mT)).tril(-1)
    dweights = product(upstream, u.mT).tril()
    dscores = times(dweights, decays.between).to(dtype)
    dsimilar = times(amount * damong, decays.between).to(dtype)
    dq = times(of_queries, decays.since_start) + product(dscores, keys)
    dk = times(of_keys, decays.to_end) + times(amount * of_w, decays.since_start) + product(dscores.mT, queries)
    dk += product(dsimilar + dsimilar.mT, keys)
    damount = (of_values * values).sum(-1) + (times(of_w, decays.since_start) * keys).sum(-1)
    damount += times(damong * similar, decays.between).sum(-1)
    ddecay = q.new_empty(0)
    if log_decay is not None:
        assert decays.between is not None
        assert decays.since_start is not None
        assert decays.to_end is not None
        # by G: of D, then of s, e and the fading of whole pieces
        by_pair = (damong * amount * similar + dweights * scores) * decays.between
        by_sum = by_pair.sum(-1) - by_pair.sum(-2)
        by_sum += ((of_w * amount * keys + of_queries * queries) * decays.since_start).sum(-1)
        to_end = (of_keys * keys * decays.to_end).sum(-1)
        by_sum -= to_end
        by_sum[..., -1] += to_end.sum(-1) + (states.float() * dstates.float()).sum((-2, -1)) * decays.since_start[:, :, -1, 0]
        # a decay counts for its own token and all behind it in the piece
        by_step = by_sum.flip(-1).cumsum(-1).flip(-1)
        ddecay = in_tokens(by_step, log_decay)
    dstate = dinitial.view(q.shape[0], q.shape[2], *dinitial.shape[1:])
    dv = amount * of_values
    return in_tokens(dq, q), in_tokens(dk, k), in_tokens(dv, v), in_tokens(damount, beta), ddecay, dstate


def gradient_shapes(
    dout: Any, dfinal: Any, q: Any, k: Any, v: Any, beta: Any, log_decay: Any, states: Any, u: Any, scale: Any
) -> Any:
    ddecay = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dinitial = q.new_empty(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v, beta)), ddecay, dinitial


def save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, state, ctx.scale = inputs
    ctx.state_dtype = None if state is None else state.dtype
    # the state stands in the graph where gradients are asked for gradients
    ctx.save_for_backward(*tensors, *output[2:], state)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, run: Any, dout: Any, dfinal: Any) -> Any:
    *saved, _ = ctx.saved_tensors
    *of_tensors, ddecay, dinitial = run(dout, dfinal, *saved, ctx.scale)
    has_decay, has_state = saved[4] is not None, ctx.state_dtype is not None
    return *of_tensors, ddecay if has_decay else None, dinitial.to(ctx.state_dtype) if has_state else None


attend, forward, backward = operator(
    "delta_rule", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients, outputs=2
)
