"""Launches of the causal kernels; call.py says what a Call is and compiled/causal.py has the plan."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.launch import empty_as, strides
from ..common.split_sums_launch import prefix
from .bidirectional_launch import sums_of_gradients, sums_of_keys
from .call import Call, TokenLayout, angle_stride, is_aligned, parameter_row
from .compiled.causal import causal_kernel
from .compiled.causal_gradient import causal_dq_kernel
from .compiled.causal_gradient_of_keys import causal_dk_kernel
from .compiled.causal_gradient_of_values import causal_dv_kernel
from .compiled.causal_whole_gradient import causal_whole_gradient_kernel


def forward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    layout: TokenLayout,
    initial: Tensor | None,
    log_decay: Tensor | None,
    out: Tensor,
    want_total: bool,
    keep: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Writes out; returns the sums of all tokens, those before each stretch, and if kept 1 / denominator per row.

    Of one short walk whose sums nobody wants there are none.
    """
    cos_q, sin_q, cos_k, sin_k, mask, bounds = layout.pointers(q)
    inverse = torch.empty(call.per_row if keep else 0, dtype=torch.float32, device=call.device)
    count, stretch = call.causal_splits()
    has_total = count > 1 or want_total
    sums = total = None
    if has_total:
        weight, keep_of_stretch = parameters, None
        if log_decay is not None:
            faded, end = faded_in_stretches(log_decay, count, stretch)
            weight, keep_of_stretch = (end - faded).exp().flatten(2)[..., : k.shape[1]].contiguous(), left_of_stretches(end)
        sums, _ = sums_of_keys(call, k, v, parameters, weight, layout, count, stretch)
        total = prefix(call.launches, sums, initial, reverse=False, keep=keep_of_stretch)
    else:
        # nothing comes before the only stretch, since who has a state before wants the one after as well: one launch
        assert initial is None
        if not call.is_one_walk:
            sums = call.sums(1, call.kv_heads).zero_()
    has_before = sums is not None
    call.start(
        ("causal", keep, has_total, has_before),
        causal_kernel,
        (
            *(q, k, v, mask, bounds, parameters, cos_q, sin_q, cos_k, sin_k),
            *(inverse if sums is None else sums, inverse if total is None else total),
            *(inverse if log_decay is None else log_decay, out, inverse),
        ),
        lambda: (
            "causal",
            (count, call.samples * call.heads),
            (
                *(call.num_rows, call.num_queries, call.heads, call.group, stretch),
                *(*strides(q), *strides(k), *strides(v), *strides(out)),
                *parameters_of_both(call, parameters, layout),
                *call.scalars,
            ),
            {"KEEP": keep, "HAS_BEFORE": has_before, "HAS_TOTAL": has_total, "BN": tokens_at_once(call, q, k, v)},
        ),
    )
    return total, sums, inverse


def tokens_at_once(call: Call, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Of the tile; without reading ahead ptxas 12.8 breaks the larger one (machine_code.py)."""
    tokens = call.tile("causal").tokens
    return tokens if is_aligned(q, k, v) else min(tokens, 32)


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    inverse: Tensor,
    dtotal: Tensor | None,
    parameters: Tensor,
    layout: TokenLayout,
    before: Tensor | None,
    log_decay: Tensor | None,
    is_learned: bool,
    moves_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv, the gradient of the initial sums if they move; for learned maps those of the parameters per head; and that of
    the decays, if keys fade."""
    cos_q, sin_q, cos_k, sin_k, mask, bounds = layout.pointers(q)
    dq, dk, dv = empty_as(q), empty_as(k), empty_as(v)
    group = call.group
    count, stretch = call.causal_splits()
    same_angles = cos_q.data_ptr() == cos_k.data_ptr()
    constants: dict[str, object] = {"SAME_ANGLES": same_angles, "LEARNED": is_learned}
    kind_of_dout = (dout.stride(), dout.data_ptr() % 16, is_learned, same_angles)
    drop = torch.empty_like(inverse)
    dquery = dkey = drop
    if is_learned:
        dquery, dkey = (
            torch.empty((count, call.samples, heads, 2, call.head_dim), dtype=torch.float32, device=call.device)
            for heads in (call.heads, call.kv_heads)
        )
    if before is None:
        call.start(
            ("causal whole gradient", kind_of_dout),
            causal_whole_gradient_kernel,
            (
                *(q, k, v, out, dout, inverse, mask, parameters, cos_q, sin_q, cos_k, sin_k),
                *(dq, dk, dv, drop, dquery, dkey),
            ),
            lambda: (
                "causal_whole_gradient",
                (1, call.samples * call.heads),
                (
                    *(call.num_queries, call.heads, stretch),
                    *(*strides(q), *strides(k), *strides(v), *strides(out)),
                    *(*strides(dout), *strides(dq), *strides(dk), *strides(dv)),
                    *parameters_of_both(call, parameters, layout),
                    *call.scalars,
                ),
                constants,
            ),
        )
        return dq, dk, dv, None, *((dquery.sum((0, 1)), dkey.sum((0, 1))) if is_learned else (None, None)), None
    constants |= {"HAS_BEFORE": True, "HAS_AFTER": True, "GROUPED": group > 1}
    fade = inverse if log_decay is None else log_decay
    dfade = inverse if log_decay is None else torch.empty_like(log_decay)
    call.start(
        ("causal dq", kind_of_dout),
        causal_dq_kernel,
        (q, k, v, out, dout, inverse, mask, bounds, parameters, cos_q, sin_q, cos_k, sin_k, before, fade, dq, drop, dquery),
        lambda: (
            "causal_dq",
            (count, call.samples * call.heads),
            (
                *(call.num_rows, call.num_queries, call.heads, group, stretch),
                *(*strides(q), *strides(k), *strides(v), *strides(out), *strides(dout), *strides(dq)),
                *parameters_of_both(call, parameters, layout),
                *call.scalars,
            ),
            constants,
        ),
    )
    if count == 1 and dtotal is None and not moves_initial:
        # nothing comes after the only stretch, and nobody asks what came before it
        after = call.sums(1, call.kv_heads).zero_()
        dinitial = after[0]
    else:
        far_inverse, keep_of_stretch = inverse, None
        if log_decay is not None:
            # queries read the sums before their stretch through what has faded since
            faded, end = faded_in_stretches(log_decay, count, stretch)
            left = faded.exp().flatten(2)[..., : q.shape[1]]
            far_inverse, keep_of_stretch = inverse * left.repeat_interleave(group, dim=1), left_of_stretches(end)
        by_query = sums_of_gradients(
            *(call, q, dout, parameters, layout, before, before, far_inverse, drop, kind_of_dout, count, stretch),
            kernel="causal_dsums",
        )
        after = by_query if group == 1 else by_query.unflatten(1, (-1, group)).sum(2)
        dinitial = prefix(call.launches, after, dtotal, reverse=True, keep=keep_of_stretch)
    call.start(
        ("causal dk", kind_of_dout),
        causal_dk_kernel,
        (q, k, v, dout, mask, bounds, parameters, cos_q, sin_q, cos_k, sin_k, inverse, drop, after, fade, dfade, dk, dkey),
        lambda: (
            "causal_dk",
            (count, call.samples * call.kv_heads),
            (
                *(call.num_rows, call.num_queries, call.kv_heads, group, stretch),
                *(*strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk)),
                *parameters_of_both(call, parameters, layout),
                *call.scalars[:2],
            ),
            constants,
        ),
    )
    call.start(
        ("causal dv", kind_of_dout),
        causal_dv_kernel,
        (q, k, dout, mask, bounds, parameters, cos_q, sin_q, cos_k, sin_k, inverse, after, fade, dv),
        lambda: (
            "causal_dv",
            (count, call.samples * call.kv_heads),
            (
                *(call.num_rows, call.num_queries, call.kv_heads, group, stretch),
                *(*strides(q), *strides(k), *strides(dout), *strides(dv)),
                *parameters_of_both(call, parameters, layout),
                *call.scalars[:2],
            ),
            constants,
        ),
    )
    of_parameters = (dquery.sum((0, 1)), dkey.sum((0, 1))) if is_learned else (None, None)
    if log_decay is None:
        return dq, dk, dv, dinitial, *of_parameters, None
    # a query whose keys had all faded less would feel it through eps alone
    through_eps = -drop[0] * inverse[0] * call.scalars[2]
    by_token = through_eps.unflatten(1, (-1, group)).sum(2) - dfade
    ddecay = sums_over_later_tokens(by_token, before, after, stretch, has_total=dtotal is not None)
    return dq, dk, dv, dinitial, *of_parameters, ddecay


def sums_over_later_tokens(by_token: Tensor, before: Tensor, after: Tensor, stretch: int, *, has_total: bool) -> Tensor:
    """The gradients of decays, each of which reaches all tokens after it: by_token [B, K, N], added up from the end.

    A decay is a factor of all that came before it. So what the later stretches add up to is the product of the sums before
    them with their gradient, which no rounding of a token reaches; unless the total has a gradient, which it does not know.
    """
    if has_total or len(before) == 1:
        return by_token.flip(-1).cumsum(-1).flip(-1)
    # without the number of keys
    later = torch.einsum("srpdv,srpdv->rs", after[:-1, ..., :-1], before[1:, ..., :-1])
    later = F.pad(later, (0, 1)).unflatten(0, by_token.shape[:2])
    padded = F.pad(by_token, (0, len(before) * stretch - by_token.shape[-1])).unflatten(-1, (-1, stretch))
    found = padded.flip(-1).cumsum(-1).flip(-1) + later[..., None]
    return found.flatten(2)[..., : by_token.shape[-1]]


def faded_in_stretches(log_decay: Tensor, count: int, stretch: int) -> tuple[Tensor, Tensor]:
    """Of log_decay [B, K, N]: the running sums in each stretch, [B, K, count, stretch], and their ends, [B, K, count, 1]."""
    padded = F.pad(log_decay, (0, count * stretch - log_decay.shape[-1]))
    faded = padded.unflatten(-1, (count, stretch)).cumsum(-1)
    return faded, faded[..., -1:]


def left_of_stretches(end: Tensor) -> Tensor:
    """What each stretch leaves of the sums that reach it, [count, B * K]."""
    return end[..., 0].flatten(0, 1).T.exp().contiguous()


def parameters_of_both(call: Call, parameters: Tensor, layout: TokenLayout) -> tuple[int, ...]:
    """Strides of the angles, query and key heads per row of parameters, and the length of a row."""
    query_group, num_params = parameter_row(call.heads, parameters)
    key_group, _ = parameter_row(call.kv_heads, parameters)
    return angle_stride(layout.cos_q), angle_stride(layout.cos_k), query_group, key_group, num_params
