"""What the trainer asks of a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ..data import Samples


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A mean over `weight` units, so that means over parts of a batch join to the mean over the whole.

    sum_r weight_r total_r / sum_r weight_r over accumulation steps and ranks is what is minimised.
    """

    total: Tensor
    """Scalar with gradient: the mean over the units."""
    weight: float
    """How many units it is the mean of: images, boxes, tokens."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars for the log, means over the same units; no gradient is taken of them."""


class Metrics(Protocol):
    """Sums that grow with every batch and may be added over ranks."""

    sums: Tensor
    """float64, on the CPU."""

    def update(self, model: nn.Module, batch: Any) -> None:
        """Add what the model makes of a batch."""

    def result(self) -> dict[str, float]:
        """The figures, the one by which checkpoints are compared first (higher is better)."""


class Task(Protocol):
    """Data, loss and metrics. The model is passed in: a task fits many."""

    @property
    def train_data(self) -> Samples: ...

    @property
    def eval_data(self) -> Samples: ...

    def loss(self, model: nn.Module, batch: Any) -> Loss: ...

    def metrics(self) -> Metrics:
        """A fresh set, all zero."""
