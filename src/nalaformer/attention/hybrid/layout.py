"""Where the tokens of a call stand among the chunks of each sample.

Chunks begin at a sample's first real token, so samples of a padded batch are at different places of their chunks. A call works
on slots: two chunks that the state has kept (the one before the current chunk, then the current one as far as it is filled),
then the new tokens, all samples padded to whole chunks:

    slot   0 .. l-1           l .. l+filled-1        l+filled .. l+filled+count-1
    token  previous chunk     current chunk so far   new

Queries are new tokens; those of slots l(r+1) .. l(r+2)-1 form group r and see the keys of slots lr .. l(r+2)-1.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.kept_tensors import kept


class Layout:
    """The places of N new tokens after `lengths` real ones. Everything that decides a shape is known without the device."""

    def __init__(
        self,
        chunk_size: int,
        tokens: int,
        lengths: tuple[int, ...],
        device: torch.device,
        key_mask: Tensor | None = None,
    ) -> None:
        self.chunk_size, self.tokens, self.lengths, self.device, self.key_mask = chunk_size, tokens, lengths, device, key_mask
        self.counts = (tokens,) * len(lengths) if key_mask is None else tuple(key_mask.sum(1).tolist())
        self.filled = [length % chunk_size for length in lengths]
        self.is_uniform = key_mask is None and len(set(lengths)) <= 1
        self.groups = -(-(max(self.filled, default=0) + tokens) // chunk_size)
        self.slots = (self.groups + 1) * chunk_size
        self.left = [(filled + count) // chunk_size for filled, count in zip(self.filled, self.counts, strict=True)]
        self.leaving = max(self.left, default=0)
        """Chunks, from slot 0 on, that leave the window in at least one sample."""

    @property
    def lengths_after(self) -> tuple[int, ...]:
        return tuple(length + count for length, count in zip(self.lengths, self.counts, strict=True))

    def _per_sample(self, values: Sequence[int]) -> Tensor:
        """[B, 1], or [1, 1] where all are alike."""
        if self.is_uniform:
            values = values[:1]
        return torch.tensor(values, dtype=torch.int64, device=self.device)[:, None]

    @cached_property
    def _filled(self) -> Tensor:
        return self._per_sample(self.filled)

    @cached_property
    def positions(self) -> Tensor:
        """[B or 1, slots]: the place of each slot's token in its sample; negative before the beginning."""
        before = self._per_sample([(length // self.chunk_size - 1) * self.chunk_size for length in self.lengths])
        return before + torch.arange(self.slots, device=self.device)

    @cached_property
    def chunks_before(self) -> Tensor:
        """[B or 1, R]: chunks of the sample before each group of queries."""
        return torch.div(self.positions[:, self.chunk_size :: self.chunk_size], self.chunk_size, rounding_mode="floor")

    @cached_property
    def first_slots(self) -> Tensor:
        """[B] int32: the first slot of each sample that exists; its first chunk has none before it."""
        slots = [0 if length >= self.chunk_size else self.chunk_size for length in self.lengths]
        return torch.tensor(slots, dtype=torch.int32, device=self.device)

    @cached_property
    def leaves(self) -> Tensor:
        """[B or 1, leaving]: whether this sample has the chunk and it leaves the window."""
        chunk = torch.arange(self.leaving, device=self.device)
        exists = self.positions[:, : self.leaving * self.chunk_size : self.chunk_size] >= 0
        return exists & (chunk < self._per_sample(self.left))

    @cached_property
    def query_slots(self) -> Tensor:
        """[1, R, T]."""
        return torch.arange(self.chunk_size, self.slots, device=self.device).view(1, self.groups, self.chunk_size)

    @cached_property
    def key_slots(self) -> Tensor:
        """[R, W]: the slots that the queries of a group may see."""
        first = torch.arange(self.groups, device=self.device)[:, None] * self.chunk_size
        return first + torch.arange(2 * self.chunk_size, device=self.device)

    @cached_property
    def visible(self) -> Tensor:
        """[B or 1, R, T, W]: keys up to the query's own, from the beginning of the sample on."""
        exists = self.positions[:, self.key_slots] >= 0  # [B or 1, R, W]
        return (self.key_slots[:, None] <= self.query_slots[..., None]) & exists[:, :, None]

    @cached_property
    def is_query(self) -> Tensor:
        """[B or 1, R, T, 1]: whether a new token stands there; the other rows are padding or were queries before."""
        return self._is_new.unflatten(1, (self.groups, self.chunk_size))[..., None]

    @cached_property
    def _is_new(self) -> Tensor:
        """[B or 1, slots - l]: whether a new token stands in each slot after the previous chunk."""
        place = torch.arange(self.slots - self.chunk_size, device=self.device) - self._filled
        return (place >= 0) & (place < self._per_sample(self.counts))

    @cached_property
    def is_self(self) -> Tensor:
        """[1, R, T, W]."""
        return self.key_slots[:, None] == self.query_slots[..., None]

    @cached_property
    def is_near(self) -> Tensor:
        """[1, R, T, W]: among the last chunk_size keys."""
        return self.key_slots[:, None] > self.query_slots[..., None] - self.chunk_size

    @cached_property
    def _new_tokens(self) -> Tensor:
        """[B, slots - l]: which new token stands in each slot after the previous chunk; anything where none does."""
        place = torch.arange(self.slots - self.chunk_size, device=self.device) - self._filled
        place = place.clamp(0, self.tokens - 1).expand(len(self.lengths), -1)
        if self.key_mask is not None:
            # real tokens first, in their order
            place = self.key_mask.logical_not().to(torch.uint8).sort(dim=1, stable=True).indices.gather(1, place)
        return place

    def place(self, new: Tensor) -> Tensor:
        """New tokens [B, N, ...] in the slots after the previous chunk, zeros elsewhere."""
        if self.is_uniform:
            filled = self.filled[0] if self.filled else 0
            after = self.slots - self.chunk_size - filled - self.tokens
            if not filled and not after:
                return new
            return F.pad(new, (0, 0) * (new.dim() - 2) + (filled, after))
        return torch.where(_like(self._is_new, new), _take(new, self._new_tokens), 0)

    def align(self, kept: Tensor, new: Tensor) -> Tensor:
        """Kept [B, 2l, ...] and new [B, N, ...] tokens in their slots, zeros where there is none."""
        # kept tokens and new ones never share a slot, and both are zero where they are not
        placed = self.place(new)
        kept = kept.to(placed.dtype)
        current = placed[:, : self.chunk_size] + kept[:, self.chunk_size :]
        return torch.cat((kept[:, : self.chunk_size], current, placed[:, self.chunk_size :]), dim=1)

    def queries(self, new: Tensor) -> Tensor:
        """[B, N, ...] -> [B, R, T, ...]."""
        return self.place(new).unflatten(1, (self.groups, self.chunk_size))

    def collect(self, rows: Tensor) -> Tensor:
        """[B, R, T, ...] -> [B, N, ...], zero for padding."""
        if self.is_uniform:
            filled = self.filled[0] if self.filled else 0
            return rows.flatten(1, 2)[:, filled : filled + self.tokens]
        rank = torch.arange(self.tokens, device=self.device) if self.key_mask is None else self.key_mask.cumsum(1) - 1
        new = _take(rows.flatten(1, 2), (rank.clamp(min=0) + self._filled).expand(len(self.lengths), -1))
        return new if self.key_mask is None else torch.where(_like(self.key_mask, new), new, 0)

    def window_after(self, aligned: Tensor) -> Tensor:
        """[B, slots, ...] -> [B, 2l, ...]: what the next call needs of the tokens."""
        size = self.chunk_size
        behind = (0, 0) * (aligned.dim() - 2)
        if self.is_uniform:
            part = aligned[:, self.leaving * size : (self.leaving + 2) * size]
            # a copy: a view would keep all tokens of the call
            return F.pad(part, (*behind, 0, 2 * size - part.shape[1])) if part.shape[1] < 2 * size else part.clone()
        index = self._per_sample(self.left) * size + torch.arange(2 * size, device=self.device)
        return _take(F.pad(aligned, (*behind, 0, size)), index)


# without a mask all layers of a model ask for the same one in turn
kept_layout = kept(Layout, maxsize=16)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i], ...]."""
    return x.gather(1, _like(index, x).expand(*index.shape, *x.shape[2:]))


def _like(mask: Tensor, x: Tensor) -> Tensor:
    """[B, N] -> [B, N, 1, ...] with as many axes as x."""
    return mask.view(*mask.shape, *(1,) * (x.dim() - 2))
