"""The two branches of hybrid attention and their merge, in plain torch.

Sizes: B samples, K key heads, G queries for each (H = K G), R groups of T queries, W keys in a window, E salient tokens,
D head size, V value size, F features. All tensors here are float32 (float64 for float64 inputs).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...feature_maps import FeatureMap
from ...ops import LinearState
from .layout import Layout
from .salient import Leaving, Store, repeated_for
from .settings import HybridSettings, linear_share

EPS = 1e-6


class Exact(NamedTuple):
    """Softmax before its division: row_max, total [B, K, G, R, T], weighted [B, K, G, R, T, V]."""

    row_max: Tensor
    total: Tensor
    weighted: Tensor


class Linear(NamedTuple):
    """Linear attention before its division: weighted [B, H, R, T, V], total [B, H, R, T]."""

    weighted: Tensor
    total: Tensor


def exact_branch(
    queries: Tensor,
    window_keys: Tensor,
    window_values: Tensor,
    window_visible: Tensor,
    salient_keys: Tensor,
    salient_values: Tensor,
    salient_visible: Tensor,
) -> Exact:
    """Compute sum_j exp(s_j - m) v_j, sum_j exp(s_j - m) and m = max_j s_j over the visible keys of window and store.

    queries: [B, K, G, R, T, D], scaled; window: keys [B, K, R, W, D], values [B, K, R, W, V], visible [B or 1, R, T, W];
    salient, with X = G or 1 (shared by the heads of a group): keys [B, K, X, E, D], values, visible [B, K, X, R, E].
    A row without visible keys (padding) is zero.
    """
    near = window_logits(queries, window_keys).masked_fill(~window_visible[:, None, None], -torch.inf)
    row_max = near.amax(-1)
    far = None
    if salient_keys.shape[3]:
        shared = salient_keys.shape[2] == 1
        far = torch.einsum("bkgrtd,bkxed->bkgrte" if shared else "bkgrtd,bkged->bkgrte", queries, salient_keys)
        far = far.masked_fill(~salient_visible[..., None, :], -torch.inf)
        row_max = torch.maximum(row_max, far.amax(-1))
    row_max = torch.where(row_max == -torch.inf, 0, row_max)
    near = (near - row_max[..., None]).exp()
    total = near.sum(-1)
    weighted = torch.einsum("bkgrtw,bkrwv->bkgrtv", near, window_values)
    if far is not None:
        far = (far - row_max[..., None]).exp()
        total = total + far.sum(-1)
        weighted = weighted + torch.einsum("bkgrte,bkxev->bkgrtv" if shared else "bkgrte,bkgev->bkgrtv", far, salient_values)
    return Exact(row_max, total, weighted)


def window_logits(queries: Tensor, window_keys: Tensor) -> Tensor:
    """Return the logits of queries and window keys, [B, K, G, R, T, W]."""
    return torch.einsum("bkgrtd,bkrwd->bkgrtw", queries, window_keys)


class ChunkSums(NamedTuple):
    """The state before each group of queries, [B, H, R, F, V] and key_sum [B, H, R, F], and the state after the call."""

    state: Tensor
    key_sum: Tensor
    state_after: Tensor
    key_sum_after: Tensor


def chunk_sums(state: Tensor, key_sum: Tensor, leaving: Sequence[tuple[Tensor, Tensor]], *, groups: int) -> ChunkSums:
    """Compute prefix sums over the tokens that leave chunk by chunk: group r has all tokens that left before chunk r.

    state: [B, H, F, V]; key_sum: [B, H, F]; leaving: key features [B, H, m, *, F], zero where a token does not count, and
    values [B, H, m, *, V].
    """
    added = torch.stack([torch.einsum("bhmlf,bhmlv->bhmfv", features, values) for features, values in leaving]).sum(0)
    added_keys = torch.stack([features.sum(3) for features, _ in leaving]).sum(0)
    states = torch.cat((state[:, :, None], added), dim=2).cumsum(2)
    key_sums = torch.cat((key_sum[:, :, None], added_keys), dim=2).cumsum(2)
    last = states.shape[2] - 1
    if last >= groups - 1:
        before, before_sum = states[:, :, :groups], key_sums[:, :, :groups]
    else:
        # these groups hold nothing but padding
        index = torch.arange(groups, device=states.device).clamp(max=last)
        before, before_sum = states[:, :, index], key_sums[:, :, index]
    # copies, since views would keep the sums of all chunks alive
    return ChunkSums(before, before_sum, states[:, :, last].clone(), key_sums[:, :, last].clone())


def linear_branch(query_features: Tensor, state: Tensor, key_sum: Tensor) -> Linear:
    """Return phi(q) . S and phi(q) . z. query_features: [B, H, R, T, F]; state: [B, H, R, F, V]; key_sum: [B, H, R, F]."""
    return Linear(query_features @ state, (query_features @ key_sum[..., None])[..., 0])


def scale_sums(linear: Linear, share: Tensor | None) -> Linear:
    """Multiply both sums by share [B or 1, R]."""
    if share is None:
        return linear
    share = share[:, None, :, None]
    return Linear(linear.weighted * share[..., None], linear.total * share)


def merge(exact: Exact, linear: Linear | None, gate: Tensor | None, *, kind: str, eps: float) -> Tensor:
    """Return (sum exp(s-m) v + g phi(q).S) / (sum exp(s-m) + phi(q).z + eps), [..., V]; both branches of the same shape.

    kind "released" uses the linear sums unscaled; "exact" scales them by exp(-m), as a softmax over both would.
    """
    total, weighted = exact.total, exact.weighted
    if linear is None:
        return weighted / (total + eps)[..., None]
    linear_weighted, linear_total = linear
    if gate is not None:
        linear_weighted = linear_weighted * gate
    scale = torch.ones_like(total)
    if kind == "exact":
        # scale relative to the larger of exp(m) and 1, so that neither factor overflows
        top = exact.row_max.clamp(min=0)
        scale, linear_scale = (exact.row_max - top).exp(), (-top).exp()
        linear_weighted, linear_total = linear_weighted * linear_scale[..., None], linear_total * linear_scale
        total, weighted = total * scale, weighted * scale[..., None]
    return (weighted + linear_weighted) / (total + linear_total + eps * scale)[..., None]


class Segment(NamedTuple):
    """Some chunks of a call, with the keys and state that their queries see.

    rows: queries [B, R, T, H, D]; keys, values by slot, [B, slots, K, *]; gate: [B, R, T, H, V or 1].
    """

    rows: Tensor
    keys: Tensor
    values: Tensor
    gate: Tensor | None
    layout: Layout
    store: Store
    leaving: Sequence[Leaving]
    before: LinearState


def attend(
    segment: Segment, *, feature_map: FeatureMap, settings: HybridSettings, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, R, T, H, V] of a `Segment`, and the linear state after it: state [B, H, F, V], key_sum [B, H, F]."""
    rows, keys, values, gate, layout, store, leaving, before = segment
    dtype = before.state.dtype
    heads = (keys.shape[2], -1)
    rows = rows.to(dtype)
    exact = exact_branch(
        by_key_head(rows * scale, keys.shape[2]),
        windows(keys, layout, dtype),
        windows(values, layout, dtype),
        layout.visible,
        store.keys.to(dtype).unflatten(1, heads),
        store.values.to(dtype).unflatten(1, heads),
        store.is_salient(layout.groups).unflatten(1, heads),
    )
    linear, state_after, key_sum_after = None, before.state, before.key_sum
    if settings.linear:
        query_features = feature_map.query(rows.flatten(1, 2)).unflatten(1, rows.shape[1:3]).permute(0, 3, 1, 2, 4)
        sums = sums_before(before, leaving, feature_map, chunks=layout.leaving, groups=layout.groups)
        state_after, key_sum_after = sums.state_after, sums.key_sum_after
        share = linear_share(layout.chunks_before, settings, dtype)
        seen = scale_sums(linear_branch(query_features, sums.state, sums.key_sum), share)
        linear = Linear(*(x.unflatten(1, exact.total.shape[1:3]) for x in seen))
    gates = None if gate is None else by_key_head(gate.to(dtype), keys.shape[2])
    out = merge(exact, linear, gates, kind=settings.merge, eps=EPS)
    return out.flatten(1, 2).permute(0, 2, 3, 1, 4), state_after, key_sum_after


def windows(slots: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the window of each group: [B, slots, K, D] -> [B, K, R, W, D]."""
    size = layout.chunk_size
    return slots.to(dtype).unfold(1, 2 * size, size).permute(0, 2, 1, 4, 3)


def by_key_head(rows: Tensor, key_heads: int) -> Tensor:
    """Group the query heads by their key head: [B, R, T, H, D] -> [B, K, G, R, T, D]."""
    return rows.permute(0, 3, 1, 2, 4).unflatten(1, (key_heads, -1))


def sums_before(
    before: LinearState, leaving: Sequence[Leaving], feature_map: FeatureMap, *, chunks: int, groups: int
) -> ChunkSums:
    """Return the linear state before each group of queries, and after the chunks that leave the window."""
    if not chunks:
        state, key_sum = before.state[:, :, None], before.key_sum[:, :, None]
        repeats = (-1, -1, groups)
        # copies: steps write into the state after the call, while the caller owns the one before it
        return ChunkSums(
            state.expand(*repeats, -1, -1), key_sum.expand(*repeats, -1), before.state.clone(), before.key_sum.clone()
        )
    heads, dtype = before.state.shape[1], before.state.dtype
    pairs = []
    for tokens in leaving:
        features = feature_map.key(repeated_for(tokens.keys.to(dtype), heads))
        features = features.masked_fill(~repeated_for(tokens.counts, heads)[..., None], 0)
        numbers = features, repeated_for(tokens.values.to(dtype), heads)
        pairs.append(tuple(x.transpose(1, 2).unflatten(2, (chunks, tokens.per_chunk)) for x in numbers))
    return chunk_sums(before.state, before.key_sum, pairs, groups=groups)
