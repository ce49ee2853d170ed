"""Launch the causal kernels; call.py describes a Call, and compiled/causal.py has the plan."""

import torch
from torch import Tensor

from ..common.launch import empty_as, strides
from ..common.split_sums_launch import prefix
from .bidirectional_launch import sum_gradients, sum_keys
from .call import Call, TokenLayout, angle_stride, is_aligned, parameter_row
from .compiled.causal import causal_kernel
from .compiled.causal_gradient import causal_dq_kernel
from .compiled.causal_gradient_of_keys import causal_dk_kernel
from .compiled.causal_gradient_of_values import causal_dv_kernel
from .compiled.causal_whole_gradient import causal_whole_gradient_kernel
from .decay_splits import Splits, key_factors, split_factors, sums_over_later_tokens


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
    needs_backward: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Write out; return the sums of all tokens, those before each split, and with needs_backward 1 / denominator per row.

    A single short scan whose total is not needed has no sums.
    """
    cos_q, sin_q, cos_k, sin_k, mask, bounds = layout.pointers(q)
    inverse = torch.empty(call.per_row if needs_backward else 0, dtype=torch.float32, device=call.device)
    count, split_size = call.causal_splits()
    has_total = count > 1 or want_total
    sums = total = None
    if has_total:
        weight, split_decay = parameters, None
        if log_decay is not None:
            weight, split_decay = key_factors(Splits.build(call, layout, count, split_size), log_decay)
        sums, _ = sum_keys(call, k, v, parameters, weight, layout, count, split_size)
        total = prefix(call.launches, sums, initial, reverse=False, decay=split_decay)
    else:
        # nothing comes before the only split: a caller with a state before it also needs the one after it, which takes sums
        assert initial is None
        if not call.is_single_scan:
            sums = call.sums(1, call.kv_heads).zero_()
    has_before = sums is not None
    call.start(
        ("causal", needs_backward, has_total, has_before),
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
                *(call.num_rows, call.num_queries, call.heads, call.group, split_size),
                *(*strides(q), *strides(k), *strides(v), *strides(out)),
                *parameter_layout(call, parameters, layout),
                *call.scalars,
            ),
            {"KEEP": needs_backward, "HAS_BEFORE": has_before, "HAS_TOTAL": has_total, "BN": tokens_at_once(call, q, k, v)},
        ),
    )
    return total, sums, inverse


def tokens_at_once(call: Call, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the tokens of the tile; without reading ahead ptxas 12.8 breaks the larger one (machine_code.py)."""
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
    """Return dq, dk, dv and the gradient of the initial sums, if they need one; for learned maps those of the parameters per
    head; and with decay that of log_decay."""
    cos_q, sin_q, cos_k, sin_k, mask, bounds = layout.pointers(q)
    dq, dk, dv = empty_as(q), empty_as(k), empty_as(v)
    group = call.group
    count, split_size = call.causal_splits()
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
                    *(call.num_queries, call.heads, split_size),
                    *(*strides(q), *strides(k), *strides(v), *strides(out)),
                    *(*strides(dout), *strides(dq), *strides(dk), *strides(dv)),
                    *parameter_layout(call, parameters, layout),
                    *call.scalars,
                ),
                constants,
            ),
        )
        return dq, dk, dv, None, *((dquery.sum((0, 1)), dkey.sum((0, 1))) if is_learned else (None, None)), None
    constants |= {"HAS_BEFORE": True, "HAS_AFTER": True, "GROUPED": group > 1}
    decay_pointer = inverse if log_decay is None else log_decay
    dlog_decay = inverse if log_decay is None else torch.empty_like(log_decay)
    splits = None if log_decay is None else Splits.build(call, layout, count, split_size)
    call.start(
        ("causal dq", kind_of_dout),
        causal_dq_kernel,
        (
            q,
            k,
            v,
            out,
            dout,
            inverse,
            mask,
            bounds,
            parameters,
            cos_q,
            sin_q,
            cos_k,
            sin_k,
            before,
            decay_pointer,
            dq,
            drop,
            dquery,
        ),
        lambda: (
            "causal_dq",
            (count, call.samples * call.heads),
            (
                *(call.num_rows, call.num_queries, call.heads, group, split_size),
                *(*strides(q), *strides(k), *strides(v), *strides(out), *strides(dout), *strides(dq)),
                *parameter_layout(call, parameters, layout),
                *call.scalars,
            ),
            constants,
        ),
    )
    if count == 1 and dtotal is None and not moves_initial:
        # nothing comes after the only split, and no gradient needs the sums before it
        after = call.sums(1, call.kv_heads).zero_()
        dinitial = after[0]
    else:
        far_inverse, split_decay = inverse, None
        if splits is not None and log_decay is not None:
            # queries read the sums before their split with the decay since
            decay_factor = splits.since_start(log_decay).exp().float().repeat_interleave(group, dim=-2)
            far_inverse, split_decay = inverse * decay_factor, split_factors(splits, log_decay)
        by_query = sum_gradients(
            *(call, q, dout, parameters, layout, before, before, far_inverse, drop, kind_of_dout, count, split_size),
            kernel="causal_dsums",
        )
        after = by_query if group == 1 else by_query.unflatten(1, (-1, group)).sum(2)
        dinitial = prefix(call.launches, after, dtotal, reverse=True, decay=split_decay)
    call.start(
        ("causal dk", kind_of_dout),
        causal_dk_kernel,
        (
            q,
            k,
            v,
            dout,
            mask,
            bounds,
            parameters,
            cos_q,
            sin_q,
            cos_k,
            sin_k,
            inverse,
            drop,
            after,
            decay_pointer,
            dlog_decay,
            dk,
            dkey,
        ),
        lambda: (
            "causal_dk",
            (count, call.samples * call.kv_heads),
            (
                *(call.num_rows, call.num_queries, call.kv_heads, group, split_size),
                *(*strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk)),
                *parameter_layout(call, parameters, layout),
                *call.scalars[:2],
            ),
            constants,
        ),
    )
    call.start(
        ("causal dv", kind_of_dout),
        causal_dv_kernel,
        (q, k, dout, mask, bounds, parameters, cos_q, sin_q, cos_k, sin_k, inverse, after, decay_pointer, dv),
        lambda: (
            "causal_dv",
            (count, call.samples * call.kv_heads),
            (
                *(call.num_rows, call.num_queries, call.kv_heads, group, split_size),
                *(*strides(q), *strides(k), *strides(dout), *strides(dv)),
                *parameter_layout(call, parameters, layout),
                *call.scalars[:2],
            ),
            constants,
        ),
    )
    of_parameters = (dquery.sum((0, 1)), dkey.sum((0, 1))) if is_learned else (None, None)
    if splits is None:
        return dq, dk, dv, dinitial, *of_parameters, None
    # with less decay of all its keys, a query would change only through eps
    through_eps = -drop[0] * inverse[0] * call.scalars[2]
    by_token = through_eps.unflatten(-2, (-1, group)).sum(-2) - dlog_decay
    if dtotal is None:
        ddecay = sums_over_later_tokens(splits, by_token, before, after, call.kv_heads)
    else:
        # one sequence after a state: those products do not include the gradient of the total
        ddecay = by_token.flip(-1).cumsum(-1).flip(-1)
    return dq, dk, dv, dinitial, *of_parameters, ddecay


def parameter_layout(call: Call, parameters: Tensor, layout: TokenLayout) -> tuple[int, ...]:
    """Return strides of the angles, query and key heads per row of parameters, and the length of a row."""
    query_group, num_params = parameter_row(call.heads, parameters)
    key_group, _ = parameter_row(call.kv_heads, parameters)
    return angle_stride(layout.cos_q), angle_stride(layout.cos_k), query_group, key_group, num_params
