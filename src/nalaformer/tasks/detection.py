"""Finding objects in images: boxes, and with Mask R-CNN their masks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.detection import (
    CocoFolder,
    EvalSamples,
    OverlappingShapes,
    TrainingSamples,
    as_tensor,
    fitting_scale,
    resized,
)
from ..field_types import check_field_types, check_ranges
from ..registry import unknown_name
from .base import TASKS, Answer, Gather, Loss, held_out_note
from .detection_picture import draw_objects

if TYPE_CHECKING:
    from PIL.Image import Image

DETECTORS = ("retinanet", "mask_rcnn")
GENERATED_NAME = "overlapping_shapes"
Batch = tuple[list[Tensor], list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class DetectionConfig:
    """Which images, in which sizes, and what finds the objects in them."""

    data: str
    """A folder in COCO's layout (annotations/instances_train.json with train/, the same for val), or "overlapping_shapes"."""
    data_options: dict[str, Any] = field(default_factory=dict)
    """Options of generated data, e.g. {"most_objects": 3}."""
    holdout: float = 0.0
    """Share of the images that is held out for evaluation where the folder has no val split; 0: it must have one."""
    data_seed: int = 0
    """Seed of generated data, and of which images are held out."""
    train_samples: int = 1_000
    """Generated data: images to learn from."""
    eval_samples: int = 200
    """Generated data: images of the val split."""
    generated_folder: str = "runs/data"
    """Where generated data is written, once."""
    detector: str = "retinanet"
    """"retinanet" (boxes) or "mask_rcnn" (boxes and masks)."""
    short_sides: tuple[int, ...] = (800,)
    """Training images are resized to a short side drawn from these, their shape kept; 0 or none: they keep their size."""
    eval_short_side: int = 800
    """The same in evaluation and for answers; 0: images keep their size."""
    longest_side: int = 1333
    """No side becomes longer than this; 0: no limit."""
    flip: float = 0.5
    """Probability that a training image is mirrored."""
    empty_images: bool = True
    """Learn from images without objects too; the published COCO recipes leave them out."""

    def __post_init__(self) -> None:
        check_field_types(self)
        # as a checkpoint's settings hold it
        object.__setattr__(self, "short_sides", tuple(self.short_sides))
        if self.detector not in DETECTORS:
            raise unknown_name("detector", self.detector, DETECTORS)
        if any(side < 0 for side in self.short_sides):
            raise ValueError(f"short_sides must not be negative, got {self.short_sides}; 0 leaves images as they are")
        check_ranges(
            self,
            positive=("train_samples", "eval_samples"),
            not_negative=("data_seed", "eval_short_side", "longest_side"),
            shares=("flip",),
            sides=("short_sides", "eval_short_side", "longest_side"),
            below_one=("holdout",),
        )


@dataclass(frozen=True, kw_only=True)
class DetectionAnswers:
    """Which of the objects that were found are shown."""

    score: float = 0.5
    """The least score of an object that is shown; below 0.05 it changes nothing: detectors themselves drop such objects."""


@TASKS.register("detection")
class Detection:
    """The detector's own losses, and COCO's mAP of boxes and masks."""

    Config = DetectionConfig
    AnswerOptions = DetectionAnswers
    headings = ("objects", "which")
    has_pictures = True

    def __init__(self, config: DetectionConfig) -> None:
        self.config = config

    @property
    def has_masks(self) -> bool:
        return self.config.detector == "mask_rcnn"

    @cached_property
    def folder(self) -> str:
        """The folder of the data; generated data is written at the first call."""
        config = self.config
        if config.data != GENERATED_NAME:
            return config.data
        try:
            shapes = OverlappingShapes(**config.data_options)
        except TypeError as error:
            raise ValueError(f"{GENERATED_NAME} does not take the options {config.data_options}: {error}") from error
        place = shapes.folder(
            config.generated_folder, train=config.train_samples, val=config.eval_samples, seed=config.data_seed
        )
        return str(place)

    def split(self, name: str) -> CocoFolder:
        return CocoFolder(self.folder, name, holdout=self.config.holdout, seed=self.config.data_seed)

    def notes(self) -> list[str]:
        """The images held out, of a folder without val."""
        is_cut = self.eval_data.folder.is_cut
        return [held_out_note(len(self.train_data), len(self.eval_data), self.config.holdout)] if is_cut else []

    @cached_property
    def train_data(self) -> TrainingSamples:
        config = self.config
        folder = self.split("train")
        if folder.classes != self.classes:
            raise ValueError(
                f"train and val must have the same categories, got {', '.join(folder.classes)} in {folder.file} and "
                f"{', '.join(self.classes)} in {self.eval_data.folder.file}"
            )
        return TrainingSamples(
            folder,
            masks=self.has_masks,
            short_sides=config.short_sides,
            longest_side=config.longest_side,
            flip=config.flip,
            empty_images=config.empty_images,
        )

    @cached_property
    def eval_data(self) -> EvalSamples:
        config = self.config
        return EvalSamples(
            self.split("val"),
            masks=self.has_masks,
            short_side=config.eval_short_side,
            longest_side=config.longest_side,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """Names, by label."""
        return self.eval_data.folder.classes

    def facts(self) -> dict[str, Any]:
        return {"classes": list(self.classes), "detector": self.config.detector}

    @staticmethod
    def create_model(name: str, options: dict[str, Any], facts: dict[str, Any]) -> nn.Module:
        """The detector on timm's backbone of that name; options are those of DetectorConfig and of the backbone."""
        from ..models.vision.detectors import DetectorConfig, build_detector

        own = {part.name for part in fields(DetectorConfig)} - {"kind", "classes"}
        config = DetectorConfig(
            kind=facts["detector"],
            classes=len(facts["classes"]),
            **{key: value for key, value in options.items() if key in own},
        )
        return build_detector(config, name, {key: value for key, value in options.items() if key not in own})

    @staticmethod
    def backbone(model: nn.Module) -> nn.Module:
        """timm's network inside the detector."""
        from ..models.vision.detectors import Detector

        assert isinstance(model, Detector)
        return model.backbone

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The sum of the detector's losses, which are its parts."""
        images, targets = batch
        parts = model([in_unit_range(image) for image in images], targets)
        return Loss(total=torch.stack(list(parts.values())).sum(), weight=len(images), parts=parts)

    def metrics(self) -> "MeanPrecision":
        return MeanPrecision(has_masks=self.has_masks)

    @torch.no_grad()
    def answer(self, model: nn.Module, image: "Image", facts: dict[str, Any], options: DetectionAnswers) -> Answer:
        """Values: for each object a dictionary of class, score, box (left, top, right, bottom), and mask [H, W] if any."""
        config = self.config
        pixels = as_tensor(resized(image, fitting_scale(image.size, config.eval_short_side, config.longest_side)))
        pixels, size = pixels.to(next(model.parameters()).device), (image.height, image.width)
        found = find_objects(model, pixels, size, least_score=options.score)
        values = [
            {"class": facts["classes"][label], "score": score, "box": box}
            for label, score, box in zip(
                found["labels"].tolist(), found["scores"].tolist(), found["boxes"].tolist(), strict=True
            )
        ]
        for value, mask in zip(values, found.get("masks", ()), strict=False):
            value["mask"] = mask.numpy()
        which = [f"{value['class']} {value['score']:.2f}" for value in values[:MOST_NAMED]]
        more = [f"and {len(values) - MOST_NAMED} more"] if len(values) > MOST_NAMED else []
        if not values:
            more = [why_none(find_objects(model, pixels, size)["scores"], options.score)]
        return Answer(
            cells=(str(len(values)), ", ".join(which + more)),
            values=tuple(values),
            rows=tuple(
                {"class": value["class"], "score": value["score"]} | dict(zip(SIDES, value["box"], strict=True))
                for value in values
            ),
            picture=draw_objects(image, values, facts["classes"]),
        )


# of a box, in pixels of the image
SIDES = ("left", "top", "right", "bottom")
# in a table's cell
MOST_NAMED = 8


def why_none(scores: Tensor, least: float) -> str:
    """What to say where no object reaches the least score."""
    if not len(scores) or scores.max() >= least:
        return "nothing found with a score of 0.05 or more"
    best = scores.max().item()
    return f"none reaches {least:g}, the best has {best:.2f}: --set score={max(0.0, best - 0.005):.2f}"


def in_unit_range(image: Tensor) -> Tensor:
    return image.float() / 255


def find_objects(model: nn.Module, image: Tensor, size: tuple[int, int], *, least_score: float = 0.0) -> dict[str, Tensor]:
    """What a detector finds in an image [3, h, w], in pixels of the image of `size` (height, width), on the CPU."""
    from ..models.vision.detectors import paste

    (found,) = model([in_unit_range(image)])
    kept = found["scores"] >= least_score
    height, width = image.shape[1:]
    ratio = torch.tensor([size[1] / width, size[0] / height], device=image.device).repeat(2)
    boxes = found["boxes"][kept].float() * ratio
    result = {"boxes": boxes, "labels": found["labels"][kept], "scores": found["scores"][kept].float()}
    if "masks" in found:
        result["masks"] = paste(found["masks"][kept].float(), boxes, size)
    return {name: value.cpu() for name, value in result.items()}


class MeanPrecision:
    """COCO's mAP, in pixels of the images as they are on the disk.

    Images are shown to the model one by one: in a batch they would be padded by their neighbours' sizes, and the figures would
    depend on who the neighbours are, that is on the number of processes.
    """

    def __init__(self, *, has_masks: bool) -> None:
        self.metric = make_metric(has_masks)
        self.indices: list[int] = []

    def update(self, model: nn.Module, batch: Batch) -> None:
        for image, target in zip(*batch, strict=True):
            found = find_objects(model, image, target["size"])
            truth = {name: value.cpu() for name, value in target.items() if isinstance(value, Tensor)}
            self.metric.update([found], [truth])
            self.indices.append(target["index"])

    def join(self, gather: Gather) -> None:
        # equal scores keep the order of their images
        parts = gather((self.indices, self.metric.metric_state))
        order = sorted((index, rank, place) for rank, (own, _) in enumerate(parts) for place, index in enumerate(own))
        self.indices = [index for index, _, _ in order]
        for name in self.metric.metric_state:
            # boxes or masks alone leave the other's list empty
            lists = [state[name] for _, state in parts]
            setattr(self.metric, name, [lists[rank][place] for _, rank, place in order] if any(lists) else [])

    def result(self) -> dict[str, float]:
        """Box mAP first; a size of which there are no objects has no figure."""
        if not self.indices:
            raise ValueError("mAP needs at least one image, got none that could be read")
        found = figures(self.metric.compute())
        if not found:
            raise ValueError("mAP needs at least one object that is no crowd, got none in the images that could be read")
        return found | {"images": float(len(self.indices))}


# torchmetrics' names, and the words before them when it looks at boxes alone
FIGURES = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


def figures(computed: Mapping[str, Tensor]) -> dict[str, float]:
    """Figures of boxes, then of masks; -1 stands for "no such object" and is left out."""
    named = {
        f"{ours}_{name}": computed.get(f"{theirs}{name}")
        for ours, theirs in (("box", ""), ("box", "bbox_"), ("mask", "segm_"))
        for name in FIGURES
        if f"{theirs}{name}" in computed
    }
    return {name: value.item() for name, value in named.items() if value is not None and value.item() >= 0}


def make_metric(has_masks: bool) -> Any:
    try:
        import faster_coco_eval  # noqa: F401  (torchmetrics imports it late)
        from torchmetrics.detection import MeanAveragePrecision
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"mAP needs {error.name}: pip install 'nalaformer[detection]'", name=error.name) from error
    kinds: Any = ("bbox", "segm") if has_masks else "bbox"
    return MeanAveragePrecision(
        iou_type=kinds,
        # COCO's own, in float64: torchmetrics has them in float32, where a recall of 3/5 is below the threshold of 0.6
        iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
        rec_thresholds=np.linspace(0, 1, 101).tolist(),
        backend="faster_coco_eval",
        # processes are joined by the trainer
        sync_on_compute=False,
    )
