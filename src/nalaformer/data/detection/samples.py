"""Images with their objects, in the sizes in which a detector sees them."""

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .coco import CocoFolder

if TYPE_CHECKING:
    from PIL.Image import Image

Sample = tuple[Tensor, dict[str, Any]]


def fitting_scale(size: tuple[int, int], short_side: int, longest_side: int) -> float:
    """The factor that makes the short side `short_side`, or less where the long side would be too long. 0: no such limit."""
    scale = short_side / min(size) if short_side else 1.0
    return min(scale, longest_side / max(size)) if longest_side else scale


def resized(image: "Image", scale: float) -> "Image":
    """The image `scale` times as large, its shape kept."""
    from PIL.Image import Resampling

    target = tuple(max(1, round(side * scale)) for side in image.size)
    return image if target == image.size else image.resize((target[0], target[1]), Resampling.BILINEAR)


def as_tensor(image: "Image") -> Tensor:
    """[3, H, W], whole numbers up to 255."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


class DetectionSamples:
    """Samples of a folder: (image [3, H, W], target).

    Samples differ in size, so a batch is a list of images and a list of targets.
    """

    def __init__(self, folder: CocoFolder, *, masks: bool, longest_side: int) -> None:
        self.folder, self.masks, self.longest_side = folder, masks, longest_side

    @staticmethod
    def collate(samples: list[Sample]) -> tuple[list[Tensor], list[dict[str, Any]]]:
        return [image for image, _ in samples], [target for _, target in samples]


class TrainingSamples(DetectionSamples):
    """Resized to a short side that is drawn for each image, and flipped at random; crowds are left out.

    target: `boxes` [N, 4], `labels` [N], and `masks` [N, H, W] where they are wanted, in pixels of the resized image.
    """

    def __init__(
        self,
        folder: CocoFolder,
        *,
        masks: bool,
        short_sides: tuple[int, ...],
        longest_side: int,
        flip: float,
        empty_images: bool,
    ) -> None:
        super().__init__(folder, masks=masks, longest_side=longest_side)
        self.short_sides, self.flip = short_sides, flip
        self.indices = np.arange(len(folder)) if empty_images else np.flatnonzero(~folder.is_empty)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        index = int(self.indices[index])
        objects, image = self.folder.read_objects(index), self.folder.read_image(index)
        # both are drawn whatever the options, so that one of them does not change the other
        short_side, is_flipped = random.choice(self.short_sides or (0,)), random.random() < self.flip
        pixels = as_tensor(resized(image, fitting_scale(image.size, short_side, self.longest_side)))
        scale = pixels.shape[2] / image.width, pixels.shape[1] / image.height
        alone = ~objects.crowds
        boxes = torch.from_numpy(objects.boxes[alone]) * torch.tensor([*scale, *scale])
        target = {"boxes": boxes, "labels": torch.from_numpy(objects.labels[alone])}
        if self.masks:
            masks = self.folder.read_masks(index, alone, scale=scale)
            target["masks"] = torch.from_numpy(masks).to(torch.uint8)
        return flipped(pixels, target) if is_flipped else (pixels, target)


class EvalSamples(DetectionSamples):
    """Resized to one short side; the objects stay in pixels of the image as it is on the disk, for figures are of those.

    target: `boxes`, `labels`, `iscrowd`, `area`, and `masks` where they are wanted; `size` (height, width) of the image,
    and its `index`.
    """

    def __init__(self, folder: CocoFolder, *, masks: bool, short_side: int, longest_side: int) -> None:
        super().__init__(folder, masks=masks, longest_side=longest_side)
        self.short_side = short_side

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Sample:
        objects, image = self.folder.read_objects(index), self.folder.read_image(index)
        target: dict[str, Any] = {
            "boxes": torch.from_numpy(objects.boxes),
            "labels": torch.from_numpy(objects.labels),
            "iscrowd": torch.from_numpy(objects.crowds).long(),
            "area": torch.from_numpy(objects.areas),
            "size": (image.height, image.width),
            "index": index,
        }
        if self.masks:
            everything = np.ones(len(objects.labels), dtype=bool)
            target["masks"] = torch.from_numpy(self.folder.read_masks(index, everything, scale=(1.0, 1.0)))
        return as_tensor(resized(image, fitting_scale(image.size, self.short_side, self.longest_side))), target


def flipped(image: Tensor, target: dict[str, Tensor]) -> Sample:
    """Left and right exchanged."""
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[2]
    boxes = torch.stack((width - right, top, width - left, bottom), dim=1)
    masks = {"masks": target["masks"].flip(2)} if "masks" in target else {}
    return image.flip(2), target | {"boxes": boxes} | masks
