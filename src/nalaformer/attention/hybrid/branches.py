"""The two branches of hybrid attention, and how they are joined.

Sizes: B samples, K heads of keys, G queries for each (H = K G), R groups of T queries, W keys in a window, E salient tokens,
D head size, V value size, F features. Everything here is float32 (float64 for float64 inputs).
"""

from typing import NamedTuple

import torch
from torch import Tensor


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
    """sum_j exp(s_j - m) v_j, sum_j exp(s_j - m) and m = max_j s_j over the visible keys of window and store.

    queries: [B, K, G, R, T, D], scaled; window: keys [B, K, R, W, D], values [B, K, R, W, V], visible [B or 1, R, T, W];
    salient, with X = G or 1 (shared by the heads of a group): keys [B, K, X, E, D], values, visible [B, K, X, R, E].
    A row that sees nothing (padding) has zeros.
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
    """[B, K, G, R, T, W]."""
    return torch.einsum("bkgrtd,bkrwd->bkgrtw", queries, window_keys)


class ChunkSums(NamedTuple):
    """Sums before each group of queries: state [B, H, R, F, V], key_sum [B, H, R, F]; and those after the call."""

    state: Tensor
    key_sum: Tensor
    state_after: Tensor
    key_sum_after: Tensor


def chunk_sums(state: Tensor, key_sum: Tensor, key_features: Tensor, values: Tensor, *, groups: int) -> ChunkSums:
    """Prefix sums over the chunks that leave the window: group r has all of them before chunk r.

    state: [B, H, F, V]; key_sum: [B, H, F]; key_features: [B, H, m, l, F], zero where a token does not count;
    values: [B, H, m, l, V].
    """
    added = torch.einsum("bhmlf,bhmlv->bhmfv", key_features, values)
    states = torch.cat((state[:, :, None], added), dim=2).cumsum(2)
    key_sums = torch.cat((key_sum[:, :, None], key_features.sum(3)), dim=2).cumsum(2)
    last = states.shape[2] - 1
    if last >= groups - 1:
        before, before_sum = states[:, :, :groups], key_sums[:, :, :groups]
    else:
        # groups that hold nothing but padding
        index = torch.arange(groups, device=states.device).clamp(max=last)
        before, before_sum = states[:, :, index], key_sums[:, :, index]
    return ChunkSums(before, before_sum, states[:, :, last], key_sums[:, :, last])


def linear_branch(query_features: Tensor, state: Tensor, key_sum: Tensor) -> Linear:
    """phi(q) . S and phi(q) . z. query_features: [B, H, R, T, F]; state: [B, H, R, F, V]; key_sum: [B, H, R, F]."""
    return Linear(query_features @ state, (query_features @ key_sum[..., None])[..., 0])


def pairs_branch(query_features: Tensor, key_features: Tensor, values: Tensor, visible: Tensor) -> Linear:
    """Linear attention over few tokens, each with its own mask: those that have lost their place among the salient.

    key_features: [B, H, E, F]; values: [B, H, E, V]; visible: [B, H, R, E].
    """
    weights = torch.einsum("bhrtf,bhef->bhrte", query_features, key_features).masked_fill(~visible[:, :, :, None], 0)
    return Linear(torch.einsum("bhrte,bhev->bhrtv", weights, values), weights.sum(-1))


def merge(exact: Exact, linear: Linear | None, gate: Tensor | None, *, kind: str, eps: float) -> Tensor:
    """(sum exp(s-m) v + g phi(q).S) / (sum exp(s-m) + phi(q).z + eps), [B, K, G, R, T, V].

    kind "released" takes the linear sums as they are; "exact" scales them by exp(-m), as a softmax over both would.
    """
    total, weighted = exact.total, exact.weighted
    if linear is None:
        return weighted / (total + eps)[..., None]
    shape = exact.total.shape[1:3]
    linear_weighted, linear_total = linear.weighted.unflatten(1, shape), linear.total.unflatten(1, shape)
    if gate is not None:
        linear_weighted = linear_weighted * gate
    scale = torch.ones_like(total)
    if kind == "exact":
        # relative to the larger of exp(m) and 1, so that neither factor overflows
        top = exact.row_max.clamp(min=0)
        scale, linear_scale = (exact.row_max - top).exp(), (-top).exp()
        linear_weighted, linear_total = linear_weighted * linear_scale[..., None], linear_total * linear_scale
        total, weighted = total * scale, weighted * scale[..., None]
    return (weighted + linear_weighted) / (total + linear_total + eps * scale)[..., None]
