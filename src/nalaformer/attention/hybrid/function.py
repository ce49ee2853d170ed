"""Hybrid attention as a function: one implementation for training, prompts and decoding.

A call of any length is cut into pieces of some chunks; each piece is computed at once from the state before it. Nothing of size
tokens x tokens exists, salient keys are never copied for each chunk, and the workspace of a piece is bounded.
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
from .branches import ChunkSums, Linear, chunk_sums, exact_branch, linear_branch, merge, pairs_branch, window_logits
from .checks import check_inputs
from .layout import Layout, layout_without_mask
from .salient import store_after, updated_store
from .selection import SELECTIONS, Selection
from .settings import HybridSettings
from .state import HybridState

EPS = 1e-6
# of one piece: chunks, numbers per head, and numbers over all heads and samples
MOST_CHUNKS, HEAD_WORKSPACE, WORKSPACE = 32, 2**20, 2**26


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
    """Causal attention, exact for the near and the salient and linear for the rest, over whole sequences.

    q: [B, N, H, D]; k: [B, N, K, D]; v: [B, N, K, V], H a multiple of K, rotary applied -> [B, N, H, V] in the dtype of q.
    gate: [B, N, H, V or 1], factor of the linear branch; scores: [B, N, K or H] for rules that are told them;
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
    """The same for the tokens that follow `state`, and the state after them; pieces of any sizes give the same outputs."""
    check_inputs(q, k, v, feature_map=feature_map, settings=settings, gate=gate, scores=scores, key_mask=key_mask)
    if state is None:
        state = empty_state(q, k, v, feature_map=feature_map, settings=settings)
    if len(state.lengths) != len(q):
        raise ValueError(f"the state is of {len(state.lengths)} samples, got {len(q)}; both must come from the same batch")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with outside_autocast(q):
        if not settings.exact:
            return _linear_alone(q, k, v, feature_map=feature_map, state=state, gate=gate, key_mask=key_mask)
        rule = SELECTIONS[settings.selection]()
        outputs = []
        size = piece_size(q, v, state, feature_map, settings)
        needs_memory = torch.is_grad_enabled() and q.shape[1] > size
        for start in range(0, q.shape[1], size):
            given = (None if x is None else x[:, start : start + size] for x in (q, k, v, gate, scores, key_mask))
            arguments: tuple[Any, ...] = (*given, state, feature_map, rule, settings, scale)
            # between pieces only states are kept for the backward pass
            out, state = checkpoint(_piece, *arguments, use_reentrant=False) if needs_memory else _piece(*arguments)
            outputs.append(out)
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0], state


def empty_state(q: Tensor, k: Tensor, v: Tensor, *, feature_map: FeatureMap, settings: HybridSettings) -> HybridState:
    """The state before the first token, for inputs like these."""
    batch, _, heads, head_dim = q.shape
    key_heads, values, dtype = k.shape[2], v.shape[-1], compute_dtype(q, k, v)
    window = 2 * settings.chunk_size if settings.exact else 0
    store_heads = heads if settings.select_per == "query_head" else key_heads
    score_heads = heads if SELECTIONS[settings.selection].of_query_heads else key_heads
    with torch.no_grad():
        features = feature_map.query(q.new_zeros(1, 1, heads, head_dim, dtype=dtype)).shape[-1]
    return HybridState(
        keys=k.new_zeros(batch, window, key_heads, head_dim),
        values=v.new_zeros(batch, window, key_heads, values),
        scores=k.new_zeros(batch, window if keeps_scores(settings) else 0, score_heads, dtype=torch.float32),
        salient_keys=k.new_zeros(batch, store_heads, 0, head_dim),
        salient_values=v.new_zeros(batch, store_heads, 0, values),
        salient_scores=k.new_zeros(batch, store_heads, 0, dtype=torch.float32),
        linear=LinearState.empty(batch, heads, features, values, dtype=dtype, device=q.device),
        is_poisoned=torch.zeros(batch, dtype=torch.bool, device=q.device),
        lengths=(0,) * batch,
    )


def keeps_scores(settings: HybridSettings) -> bool:
    """Whether the scores of tokens in the window are part of the state: those that cannot be had from the token alone."""
    rule = SELECTIONS[settings.selection]
    return settings.exact and settings.salient_per_chunk > 0 and (rule.needs_window or rule.needs_scores)


def piece_size(q: Tensor, v: Tensor, state: HybridState, feature_map: FeatureMap, settings: HybridSettings) -> int:
    """Tokens that are computed at once: whole chunks, as many as the workspace allows."""
    chunk, tokens = settings.chunk_size, q.shape[1]
    longest = max(state.lengths, default=0) + tokens
    salient = settings.salient_per_chunk * (longest // chunk)
    if settings.largest_store is not None:
        salient = min(salient, settings.largest_store + MOST_CHUNKS * settings.salient_per_chunk)
    per_chunk = max(chunk * (2 * chunk + salient), state.linear.state[0, 0].numel() if len(q) else 1)
    heads = max(1, q.shape[0] * q.shape[2])
    return chunk * max(1, min(MOST_CHUNKS, HEAD_WORKSPACE // per_chunk, WORKSPACE // (per_chunk * heads)))


def _piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    scores: Tensor | None,
    key_mask: Tensor | None,
    state: HybridState,
    *context: Any,
) -> tuple[Tensor, HybridState]:
    """One piece in the dtype of q: what is bad in it reaches later tokens alone, and padding is zero."""
    k, v, is_poisoned = _without_poison(k, v, key_mask, state)
    out, after = _advance(q, k, v, gate, scores, key_mask, state, *context)
    out = out.masked_fill(is_poisoned[:, :, None, None], math.nan)
    if key_mask is not None:
        out = torch.where(key_mask[:, :, None, None], out, 0)
    return out.to(q.dtype), replace(after, is_poisoned=is_poisoned[:, -1])


def _advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    scores: Tensor | None,
    key_mask: Tensor | None,
    state: HybridState,
    feature_map: FeatureMap,
    rule: Selection,
    settings: HybridSettings,
    scale: float,
) -> tuple[Tensor, HybridState]:
    """One piece: outputs [B, N, H, V] in the computing dtype, and the state after it."""
    dtype = compute_dtype(q, k, v)
    size, key_heads = settings.chunk_size, k.shape[2]
    if key_mask is None:
        layout = layout_without_mask(size, q.shape[1], state.lengths, q.device, torch.is_inference_mode_enabled())
    else:
        layout = Layout(size, q.shape[1], state.lengths, q.device, key_mask)

    keys, values = layout.align(state.keys, k), layout.align(state.values, v)
    rows = layout.queries(q).to(dtype)  # [B, R, T, H, D]
    queries = (rows * scale).permute(0, 3, 1, 2, 4).unflatten(1, (key_heads, -1))
    windows = keys.to(dtype).unfold(1, 2 * size, size).permute(0, 2, 1, 4, 3)  # [B, K, R, W, D]
    window_values = values.to(dtype).unfold(1, 2 * size, size).permute(0, 2, 1, 4, 3)

    with torch.no_grad():
        score_slots = _scores(state, layout, keys, k, scores, queries, windows, rule, settings)
    store = updated_store(state, layout, keys, values, score_slots, rule, settings)
    heads_of_store = (key_heads, -1)
    store_keys, store_values = store.keys.to(dtype), store.values.to(dtype)
    exact = exact_branch(
        queries,
        windows,
        window_values,
        layout.visible,
        store_keys.unflatten(1, heads_of_store),
        store_values.unflatten(1, heads_of_store),
        store.is_salient.unflatten(1, heads_of_store),
    )
    (salient_keys, salient_values, salient_scores), is_gone = store_after(store, layout, settings)
    linear, linear_state = None, state.linear
    if settings.linear:
        query_features = feature_map.query(rows.flatten(1, 2)).unflatten(1, rows.shape[1:3]).permute(0, 3, 1, 2, 4)
        heads = query_features.shape[1]
        sums = _sums(state.linear, layout, keys, values, store.is_left_out, feature_map, dtype)
        linear = linear_branch(query_features, sums.state, sums.key_sum)
        state_after, key_sum_after = sums.state_after, sums.key_sum_after
        if store.is_evicted is not None and is_gone is not None:
            group = heads // store.keys.shape[1]
            evicted_keys, evicted_values = (x.repeat_interleave(group, dim=1) for x in (store_keys, store_values))
            evicted_features = feature_map.key(evicted_keys.transpose(1, 2)).transpose(1, 2)
            is_evicted = store.is_evicted.repeat_interleave(group, dim=1)
            late = pairs_branch(query_features, evicted_features, evicted_values, is_evicted)
            linear = Linear(linear.weighted + late.weighted, linear.total + late.total)
            gone = evicted_features.masked_fill(~is_gone.repeat_interleave(group, dim=1)[..., None], 0)
            state_after = state_after + gone.transpose(-1, -2) @ evicted_values
            key_sum_after = key_sum_after + gone.sum(2)
        linear_state = LinearState(state_after, key_sum_after, layout.count_after, state.linear.log_scale)

    gates = None
    if gate is not None:
        gates = layout.queries(gate).to(dtype).permute(0, 3, 1, 2, 4).unflatten(1, (key_heads, -1))
    merged = merge(exact, linear, gates, kind=settings.merge, eps=EPS)
    after = HybridState(
        keys=layout.window_after(keys),
        values=layout.window_after(values),
        scores=layout.window_after(score_slots) if keeps_scores(settings) else state.scores,
        salient_keys=salient_keys,
        salient_values=salient_values,
        salient_scores=salient_scores,
        linear=linear_state,
        is_poisoned=state.is_poisoned,
        lengths=layout.lengths_after,
    )
    return layout.collect(merged.flatten(1, 2).permute(0, 2, 3, 1, 4)), after


def _sums(
    before: LinearState,
    layout: Layout,
    keys: Tensor,
    values: Tensor,
    is_left_out: Tensor,
    feature_map: FeatureMap,
    dtype: torch.dtype,
) -> ChunkSums:
    """The linear sums before each group of queries, and after the chunks that leave the window."""
    if not layout.leaving:
        state, key_sum = before.state[:, :, None], before.key_sum[:, :, None]
        groups = (-1, -1, layout.groups)
        return ChunkSums(state.expand(*groups, -1, -1), key_sum.expand(*groups, -1), before.state, before.key_sum)
    heads, chunks = before.state.shape[1], (layout.leaving, layout.chunk_size)
    leaving = slice(0, layout.leaving * layout.chunk_size)
    features = feature_map.key(_for_heads(keys[:, leaving].to(dtype), heads))
    features = features.masked_fill(~_for_heads(is_left_out.flatten(1, 2), heads)[..., None], 0)
    old_values = _for_heads(values[:, leaving].to(dtype), heads)
    return chunk_sums(
        before.state,
        before.key_sum,
        features.transpose(1, 2).unflatten(2, chunks),
        old_values.transpose(1, 2).unflatten(2, chunks),
        groups=layout.groups,
    )


def _scores(
    state: HybridState,
    layout: Layout,
    keys: Tensor,
    new_keys: Tensor,
    given: Tensor | None,
    queries: Tensor,
    windows: Tensor,
    rule: Selection,
    settings: HybridSettings,
) -> Tensor:
    """[B, slots, heads]: what the rule knows of every token by now."""
    size = layout.chunk_size
    if not settings.salient_per_chunk:
        return state.scores
    if rule.needs_scores:
        assert given is not None
        return layout.align(state.scores, given.float())
    if not rule.needs_window:
        # known of tokens by themselves, so whenever they are asked for
        return rule.of_tokens(keys, layout.positions) if layout.leaving else state.scores
    heads = state.scores.shape[2]
    scores = layout.align(state.scores, new_keys.new_zeros(*new_keys.shape[:2], heads, dtype=torch.float32))
    logits = window_logits(queries, windows).flatten(1, 2)  # [B, H, R, T, W]
    own, received = rule.in_window(logits, layout.visible & layout.is_query, layout.is_self, layout.is_near)
    if own is not None:
        own = layout.collect(own.permute(0, 2, 3, 1).float())
        scores = scores + _after_previous_chunk(layout.place(own), size)
    if received is not None:
        received = received.permute(0, 2, 3, 1).float()  # [B, R, W, H]
        for half in range(2):
            part = received[:, :, half * size : (half + 1) * size].flatten(1, 2)
            scores[:, half * size : half * size + part.shape[1]] += part
    return scores


def _after_previous_chunk(x: Tensor, slots: int) -> Tensor:
    """Zeros for the slots of the previous chunk, then x."""
    return torch.cat((x.new_zeros(x.shape[0], slots, *x.shape[2:]), x), dim=1)


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, K, ...] -> [B, N, heads, ...]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


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
    out, linear = recurrent_linear_attention(q, k, v, feature_map=feature_map, state=state.linear, key_mask=key_mask)
    counts = (q.shape[1],) * len(q) if key_mask is None else key_mask.sum(1).tolist()
    lengths = tuple(length + count for length, count in zip(state.lengths, counts, strict=True))
    if gate is not None:
        out = out * gate.to(out.dtype)
    if key_mask is not None:
        out = torch.where(key_mask[:, :, None, None], out, 0)
    return out, replace(state, linear=linear, lengths=lengths)


def _without_poison(k: Tensor, v: Tensor, key_mask: Tensor | None, state: HybridState) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with bad tokens zeroed, and [B, N]: whether this token or one before it is bad.

    Zero times NaN is NaN: a bad token would reach the rows of its chunk that do not see it. A step has no such rows, and what
    is bad in it goes on by itself.
    """
    if k.shape[1] == 1 and key_mask is None:
        return k, v, state.is_poisoned[:, None]
    is_bad = ~(k.isfinite().flatten(2).all(-1) & v.isfinite().flatten(2).all(-1))
    hidden = is_bad if key_mask is None else is_bad | ~key_mask
    k, v = (torch.where(hidden[:, :, None, None], 0, x) for x in (k, v))
    if key_mask is not None:
        is_bad = is_bad & key_mask
    return k, v, (is_bad.cumsum(1) > 0) | state.is_poisoned[:, None]
