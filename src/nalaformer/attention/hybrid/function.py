"""Hybrid attention as a function, for training and prompts; stepping.py decodes single tokens in place.

A call of any length is split into segments of some chunks, each computed at once from the state before it. No tensor has
tokens x tokens elements, salient keys are never copied per chunk, and the workspace of a segment is bounded.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...feature_maps import FeatureMap
from ...ops import LinearState, compute_dtype, recurrent_linear_attention
from ...ops.features import outside_autocast
from . import branches, every_token, fused
from .checks import check_inputs
from .layout import Layout, cached_layout
from .salient import leaving_tokens, repeated_for, store_after, updated_store
from .selection import Selection
from .settings import HybridSettings
from .state import HybridState

# limits of a segment: chunks, elements per head, and elements over all heads and samples
MOST_CHUNKS, HEAD_WORKSPACE, WORKSPACE = 32, 2**20, 2**26
# limit of a segment on the kernels: elements over all heads and samples
FUSED_WORKSPACE = 2**28


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap,
    settings: HybridSettings,
    gate: Tensor | None = None,
    scores: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute causal attention of whole sequences: exact for near and salient tokens, linear for the rest.

    q: [B, N, H, D]; k: [B, N, K, D]; v: [B, N, K, V], H a multiple of K, rotary applied -> [B, N, H, V] in the dtype of q.
    gate: [B, N, H, V or 1], factor of the linear branch; scores: [B, N, K or H] for rules that take them;
    key_mask: [B, N] bool, True = a real token; scale of the exact scores, D^-0.5 by default.
    """
    return recurrent_hybrid_attention(
        q, k, v, feature_map=feature_map, settings=settings, gate=gate, scores=scores, key_mask=key_mask, scale=scale
    )[0]


def recurrent_hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap,
    settings: HybridSettings,
    state: HybridState | None = None,
    gate: Tensor | None = None,
    scores: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, HybridState]:
    """Attend from the tokens that follow `state`; return outputs and the next state, whatever the lengths of the calls."""
    check_inputs(q, k, v, feature_map=feature_map, settings=settings, gate=gate, scores=scores, key_mask=key_mask)
    if state is None:
        state = empty_state(q, k, v, feature_map=feature_map, settings=settings)
    if len(state.lengths) != len(q):
        raise ValueError(f"the state is of {len(state.lengths)} samples, got {len(q)}; both must come from the same batch")
    if settings.largest_store is not None and state.capacity > settings.largest_store:
        raise ValueError(
            f"the state has room for {state.capacity} salient tokens of a head, more than max_salient "
            f"({settings.largest_store}); continue with the settings that it was made with"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with outside_autocast(q):
        if not settings.exact:
            return _linear_alone(q, k, v, feature_map=feature_map, state=state, gate=gate, key_mask=key_mask)
        outputs = []
        is_fused = fused.serves(q, k, v, state)
        is_plain = every_token.serves(q, k, v, state, settings, key_mask)
        size = q.shape[1] if is_plain else segment_size(q, state, settings, is_fused=is_fused)
        needs_memory = torch.is_grad_enabled() and q.shape[1] > size
        for start in range(0, q.shape[1], size):
            given = (None if x is None else x[:, start : start + size] for x in (q, k, v, gate, scores, key_mask))
            arguments: tuple[Any, ...] = (*given, state, feature_map, settings, scale, is_fused)
            # the backward pass keeps only the states between segments
            out, state = (
                checkpoint(_attend_segment, *arguments, use_reentrant=False) if needs_memory else _attend_segment(*arguments)
            )
            outputs.append(out)
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], state


def empty_state(q: Tensor, k: Tensor, v: Tensor, *, feature_map: FeatureMap, settings: HybridSettings) -> HybridState:
    """Return the state before the first token, for inputs with these shapes."""
    batch, _, heads, head_dim = q.shape
    key_heads, values, dtype = k.shape[2], v.shape[-1], compute_dtype(q, k, v)
    window = 2 * settings.chunk_size if settings.exact else 0
    store_heads = heads if settings.stores_per_query_head else key_heads
    score_heads = heads if settings.rule.of_query_heads else key_heads
    features = 0
    if settings.linear:
        with torch.no_grad():
            features = feature_map.query(q.new_zeros(1, 1, heads, head_dim, dtype=dtype)).shape[-1]
    return HybridState(
        keys=k.new_zeros(batch, store_heads, window, head_dim),
        values=v.new_zeros(batch, store_heads, window, values),
        scores=k.new_zeros(batch, window if settings.keeps_scores else 0, score_heads, dtype=torch.float32),
        salient_scores=k.new_zeros(batch, store_heads, 0, dtype=torch.float32),
        linear=LinearState.empty(batch, heads, features, values, dtype=dtype, device=q.device),
        is_poisoned=torch.zeros(batch, dtype=torch.bool, device=q.device),
        key_heads=key_heads,
        lengths=(0,) * batch,
    )


def segment_size(q: Tensor, state: HybridState, settings: HybridSettings, *, is_fused: bool) -> int:
    """Return how many tokens are computed at once: whole chunks, as many as the workspace allows."""
    chunk, tokens = settings.chunk_size, q.shape[1]
    heads = max(1, q.shape[0] * q.shape[2])
    features, values = state.linear.state.shape[-2:]
    if is_fused:
        # memory for features of queries and keys and the sums of both branches; none of it grows with the salient tokens
        most = FUSED_WORKSPACE // (heads * chunk * (4 * features + 3 * values))
        segments = -(-tokens // (chunk * max(1, most)))
        # equal segments, since a short last one would leave most of a GPU idle
        return chunk * max(1, -(-tokens // (chunk * segments)))
    longest = max(state.lengths, default=0) + tokens
    salient = settings.salient_per_chunk * (longest // chunk)
    if settings.largest_store is not None:
        salient = min(salient, settings.largest_store + MOST_CHUNKS * settings.salient_per_chunk)
    per_chunk = max(chunk * (2 * chunk + salient), features * values)
    return chunk * max(1, min(MOST_CHUNKS, HEAD_WORKSPACE // per_chunk, WORKSPACE // (per_chunk * heads)))


def _attend_segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    scores: Tensor | None,
    key_mask: Tensor | None,
    state: HybridState,
    feature_map: FeatureMap,
    settings: HybridSettings,
    scale: float,
    is_fused: bool,
) -> tuple[Tensor, HybridState]:
    """Return outputs [B, N, H, V] of one segment in the dtype of q, and the state after it.

    Non-finite tokens reach only later tokens, and padding is zero.
    """
    k, v, is_poisoned = _without_poison(k, v, key_mask, state)
    if every_token.serves(q, k, v, state, settings, key_mask):
        out, after = every_token.attend(q, k, v, state, settings, scale)
        out = out.masked_fill(is_poisoned[:, :, None, None], math.nan)
        return out, replace(after, is_poisoned=is_poisoned[:, -1].clone())
    size = settings.chunk_size
    if key_mask is None:
        layout = cached_layout(size, q.shape[1], state.lengths, device=q.device)
    else:
        layout = Layout(size, q.shape[1], state.lengths, q.device, key_mask)

    keys, values = layout.align(state.window_keys, k), layout.align(state.window_values, v)
    rows = layout.queries(q)  # [B, R, T, H, D]
    with torch.no_grad():
        score_slots = _scores(state, layout, keys, scores, rows, settings, scale)
    store = updated_store(state, layout, keys, values, score_slots, settings)
    gates, leaving = None if gate is None else layout.queries(gate), leaving_tokens(store, layout, keys, values)
    segment = branches.Segment(rows, keys, values, gates, layout, store, leaving, state.linear)
    attend = fused.attend if is_fused else branches.attend
    out, state_after, key_sum_after = attend(segment, feature_map=feature_map, settings=settings, scale=scale)
    salient_keys, salient_values, salient_scores = store_after(store, layout, settings)
    count = state.linear.count + (q.shape[1] if key_mask is None else key_mask.sum(1))
    after = HybridState(
        keys=_beside(layout.window_after(keys), salient_keys),
        values=_beside(layout.window_after(values), salient_values),
        scores=layout.window_after(score_slots) if settings.keeps_scores else state.scores,
        salient_scores=salient_scores,
        linear=LinearState(state_after, key_sum_after, count, state.linear.log_scale),
        is_poisoned=is_poisoned[:, -1].clone(),
        key_heads=keys.shape[2],
        lengths=layout.lengths_after,
    )
    out = layout.collect(out).masked_fill(is_poisoned[:, :, None, None], math.nan)
    if key_mask is not None:
        out = torch.where(key_mask[:, :, None, None], out, 0)
    return out.to(q.dtype), after


def _beside(near: Tensor, salient: Tensor) -> Tensor:
    """Join the window [B, 2l, K, D] and the store [B, S, E, D]: [B, S, 2l + E, D]."""
    return torch.cat((repeated_for(near, salient.shape[1]).transpose(1, 2), salient), dim=2).contiguous()


def _scores(
    state: HybridState, layout: Layout, keys: Tensor, given: Tensor | None, rows: Tensor, settings: HybridSettings, scale: float
) -> Tensor:
    """Return the current score of every token, [B, slots, heads]."""
    rule, size = settings.rule, layout.chunk_size
    if not settings.salient_per_chunk:
        return state.scores
    if rule.needs_scores:
        assert given is not None
        return layout.align(state.scores, given.float())
    if not rule.needs_window:
        # these scores depend on the token alone and can be computed lazily
        return rule.of_tokens(keys, layout.positions) if layout.leaving else state.scores
    batch, _, heads = state.scores.shape
    scores = layout.align(state.scores, state.scores.new_zeros(batch, layout.tokens, heads))
    own, received = _scores_in_window(rows, keys, layout, rule, scale, state.linear.state.dtype)
    if own is not None:
        scores[:, size:] += layout.place(layout.collect(own.permute(0, 2, 3, 1).float()))
    if received is not None:
        received = received.permute(0, 2, 3, 1).float()  # [B, R, W, H]
        for half in range(2):
            part = received[:, :, half * size : (half + 1) * size].flatten(1, 2)
            scores[:, half * size : half * size + part.shape[1]] += part
    return scores


def _scores_in_window(
    rows: Tensor, keys: Tensor, layout: Layout, rule: Selection, scale: float, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Compute Selection.in_window for some groups at a time, so that the logits of all groups never exist at once."""
    windows = branches.windows(keys, layout, dtype)
    numbers = rows.shape[0] * rows.shape[2] * rows.shape[3] * 2 * layout.chunk_size
    some = max(1, WORKSPACE // max(1, numbers))
    found = []
    for first in range(0, layout.groups, some):
        groups = slice(first, first + some)
        queries = branches.by_key_head(rows[:, groups].to(dtype) * scale, keys.shape[2])
        logits = branches.window_logits(queries, windows[:, :, groups]).flatten(1, 2)  # [B, H, R, T, W]
        visible = layout.visible[:, groups] & layout.is_query[:, groups]
        found.append(rule.in_window(logits, visible, layout.is_self[:, groups], layout.is_near[:, groups]))
    own, received = (None if parts[0] is None else torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
    return own, received


def _linear_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap,
    state: HybridState,
    gate: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, HybridState]:
    # the state has one part per query head, whether or not the map differs between heads that share keys
    k, v = (repeated_for(x, q.shape[2]) for x in (k, v))
    out, linear = recurrent_linear_attention(q, k, v, feature_map=feature_map, state=state.linear, key_mask=key_mask)
    counts = (q.shape[1],) * len(q) if key_mask is None else key_mask.sum(1).tolist()
    lengths = tuple(length + count for length, count in zip(state.lengths, counts, strict=True))
    if gate is not None:
        out = out * gate.to(out.dtype)
    if key_mask is not None:
        out = torch.where(key_mask[:, :, None, None], out, 0)
    return out, replace(state, linear=linear, lengths=lengths)


def _without_poison(k: Tensor, v: Tensor, key_mask: Tensor | None, state: HybridState) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values with non-finite tokens zeroed, and [B, N] bool: True from the first non-finite token on.

    Zero times NaN is NaN, so such a token would reach rows of its chunk that do not see it.
    """
    is_bad = ~(k.isfinite().flatten(2).all(-1) & v.isfinite().flatten(2).all(-1))
    hidden = is_bad if key_mask is None else is_bad | ~key_mask
    k, v = (torch.where(hidden[:, :, None, None], 0, x) for x in (k, v))
    if key_mask is not None:
        is_bad = is_bad & key_mask
    return k, v, (is_bad.cumsum(1) > 0) | state.is_poisoned[:, None]
