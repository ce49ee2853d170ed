"""Metrics of answers, each with its training loss: accuracy, R^2 or perplexity."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# the target of a position that asks nothing, as torch's cross-entropy has it
IGNORE = -100


class Metric(ABC):
    """A metric of many answers: a function of sums over them, so that batches and groups add up."""

    name: str
    higher_is_better = True

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the training loss, a mean over the answers. outputs: [n, C]; targets: classes [n], or vectors [n, C]."""

    @abstractmethod
    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the terms to sum, for each answer: [n, T] float64. The first is 1, or 0 where nothing is asked."""

    @abstractmethod
    def num_terms(self, outputs: int) -> int:
        """T, where answers are of so many outputs."""

    @abstractmethod
    def value(self, sums: Sequence[float]) -> float:
        """Return the metric from the terms summed over at least one answer."""

    @abstractmethod
    def mean_loss(self, sums: Sequence[float]) -> float:
        """The loss over the same answers."""

    @property
    def worst(self) -> float:
        """Value that every other one is better than."""
        return -math.inf if self.higher_is_better else math.inf

    def is_better(self, new: float, old: float) -> bool:
        return new > old if self.higher_is_better else new < old


class AccuracyMetric(Metric):
    """Share of the answers that are right."""

    name = "accuracy"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # a part of a batch that asks nothing has no loss, and no mean
        total = F.cross_entropy(outputs, targets, ignore_index=IGNORE, reduction="sum")
        return total / (targets != IGNORE).sum().clamp(min=1)

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        asked = targets != IGNORE
        right = (outputs.argmax(dim=1) == targets) & asked
        losses = F.cross_entropy(outputs, targets, ignore_index=IGNORE, reduction="none")
        return torch.stack((asked.double(), right.double(), losses.double()), dim=1)

    def num_terms(self, outputs: int) -> int:
        return 3

    def value(self, sums: Sequence[float]) -> float:
        return sums[1] / sums[0]

    def mean_loss(self, sums: Sequence[float]) -> float:
        return sums[2] / sums[0]


class PerplexityMetric(AccuracyMetric):
    """exp of the mean cross-entropy: among how many tokens that are equally likely a model would be as unsure."""

    name = "perplexity"
    higher_is_better = False

    def value(self, sums: Sequence[float]) -> float:
        # the exponential overflows for a model that is sure and wrong
        return math.exp(min(self.mean_loss(sums), 700.0))


class R2Metric(Metric):
    """R^2 = 1 - sum |y - output|^2 / sum |y - mean y|^2: 1 is perfect, 0 as good as the mean."""

    name = "R^2"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs, targets = outputs.double(), targets.double()
        squares = ((outputs - targets).square().sum(1, keepdim=True), targets.square().sum(1, keepdim=True))
        return torch.cat((torch.ones_like(squares[0]), *squares, targets), dim=1)

    def num_terms(self, outputs: int) -> int:
        return 3 + outputs

    def value(self, sums: Sequence[float]) -> float:
        count, missed, square, *of_channels = sums
        return 1 - missed / (square - sum(total**2 for total in of_channels) / count)

    def mean_loss(self, sums: Sequence[float]) -> float:
        return sums[1] / (sums[0] * (len(sums) - 3))


METRICS: dict[str, Metric] = {metric.name: metric for metric in (AccuracyMetric(), PerplexityMetric(), R2Metric())}


def flatten_answers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One row for each answer: [..., C] -> [n, C]; classes [...] -> [n], vectors [..., C] -> [n, C]."""
    rows = outputs.float().flatten(0, -2)
    return rows, targets.reshape(rows.shape if targets.is_floating_point() else rows.shape[:1])
