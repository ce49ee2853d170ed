"""A cache layer for timing one step of softmax attention again and again."""

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class FixedLayer(DynamicLayer):
    """Keys and values [B, H, N, D] in memory of fixed size, whose last place each new token takes again.

    The cost of a token after N - 1 others, without a copy of all of them: what a benchmark needs, and no generation.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2] - 1
