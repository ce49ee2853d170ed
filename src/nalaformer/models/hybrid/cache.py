"""What generation remembers of a converted model: one hybrid state for each layer."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...attention.hybrid import HybridState
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
