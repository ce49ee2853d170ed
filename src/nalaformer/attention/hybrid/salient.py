"""The store of salient tokens: who enters when a chunk leaves the window, who is seen when, who has to go."""

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout
from .selection import Selection, for_heads, rank_descending
from .settings import HybridSettings
from .state import HybridState


class Store(NamedTuple):
    """Salient tokens before the call and those that enter in it, with what is seen by which group of queries.

    keys, values: [B, S, E, *]; scores: [B, S, E], -inf where there is no token; is_salient, is_evicted: [B, S, R, E];
    is_left_out: [B, m, l, S], tokens of leaving chunks that did not enter.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    is_salient: Tensor
    is_evicted: Tensor | None
    is_left_out: Tensor


def updated_store(
    state: HybridState, layout: Layout, keys: Tensor, values: Tensor, scores: Tensor, rule: Selection, settings: HybridSettings
) -> Store:
    """Choose salient_per_chunk tokens of every chunk that leaves. keys, values: [B, slots, K, *]; scores: [B, slots, heads]."""
    batch, heads = state.salient_keys.shape[:2]
    size, chosen = settings.chunk_size, settings.salient_per_chunk
    leaving = layout.leaving if chosen else 0
    if not layout.leaving:
        # most steps of decoding: nobody comes, nobody goes
        is_here = (state.salient_scores > -torch.inf)[:, :, None].expand(-1, -1, layout.groups, -1)
        nobody = is_here.new_zeros(batch, 0, size, heads)
        return Store(state.salient_keys, state.salient_values, state.salient_scores, is_here, None, nobody)
    born = torch.zeros(state.salient_keys.shape[2], dtype=torch.int64, device=keys.device)
    store_keys, store_values, store_scores = state.salient_keys, state.salient_values, state.salient_scores
    left_out = layout.leaves[:, :, None, None].expand(batch, -1, size, heads)
    if leaving:
        tokens = slice(0, leaving * size)
        finished = rule.finish(scores[:, tokens].unflatten(1, (leaving, size)))
        compared = rule.comparable(for_heads(finished, heads))
        if settings.keep_first:
            first = (layout.positions[:, tokens] == 0).view(-1, leaving, size, 1)
            compared = compared.masked_fill(first, torch.inf)
        compared = compared.permute(0, 3, 1, 2)  # [B, S, m, l]
        index = rank_descending(compared)[..., :chosen]
        entering = compared.gather(-1, index).masked_fill(~layout.leaves[:, None, :, None], -torch.inf)
        left_out = left_out & ~torch.zeros_like(compared, dtype=torch.bool).scatter(-1, index, True).permute(0, 2, 3, 1)
        slot = (index + size * torch.arange(leaving, device=keys.device)[:, None]).flatten(2)  # [B, S, m * chosen]
        store_keys = torch.cat((store_keys, _gathered(keys[:, tokens], slot)), dim=2)
        store_values = torch.cat((store_values, _gathered(values[:, tokens], slot)), dim=2)
        store_scores = torch.cat((store_scores, entering.flatten(2)), dim=2)
        # seen from the second chunk after its own on; group r holds the queries of chunk r + 1
        born = torch.cat((born, (torch.arange(leaving, device=keys.device) + 1).repeat_interleave(chosen)))
    groups = torch.arange(layout.groups, device=keys.device)
    is_here = (born <= groups[:, None]) & (store_scores > -torch.inf)[:, :, None]  # [B, S, R, E]
    most = settings.largest_store
    if most is None or store_scores.shape[2] <= most:
        return Store(store_keys, store_values, store_scores, is_here, None, left_out)
    # how many of those that are here are better: the first `most` stay, as if chunks had come one by one
    better = _is_better(store_scores).to(torch.float32)
    is_kept = torch.einsum("bsef,bsrf->bsre", better, is_here.to(torch.float32)) < most - 0.5
    return Store(store_keys, store_values, store_scores, is_here & is_kept, is_here & ~is_kept, left_out)


def store_after(store: Store, layout: Layout, settings: HybridSettings) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Keys, values and scores that the next call finds, and [B, S, E] bool: which tokens have to go to the linear state."""
    if not layout.leaving:
        return (store.keys, store.values, store.scores), None
    # complete chunks but the one in the window have left; a sample has at most that many tokens here
    chunks = max((length // settings.chunk_size - 1 for length in layout.lengths_after), default=0)
    size = max(0, chunks) * settings.salient_per_chunk
    if settings.largest_store is not None:
        size = min(size, settings.largest_store)
    if store.scores.shape[2] <= size:
        return (store.keys, store.values, store.scores), None
    order = rank_descending(store.scores)
    index, rest = order[..., :size], order[..., size:]
    is_gone = torch.zeros_like(store.scores, dtype=torch.bool).scatter(-1, rest, True) & (store.scores > -torch.inf)

    def kept(x: Tensor) -> Tensor:
        return x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))

    after = kept(store.keys), kept(store.values), store.scores.gather(-1, index)
    return after, is_gone if settings.largest_store is not None else None


def _is_better(scores: Tensor) -> Tensor:
    """[..., E] -> [..., E, E]: whether f comes before e; of equals the older does."""
    mine, other = scores[..., :, None], scores[..., None, :]
    place = torch.arange(scores.shape[-1], device=scores.device)
    return (other > mine) | ((other == mine) & (place < place[:, None]))


def _gathered(x: Tensor, slot: Tensor) -> Tensor:
    """x [B, A, K, D], slot [B, S, E] -> [B, S, E, D], S a multiple of K."""
    heads = slot.shape[1]
    x = x.repeat_interleave(heads // x.shape[2], dim=2) if heads != x.shape[2] else x
    return x.transpose(1, 2).gather(2, slot[..., None].expand(*slot.shape, x.shape[-1]))
