"""Semantic segmentation for the one trainer."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.generated_folders import written_once
from ...data.segmentation import IGNORED, EvalResize, MaskedImages, TrainingCrop, check_counted_classes, write_scenes
from ..base import TASKS, Answer, Loss, held_out_note
from .config import SCENES, SegmentationAnswers, SegmentationConfig
from .metrics import ConfusionMatrix
from .overlay import draw_overlay
from .windows import label_pixels, logits_in_windows

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_NAMED = 5


@TASKS.register("segmentation")
class Segmentation:
    """Cross-entropy over labelled pixels and mIoU, on folders of images and masks or generated scenes."""

    Config = SegmentationConfig
    AnswerOptions = SegmentationAnswers
    headings = ("parts of the image",)
    has_pictures = True

    def __init__(self, config: SegmentationConfig) -> None:
        self.config = config

    @cached_property
    def folder(self) -> Path:
        config = self.config
        if config.data != SCENES:
            if not Path(config.data).is_dir():
                raise ValueError(f'data must be a folder of images and masks, or "{SCENES}", got {config.data!r}')
            return Path(config.data)
        name = f"{SCENES}_{config.train_samples}_{config.eval_samples}_seed{config.data_seed}"
        return written_once(
            Path(config.generated_folder) / name,
            lambda aside: write_scenes(aside, train=config.train_samples, val=config.eval_samples, seed=config.data_seed),
        )

    @cached_property
    def train_data(self) -> MaskedImages:
        config = self.config
        crop = TrainingCrop(
            crop=config.crop,
            short_side=config.short_side,
            smallest_scale=config.smallest_scale,
            largest_scale=config.largest_scale,
            most_of_one_class=config.most_of_one_class,
            flip=config.flip,
            color_jitter=config.color_jitter,
        )
        return self.split("train", crop)

    @cached_property
    def eval_data(self) -> MaskedImages:
        return self.split("val", EvalResize(short_side=self.config.short_side))

    def split(self, name: str, transform: TrainingCrop | EvalResize) -> MaskedImages:
        config = self.config
        chosen: dict[str, Any] = {"holdout": config.holdout, "seed": config.data_seed, "binary": config.binary}
        data = MaskedImages(self.folder, name, transform=transform, **chosen)
        check_counted_classes(data.files)
        return data

    def notes(self) -> list[str]:
        """The images held out, of a folder without val."""
        is_cut = self.eval_data.files.is_cut
        return [held_out_note(len(self.train_data), len(self.eval_data), self.config.holdout)] if is_cut else []

    def facts(self) -> dict[str, Any]:
        return {"classes": list(self.eval_data.classes), "colours": [list(colour) for colour in self.eval_data.colours]}

    @staticmethod
    def create_model(name: str, options: dict[str, Any], facts: dict[str, Any]) -> nn.Module:
        """The network of a name DECODER:BACKBONE, such as "upernet:nalaformer_t"."""
        from ...models.vision.segmentation import create_segmentation_network

        return create_segmentation_network(name, classes=len(facts["classes"]), **options)

    @staticmethod
    def backbone(model: nn.Module) -> nn.Module:
        """timm's model inside it."""
        from ...models.vision.segmentation import SegmentationNetwork

        assert isinstance(model, SegmentationNetwork)
        return model.backbone

    def loss(self, model: nn.Module, batch: tuple[list[Tensor], list[Tensor]]) -> Loss:
        """Cross-entropy, the mean over labelled pixels, plus auxiliary_weight times that of the auxiliary head.

        Units are images: a crop whose pixels are half unlabelled counts half. Parts: "decoder", and "auxiliary" of its head.
        """
        images, labels = torch.stack(batch[0]), torch.stack(batch[1]).long()
        counted = (labels != IGNORED).sum()
        losses = [
            F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum") / counted.clamp(min=1)
            for logits in model(images)
        ]
        parts = dict(zip(("decoder", "auxiliary"), losses, strict=False))
        total = losses[0] + self.config.auxiliary_weight * sum(losses[1:])
        return Loss(total=total, weight=counted.item() / labels[0].numel(), parts=parts)

    def metrics(self) -> ConfusionMatrix:
        config, names = self.config, self.eval_data.classes
        return ConfusionMatrix(len(names), window=config.window, stride=config.window_stride, names=names)

    @torch.no_grad()
    def answer(self, model: nn.Module, image: "Image", facts: dict[str, Any], options: SegmentationAnswers) -> Answer:
        """Values: the label of each pixel, uint8 [H, W]; the picture shows them in colours over the image."""
        window, stride = options.window, options.window_stride
        if window < 0:
            window, stride = self.config.window, self.config.window_stride
        batch = EvalResize(short_side=self.config.short_side).of_image(image)[None]
        logits = logits_in_windows(model, batch.to(next(model.parameters()).device), window=window, stride=stride)
        labels = label_pixels(logits, (image.height, image.width))[0].to(torch.uint8).cpu().numpy()
        shares = np.bincount(labels.ravel(), minlength=len(facts["classes"])) / labels.size
        present = [label for label in np.argsort(-shares, kind="stable") if shares[label] > 0]
        picture = draw_overlay(
            image,
            labels,
            classes=facts["classes"],
            colours=[(red, green, blue) for red, green, blue in facts["colours"]],
            opacity=options.opacity,
            legend=options.legend,
        )
        named = ", ".join(f"{facts['classes'][label]} {100 * shares[label]:.1f}%" for label in present[:MOST_NAMED])
        rows = tuple({"class": facts["classes"][label], "share": float(shares[label])} for label in present)
        return Answer(cells=(named,), values=labels, rows=rows, picture=picture)
