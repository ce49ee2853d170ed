"""The cache of a converted model: one hybrid state for each layer."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...attention.hybrid import GroupedState, HeadGroups
from ..state_layer import StateLayer


class HybridCacheLayer(StateLayer):
    """The state of one attention, in its own memory or in a decoder's; callers see no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.held: GroupedState | None = None
        """The current state, wherever it is stored; read only."""
        self._lock: AbstractContextManager[object] | None = None
        """The lock around reads and changes of a state in a decoder's memory; None: the state is in its own."""

    @property
    def is_lent(self) -> bool:
        """True if the state is in the memory of a decoder, which may move on to another cache."""
        return self._lock is not None

    def access(self) -> AbstractContextManager[object]:
        """Return a context in which no other thread changes `held`."""
        return nullcontext() if (lock := self._lock) is None else lock

    @property
    def state(self) -> GroupedState | None:
        """A copy of the state, which steps do not change; an assigned state is the layer's own and ends a loan."""
        with self.access():
            return None if self.held is None else self.held.clone()

    @state.setter
    def state(self, state: GroupedState | None) -> None:
        with self.access():
            self.held, self._lock = state, None

    def lend(self, state: GroupedState, lock: AbstractContextManager[object]) -> None:
        """Store the state in a decoder's memory from now on."""
        self.held, self._lock = state, lock

    def take_back(self) -> None:
        """End the loan, if there is one."""
        with self.access():
            if self.is_lent:
                self.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        # copies own their state
        return vars(self) | {"held": self.state, "_lock": None}

    def put(self, state: GroupedState, tokens: int) -> None:
        """Store the state after `tokens` more."""
        # detach, since a cache outlives the autograd graph of its tokens
        self.state, self.seen = state.detach(), self.seen + tokens

    def attend(self, hybrid: HeadGroups, *tokens: Tensor, key_mask: Tensor | None, scale: float | None) -> Tensor:
        """Return the outputs of new tokens and advance the state. Arguments as in HeadGroups.forward."""
        self.take_back()
        state = self.held
        if state is None or not _is_step(hybrid, state, tokens, key_mask):
            out, state = hybrid(*tokens, key_mask=key_mask, scale=scale, state=state)
            self.put(state, out.shape[1])
            return out
        if state.keys.is_inference() and not torch.is_inference_mode_enabled():
            # the state of a prompt in inference mode cannot be written outside of it
            state = state.clone()
        hybrid.make_room_(state)
        out = hybrid.step_(*tokens, state=state, scale=scale)
        if state.advance():
            hybrid.roll_(state)
        self.held, self.seen = state, self.seen + 1
        return out

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        with self.access():
            if self.held is not None and self.is_lent and len(indices) == len(self.held.lengths):
                self.held.select_(indices)
            elif self.held is not None:
                self.state = self.held.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if (held := self.held) is not None:
            self.batch_select_indices(torch.arange(len(held.lengths)).repeat_interleave(repeats))


class HybridCache(Cache):
    """The cache of a converted model, one layer for each attention."""

    layers: list[HybridCacheLayer]  # type: ignore[assignment]

    def __init__(self, config: Any) -> None:
        """Create an empty cache. config: the model's."""
        number = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[HybridCacheLayer() for _ in range(number)])
        self.single_steps = 0
        """The number of eager steps that a decoder could have taken; see `Stepping`."""

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(state.nbytes for state in (layer.held for layer in self.layers) if state is not None)


def _is_step(hybrid: HeadGroups, state: GroupedState, tokens: tuple[Tensor, ...], key_mask: Tensor | None) -> bool:
    """True if the state can be written in place: one real token of each sample, no gradients, and the dtypes of the state."""
    _, k, v, _ = tokens
    return (
        k.shape[1] == 1
        and key_mask is None
        and not torch.is_grad_enabled()
        and (k.dtype, v.dtype) == (state.keys.dtype, state.values.dtype)
        and hybrid.has_steps
    )
