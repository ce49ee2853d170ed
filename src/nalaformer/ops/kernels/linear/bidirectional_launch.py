"""Launch the bidirectional kernels; call.py describes a Call, and compiled/bidirectional.py has the plan."""

import torch
from torch import Tensor

from ..common.launch import empty_as, strides
from ..common.split_sums_launch import merge, merge_scaled
from . import mean_query_launch
from .call import SHORT_TOKENS, WHOLE_PROGRAMS, Call, TokenLayout, angle_stride, parameter_row
from .compiled.bidirectional import output_kernel, state_kernel, whole_kernel
from .compiled.bidirectional_gradient import dq_kernel, dsums_kernel
from .compiled.bidirectional_gradient_of_keys import dk_kernel
from .compiled.short import short_gradient_kernel, short_kernel
from .compiled.whole_gradient import whole_gradient_kernel


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor | None,
    layout: TokenLayout,
    call: Call,
    needs_backward: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the output, and for a backward pass: the sums [B * K, PARTS, D, V + 2], their log2 scale [B * K] where they
    have one, 1 / denominator, and the mean query where it weighs keys."""
    cos_q, sin_q, cos_k, sin_k, mask, bounds = layout.pointers(q)
    out = torch.empty(call.output_shape, dtype=call.output, device=call.device)
    inverse = torch.empty(call.per_row, dtype=torch.float32, device=call.device) if needs_backward else None
    # unused pointers point to other tensors of their type
    weights, inverses = parameters if weight is None else weight, parameters if inverse is None else inverse
    if call.is_whole:
        sums = torch.empty(call.all_sums_shape, dtype=torch.float32, device=call.device) if needs_backward else None
        scale = sums.new_empty(len(sums)) if sums is not None and call.has_scale else None
        if call.is_short:
            # the sums stay empty: the backward pass needs none
            short_forward(call, q, k, v, parameters, mask, out)
            return out, sums, scale, inverse, None
        call.start(
            ("whole", needs_backward),
            whole_kernel,
            (
                *(q, k, v, mask, weights, parameters, cos_q, sin_q, cos_k, sin_k, out, inverses),
                *(parameters if sums is None else sums, parameters if scale is None else scale),
            ),
            lambda: (
                "whole" if call.samples * call.heads <= WHOLE_PROGRAMS else "whole_many",
                (call.samples * call.heads,),
                (
                    *(call.num_queries, call.num_keys, call.heads),
                    *(*strides(q), *strides(k), *strides(v), *strides(out)),
                    *(angle_stride(layout.cos_q), angle_stride(layout.cos_k)),
                    *parameter_row(call.heads, parameters),
                    *(*call.scalars, call.settings.contrast),
                ),
                {"KEEP": needs_backward},
            ),
        )
        return out, sums, scale, inverse, None

    count, split_size = call.splits(call.state_kernel, call.num_keys, call.kv_heads)
    query_sums = mean = None
    if call.settings.by_mean_query:
        mean = torch.empty(mean_query_launch.mean_shape(call), dtype=torch.float32, device=call.device)
        query_sums = mean_query_launch.sum_queries(call, q, weight)
    partial, partial_scale = sum_keys(call, k, v, parameters, weights, layout, count, split_size, query_sums, mean)
    if call.has_scale:
        sums, scale = merge_scaled(call.launches, partial, partial_scale, counts_weights=call.settings.by_mean_query)
    else:
        sums, scale = merge(call.launches, partial), None

    count, query_split = call.splits("output", call.num_queries, call.heads)
    call.start(
        ("output", needs_backward),
        output_kernel,
        (q, bounds, parameters, cos_q, sin_q, sums, sums if scale is None else scale, out, inverses),
        lambda: (
            "output",
            (count, call.samples * call.heads),
            (
                *call.query_sizes(query_split),
                *(*strides(q), *strides(out), angle_stride(layout.cos_q)),
                *parameter_row(call.heads, parameters),
                *(*call.scalars, call.settings.contrast),
            ),
            {"KEEP": needs_backward},
        ),
    )
    return (out, sums, scale, inverse, mean) if needs_backward else (out, None, None, None, None)


def short_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, parameters: Tensor, mask: Tensor, out: Tensor) -> None:
    """Fill `out`."""
    call.start(
        "short",
        short_kernel,
        (q, k, v, mask, parameters, out),
        lambda: (
            "short",
            (call.samples * call.heads,),
            (
                *(call.num_queries, call.num_keys, call.heads),
                *(*strides(q), *strides(k), *strides(v), *strides(out)),
                *parameter_row(call.heads, parameters),
                *call.scalars,
            ),
            {"BN": SHORT_TOKENS},
        ),
    )


def sum_keys(
    call: Call,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    weight: Tensor,
    layout: TokenLayout,
    count: int,
    split_size: int,
    query_sums: Tensor | None = None,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sums of each of `count` splits of keys, [count, B * K, PARTS, D, V + 2], and their log2 scale.

    query_sums: of the queries whose mean weighs the keys, [splits, B * K, PARTS * D + 1]; `mean` receives that mean.
    """
    _, _, cos, sin, mask, bounds = layout.pointers(k)
    sums = call.sums(count, call.kv_heads)
    # an unused pointer points to another tensor
    scale = sums.new_empty(sums.shape[:2]) if call.has_scale else sums
    given = sums if query_sums is None else query_sums
    call.start(
        ("state", split_size),
        state_kernel,
        (k, v, mask, weight, given, sums if mean is None else mean, bounds, parameters, cos, sin, sums, scale),
        lambda: (
            call.state_kernel,
            (count, call.samples * call.kv_heads),
            (
                *(call.num_key_rows, call.num_keys, call.kv_heads, split_size, len(given)),
                *(*strides(k), *strides(v), angle_stride(layout.cos_k)),
                *parameter_row(call.kv_heads, parameters),
                call.scalars[1],
            ),
            {},
        ),
    )
    return sums, scale


def short_backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    parameters: Tensor,
    mask: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dquery: Tensor,
    dkey: Tensor,
    kind_of_dout: tuple[object, ...],
) -> None:
    """Fill the gradients; for learned parameters (the last of `kind_of_dout`) also theirs, [1, B, H, 4 or 2, D]."""
    call.start(
        ("short gradient", kind_of_dout),
        short_gradient_kernel,
        (q, k, v, dout, mask, parameters, dq, dk, dv, dquery, dkey),
        lambda: (
            "short_gradient",
            (call.samples * call.heads,),
            (
                *(call.num_queries, call.num_keys, call.heads),
                *(*strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *strides(dk), *strides(dv)),
                *parameter_row(call.heads, parameters),
                *call.scalars,
            ),
            {"BN": SHORT_TOKENS, "LEARNED": kind_of_dout[-1]},
        ),
    )


def sum_gradients(
    call: Call,
    q: Tensor,
    dout: Tensor,
    parameters: Tensor,
    layout: TokenLayout,
    sums: Tensor,
    scale: Tensor,
    inverse: Tensor,
    drop: Tensor,
    kind_of_dout: object,
    count: int,
    split_size: int,
    kernel: str = "dsums",
) -> Tensor:
    """Return the gradients of the sums by each of `count` splits of queries, [count, B * H, PARTS, D, V + 2].

    Fill `drop` from the sums; as "causal_dsums" read it, and no sums.
    """
    cos, sin, _, _, _, bounds = layout.pointers(q)
    dsums = call.sums(count, call.heads)
    call.start(
        (kernel, kind_of_dout, split_size),
        dsums_kernel,
        (q, dout, bounds, parameters, cos, sin, sums, scale, inverse, drop, dsums),
        lambda: (
            kernel,
            (count, call.samples * call.heads),
            (
                *call.query_sizes(split_size),
                *(*strides(q), *strides(dout), angle_stride(layout.cos_q)),
                *parameter_row(call.heads, parameters),
                *(*call.scalars, call.settings.contrast),
            ),
            {"IS_KNOWN": kernel == "causal_dsums"},
        ),
    )
    return dsums


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    inverse: Tensor,
    parameters: Tensor,
    weight: Tensor | None,
    layout: TokenLayout,
    sums: Tensor,
    scale: Tensor | None,
    mean: Tensor | None,
    is_learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return dq, dk, dv, the gradient of the weight, if there is one; and for learned maps those of the query's [4, D] and
    key's [2, D] parameters per head."""
    # unused pointers point to other tensors of their type
    scale = sums if scale is None else scale
    weights, means = parameters if weight is None else weight, sums if mean is None else mean
    cos_q, sin_q, cos_k, sin_k, mask, bounds = layout.pointers(q)
    # launches depend on the strides of dout: the next layer chooses its layout
    kind_of_dout = (dout.stride(), dout.data_ptr() % 16, is_learned)
    by_mean = call.settings.by_mean_query

    def parameter_buffer(splits: int, heads: int, rows: int) -> Tensor:
        shape = (splits, call.samples, heads, rows, call.head_dim)
        return torch.empty(shape, dtype=torch.float32, device=call.device) if is_learned else sums

    drop = torch.empty_like(inverse)
    if call.is_whole:
        dq, dk, dv = empty_as(q), empty_as(k), empty_as(v)
        dweight = empty_as(weights) if call.settings.has_weight else None
        dquery, dkey = parameter_buffer(1, call.heads, 4), parameter_buffer(1, call.heads, 2)
        if call.is_short:
            short_backward(call, q, k, v, dout, parameters, mask, dq, dk, dv, dquery, dkey, kind_of_dout)
        else:
            call.start(
                ("whole gradient", kind_of_dout),
                whole_gradient_kernel,
                (
                    *(q, k, v, dout, mask, weights, parameters, cos_q, sin_q, cos_k, sin_k, sums, scale, inverse, drop),
                    *(dq, dk, dv, drop if dweight is None else dweight, dquery, dkey),
                ),
                lambda: (
                    "whole_gradient",
                    (1, call.samples * call.heads),
                    (
                        *(call.per_row[1:].numel(), call.num_queries, call.num_keys, call.heads),
                        *(*strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *strides(dk), *strides(dv)),
                        *(angle_stride(layout.cos_q), angle_stride(layout.cos_k)),
                        *parameter_row(call.heads, parameters),
                        *(*call.scalars, call.settings.contrast),
                    ),
                    {"LEARNED": is_learned},
                ),
            )
        of_parameters = (dquery.sum((0, 1)), dkey.sum((0, 1))) if is_learned else (None, None)
        return dq, dk, dv, dweight, *of_parameters
    sum_count, sum_split = call.splits("dsums", call.num_queries, call.heads)
    partial = sum_gradients(call, q, dout, parameters, layout, sums, scale, inverse, drop, kind_of_dout, sum_count, sum_split)
    dsums = merge(call.launches, partial, group=call.group)
    del partial

    count, split_size = call.splits("dq", call.num_queries, call.heads)
    dquery = parameter_buffer(count, call.heads, 4)
    key_count, key_split = call.splits("dk", call.num_keys, call.kv_heads)
    dkey = parameter_buffer(key_count, call.kv_heads, 2)
    # the gradient of the mean query, by each split of keys
    dmean = means.new_empty((key_count, means.shape[0], means.shape[1] - 1)) if by_mean else scale

    def query_gradients() -> Tensor:
        dq = empty_as(q)
        call.start(
            ("dq", kind_of_dout, mean_query_launch.mask_kind(call, weight)),
            dq_kernel,
            (q, dout, inverse, drop, weights, means, dmean, bounds, parameters, cos_q, sin_q, sums, dq, dquery),
            lambda: (
                "dq",
                (count, call.samples * call.heads),
                (
                    *(*call.query_sizes(split_size), len(dmean)),
                    *(*strides(q), *strides(dout), *strides(dq), angle_stride(layout.cos_q)),
                    *parameter_row(call.heads, parameters),
                    *(*call.scalars, call.settings.contrast),
                ),
                {"LEARNED": is_learned, "HAS_QUERY_MASK": by_mean and weight is not None},
            ),
        )
        return dq

    def key_gradients() -> tuple[Tensor, Tensor, Tensor | None]:
        dk, dv = empty_as(k), empty_as(v)
        dweight = empty_as(weights) if call.settings.has_weight else None
        call.start(
            ("dk", is_learned),
            dk_kernel,
            (
                *(k, v, mask, weights, bounds, parameters, cos_k, sin_k),
                *(sums, means, dsums, scale, dk, dv, sums if dweight is None else dweight, dmean, dkey),
            ),
            lambda: (
                "dk",
                (key_count, call.samples * call.kv_heads),
                (
                    *(call.num_key_rows, call.num_keys, call.kv_heads, key_split),
                    *(*strides(k), *strides(v), *strides(dk), *strides(dv), angle_stride(layout.cos_k)),
                    *parameter_row(call.kv_heads, parameters),
                    call.scalars[1],
                ),
                {"LEARNED": is_learned},
            ),
        )
        return dk, dv, dweight

    if by_mean:
        # keys come first: queries need the gradient of their mean
        dk, dv, dweight = key_gradients()
        dq = query_gradients()
    else:
        dq = query_gradients()
        # freed before the next gradients are allocated: less memory at the peak
        del drop
        dk, dv, dweight = key_gradients()
    if not is_learned:
        return dq, dk, dv, dweight, None, None
    return dq, dk, dv, dweight, dquery.sum((0, 1)), dkey.sum((0, 1))
