"""What generation remembers of a converted model: one hybrid state for each layer."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...attention.hybrid import HybridState


class HybridCacheLayer(CacheLayerMixin):
    """The state of one attention; it replaces keys and values of all tokens."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: HybridState | None = None
        self.seen = 0
        """Tokens with their padding: where the next one stands in the batch."""

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: the attention puts its state here after the first tokens."""

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "a hybrid cache keeps no keys and values of all tokens; it serves models that nalaformer has converted, "
            "others need a DynamicCache"
        )

    def put(self, state: HybridState, tokens: int) -> None:
        """What the attention remembers after `tokens` more."""
        # a cache outlives the graph of its tokens
        self.state, self.seen = state.detach(), self.seen + tokens

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # the name of get_max_length in transformers before 5.18
    get_max_cache_shape = get_max_length

    def crop(self, *args: object) -> None:
        raise ValueError(
            "a hybrid cache cannot be cropped: older tokens are summed up; copy it (copy.deepcopy) before tokens that you may "
            "want to take back"
        )

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.select(torch.arange(len(self.state.lengths)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Nothing to do: a state is small and read at every token."""

    def prefetch(self) -> None:
        """Nothing to do, as in `offload`."""


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
