"""What the trainer asks of a task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..data import Samples
from ..registry import Registry

if TYPE_CHECKING:
    from PIL.Image import Image


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


# what one process gives, of all processes, in the order of their ranks
Gather = Callable[[Any], list[Any]]


class Metrics(Protocol):
    """Figures that grow with every batch, over all ranks."""

    def update(self, model: nn.Module, batch: Any) -> None:
        """Add what the model makes of a batch."""

    def join(self, gather: Gather) -> None:
        """Take in what the other ranks have; afterwards all have the same."""

    def result(self) -> dict[str, float]:
        """The figures, the one by which checkpoints are compared first (higher is better)."""


class SummedMetrics:
    """Metrics whose every figure follows from sums over samples."""

    sums: Tensor
    """float64, on the CPU."""

    def join(self, gather: Gather) -> None:
        self.sums = torch.stack(gather(self.sums)).sum(0)


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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model says of one image."""

    cells: tuple[str, ...]
    """For people: a row of the table whose headings the task names."""
    values: Any
    """For programs; each task says what it is."""
    rows: tuple[dict[str, Any], ...] = ()
    """For files: for each thing that the answer names, numbers and text by their names."""
    picture: "Image | None" = None
    """The answer drawn into the image, or the image that is the answer."""


class ImageTask(RecipeTask, Protocol):
    """A task whose models answer for single images, of which the task may know nothing else: its data may be gone."""

    headings: tuple[str, ...]
    """The heading of each cell of an answer; an answer may have fewer cells."""
    has_pictures: bool
    """True if its answers are drawn."""
    AnswerOptions: type[Any]
    """The frozen dataclass of what may be chosen when a model is asked."""

    def answer(self, model: nn.Module, image: "Image", facts: dict[str, Any], options: Any) -> Answer:
        """What the model, in evaluation mode on its device, makes of an RGB image of any size."""


TASKS: Registry[type[RecipeTask]] = Registry("task")


def held_out_note(learned: int, held_out: int, share: float) -> str:
    """Say which images of a folder without a val split are evaluated on."""
    return (
        f"{learned:,} images to learn from; {held_out:,} more are held out to evaluate on: {100 * share:g}% of all, chosen by "
        "their names, the same in every run"
    )


def task_name(config: object) -> str:
    """Which task a description is of."""
    return next(name for name in TASKS.names() if type(config) is TASKS[name].Config)
