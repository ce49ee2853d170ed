"""Hybrid attention of heads that keep every token: torch's softmax attention with the same state as other heads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import LinearState
from .settings import HybridSettings, salient_tokens
from .state import HybridState

# the number of queries that share one mask
ROWS = 2048


def serves(q: Tensor, k: Tensor, v: Tensor, state: HybridState, settings: HybridSettings, key_mask: Tensor | None) -> bool:
    """True if all samples have the same length and nothing is masked, so that keys can simply be appended."""
    is_uniform = key_mask is None and len(set(state.lengths)) == 1
    return settings.keeps_all and is_uniform and q.dtype == k.dtype == v.dtype == state.keys.dtype


def attend(
    q: Tensor, k: Tensor, v: Tensor, state: HybridState, settings: HybridSettings, scale: float
) -> tuple[Tensor, HybridState]:
    """Return softmax attention [B, N, H, V] over all tokens so far, and the state after them.

    The store holds its tokens in order of arrival, as it does for equal scores.
    """
    before, tokens, size = state.lengths[0], q.shape[1], settings.chunk_size
    keys, values = (
        torch.cat((_in_order(kept, before, size, settings), new.transpose(1, 2)), dim=2)
        for kept, new in ((state.keys, k), (state.values, v))
    )
    out = _softmax(q.transpose(1, 2), keys, values, before, scale).transpose(1, 2)
    after = before + tokens
    stored = salient_tokens(after, settings)
    scores = keys.new_zeros(*keys.shape[:2], stored, dtype=torch.float32)
    if stored and settings.keep_first:
        scores[..., 0] = torch.inf
    linear = LinearState(state.linear.state, state.linear.key_sum, state.linear.count + tokens, state.linear.log_scale)
    return out, HybridState(
        keys=_as_state(keys, after, stored, size),
        values=_as_state(values, after, stored, size),
        scores=state.scores,
        salient_scores=scores,
        linear=linear,
        is_poisoned=state.is_poisoned,
        key_heads=state.key_heads,
        lengths=(after,) * len(state.lengths),
    )


def _softmax(q: Tensor, keys: Tensor, values: Tensor, before: int, scale: float) -> Tensor:
    """Return causal attention of the last tokens, [B, H, N, V], to all keys [B, K, before + N, D]."""
    grouped = q.shape[1] != keys.shape[1]
    if not before:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
    found = []
    for first in range(0, q.shape[2], ROWS):
        some = q[:, :, first : first + ROWS]
        seen = before + first + some.shape[2]
        mask = torch.ones(some.shape[2], seen, dtype=torch.bool, device=q.device).tril(before + first)
        visible = keys[:, :, :seen], values[:, :, :seen]
        found.append(F.scaled_dot_product_attention(some, *visible, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return torch.cat(found, dim=2)


def _in_order(kept: Tensor, length: int, size: int, settings: HybridSettings) -> Tensor:
    """Return the tokens [B, K, length, D] of a state's window and store [B, K, 2l + E, D] from the first to the last."""
    stored = salient_tokens(length, settings)
    first = 0 if length >= size else size
    return torch.cat((kept[:, :, 2 * size : 2 * size + stored], kept[:, :, first : size + length % size]), dim=2)


def _as_state(tokens: Tensor, length: int, stored: int, size: int) -> Tensor:
    """Return window, then store, of all tokens [B, K, length, D]; see HybridState."""
    current = length // size * size
    previous = tokens[:, :, stored:current]
    window = F.pad(tokens[:, :, current:], (0, 0, 0, size - (length - current)))
    if not previous.shape[2]:
        previous = torch.zeros_like(window)
    return torch.cat((previous, window, tokens[:, :, :stored]), dim=2)
