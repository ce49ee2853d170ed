"""Write linear attention as a product of two factors, for sums of weights that need no single weight."""

from typing import NamedTuple

import torch
from torch import Tensor

from .decay import decayed_sums, usable_decay
from .features import FeatureMapLike, compute_dtype, key_features, key_log_scale, outside_autocast, query_features
from .reference import last_of_block
from .rotary import Rotary

# Queries of softmax attention whose weights exist at the same time.
CHUNK = 256


class LinearForm(NamedTuple):
    """Hold one stream of linear attention: weights = queries keys^T."""

    queries: Tensor
    """[B, H, N, F], divided by the denominators."""
    keys: Tensor
    """[B, H, M, F]."""
    log_denominators: Tensor
    """[B, H, N]."""


def linear_forms(
    q: Tensor,
    k: Tensor,
    *,
    feature_map: FeatureMapLike,
    causal: bool = False,
    rotary: tuple[Rotary | None, Rotary | None] = (None, None),
    key_mask: Tensor | None = None,
    key_weight: Tensor | None = None,
    block: int = 1,
    log_decay: Tensor | None = None,
    eps: float = 1e-6,
    asked: int | None = None,
) -> list[LinearForm]:
    """Return the factors of the weights of each stream: q [B, N, H, D], k [B, M, H, D].

    asked: the number of queries to take from the front, without positions; None takes all.
    causal: the denominators count the keys that a query sees; with `block` it sees its own block and earlier ones. The product
    still holds all pairs, without decay; log_decay [B, M, H] enters the denominators alone.
    """
    with outside_autocast(q):
        dtype = compute_dtype(q, k)
        # in self-attention a token that is masked as a key is no query either
        query_mask = key_mask if key_mask is not None and key_mask.shape == q.shape[:2] and not causal else None
        mapped = feature_map.given(q, k, key_mask=key_mask, query_mask=query_mask, causal=causal)
        scales = key_log_scale(mapped, k, key_mask, dtype)
        scale = None if scales is None else scales.amax(dim=1, keepdim=True)  # [B, 1, H, 1]
        each_rotary = rotary[1]
        keys = key_features(
            mapped, k, k, key_mask=key_mask, rotary=each_rotary, log_scale=scale, dtype=dtype, weight=key_weight
        )
        seen, count = keys.plain.sum(1, keepdim=True), keys.visible[:, None]
        if causal:
            last = last_of_block(torch.arange(k.shape[1], device=k.device), block, k.shape[1])
            visible = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
            # counted in the type of the sums: eps times an integer would be float32
            seen, count = (x.cumsum(1).index_select(1, last) for x in (keys.plain, visible.to(dtype)))
        if log_decay is not None:
            decay = usable_decay(log_decay, key_mask)
            assert decay is not None
            seen, count = decayed_sums(keys.plain, decay.to(dtype)), torch.ones_like(count)
        forms = []
        for queries in query_features(mapped, q[:, :asked], rotary[0], dtype, like=keys.plain):
            log_scale = seen.new_zeros(())
            for part in (queries.log_scale, scale):
                log_scale = log_scale if part is None else log_scale + part[..., 0]
            denominators = (queries.plain * seen).sum(-1) + eps * count[..., None] * torch.exp(-log_scale)  # [B, N, H]
            divided = queries.rotated / torch.where(denominators == 0, 1.0, denominators)[..., None]
            logs = denominators.log() + log_scale
            forms.append(LinearForm(divided.transpose(1, 2), keys.rotated.transpose(1, 2), logs.transpose(1, 2)))
        return forms


def received_attention(
    q: Tensor,
    k: Tensor,
    *,
    feature_map: FeatureMapLike | None,
    key_weight: Tensor | None = None,
    prefix: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Return the mean weight that each key gets: [B, M], mean over the heads and queries, 1 / M if all are attended alike.

    prefix: use only that many queries from the front, such as a class token; 0 uses all. Linear attention: sum_i w_ij =
    phi(k_j) . sum_i phi(q_i) / d_i, in time linear in the number of tokens. Without a map it is softmax attention, for some
    queries at a time. Rotary positions are ignored, and so is a contrast, which only stresses these weights.
    """
    asked = prefix or q.shape[1]
    if feature_map is None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        parts = [
            torch.einsum("bihd,bjhd->bhij", scale * part, k).softmax(-1).sum((1, 2))
            for part in q[:, :asked].split(CHUNK, dim=1)
        ]
        total = sum(parts[1:], parts[0])
    else:
        forms = linear_forms(q, k, feature_map=feature_map, key_weight=key_weight, asked=asked)
        sums = [torch.einsum("bhf,bhjf->bj", form.queries.sum(2), form.keys) for form in forms]
        total = sum(sums[1:], sums[0]) / len(sums)
    return total / (asked * q.shape[2])
