"""Answering what a sequence asks: one class for all of it, or a class or a vector at each position that asks."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalaformer.field_types import check_field_types, check_ranges
from nalaformer.registry import check_options, unknown_name
from nalaformer.tasks.base import TASKS, Loss, SummedMetrics

from .models import SEQUENCE_MODELS
from .sequences import (
    IGNORE,
    METRICS,
    SEQUENCES,
    Metric,
    SequenceData,
    Stored,
    flatten_answers,
    make_sequences,
    stored_name,
)


@dataclass(frozen=True, kw_only=True)
class SequencesConfig:
    """Settings of sequence data."""

    data: str
    """Name of the sequence data, or a folder that `python -m research.sequences` wrote."""
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

    def check_against(self, original: "SequencesConfig", name: str) -> None:
        """Raise ValueError if a folder holds other sequences than those that the recipe of that name is about."""
        if self.data in SEQUENCES.names():
            return
        held = stored_name(self.data)
        if held not in (None, original.data):
            raise ValueError(
                f"{name} learns from {original.data}, got {self.data}, which holds {held}; name another folder, or "
                f"a recipe on {held}"
            )


@TASKS.register("sequences")
class Sequences:
    """The figure of the data and its loss at the answers, over all and by group, beside chance and what shortcuts reach."""

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

    @property
    def figure(self) -> Metric:
        """Metric of the answers."""
        return METRICS[self.train_data.figure]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        outputs, targets = select_answers(model, batch)
        weight = (targets != IGNORE).sum().item()
        return Loss(total=self.figure.loss(outputs, targets), weight=weight)

    def metrics(self) -> "AnswerMetrics":
        data = self.eval_data
        known = {"chance": data.chance, **data.shortcuts}
        return AnswerMetrics(data.groups, known=known, figure=self.figure, outputs=data.facts.outputs)


def select_answers(
    model: nn.Module, batch: dict[str, Tensor], *, only_answers: bool = False, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs [n, C] and targets, [n] or [n, C], of everything that is asked; IGNORE where a sample asks less than others.

    only_answers: of a language, the answers and not every next token. most: answers of a sample, where it is known; without
    it the device is asked.
    """
    inputs, targets = batch["inputs"], batch["targets"]
    if targets.dim() != 2:
        return flatten_answers(model(inputs), targets)
    if only_answers and "answers" in batch:
        targets = targets.masked_fill(~batch["answers"], IGNORE)
    asks = targets != IGNORE
    count = most if most is not None else max(1, int(asks.sum(dim=1).max()))
    if count == targets.shape[1]:
        return flatten_answers(model(inputs), targets)
    # the output layer, often the largest part of the work, runs where it matters alone
    at = asks.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return flatten_answers(model(inputs, at=at), targets.gather(1, at))


class AnswerMetrics(SummedMetrics):
    """Metrics of answers, in each group and in the mean over groups with equal weight.

    `known` levels, such as chance, are reported beside them.
    """

    def __init__(
        self,
        groups: tuple[str, ...],
        *,
        known: dict[str, float] | None = None,
        figure: Metric = METRICS["accuracy"],
        outputs: int = 0,
    ) -> None:
        self.groups, self.known, self.figure = groups, known or {}, figure
        # the terms of the figure, for each group
        self.sums = torch.zeros(len(groups) * figure.num_terms(outputs), dtype=torch.float64)

    def update(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.sums += answer_sums(model, batch, len(self.groups), figure=self.figure).cpu()

    def result(self) -> dict[str, float]:
        name, sums = self.figure.name, self.sums.view(len(self.groups), -1)
        every = sums.sum(0).tolist()
        if not every[0]:
            raise ValueError(f"{name} needs at least one answer, got none")
        found = {group: self.figure.value(of) for group, of in zip(self.groups, sums.tolist(), strict=True) if of[0]}
        figures = {name: sum(found.values()) / len(found), "loss": self.figure.mean_loss(every), "answers": every[0]}
        if len(found) > 1:
            figures |= {f"{name}, {group}": value for group, value in found.items()}
        if not self.figure.higher_is_better:
            # first, and so what checkpoints are compared by: higher is better
            figures = {"log_likelihood": -figures["loss"]} | figures
        return figures | self.known


def answer_sums(
    model: nn.Module,
    batch: dict[str, Tensor],
    groups: int,
    *,
    most: int | None = None,
    figure: Metric = METRICS["accuracy"],
) -> Tensor:
    """The terms of the figure summed over the answers of each group, [groups T] float64, on the device of the batch."""
    terms = figure.terms(*select_answers(model, batch, only_answers=True, most=most))
    group = batch["group"].repeat_interleave(len(terms) // len(batch["group"]))
    return terms.new_zeros(groups, terms.shape[1]).index_add_(0, group, terms).flatten()
