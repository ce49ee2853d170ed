"""What hybrid attention remembers: the window, the salient tokens, and the sums over all others."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ...ops import LinearState


@dataclass(frozen=True)
class HybridState:
    """The state after `lengths` real tokens of each sample; l = chunk_size.

    keys, values: [B, 2l, K, D or V]   the chunk before the current one, and the current one; zeros where there is no token
    scores: [B, 2l, heads]             of those tokens, by the selection rule
    salient_keys, salient_values: [B, S, E, D or V]
    salient_scores: [B, S, E]          -inf where there is no token
    linear: sums over all older tokens that are not salient
    is_poisoned: [B] bool              a token held NaN or infinity: nothing after it can be trusted
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    salient_keys: Tensor
    salient_values: Tensor
    salient_scores: Tensor
    linear: LinearState
    is_poisoned: Tensor
    lengths: tuple[int, ...]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("linear", "lengths")}
        return own | {f"linear.{name}": tensor for name, tensor in self.linear.tensors().items()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def _own(self, change: "dict[str, Tensor]", linear: LinearState, lengths: tuple[int, ...]) -> "HybridState":
        return replace(self, **change, linear=linear, lengths=lengths)

    def select(self, samples: Tensor | Sequence[int]) -> "HybridState":
        """The states of some samples, in the given order and with repetitions: beam search reorders with it."""
        index = torch.as_tensor(samples, dtype=torch.int64, device=self.keys.device)
        change = {n: t.index_select(0, index) for n, t in self.tensors().items() if "." not in n}
        # where all are alike, which samples are taken is not asked of the device
        is_uniform = len(set(self.lengths)) == 1
        lengths = self.lengths[:1] * len(index) if is_uniform else tuple(self.lengths[i] for i in index.tolist())
        return self._own(change, self.linear.select(index), lengths)

    def detach(self) -> "HybridState":
        """Cut the gradient between pieces of a sequence."""
        change = {name: tensor.detach() for name, tensor in self.tensors().items() if "." not in name}
        return self._own(change, self.linear.detach(), self.lengths)

    def to(self, device: torch.device | str) -> "HybridState":
        change = {name: tensor.to(device) for name, tensor in self.tensors().items() if "." not in name}
        return self._own(change, self.linear.to(device), self.lengths)
