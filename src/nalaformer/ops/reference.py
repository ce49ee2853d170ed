"""Define linear attention, written as the formula reads.

    out_i = rot(phi_q(q_i)) . sum_j rot(phi_k(k_j)) v_j^T  /  ( phi_q(q_i) . sum_j phi_k(k_j)  +  eps * n )

n = number of keys that token i sees. Weights of keys multiply their features, keys may decay (decay.py; then eps stands
alone), and a contrast (contrast.py) may follow. Tests judge every other backend against this one in float64. The causal form
computes the whole matrix of weights, which is quadratic, and clear.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .contrast import Contrast, add_contrast, mean_score
from .features import (
    FeatureMapLike,
    compute_dtype,
    hide,
    key_features,
    key_log_scale,
    normalise,
    query_features,
    repeat_heads,
    weighted_values,
    without_infinity,
)
from .rotary import Rotary
from .state import LinearState


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    causal: bool,
    rotary: tuple[Rotary | None, Rotary | None],
    key_mask: Tensor | None,
    eps: float,
    contrast: Contrast | None = None,
    key_weight: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """Compute q [B, N, H, D], k [B, M, K, D], v [B, M, K, V] with K dividing H -> [B, N, H, V] in the compute dtype."""
    if causal:
        weights = attention_weights(
            *(q, k),
            feature_map=feature_map,
            causal=True,
            rotary=rotary,
            key_mask=key_mask,
            eps=eps,
            rows=None,
            contrast=contrast,
            key_weight=key_weight,
            log_decay=log_decay,
        )
        values = repeat_heads(q, hide(v, key_mask).to(weights[0].dtype))
        lower = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
        outputs = [
            weighted_values(w[:, :, None], x, lower)[..., 0, :]
            for w, x in zip(weights, values.chunk(feature_map.streams, dim=-1), strict=True)
        ]
        return torch.cat(outputs, dim=-1)

    dtype = compute_dtype(q, k, v)
    kv_heads = k.shape[2]
    scales = key_log_scale(feature_map, k, key_mask, dtype)
    scale = None if scales is None else scales.amax(dim=1, keepdim=True)  # [B, 1, K, 1]
    keys = key_features(feature_map, k, v, key_mask=key_mask, rotary=rotary[1], log_scale=scale, dtype=dtype, weight=key_weight)
    state = without_infinity(torch.einsum("bjkf,bjkv->bkfv", keys.rotated, keys.values))
    key_sum = keys.plain.sum(dim=1)
    if scale is not None:
        scale = scale.repeat_interleave(q.shape[2] // kv_heads, dim=2)[..., 0]  # [B, 1, H]

    outputs = []
    values_of_stream = state.chunk(feature_map.streams, dim=-1)
    contrasts = [None] * feature_map.streams if contrast is None else contrast.split_streams(feature_map.streams)
    streams = query_features(feature_map, q, rotary[0], dtype, like=keys.plain)
    for queries, stream_state, stream_contrast in zip(streams, values_of_stream, contrasts, strict=True):
        query_scale = None if queries.log_scale is None else queries.log_scale[..., 0]
        grouped_rotated = queries.rotated.unflatten(2, (kv_heads, -1))  # [B, N, K, H/K, F]
        grouped_plain = queries.plain.unflatten(2, (kv_heads, -1))
        numerator = torch.einsum("bikgf,bkfv->bikgv", grouped_rotated, stream_state).flatten(2, 3)
        denominator = torch.einsum("bikgf,bkf->bikg", grouped_plain, key_sum).flatten(2, 3)
        count = keys.visible[:, None, None]
        outputs.append(
            normalise(
                numerator,
                denominator,
                eps=eps,
                count=count,
                query_scale=query_scale,
                key_scale=scale,
                is_rotated=queries.rotated is not queries.plain,
                contrast=stream_contrast,
            )
        )
    return torch.cat(outputs, dim=-1)


def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    state: LinearState | None,
    rotary: tuple[Rotary | None, Rotary | None],
    key_mask: Tensor | None,
    eps: float,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """Compute the causal form as a recurrence, token by token: S += rot(phi_k(k)) v^T, z += phi_k(k), then the formula above.

    With decay, S and z are multiplied by exp(log_decay) first.

    Returns [B, N, H, V] in the type of q, and the state after the last token.
    """
    outputs = []
    for token in range(q.shape[1]):
        now = slice(token, token + 1)
        rotaries = tuple(None if each_rotary is None else each_rotary.tokens(token, token + 1) for each_rotary in rotary)
        mask = None if key_mask is None else key_mask[:, now]
        if state is not None and log_decay is not None:
            keep = log_decay[:, token].to(state.state.dtype).exp()
            state = replace(state, state=state.state * keep[..., None, None], key_sum=state.key_sum * keep[..., None])
        state = update_state(state, k[:, now], v[:, now], feature_map, rotaries[1], mask)
        count = state.count if log_decay is None else torch.ones_like(state.count)
        outputs.append(read_state(replace(state, count=count), q[:, now], feature_map, rotaries[0], eps).to(q.dtype))
    assert state is not None
    return torch.cat(outputs, dim=1), state


def update_state(
    state: LinearState | None,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMapLike,
    rotary: Rotary | None,
    key_mask: Tensor | None,
) -> LinearState:
    """Return the state after one more token."""
    dtype = compute_dtype(k, v)
    scales = key_log_scale(feature_map, k, key_mask, dtype)  # [B, 1, K, 1]
    old = torch.zeros_like(k[:, 0, :, 0], dtype=dtype) if state is None else state.log_scale
    new = old if scales is None else torch.maximum(old, scales[:, 0, :, 0])
    keys = key_features(feature_map, k, v, key_mask=key_mask, rotary=rotary, log_scale=new[:, None, :, None], dtype=dtype)
    features, plain, values = keys.rotated[:, 0], keys.plain[:, 0], keys.values[:, 0]  # [B, K, F] and [B, K, V]
    token = LinearState(without_infinity(features[..., None] * values[..., None, :]), plain, keys.visible, new)
    if state is None:
        return token
    shrink = (old - new).exp()[..., None]
    return LinearState(
        state.state * shrink[..., None] + token.state, state.key_sum * shrink + plain, state.count + keys.visible, new
    )


def read_state(state: LinearState, q: Tensor, feature_map: FeatureMapLike, rotary: Rotary | None, eps: float) -> Tensor:
    """Return the output [B, 1, H, V] of one query [B, 1, H, D] that reads the state."""
    group = q.shape[2] // state.state.shape[1]
    sums, key_sum, scale = (x.repeat_interleave(group, dim=1) for x in (state.state, state.key_sum, state.log_scale))
    outputs = []
    streams = query_features(feature_map, q, rotary, compute_dtype(q, state.state), like=state.key_sum)
    for queries, values in zip(streams, sums.chunk(feature_map.streams, dim=-1), strict=True):
        out = normalise(
            torch.einsum("bhf,bhfv->bhv", queries.rotated[:, 0], values),
            torch.einsum("bhf,bhf->bh", queries.plain[:, 0], key_sum),
            eps=eps,
            count=state.count[:, None],
            query_scale=None if queries.log_scale is None else queries.log_scale[:, 0, :, 0],
            key_scale=scale,
            is_rotated=queries.rotated is not queries.plain,
        )
        outputs.append(out[:, None])
    return torch.cat(outputs, dim=-1)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    feature_map: FeatureMapLike,
    causal: bool,
    rotary: tuple[Rotary | None, Rotary | None],
    key_mask: Tensor | None,
    eps: float,
    rows: Tensor | None,
    contrast: Contrast | None = None,
    key_weight: Tensor | None = None,
    block: int = 1,
    log_decay: Tensor | None = None,
) -> list[Tensor]:
    """Return the weights that the formula gives to each value, one [B, H, R, M] per stream; rows = None means all.

    block: if causal, each row sees the keys up to the end of its own block of that many tokens.
    A contrast moves them away from equal ones: w_ij + z_i (w_ij - 1/n).
    """
    dtype = compute_dtype(q, k)
    group = q.shape[2] // k.shape[2]
    positions = torch.arange(q.shape[1], device=q.device) if rows is None else rows
    rotary_q = rotary[0]
    if rows is not None:
        q = q.index_select(1, rows)
        rotary_q = None if rotary_q is None else rotary_q.select(rows)

    scales = key_log_scale(feature_map, k, key_mask, dtype)
    keys = key_features(
        feature_map, k, k, key_mask=key_mask, rotary=rotary[1], log_scale=scales, dtype=dtype, weight=key_weight
    )
    visible = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    visible = visible[:, None, None, :]  # [B, 1, 1, M]
    # the last key that each row sees, if causal
    last = last_of_block(positions, block, k.shape[1])
    if causal:
        visible = visible & (torch.arange(k.shape[1], device=k.device) <= last[:, None])
    count = visible.sum(-1)  # [B, 1, R or 1]
    # the decay factor of each key for each row
    decay_factor: Tensor = visible
    if log_decay is not None:
        decay_sum = log_decay.to(dtype).cumsum(1).transpose(1, 2).repeat_interleave(group, dim=1)  # [B, H, M]
        passed = decay_sum.index_select(2, positions)[..., None] - decay_sum[:, :, None, :]
        decay_factor = torch.where(visible, torch.where(visible, passed, 0.0).exp(), 0.0)
        count = torch.ones_like(count)

    key_scale = shrink = None
    if scales is not None:
        token_scale = scales[..., 0].repeat_interleave(group, dim=2).transpose(1, 2)  # [B, H, M]
        if causal:
            # each row is scaled by the keys that it sees, so that a huge later key cannot cost an earlier row its digits
            key_scale = token_scale.cummax(dim=-1).values.index_select(-1, last)
        else:
            key_scale = token_scale.amax(dim=-1, keepdim=True)
        shrink = (token_scale[:, :, None, :] - key_scale[..., None]).clamp(max=0).exp()

    weights = []
    for queries in query_features(feature_map, q, rotary_q, dtype, like=keys.plain):
        rotated, plain = (
            torch.einsum("bihf,bjhf->bhij", x, y.repeat_interleave(group, dim=2))
            for x, y in ((queries.rotated, keys.rotated), (queries.plain, keys.plain))
        )
        if shrink is not None:
            rotated, plain = rotated * shrink, plain * shrink
        zero = torch.zeros((), dtype=dtype, device=q.device)
        rotated, plain = torch.where(visible, rotated, zero), torch.where(visible, plain, zero)
        if log_decay is not None:
            rotated, plain = rotated * decay_factor, plain * decay_factor
        query_scale = None if queries.log_scale is None else queries.log_scale[..., 0].transpose(1, 2)  # [B, H, R]
        found = normalise(
            rotated,
            plain.sum(-1),
            eps=eps,
            count=count,
            query_scale=query_scale,
            key_scale=key_scale,
            is_rotated=queries.rotated is not queries.plain,
        )
        if contrast is not None:
            scales_of_rows = [x for x in (query_scale, key_scale) if x is not None]
            if contrast.contrast_scale is None:
                contrast_scale = mean_score(plain.sum(-1), head_dim=contrast.head_dim, count=count, scales=scales_of_rows)
            else:
                contrast_scale = contrast.contrast_scale.index_select(1, positions).transpose(1, 2)
            total = decay_factor.sum(-1, keepdim=True)
            found = add_contrast(found, decay_factor.to(dtype) / torch.where(total == 0, 1, total), contrast_scale)
        weights.append(found)
    return weights


def last_of_block(positions: Tensor, block: int, num_tokens: int) -> Tensor:
    """Return the last token of the block of each position, for blocks of `block` tokens; the last block may be shorter."""
    return ((positions // block + 1) * block - 1).clamp(max=num_tokens - 1)
