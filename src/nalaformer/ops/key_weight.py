"""Compute the weight of a key in RALA (arXiv 2411.07635): how much all queries together attend to it."""

import math
from typing import Any

import torch
from torch import Tensor

from .backend import LARGEST_HEAD, MOST_ROWS, get_backend, runs_kernels
from .checks import check_call, check_cu_seqlens, check_query_mask, check_query_padding
from .chunked import chunk_size, run_directly, run_with_checkpoint, split_tokens
from .features import (
    FeatureMapLike,
    compute_dtype,
    heads_for,
    hide,
    key_features,
    key_log_scale,
    outside_autocast,
    repeat_heads,
)
from .kept_tensors import is_transformed

# maps without parameters, the same for queries and keys, with features >= 0
MAPS_IN_KERNELS = ("relu", "elu", "split")
# products of two features of at most this size fit into float32, whatever their signs
LARGEST_FEATURE = 1e17


def global_query_weight(
    q: Tensor,
    k: Tensor,
    *,
    feature_map: FeatureMapLike,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return RALA's weight of each key: a softmax over the keys for the mean query.

    `linear_attention(..., key_weight="global_query")` uses these weights.
    `linear_attention(..., key_weight="global_query")` weighs keys so; here are the numbers themselves.

        a_j = n softmax_j( D^-1/2 mean_i phi_q(q_i) . phi_k(k_j) )

    q: [B, N, H, D]; k: [B, M, K, D] with K dividing H -> [B, M, H], float32 (float64 for float64 inputs); the mean over the n
    visible keys is 1, and hidden ones get 0. The masks are those of `linear_attention`; both means are over visible tokens
    alone. With cu_seqlens q and k are [T, H, D], and the result is [T, H]. A map with two streams uses its first one.
    The weight reads all queries, so causal attention cannot use it.
    """
    if cu_seqlens is not None:
        return _weigh_packed(q, k, feature_map, cu_seqlens)
    check_call(q, k, k, feature_map=feature_map, causal=False, rotary=None, key_mask=key_mask, eps=0.0, has_values=False)
    check_query_mask(query_mask, q)
    check_query_padding(q, k, key_mask, query_mask)
    k, _ = heads_for(feature_map, q, k, k)
    with outside_autocast(q):
        mapped = feature_map.given(q, k, key_mask=key_mask, query_mask=query_mask, causal=False)
        if runs_kernels(q) and runs_kernels(k) and q.shape[0] * q.shape[2] <= MOST_ROWS and q.shape[3] <= LARGEST_HEAD:
            from .kernels.linear import global_query_op

            spec = mapped.kernel_spec(q.device)
            if spec is not None and spec.name in MAPS_IN_KERNELS:
                logits = global_query_op.key_logits(q, repeat_heads(q, k), query_mask, key_mask, spec.name, spec.parts)
                return softmax_over_keys(logits, key_mask)
        mean = mean_query(mapped, q, query_mask, compute_dtype(q, k))
        return softmax_over_keys(key_logits(mapped, mean, k, key_mask), key_mask)


def weight_values(
    key_weight: Tensor | str | None,
    q: Tensor,
    k: Tensor,
    feature_map: FeatureMapLike,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> Tensor | None:
    """Convert the argument of a call to numbers."""
    if not isinstance(key_weight, str):
        return key_weight
    return global_query_weight(q, k, feature_map=feature_map, key_mask=key_mask, query_mask=query_mask)


def per_key_for(q: Tensor, k: Tensor, v: Tensor, per_key: Any) -> tuple[Any, Tensor, Tensor]:
    """Expand values per key (weights, decays), keys and values to the same heads: the query heads where either has those."""
    if isinstance(per_key, str):
        return per_key, repeat_heads(q, k), repeat_heads(q, v)
    if per_key is None or per_key.shape[2] == k.shape[2]:
        return per_key, k, v
    return repeat_heads(q, per_key), repeat_heads(q, k), repeat_heads(q, v)


def mean_query(feature_map: FeatureMapLike, q: Tensor, query_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return D^-1/2 mean_i phi_q(q_i) over the tokens that the mask shows, [B, H, F]."""

    def sum_chunk(q: Tensor, mask: Tensor | None) -> Tensor:
        features = feature_map.query_streams(hide(q, mask).to(dtype))[0]
        return hide(clamp_features(features.value, features.log_scale), mask).sum(1)

    run = (
        run_directly if get_backend() == "reference" or not torch.is_grad_enabled() or is_transformed() else run_with_checkpoint
    )
    size = chunk_size(q.shape[0], q.shape[2], q.shape[3])
    parts = [run(sum_chunk, *chunk) for chunk in split_tokens(size, q, query_mask)]
    count = q.shape[1] if query_mask is None else query_mask.sum(1).clamp(min=1)[:, None, None]
    return sum(parts[1:], parts[0]) / count * q.shape[3] ** -0.5


def key_logits(feature_map: FeatureMapLike, mean: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return mean . phi_k(k_j), [B, M, H]; mean: [B, H, F]."""
    dtype = mean.dtype

    def chunk_logits(k: Tensor, mask: Tensor | None, mean: Tensor) -> Tensor:
        scales = key_log_scale(feature_map, k, mask, dtype)
        keys = key_features(feature_map, k, k, key_mask=mask, rotary=None, log_scale=scales, dtype=dtype)
        by_key_head = mean.unflatten(1, (k.shape[2], -1))
        return torch.einsum("bjkf,bkgf->bjkg", clamp_features(keys.plain, scales), by_key_head).flatten(2)

    run = (
        run_directly if get_backend() == "reference" or not torch.is_grad_enabled() or is_transformed() else run_with_checkpoint
    )
    size = chunk_size(k.shape[0], mean.shape[1], k.shape[3])
    return torch.cat([run(chunk_logits, *chunk, mean) for chunk in split_tokens(size, k, key_mask)], dim=1)


def clamp_features(features: Tensor, log_scale: Tensor | None) -> Tensor:
    """Return the true features, clamped so that their products stay finite."""
    if log_scale is not None:
        features = features * log_scale.clamp(max=math.log(LARGEST_FEATURE)).exp()
    return features.clamp(-LARGEST_FEATURE, LARGEST_FEATURE)


def softmax_over_keys(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return n times the softmax over the n visible tokens of [B, M, H]; 0 for masked ones."""
    if key_mask is None:
        return logits.softmax(1) * logits.shape[1]
    shown = key_mask[:, :, None]
    # the lowest finite number instead of minus infinity: a row without any visible key must stay finite
    weights = torch.where(shown, logits, torch.finfo(logits.dtype).min).softmax(1)
    return torch.where(shown, weights * key_mask.sum(1)[:, None, None], 0.0)


def _weigh_packed(q: Tensor, k: Tensor, feature_map: FeatureMapLike, cu_seqlens: Tensor) -> Tensor:
    """Compute the weights of each sequence by itself."""
    lengths = check_cu_seqlens(cu_seqlens, q.shape[0])
    parts = zip(q.split(lengths), k.split(lengths), strict=True)
    weights = [
        global_query_weight(q_part[None], k_part[None], feature_map=feature_map)[0] for q_part, k_part in parts if len(q_part)
    ]
    return torch.cat(weights) if weights else q.new_zeros(0, q.shape[1], dtype=compute_dtype(q, k))
