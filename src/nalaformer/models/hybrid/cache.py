"""What generation remembers of a converted model: one hybrid state for each layer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...attention.hybrid import HybridAttention, HybridState, SteppingState
from ..state_layer import StateLayer


@dataclass(frozen=True, eq=False)
class Loan:
    """Where the state of a layer is while a decoder writes it in place."""

    stepping: SteppingState
    lock: AbstractContextManager[object]
    """Held by whoever reads or changes it: the decoder may pass on to another cache."""


class HybridCacheLayer(StateLayer):
    """The state of one attention, its own or lent to a decoder; whoever asks need not know."""

    def __init__(self) -> None:
        super().__init__()
        self._own: HybridState | None = None
        self.loan: Loan | None = None

    @property
    def state(self) -> HybridState | None:
        """A copy where it is lent; what is put here ends the loan."""
        if (loan := self.loan) is not None:
            with loan.lock:
                if self.loan is loan:
                    return loan.stepping.to_state()
        return self._own

    @state.setter
    def state(self, state: HybridState | None) -> None:
        with nullcontext() if (loan := self.loan) is None else loan.lock:
            self._own, self.loan = state, None

    def lend(self, loan: Loan) -> None:
        """From now on the decoder's memory is what counts."""
        self._own, self.loan = None, loan

    def take_back(self, loan: Loan) -> None:
        """End this loan, if it is not over yet."""
        with loan.lock:
            if self.loan is loan:
                self.state = loan.stepping.to_state()

    @property
    def held(self) -> HybridState | SteppingState | None:
        """The state wherever it is, to look at."""
        return self._own if (loan := self.loan) is None else loan.stepping

    def __getstate__(self) -> dict[str, Any]:
        # copies have a state of their own
        return vars(self) | {"_own": self.state, "loan": None}

    def put(self, state: HybridState, tokens: int) -> None:
        """What the attention remembers after `tokens` more."""
        # a cache outlives the graph of its tokens
        self.state, self.seen = state.detach(), self.seen + tokens

    def attend(
        self,
        hybrid: HybridAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        key_mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Outputs of new tokens after the state, which becomes the one after them."""
        out, after = hybrid(q, k, v, x, key_mask=key_mask, scale=scale, state=self.state)
        self.put(after, q.shape[1])
        return out

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        if (loan := self.loan) is not None and len(indices) == len(loan.stepping.lengths):
            with loan.lock:
                if self.loan is loan:
                    return loan.stepping.select_(indices)
        if (state := self.state) is not None:
            self.state = state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if (state := self.state) is not None:
            self.state = state.select(torch.arange(len(state.lengths)).repeat_interleave(repeats))


class HybridCache(Cache):
    """One layer for each attention of the model."""

    layers: list[HybridCacheLayer]  # type: ignore[assignment]

    def __init__(self, config: Any) -> None:
        """config: of the model."""
        number = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[HybridCacheLayer() for _ in range(number)])
        self.single_steps = 0
        """Steps that the model has taken by itself and a decoder could have taken; see `Stepping`."""

    @property
    def nbytes(self) -> int:
        """Of all that is remembered."""
        return sum(state.nbytes for state in (layer.held for layer in self.layers) if state is not None)


class SteppingCacheLayer(HybridCacheLayer):
    """The state of one attention in memory of fixed size, for single tokens without padding."""

    def __init__(self, state: SteppingState, seen: int) -> None:
        super().__init__()
        self.stepping, self.seen, self.is_expected = state, seen, False

    def attend(
        self,
        hybrid: HybridAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        key_mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        if key_mask is not None:
            raise ValueError("a step takes one real token of each sample, got padding; leave attention_mask out")
        if q.shape[1] == 1 and not self.is_expected:
            raise ValueError(
                "memory of fixed size must be told of each step, which calls of the model do not; "
                "use SteppingDecoder.step, or `to_cache()` for calls and generate"
            )
        self.is_expected = False
        return hybrid.step_(q, k, v, x, state=self.stepping, scale=scale)

    def reset(self) -> None:
        raise ValueError("memory of fixed size goes on from a state; make a new one from an empty HybridCache's prompt")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ValueError("memory of fixed size keeps its samples; reorder `to_cache()` and make a new one from it")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(0))


class SteppingCache(HybridCache):
    """A HybridCache for single steps in place; see nalaformer.attention.hybrid.stepping."""

    layers: list[SteppingCacheLayer]  # type: ignore[assignment]

    def __init__(self, cache: HybridCache, attentions: Sequence[HybridAttention], *, capacity: int | None = None) -> None:
        """A copy of what `cache` remembers. attentions: of the model, by layer; capacity: see SteppingState.from_state."""
        layers: list[Any] = []
        for layer, hybrid in zip(cache.layers, attentions, strict=True):
            if layer.state is None:
                raise ValueError("stepping goes on from a prompt, got an empty cache; pass one that the model has filled")
            state = SteppingState.from_state(layer.state, feature_map=hybrid.map, settings=hybrid.settings, capacity=capacity)
            layers.append(SteppingCacheLayer(state, layer.seen))
        Cache.__init__(self, layers=layers)

    @property
    def states(self) -> list[SteppingState]:
        return [layer.stepping for layer in self.layers]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def load_(self, cache: HybridCache) -> None:
        """Go on from what another cache remembers of as many samples, in the same memory."""
        for own, layer in zip(self.layers, cache.layers, strict=True):
            state = layer.state
            assert state is not None
            own.stepping.load_(state)
            own.seen = layer.seen

    def expect_step(self) -> None:
        """The next call of the model is a step that was counted, or will be undone."""
        for layer in self.layers:
            layer.is_expected = True

    def advance(self) -> bool:
        """Count the step that comes now for all layers; True: their roll must follow it."""
        first, *others = self.states
        is_full = first.advance()
        # all layers have seen the same tokens: asking each of them would take the host longer than the device may wait
        for state in others:
            state.lengths = first.lengths
        for layer in self.layers:
            layer.seen += 1
        return is_full

    def to_cache(self, config: Any) -> HybridCache:
        """A copy that takes prompts, padding and beams again. config: of the model."""
        cache = HybridCache(config)
        for layer, own in zip(cache.layers, self.layers, strict=True):
            layer.put(own.stepping.to_state(), own.seen)
        return cache
