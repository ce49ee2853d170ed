"""Naming what a sequence says: one class for all of it, or one at each position that asks."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.sequences import IGNORE, SEQUENCES, SequenceData, Stored, make_sequences
from ..field_types import check_field_types, check_ranges
from ..models.sequence import SEQUENCE_MODELS
from ..registry import check_options, unknown_name
from .base import TASKS, Loss, SummedMetrics


@dataclass(frozen=True, kw_only=True)
class SequencesConfig:
    """Which sequences."""

    data: str
    """Name of the sequence data, or a folder that `nalaformer data make` wrote."""
    data_options: dict[str, Any] = field(default_factory=dict)
    """Options, e.g. {"length": 1024}; {"root": "/path"} for released files. What a folder holds must be made with them."""
    eval_options: dict[str, Any] = field(default_factory=dict)
    """Options that differ in evaluation: longer sequences, more needles."""
    data_seed: int = 0
    """Seed of generated data."""
    train_samples: int = 100_000
    """Sequences before they repeat (all, at most, of a folder)."""
    eval_samples: int = 2_000
    """Sequences of the val split."""
    test_samples: int = 20_000
    """Sequences of the test split, which no choice may look at."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_ranges(self, not_negative=("data_seed",))


@TASKS.register("sequences")
class Sequences:
    """Cross-entropy and accuracy at the answers, over all and by group, beside chance and what shortcuts reach."""

    Config = SequencesConfig

    def __init__(self, config: SequencesConfig) -> None:
        self.config = config

    def split(self, name: str, samples: int) -> SequenceData:
        """The sequences of one split."""
        config = self.config
        options = config.data_options | (config.eval_options if name != "train" else {})
        if config.data in SEQUENCES.names():
            return make_sequences(config.data, split=name, samples=samples, seed=config.data_seed, options=options)
        if Path(config.data).is_dir():
            stored = Stored(config.data, split=name, samples=samples)
            stored.check(options)
            return stored
        raise unknown_name("data (a folder, or the name of sequence data)", config.data, SEQUENCES.names())

    @cached_property
    def train_data(self) -> SequenceData:
        return self.split("train", self.config.train_samples)

    @cached_property
    def eval_data(self) -> SequenceData:
        return self.split("val", self.config.eval_samples)

    @cached_property
    def test_data(self) -> SequenceData:
        return self.split("test", self.config.test_samples)

    def facts(self) -> dict[str, Any]:
        """A model must fit the longest sequences, wherever they come."""
        train, evaluated = self.train_data.facts, self.eval_data.facts
        return asdict(train) | {"length": max(train.length, evaluated.length)}

    @staticmethod
    def create_model(name: str, options: dict[str, Any], facts: dict[str, Any]) -> nn.Module:
        check_options(SEQUENCE_MODELS[name], options, "a sequence model")
        return SEQUENCE_MODELS[name](**facts, **options)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        logits, targets = answered(model, batch)
        weight = (targets != IGNORE).sum().item()
        return Loss(total=F.cross_entropy(logits.float(), targets, ignore_index=IGNORE), weight=weight)

    def metrics(self) -> "AnswerAccuracy":
        data = self.eval_data
        return AnswerAccuracy(data.groups, known={"chance": data.chance, **data.shortcuts})


def answered(
    model: nn.Module, batch: dict[str, Tensor], *, only_answers: bool = False, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [n, outputs] and targets [n] of everything that is asked; a row of IGNORE where a sample asks less than others.

    only_answers: of a language, the answers and not every next token. most: answers of a sample, where it is known; without
    it the device is asked.
    """
    inputs, targets = batch["inputs"], batch["targets"]
    if targets.dim() == 1:
        return model(inputs), targets
    if only_answers and "answers" in batch:
        targets = targets.masked_fill(~batch["answers"], IGNORE)
    asks = targets != IGNORE
    count = most if most is not None else max(1, int(asks.sum(dim=1).max()))
    if count == targets.shape[1]:
        return model(inputs).flatten(0, 1), targets.flatten()
    # the output layer, often the largest part of the work, runs where it matters alone
    at = asks.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return model(inputs, at=at).flatten(0, 1), targets.gather(1, at).flatten()


class AnswerAccuracy(SummedMetrics):
    """How often the answer is right, in each group and in the mean over groups, each counting the same.

    `known` figures, such as chance, are reported beside it.
    """

    def __init__(self, groups: tuple[str, ...], *, known: dict[str, float] | None = None) -> None:
        self.groups, self.known = groups, known or {}
        # for each group: answers, right ones, sum of losses
        self.sums = torch.zeros(3 * len(groups), dtype=torch.float64)

    def update(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.sums += answer_sums(model, batch, len(self.groups)).cpu()

    def result(self) -> dict[str, float]:
        count, right, losses = self.sums.view(len(self.groups), 3).unbind(1)
        total = count.sum().item()
        if not total:
            raise ValueError("accuracy needs at least one answer, got none")
        shares = {group: hits / n for group, n, hits in zip(self.groups, count.tolist(), right.tolist(), strict=True) if n}
        figures = {"accuracy": sum(shares.values()) / len(shares), "loss": losses.sum().item() / total, "answers": total}
        if len(shares) > 1:
            figures |= {f"accuracy, {group}": share for group, share in shares.items()}
        return figures | self.known


def answer_sums(model: nn.Module, batch: dict[str, Tensor], groups: int, *, most: int | None = None) -> Tensor:
    """Answers, right ones and sum of losses of each group, [3 groups] float64, on the device of the batch."""
    logits, targets = answered(model, batch, only_answers=True, most=most)
    logits = logits.float()
    asked = targets != IGNORE
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    right = (logits.argmax(dim=1) == targets) & asked
    group = batch["group"].repeat_interleave(len(targets) // len(batch["group"]))
    figures = torch.stack((asked.double(), right.double(), losses.double() * asked), dim=1)
    sums = torch.zeros(groups, 3, dtype=torch.float64, device=targets.device)
    return sums.index_add_(0, group, figures).flatten()
