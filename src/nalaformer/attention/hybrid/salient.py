"""The store of salient tokens: who enters when a chunk leaves the window, who is seen when, who has to go."""

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout
from .selection import for_heads, rank_descending
from .settings import HybridSettings, most_salient
from .state import HybridState

# beyond every group of a call
NEVER = 2**30
# of tokens with each other at once, over all heads and samples
COMPARISONS = 2**26


class Store(NamedTuple):
    """Salient tokens before the call and those that enter in it, in the order of their coming.

    keys, values: [B, S, E, *]; scores: [B, S, E], -inf where there is no token.
    Group r of the queries sees the first `old + r * per_chunk` of them, but for those that had to go: with `until`, [B, S, E],
    groups up to until - 1 see a token and the sums of the linear branch hold it from there on; None: nobody has to go.
    is_left_out: [B, S, m, l], tokens of leaving chunks that did not enter.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    old: int
    per_chunk: int
    until: Tensor | None
    is_left_out: Tensor

    def seen_until(self) -> Tensor:
        """[B, S, E]: the first group that a token is hidden from, 0 where there is no token."""
        last = NEVER if self.until is None else self.until
        return torch.where(self.scores > -torch.inf, last, 0)

    def is_salient(self, groups: int) -> Tensor:
        """[B, S, R, E]: which token each group sees."""
        if not self.per_chunk:
            return (self.scores > -torch.inf)[:, :, None].expand(-1, -1, groups, -1)
        group = torch.arange(groups, device=self.scores.device)[:, None]
        place = torch.arange(self.scores.shape[2], device=self.scores.device)
        return (place < self.old + group * self.per_chunk) & (group < self.seen_until()[:, :, None])

    def departures(self) -> tuple[Tensor, Tensor] | None:
        """Who has to go as each chunk leaves: entries [B, S, m * per_chunk], and whether there is one.

        Never more go than come, and a chunk brings per_chunk tokens.
        """
        if self.until is None:
            return None
        chunks = self.is_left_out.shape[2]
        # before group r, so with chunk r - 1; those that stay go to a last place that is cut off
        chunk = torch.where((self.until > 0) & (self.until <= chunks), self.until - 1, chunks)
        chunk, order = chunk.sort(dim=-1, stable=True)
        rank = torch.arange(chunk.shape[2], device=chunk.device) - torch.searchsorted(chunk, chunk)
        size = chunks * self.per_chunk
        place = torch.where(chunk < chunks, chunk * self.per_chunk + rank, size)
        nobody = order.new_zeros(*order.shape[:2], size + 1)
        return nobody.scatter(-1, place, order)[..., :size], nobody.bool().scatter(-1, place, True)[..., :size]


class Chosen(NamedTuple):
    """Tokens of m leaving chunks that enter the store, c of each: places in their chunk and scores, [B, S, m, c].

    Scores are -inf where the chunk does not leave. is_left_out: [B, S, m, l], tokens of leaving chunks that do not enter.
    """

    places: Tensor
    scores: Tensor
    is_left_out: Tensor


def choose_salient(scores: Tensor, positions: Tensor, leaves: Tensor, *, heads: int, settings: HybridSettings) -> Chosen:
    """The best salient_per_chunk tokens of each chunk for each of `heads` heads; of equals the older wins.

    scores: [B, m, l, heads of the rule]; positions: [B or 1, m, l]; leaves: [B or 1, m], whether the chunk leaves the window.
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
    """Choose salient_per_chunk tokens of every chunk that leaves. keys, values: [B, slots, K, *]; scores: [B, slots, heads]."""
    batch, heads = state.salient_scores.shape[:2]
    size, chosen, leaving = settings.chunk_size, settings.salient_per_chunk, layout.leaving
    old = min(state.capacity, most_salient(state.lengths, settings))
    kept, kept_values, kept_scores = (x[:, :, :old] for x in (state.salient_keys, state.salient_values, state.salient_scores))
    if not leaving or not chosen:
        left_out = layout.leaves[:, None, :, None].expand(batch, heads, leaving, size)
        return Store(kept, kept_values, kept_scores, old, 0, None, left_out)
    chunks, tokens = (leaving, size), slice(0, leaving * size)
    choice = choose_salient(
        scores[:, tokens].unflatten(1, chunks),
        layout.positions[:, tokens].unflatten(1, chunks),
        layout.leaves,
        heads=heads,
        settings=settings,
    )
    slot = (choice.places + size * torch.arange(leaving, device=keys.device)[:, None]).flatten(2)  # [B, S, m * chosen]
    store_keys = torch.cat((kept, _gathered(keys[:, tokens], slot)), dim=2)
    store_values = torch.cat((kept_values, _gathered(values[:, tokens], slot)), dim=2)
    store_scores = torch.cat((kept_scores, choice.scores.flatten(2)), dim=2)
    until = None
    if settings.largest_store is not None and store_scores.shape[2] > settings.largest_store:
        # seen from the second chunk after its own on; group r holds the queries of chunk r + 1
        place = torch.arange(store_scores.shape[2], device=keys.device)
        born = (torch.div(place - old, chosen, rounding_mode="floor") + 1).clamp(min=0)
        until = _until(store_scores, born, settings.largest_store)
    return Store(store_keys, store_values, store_scores, old, chosen, until, choice.is_left_out)


def best(scores: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Entries [B, S, *] of a store that stay, in falling order of their scores [B, S, E], and those that have to go."""
    order = rank_descending(scores)
    return order[..., :room], order[..., room:]


def store_after(store: Store, layout: Layout, settings: HybridSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and scores that the next call finds."""
    if not store.per_chunk:
        return store.keys, store.values, store.scores
    stays, _ = best(store.scores, most_salient(layout.lengths_after, settings))
    return entries(store.keys, stays), entries(store.values, stays), store.scores.gather(-1, stays)


class Leaving(NamedTuple):
    """Tokens that join the linear sums as chunks leave, the same number with each: keys, values [B, m * i, heads, *];
    counts: [B, m * i, S] bool."""

    keys: Tensor
    values: Tensor
    counts: Tensor
    per_chunk: int


def leaving_tokens(store: Store, layout: Layout, keys: Tensor, values: Tensor) -> list[Leaving]:
    """The tokens of chunks that leave and did not enter the store, then those that lost their place in it."""
    tokens = slice(0, layout.leaving * layout.chunk_size)
    found = [Leaving(keys[:, tokens], values[:, tokens], store.is_left_out.flatten(2).transpose(1, 2), layout.chunk_size)]
    departures = store.departures()
    if departures is not None:
        index, is_there = departures
        gone_keys, gone_values = (entries(x, index).transpose(1, 2) for x in (store.keys, store.values))
        found.append(Leaving(gone_keys, gone_values, is_there.transpose(1, 2), store.per_chunk))
    return found


def repeated_for(x: Tensor, heads: int) -> Tensor:
    """[B, N, K, ...] -> [B, N, heads, ...]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def entries(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, E, D], index [B, S, i] -> [B, S, i, D]."""
    return x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))


def _until(scores: Tensor, born: Tensor, most: int) -> Tensor:
    """[B, S, E]: a token stays until the group before which the `most`-th better one comes; of equals the older is better."""
    place = torch.arange(scores.shape[-1], device=scores.device)
    some = max(1, COMPARISONS // max(1, scores.numel()))
    last = []
    for first in range(0, scores.shape[-1], some):
        mine, own = scores[..., first : first + some, None], place[first : first + some, None]
        is_better = (scores[..., None, :] > mine) | ((scores[..., None, :] == mine) & (place < own))
        # tokens stand in the order of their coming
        last.append((is_better.cumsum(-1, dtype=torch.int32) < most).sum(-1))
    until = torch.cat((born, born.new_full((1,), NEVER)))[torch.cat(last, dim=-1)]
    # a token that is not among the best when it comes is never seen
    return torch.where(scores > -torch.inf, torch.maximum(until, born), 0)


def _gathered(x: Tensor, slot: Tensor) -> Tensor:
    """x [B, A, K, D], slot [B, S, E] -> [B, S, E, D], S a multiple of K."""
    return entries(repeated_for(x, slot.shape[1]).transpose(1, 2), slot)
