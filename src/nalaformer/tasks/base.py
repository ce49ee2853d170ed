"""What the trainer asks of a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ..data import Samples
from ..registry import Registry


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


class RecipeTask(Task, Protocol):
    """A task that recipes name: it is made of a description, and says which model fits its data."""

    Config: type[Any]
    """The frozen dataclass that describes it."""

    def __init__(self, config: Any) -> None: ...

    def facts(self) -> dict[str, Any]:
        """What of the data the model's shape and its answers depend on, as JSON holds it: kept with every checkpoint,
        so that a model can be used where its data is not."""

    @staticmethod
    def create_model(name: str, options: dict[str, Any], facts: dict[str, Any]) -> nn.Module:
        """The model of that name for data with these facts."""


TASKS: Registry[type[RecipeTask]] = Registry("task")


def task_name(config: object) -> str:
    """Which task a description is of."""
    return next(name for name in TASKS.names() if type(config) is TASKS[name].Config)
