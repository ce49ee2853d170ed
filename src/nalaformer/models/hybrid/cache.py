"""What generation remembers of a converted model: one hybrid state for each layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...attention.hybrid import HybridAttention, HybridState, SteppingState
from ..state_layer import StateLayer


class HybridCacheLayer(StateLayer):
    """The state of one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.state: HybridState | None = None

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
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.select(torch.arange(len(self.state.lengths)).repeat_interleave(repeats))


class HybridCache(Cache):
    """One layer for each attention of the model."""

    layers: list[HybridCacheLayer]  # type: ignore[assignment]

    def __init__(self, config: Any) -> None:
        """config: of the model."""
        number = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[HybridCacheLayer() for _ in range(number)])

    @property
    def nbytes(self) -> int:
        """Of all that is remembered."""
        return sum(layer.state.nbytes for layer in self.layers if layer.state is not None)


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
