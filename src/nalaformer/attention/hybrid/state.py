"""The state of hybrid attention: the window, the salient tokens, and the linear state of all others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...ops import LinearState
from .settings import HybridSettings, most_salient


@dataclass(eq=False)
class HybridState:
    """The state after `lengths` real tokens of each sample; l = chunk_size, S heads of the store, room for E salient tokens.

    keys, values: [B, S, 2l + E, D or V]   the window, then the store, so that a query meets both in one product. The window is
                                           the previous chunk, then the current one; empty slots are zero. Heads that share
                                           keys but have their own store have a window each
    scores: [B, 2l, heads]                 of the window's tokens, if the rule needs more than the token
    salient_scores: [B, S, E]              descending, -inf for empty entries
    linear: state of all older tokens that are not salient; its count is that of all tokens, `lengths` on the device
    is_poisoned: [B] bool                  a token held NaN or infinity, so all later outputs are NaN
    key_heads: heads of the keys, S or a divisor of it

    Prompts build a new state and leave the old one unchanged; steps (stepping.py) write into the tensors in place.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    salient_scores: Tensor
    linear: LinearState
    is_poisoned: Tensor
    key_heads: int
    lengths: tuple[int, ...]

    @property
    def count(self) -> Tensor:
        """`lengths` on the device, [B] int64."""
        return self.linear.count

    @property
    def capacity(self) -> int:
        """The number of salient tokens that a head has room for."""
        return self.salient_scores.shape[-1]

    @property
    def window(self) -> int:
        """The number of slots of the window: two chunks."""
        return self.keys.shape[2] - self.capacity

    @property
    def salient_keys(self) -> Tensor:
        """The keys of the store, [B, S, E, D]."""
        return self.keys[:, :, self.window :]

    @property
    def salient_values(self) -> Tensor:
        """The values of the store, [B, S, E, V]."""
        return self.values[:, :, self.window :]

    @property
    def window_keys(self) -> Tensor:
        """The keys of the window, [B, 2l, K, D]."""
        return self._near(self.keys)

    @property
    def window_values(self) -> Tensor:
        """The values of the window, [B, 2l, K, V]."""
        return self._near(self.values)

    def _near(self, both: Tensor) -> Tensor:
        return both[:, :: both.shape[1] // self.key_heads, : self.window].transpose(1, 2)

    def _own(self) -> dict[str, Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return self._own() | {f"linear.{name}": tensor for name, tensor in self.linear.tensors().items()}

    @property
    def nbytes(self) -> int:
        """The size of the state in bytes, including empty entries."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> "HybridState":
        own: dict[str, Any] = {name: change(tensor) for name, tensor in self._own().items()}
        return replace(self, **own, linear=LinearState(*map(change, self.linear.tensors().values())))

    def select(self, samples: Tensor | Sequence[int]) -> "HybridState":
        """Return the states of some samples, in the given order and with repetitions, as beam search needs."""
        index = torch.as_tensor(samples, dtype=torch.int64, device=self.keys.device)
        # if all lengths are equal, the device is not asked which samples are taken
        is_uniform = len(set(self.lengths)) == 1
        lengths = self.lengths[:1] * len(index) if is_uniform else tuple(self.lengths[i] for i in index.tolist())
        return replace(self._map_tensors(lambda tensor: tensor.index_select(0, index)), lengths=lengths)

    def select_(self, samples: Tensor | Sequence[int]) -> None:
        """Select samples in place, as many as there are."""
        self.load_(self.select(samples))

    def detach(self) -> "HybridState":
        """Return a state without gradients, to cut backpropagation through a sequence."""
        return self._map_tensors(torch.Tensor.detach)

    def clone(self) -> "HybridState":
        return self.with_room(self.capacity)

    def to(self, device: torch.device | str) -> "HybridState":
        return self._map_tensors(lambda tensor: tensor.to(device))

    def with_room(self, capacity: int) -> "HybridState":
        """Return a copy with room for `capacity` salient tokens of a head; further ones are dropped."""
        linear = LinearState(*map(torch.clone, self.linear.tensors().values()))
        copy = replace(self, scores=self.scores.clone(), linear=linear, is_poisoned=self.is_poisoned.clone())
        copy._resize_(capacity)
        return copy

    def _resize_(self, capacity: int) -> None:
        places = self.window + capacity
        self.keys, self.values = (_resize(x, places, 0) for x in (self.keys, self.values))
        self.salient_scores = _resize(self.salient_scores, capacity, -torch.inf)

    def load_(self, state: "HybridState") -> None:
        """Copy another state of as many samples into the same memory, so that captured graphs stay valid."""
        new = state if state.capacity == self.capacity else state.with_room(self.capacity)
        pairs = list(zip(self.tensors().values(), new.tensors().values(), strict=True))
        for kept, value in pairs:
            if kept.shape != value.shape or kept.dtype != value.dtype:
                raise ValueError(
                    f"memory of fixed size takes states of its own sizes, {tuple(kept.shape)} in {kept.dtype}, got "
                    f"{tuple(value.shape)} in {value.dtype}; make a new one with stepping_state"
                )
        for kept, value in pairs:
            kept.copy_(value)
        self.lengths = state.lengths

    def salient_after_step(self, settings: HybridSettings) -> int:
        """Return the number of salient tokens of a head after one more token of each sample."""
        return most_salient([length + 1 for length in self.lengths], settings)

    def make_room_(self, settings: HybridSettings) -> None:
        """Grow a full store by an eighth, or to its limit, if one more token of each sample needs room."""
        needed = self.salient_after_step(settings)
        if needed > self.capacity:
            larger = max(needed + settings.salient_per_chunk, self.capacity + self.capacity // 8)
            self._resize_(larger if settings.largest_store is None else min(larger, settings.largest_store))

    def advance(self) -> bool:
        """Count a step on the host after it has run; return True if a roll must follow."""
        self.lengths = tuple(length + 1 for length in self.lengths)
        return any(length % (self.window // 2) == 0 for length in self.lengths)


def _resize(x: Tensor, places: int, empty: float) -> Tensor:
    """Return x with another number of entries: [B, S, E, ...] -> [B, S, places, ...]."""
    new = x.new_full((*x.shape[:2], places, *x.shape[3:]), empty)
    common = min(places, x.shape[2])
    new[:, :, :common] = x[:, :, :common]
    return new
