"""Naming what an image shows."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import (
    GENERATED,
    Augmentation,
    Generated,
    ImageFolder,
    eval_transform,
    notes_of_ignored,
    training_transform,
    usual_side,
)
from ..field_types import check_field_types, check_ranges
from ..registry import unknown_name
from .base import TASKS, Answer, Loss, SummedMetrics

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig:
    """Which images, and how they are learned."""

    data: str
    """A folder with train/<class>/ and val/<class>/ (the ImageNet layout), or with <class>/ alone (see holdout), or the name
    of generated data."""
    holdout: float = 0.0
    """Share of each class's images that is held out for evaluation where the folder has no val/; 0: it must have one."""
    data_options: dict[str, Any] = field(default_factory=dict)
    """Options of generated data, e.g. {"cells": 6}."""
    data_seed: int = 0
    """Seed of generated data, and of which images are held out."""
    train_samples: int = 100_000
    """Generated data: how many images there are before they repeat."""
    eval_samples: int = 2_000
    """Generated data: images of the eval split."""
    image_size: int = 224
    """Side of the images; 0: their own usual side, in multiples of 16 from 32 to 128; generated ones have their own size."""
    eval_crop: float = 0.9
    """Part of the resized image's side that evaluation looks at."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    """How images from a folder are changed in training."""
    mixup: float = 0.0
    """Alpha of mixup; 0: none."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0: none."""
    smoothing: float = 0.0
    """Part of the target that goes to all classes alike."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_ranges(
            self,
            positive=("train_samples", "eval_samples"),
            not_negative=("data_seed", "image_size", "mixup", "cutmix"),
            below_one=("holdout", "smoothing"),
            sides=("image_size",),
        )
        if isinstance(self.augmentation, dict):
            # as a checkpoint's settings hold it
            object.__setattr__(self, "augmentation", Augmentation(**self.augmentation))
        if not 0 < self.eval_crop <= 1:
            raise ValueError(f"eval_crop must be above 0 and at most 1, got {self.eval_crop}")


MOST_CLASSES = 5
# of a size that follows from the data: what the deepest backbone leaves a token of, and what a CPU learns from in minutes
SMALLEST_SIDE, LARGEST_SIDE = 32, 128


@dataclass(frozen=True, kw_only=True)
class ClassificationAnswers:
    """What may be chosen when a model names images."""

    most: int = MOST_CLASSES
    """Classes that are given with their probabilities, the likeliest first; 0: all. Tables show at most five."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_ranges(self, not_negative=("most",))


@TASKS.register("classification")
class Classification:
    """Cross-entropy and top-1, top-5 accuracy on a folder of images or generated ones."""

    Config = ClassificationConfig
    AnswerOptions = ClassificationAnswers
    headings = ("first", "second", "third", "fourth", "fifth")
    has_pictures = False

    def __init__(self, config: ClassificationConfig) -> None:
        self.config = config
        if not config.image_size and not self.is_generated:
            self.config = replace(config, image_size=self.chosen_size())

    @property
    def is_generated(self) -> bool:
        return self.config.data in GENERATED.names()

    def chosen_size(self) -> int:
        """The usual side of the images, rounded up to a multiple of 16, within limits."""
        side = usual_side([path for path, _ in self.images_of("train", eval_transform(SMALLEST_SIDE)).files])
        return min(max(-(-side // 16) * 16, SMALLEST_SIDE), LARGEST_SIDE)

    def images_of(self, split: str, transform: "Callable[[Image], Tensor]") -> ImageFolder:
        config = self.config
        if not Path(config.data).is_dir():
            unknown = unknown_name("data", config.data, GENERATED.names())
            raise ValueError(
                f"{unknown}; or a folder with a folder of images for each class: data=/path/to/images, with a run "
                f"--data /path/to/images (there is no folder {Path(config.data).absolute()})"
            )
        return ImageFolder(config.data, split, transform=transform, holdout=config.holdout, seed=config.data_seed)

    @cached_property
    def train_data(self) -> Generated | ImageFolder:
        config = self.config
        if self.is_generated:
            return self.generated("train", config.train_samples)
        data = self.images_of("train", training_transform(config.image_size, config.augmentation))
        if data.classes != self.classes:
            odd = sorted(set(data.classes) ^ set(self.classes))
            raise ValueError(f"train and val must have the same class folders, got only in one of them: {', '.join(odd[:5])}")
        data.check_classes()
        return data

    @cached_property
    def eval_data(self) -> Generated | ImageFolder:
        config = self.config
        if self.is_generated:
            return self.generated("val", config.eval_samples)
        data = self.images_of("val", eval_transform(config.image_size, crop=config.eval_crop))
        data.check_classes()
        return data

    def notes(self) -> list[str]:
        """Classes, size, the images held out and the files that are not read, of a folder: what was found in the data."""
        if self.is_generated:
            return []
        train, held_out = self.train_data, self.eval_data
        assert isinstance(train, ImageFolder)
        assert isinstance(held_out, ImageFolder)
        # of files that lie beside the class folders, the ending may be right
        ignored = notes_of_ignored(train.ignored if train.is_cut else [*train.ignored, *held_out.ignored])
        ignored = [f"{each} and lie in a class folder" for each in ignored]
        names = ", ".join(self.classes[:MOST_CLASSES]) + (", ..." if len(self.classes) > MOST_CLASSES else "")
        line = f"{len(train):,} images of {len(self.classes)} classes ({names}) at {self.image_size} pixels"
        if not held_out.is_cut:
            return [f"{line}; {len(held_out):,} of val/ to evaluate on", *ignored]
        return [
            f"{line}; {len(held_out):,} more are held out to evaluate on: {100 * self.config.holdout:g}% of each class, chosen "
            "by their names, the same in every run",
            *ignored,
        ]

    def generated(self, split: str, samples: int) -> Generated:
        kind = GENERATED[self.config.data]
        return kind(split=split, samples=samples, seed=self.config.data_seed, **self.config.data_options)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names, by label."""
        return self.eval_data.classes

    @property
    def image_size(self) -> int:
        return self.generated("val", 1).image_size if self.is_generated else self.config.image_size

    def facts(self) -> dict[str, Any]:
        return {"classes": list(self.classes)}

    @staticmethod
    def create_model(name: str, options: dict[str, Any], facts: dict[str, Any]) -> nn.Module:
        """timm's model of that name; those of this library are among them."""
        import timm

        from ..models import vision  # noqa: F401  (enters our names)

        try:
            return timm.create_model(name, num_classes=len(facts["classes"]), **options)
        except RuntimeError as error:
            # timm's way of saying that it has no model of that name
            raise ValueError(f"the model {name!r} cannot be created: {error}") from error

    def prepare(self, image: "Image") -> Tensor:
        """An image of any size as the model's input, [3, image_size, image_size]."""
        if self.is_generated:
            # generated images have no mean to subtract and are read as they were made
            resized = image.resize((self.image_size, self.image_size))
            return torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255 - 0.5
        return eval_transform(self.config.image_size, crop=self.config.eval_crop)(image)

    @torch.no_grad()
    def answer(self, model: nn.Module, image: "Image", facts: dict[str, Any], options: ClassificationAnswers) -> Answer:
        """Values: (class, probability), the likeliest first."""
        batch = self.prepare(image)[None].to(next(model.parameters()).device)
        top = model(batch).float().softmax(dim=1)[0].topk(min(options.most or len(facts["classes"]), len(facts["classes"])))
        found = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        values = tuple((facts["classes"][label], probability) for probability, label in found)
        return Answer(
            cells=tuple(f"{name} {100 * probability:.1f}%" for name, probability in values[:MOST_CLASSES]),
            values=values,
            rows=tuple({"class": name, "probability": probability} for name, probability in values),
        )

    @cached_property
    def _mix(self) -> Any:
        """timm's mixup, or None. It draws from numpy's random state, which the trainer sets for every step."""
        config = self.config
        if not config.mixup and not config.cutmix:
            return None
        from timm.data import Mixup

        return Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=len(self.classes))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """Cross-entropy against labels, or against mixed ones; parts: none."""
        images, labels = batch
        if self._mix is not None:
            if len(images) % 2:
                raise ValueError(
                    f"mixup and cutmix need an even number of images at once, which they mix in pairs, got {len(images)}; "
                    "choose another batch_size (over ranks x accumulate), or mixup=0 and cutmix=0"
                )
            # cloned: timm mixes in place, and the batch belongs to the loader
            images, targets = self._mix(images.clone(), labels)
            return Loss(total=F.cross_entropy(model(images).float(), targets), weight=len(images))
        logits = model(images).float()
        return Loss(total=F.cross_entropy(logits, labels, label_smoothing=self.config.smoothing), weight=len(images))

    def metrics(self) -> "TopAccuracy":
        return TopAccuracy(classes=len(self.classes))


class TopAccuracy(SummedMetrics):
    """How often the right class is the first, and among the first five where there are more."""

    def __init__(self, *, classes: int | None = None) -> None:
        self.classes = classes
        # images, right ones, right ones among five, sum of losses
        self.sums = torch.zeros(4, dtype=torch.float64)

    def update(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = cast(Tensor, model(images)).float()
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        losses = F.cross_entropy(logits, labels, reduction="sum")
        counts = (torch.tensor(float(len(labels))), ranked[:, 0].sum(), ranked.any(dim=1).sum(), losses)
        self.sums += torch.stack([count.double().cpu() for count in counts])

    def result(self) -> dict[str, float]:
        images, first, five, losses = self.sums.tolist()
        if not images:
            raise ValueError("accuracy needs at least one image, got none that could be read")
        # of five classes or fewer, every answer has the right one
        top5 = {} if self.classes is not None and self.classes <= MOST_CLASSES else {"top5": five / images}
        return {"top1": first / images} | top5 | {"loss": losses / images, "images": images}
