"""The two branches of hybrid attention and their merge, on fused kernels; branches.py has the same in plain torch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...feature_maps import FeatureMap
from ...ops import LinearState
from ...ops.backend import LARGEST_FEATURES, LARGEST_HEAD, runs_kernels
from .branches import EPS, Segment
from .salient import Leaving, repeated_for
from .settings import HybridSettings, linear_share
from .state import HybridState


def serves(q: Tensor, k: Tensor, v: Tensor, state: HybridState) -> bool:
    """True if the kernels support this call; plain torch supports all. One token has nothing to tile."""
    sums = state.linear.state
    return (
        q.shape[1] > 1
        and all(runs_kernels(x) for x in (q, k, v))
        and max(q.shape[-1], v.shape[-1]) <= LARGEST_HEAD
        and sums.shape[-2] <= LARGEST_FEATURES
        and sums.dtype == torch.float32
    )


def attend(
    segment: Segment, *, feature_map: FeatureMap, settings: HybridSettings, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as branches.attend, with outputs in the dtype of the queries."""
    # imported here, since Triton may be missing
    from ...ops.kernels.hybrid import exact_op, merge_op

    rows, keys, values, gate, layout, store, leaving, before = segment
    queries = rows.flatten(1, 2)
    is_released = settings.merge == "released" and settings.linear
    # the gradient of the row maximum belongs to the highest key; with merge="exact" it is of the size of eps, which bfloat16
    # cannot resolve
    keep_best = torch.is_grad_enabled() and any(x.requires_grad for x in (rows, keys, store.keys))
    keep_best = keep_best and (is_released or rows.dtype != torch.bfloat16)
    row_max, total, weighted = exact_op.attend(
        *(queries, keys, values, store.keys, store.values, store.seen_until().to(torch.int32), layout.first_slots),
        *(layout.chunk_size, store.old, store.per_chunk, store.until is not None, keep_best, scale),
    )
    linear_weighted = linear_total = gates = share = None
    state, key_sum = before.state, before.key_sum
    if settings.linear:
        linear_weighted, linear_total, state, key_sum = _linear(queries, leaving, before, feature_map, layout.groups)
        gates = None if gate is None else gate.flatten(1, 2)
        share = linear_share(layout.chunks_before, settings, torch.float32)
        # one factor for each sample and group
        share = None if share is None else share.expand(len(rows), -1)
    out = merge_op.merge(*(row_max, total, weighted, linear_total, linear_weighted, gates, share, is_released, EPS, rows.dtype))
    return out.unflatten(1, rows.shape[1:3]), state, key_sum


def _linear(
    queries: Tensor, leaving: Sequence[Leaving], before: LinearState, feature_map: FeatureMap, groups: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return phi(q) . S, phi(q) . z, and the state and key sum after the call."""
    from ...ops.kernels.hybrid import linear_op

    spec = feature_map.kernel_spec(queries.device)
    maps: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
    name, maps = "identity", (feature_map.query, feature_map.key)
    if spec is not None and spec.name == "softmax" and spec.before is not None:
        # the kernels continue from a matrix product
        name, maps = spec.name, spec.before
    of_queries, of_keys = maps
    mapped = of_queries(queries.float())
    initial: Tensor | None = torch.cat((before.state, before.key_sum[..., None]), dim=-1).flatten(0, 1)  # [B * H, F, V + 1]
    found = []
    for tokens in leaving:
        keys = of_keys(repeated_for(tokens.keys.float(), mapped.shape[2]))
        arguments = (mapped, keys, tokens.values, tokens.counts, initial, groups, tokens.per_chunk, name)
        found.append(linear_op.attend(*arguments))
        # only the first call adds the initial state
        initial = None
    weighted, total, sums = (
        found[0] if len(found) == 1 else (sum(more, start=first) for first, *more in zip(*found, strict=True))
    )
    sums = sums.unflatten(0, before.state.shape[:2])
    return weighted, total, sums[..., :-1].contiguous(), sums[..., -1].contiguous()
