"""The positions of a call's tokens among the chunks of each sample.

Chunks begin at a sample's first real token, so samples of a padded batch are at different places of their chunks. A call works
on slots: first the two chunks of the state (the previous chunk, then the current one as far as it is filled), then the new
tokens; all samples are padded to whole chunks:

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
    """The slots of N new tokens after `lengths` real ones. All shapes are known on the host."""

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
        """Return the values as a tensor [B, 1], or [1, 1] if all are equal."""
        if self.is_uniform:
            values = values[:1]
        return torch.tensor(values, dtype=torch.int64, device=self.device)[:, None]

    @cached_property
    def _filled(self) -> Tensor:
        return self._per_sample(self.filled)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each slot's token in its sample, [B or 1, slots]; negative before the beginning."""
        before = self._per_sample([(length // self.chunk_size - 1) * self.chunk_size for length in self.lengths])
        return before + torch.arange(self.slots, device=self.device)

    @cached_property
    def chunks_before(self) -> Tensor:
        """The number of chunks of the sample before each group of queries, [B or 1, R]."""
        return torch.div(self.positions[:, self.chunk_size :: self.chunk_size], self.chunk_size, rounding_mode="floor")

    @cached_property
    def first_slots(self) -> Tensor:
        """The first existing slot of each sample, [B] int32; the first chunk has no previous one."""
        slots = [0 if length >= self.chunk_size else self.chunk_size for length in self.lengths]
        return torch.tensor(slots, dtype=torch.int32, device=self.device)

    @cached_property
    def leaves(self) -> Tensor:
        """True if this sample has the chunk and it leaves the window, [B or 1, leaving]."""
        chunk = torch.arange(self.leaving, device=self.device)
        exists = self.positions[:, : self.leaving * self.chunk_size : self.chunk_size] >= 0
        return exists & (chunk < self._per_sample(self.left))

    @cached_property
    def query_slots(self) -> Tensor:
        """The slots of the queries, [1, R, T]."""
        return torch.arange(self.chunk_size, self.slots, device=self.device).view(1, self.groups, self.chunk_size)

    @cached_property
    def key_slots(self) -> Tensor:
        """The slots that the queries of a group may see, [R, W]."""
        first = torch.arange(self.groups, device=self.device)[:, None] * self.chunk_size
        return first + torch.arange(2 * self.chunk_size, device=self.device)

    @cached_property
    def visible(self) -> Tensor:
        """The visibility mask: keys up to the query's own, from the beginning of the sample on, [B or 1, R, T, W]."""
        exists = self.positions[:, self.key_slots] >= 0  # [B or 1, R, W]
        return (self.key_slots[:, None] <= self.query_slots[..., None]) & exists[:, :, None]

    @cached_property
    def is_query(self) -> Tensor:
        """True for new tokens, [B or 1, R, T, 1]; the other rows are padding or earlier queries."""
        return self._is_new.unflatten(1, (self.groups, self.chunk_size))[..., None]

    @cached_property
    def _is_new(self) -> Tensor:
        """True if a slot after the previous chunk holds a new token, [B or 1, slots - l]."""
        place = torch.arange(self.slots - self.chunk_size, device=self.device) - self._filled
        return (place >= 0) & (place < self._per_sample(self.counts))

    @cached_property
    def is_self(self) -> Tensor:
        """True if the key is the query's own, [1, R, T, W]."""
        return self.key_slots[:, None] == self.query_slots[..., None]

    @cached_property
    def is_near(self) -> Tensor:
        """True for the last chunk_size keys, [1, R, T, W]."""
        return self.key_slots[:, None] > self.query_slots[..., None] - self.chunk_size

    @cached_property
    def _new_tokens(self) -> Tensor:
        """The index of the new token in each slot after the previous chunk, [B, slots - l]; arbitrary in empty slots."""
        place = torch.arange(self.slots - self.chunk_size, device=self.device) - self._filled
        place = place.clamp(0, self.tokens - 1).expand(len(self.lengths), -1)
        if self.key_mask is not None:
            # real tokens come first, in their order
            place = self.key_mask.logical_not().to(torch.uint8).sort(dim=1, stable=True).indices.gather(1, place)
        return place

    def place(self, new: Tensor) -> Tensor:
        """Put new tokens [B, N, ...] into the slots after the previous chunk, zeros elsewhere."""
        if self.is_uniform:
            filled = self.filled[0] if self.filled else 0
            after = self.slots - self.chunk_size - filled - self.tokens
            if not filled and not after:
                return new
            return F.pad(new, (0, 0) * (new.dim() - 2) + (filled, after))
        return torch.where(_like(self._is_new, new), _take(new, self._new_tokens), 0)

    def align(self, kept: Tensor, new: Tensor) -> Tensor:
        """Put tokens of the state [B, 2l, ...] and new ones [B, N, ...] into their slots, zeros elsewhere."""
        # both are zero in the slots of the other, so they can be added
        placed = self.place(new)
        kept = kept.to(placed.dtype)
        current = placed[:, : self.chunk_size] + kept[:, self.chunk_size :]
        return torch.cat((kept[:, : self.chunk_size], current, placed[:, self.chunk_size :]), dim=1)

    def queries(self, new: Tensor) -> Tensor:
        """Group new tokens by chunk: [B, N, ...] -> [B, R, T, ...]."""
        return self.place(new).unflatten(1, (self.groups, self.chunk_size))

    def collect(self, rows: Tensor) -> Tensor:
        """Return the rows of the new tokens: [B, R, T, ...] -> [B, N, ...], zero for padding."""
        if self.is_uniform:
            filled = self.filled[0] if self.filled else 0
            return rows.flatten(1, 2)[:, filled : filled + self.tokens]
        rank = torch.arange(self.tokens, device=self.device) if self.key_mask is None else self.key_mask.cumsum(1) - 1
        new = _take(rows.flatten(1, 2), (rank.clamp(min=0) + self._filled).expand(len(self.lengths), -1))
        return new if self.key_mask is None else torch.where(_like(self.key_mask, new), new, 0)

    def window_after(self, aligned: Tensor) -> Tensor:
        """Return the tokens that the next call needs: [B, slots, ...] -> [B, 2l, ...]."""
        size = self.chunk_size
        behind = (0, 0) * (aligned.dim() - 2)
        if self.is_uniform:
            part = aligned[:, self.leaving * size : (self.leaving + 2) * size]
            # a copy, since a view would keep all tokens of the call alive
            return F.pad(part, (*behind, 0, 2 * size - part.shape[1])) if part.shape[1] < 2 * size else part.clone()
        index = self._per_sample(self.left) * size + torch.arange(2 * size, device=self.device)
        return _take(F.pad(aligned, (*behind, 0, size)), index)


# without a mask all layers of a model use the same layout
cached_layout = kept(Layout, maxsize=16)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return x[b, index[b, i], ...]."""
    return x.gather(1, _like(index, x).expand(*index.shape, *x.shape[2:]))


def _like(mask: Tensor, x: Tensor) -> Tensor:
    """Add axes to a mask until it has as many as x: [B, N] -> [B, N, 1, ...]."""
    return mask.view(*mask.shape, *(1,) * (x.dim() - 2))
