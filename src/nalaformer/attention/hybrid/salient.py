"""The store of salient tokens: which ones enter it when a chunk leaves the window, which groups see them, which are evicted."""

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout
from .selection import for_heads, rank_descending
from .settings import HybridSettings, most_salient
from .state import HybridState

# larger than the number of groups of any call
NEVER = 2**30
# comparisons between tokens at once, over all heads and samples
COMPARISONS = 2**26


class Store(NamedTuple):
    """Salient tokens before the call, and those that enter it, in order of arrival.

    keys, values: [B, S, E, *]; scores: [B, S, E], -inf for empty entries.
    Group r of the queries sees the first `old + r * per_chunk` of them, except for evicted ones: with `until`, [B, S, E],
    groups up to until - 1 see a token, and later the linear state holds it; None: no eviction.
    is_skipped: [B, S, m, l], tokens of leaving chunks that did not enter.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    old: int
    per_chunk: int
    until: Tensor | None
    is_skipped: Tensor

    def seen_until(self) -> Tensor:
        """Return the first group from which a token is masked, [B, S, E]; 0 for empty entries."""
        last = NEVER if self.until is None else self.until
        return torch.where(self.scores > -torch.inf, last, 0)

    def is_salient(self, groups: int) -> Tensor:
        """Return which tokens each group sees, [B, S, R, E]."""
        if not self.per_chunk:
            return (self.scores > -torch.inf)[:, :, None].expand(-1, -1, groups, -1)
        group = torch.arange(groups, device=self.scores.device)[:, None]
        place = torch.arange(self.scores.shape[2], device=self.scores.device)
        return (place < self.old + group * self.per_chunk) & (group < self.seen_until()[:, :, None])

    def departures(self) -> tuple[Tensor, Tensor] | None:
        """Return the evicted entries as each chunk leaves, [B, S, m * per_chunk], and which of them are real.

        A chunk brings per_chunk tokens, so it evicts at most as many.
        """
        if self.until is None:
            return None
        chunks = self.is_skipped.shape[2]
        # a token leaves before group r, so with chunk r - 1; those that stay go to an extra last place that is cut off
        chunk = torch.where((self.until > 0) & (self.until <= chunks), self.until - 1, chunks)
        chunk, order = chunk.sort(dim=-1, stable=True)
        rank = torch.arange(chunk.shape[2], device=chunk.device) - torch.searchsorted(chunk, chunk)
        size = chunks * self.per_chunk
        place = torch.where(chunk < chunks, chunk * self.per_chunk + rank, size)
        empty = order.new_zeros(*order.shape[:2], size + 1)
        return empty.scatter(-1, place, order)[..., :size], empty.bool().scatter(-1, place, True)[..., :size]


class Chosen(NamedTuple):
    """Tokens of m leaving chunks that enter the store, c of each: places in their chunk and scores, [B, S, m, c].

    Scores are -inf where the chunk does not leave. is_skipped: [B, S, m, l], tokens of leaving chunks that do not enter.
    """

    places: Tensor
    scores: Tensor
    is_skipped: Tensor


def choose_salient(scores: Tensor, positions: Tensor, leaves: Tensor, *, heads: int, settings: HybridSettings) -> Chosen:
    """Choose the best salient_per_chunk tokens of each chunk for each of `heads` heads; the older token wins a tie.

    scores: [B, m, l, heads of the rule]; positions: [B or 1, m, l]; leaves: [B or 1, m], True if the chunk leaves the window.
    """
    rule = settings.rule
    compared = rule.comparable(for_heads(rule.finish(scores), heads))
    if settings.keep_first:
        compared = compared.masked_fill((positions == 0)[..., None], torch.inf)
    compared = compared.permute(0, 3, 1, 2)  # [B, S, m, l]
    index = rank_descending(compared)[..., : settings.salient_per_chunk]
    leaves = leaves[:, None, :, None]
    entering = compared.gather(-1, index).masked_fill(~leaves, -torch.inf)
    return Chosen(index, entering, leaves.expand_as(compared).scatter(-1, index, False))


def updated_store(
    state: HybridState, layout: Layout, keys: Tensor, values: Tensor, scores: Tensor, settings: HybridSettings
) -> Store:
    """Choose salient_per_chunk tokens of every leaving chunk. keys, values: [B, slots, K, *]; scores: [B, slots, heads]."""
    batch, heads = state.salient_scores.shape[:2]
    size, chosen, leaving = settings.chunk_size, settings.salient_per_chunk, layout.leaving
    old = min(state.capacity, most_salient(state.lengths, settings))
    kept, kept_values, kept_scores = (x[:, :, :old] for x in (state.salient_keys, state.salient_values, state.salient_scores))
    if not leaving or not chosen:
        skipped = layout.leaves[:, None, :, None].expand(batch, heads, leaving, size)
        return Store(kept, kept_values, kept_scores, old, 0, None, skipped)
    chunks, tokens = (leaving, size), slice(0, leaving * size)
    choice = choose_salient(
        scores[:, tokens].unflatten(1, chunks),
        layout.positions[:, tokens].unflatten(1, chunks),
        layout.leaves,
        heads=heads,
        settings=settings,
    )
    slot = (choice.places + size * torch.arange(leaving, device=keys.device)[:, None]).flatten(2)  # [B, S, m * chosen]
    store_keys = torch.cat((kept, _gather_slots(keys[:, tokens], slot)), dim=2)
    store_values = torch.cat((kept_values, _gather_slots(values[:, tokens], slot)), dim=2)
    store_scores = torch.cat((kept_scores, choice.scores.flatten(2)), dim=2)
    until = None
    if settings.largest_store is not None and store_scores.shape[2] > settings.largest_store:
        # tokens are seen from the second chunk after their own on; group r holds the queries of chunk r + 1
        place = torch.arange(store_scores.shape[2], device=keys.device)
        born = (torch.div(place - old, chosen, rounding_mode="floor") + 1).clamp(min=0)
        until = _until(store_scores, born, settings.largest_store)
    return Store(store_keys, store_values, store_scores, old, chosen, until, choice.is_skipped)


def best(scores: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return the entries [B, S, *] of a store that stay, by descending score [B, S, E], and the evicted ones."""
    order = rank_descending(scores)
    return order[..., :room], order[..., room:]


def store_after(store: Store, layout: Layout, settings: HybridSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and scores of the store for the next call."""
    if not store.per_chunk:
        return store.keys, store.values, store.scores
    stays, _ = best(store.scores, most_salient(layout.lengths_after, settings))
    return entries(store.keys, stays), entries(store.values, stays), store.scores.gather(-1, stays)


class Leaving(NamedTuple):
    """Tokens that join the linear state as chunks leave, the same number with each: keys, values [B, m * i, heads, *];
    counts: [B, m * i, S] bool."""

    keys: Tensor
    values: Tensor
    counts: Tensor
    per_chunk: int


def leaving_tokens(store: Store, layout: Layout, keys: Tensor, values: Tensor) -> list[Leaving]:
    """Return the tokens of leaving chunks that did not enter the store, then the evicted ones."""
    tokens = slice(0, layout.leaving * layout.chunk_size)
    found = [Leaving(keys[:, tokens], values[:, tokens], store.is_skipped.flatten(2).transpose(1, 2), layout.chunk_size)]
    departures = store.departures()
    if departures is not None:
        index, is_there = departures
        gone_keys, gone_values = (entries(x, index).transpose(1, 2) for x in (store.keys, store.values))
        found.append(Leaving(gone_keys, gone_values, is_there.transpose(1, 2), store.per_chunk))
    return found


def repeated_for(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads for the query heads: [B, N, K, ...] -> [B, N, heads, ...]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def entries(x: Tensor, index: Tensor) -> Tensor:
    """Gather entries: x [B, S, E, D], index [B, S, i] -> [B, S, i, D]."""
    return x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))


def _until(scores: Tensor, born: Tensor, most: int) -> Tensor:
    """Return the group before which a token has `most` better ones, [B, S, E]; the older token wins a tie."""
    place = torch.arange(scores.shape[-1], device=scores.device)
    some = max(1, COMPARISONS // max(1, scores.numel()))
    last = []
    for first in range(0, scores.shape[-1], some):
        mine, own = scores[..., first : first + some, None], place[first : first + some, None]
        is_better = (scores[..., None, :] > mine) | ((scores[..., None, :] == mine) & (place < own))
        # tokens are in order of arrival
        last.append((is_better.cumsum(-1, dtype=torch.int32) < most).sum(-1))
    until = torch.cat((born, born.new_full((1,), NEVER)))[torch.cat(last, dim=-1)]
    # a token that is not among the best on arrival is never seen
    return torch.where(scores > -torch.inf, torch.maximum(until, born), 0)


def _gather_slots(x: Tensor, slot: Tensor) -> Tensor:
    """Gather slots for the heads of the store: x [B, A, K, D], slot [B, S, E] -> [B, S, E, D], S a multiple of K."""
    return entries(repeated_for(x, slot.shape[1]).transpose(1, 2), slot)
