"""From an image and its labels to what the network sees."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .masks import IGNORED

if TYPE_CHECKING:
    from PIL.Image import Image

Labels = NDArray[np.uint8]
# of the ImageNet's images, as the backbones are trained
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], dtype=np.float32)
# the long side is at most so many short sides of the wanted size: 512 x 2048
LONGEST = 4
# draws of a crop before one is taken in which a class is in excess
DRAWS = 10


@dataclass(frozen=True, kw_only=True)
class TrainingCrop:
    """A random part of the image at a random scale: image [3, crop, crop], labels [crop, crop].

    Where the scaled image is smaller than the crop, it is filled up at the right and below: with the mean colour, IGNORED.
    """

    crop: int
    """Side, in pixels."""
    short_side: int = 0
    """Pixels of the image's short side at scale 1; 0: as the file has it."""
    smallest_scale: float = 0.5
    largest_scale: float = 2.0
    most_of_one_class: float = 0.75
    """A crop in which one class has more of the labelled pixels is drawn again, up to ten times."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    color_jitter: float = 0.0
    """Strength of random brightness, contrast and saturation, and a fourth of it of hue."""

    def __call__(self, image: "Image", labels: Labels) -> tuple[Tensor, Tensor]:
        from PIL import Image

        scale = random.uniform(self.smallest_scale, self.largest_scale)
        size = scaled_size(image.size, self.short_side, scale)
        image = image.resize(size, Image.Resampling.BILINEAR)
        labels = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        left, top = self.draw_place(labels)
        right, bottom = min(left + self.crop, size[0]), min(top + self.crop, size[1])
        image, labels = image.crop((left, top, right, bottom)), labels[top:bottom, left:right]
        if random.random() < self.flip:
            image, labels = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), labels[:, ::-1]
        if self.color_jitter:
            from torchvision.transforms import ColorJitter

            strength = self.color_jitter
            image = ColorJitter(strength, strength, strength, min(strength / 4, 0.5))(image)
        whole = torch.zeros(3, self.crop, self.crop)
        of_whole = torch.full((self.crop, self.crop), IGNORED, dtype=torch.uint8)
        whole[:, : labels.shape[0], : labels.shape[1]] = as_input(image)
        of_whole[: labels.shape[0], : labels.shape[1]] = torch.from_numpy(labels.copy())
        return whole, of_whole

    def draw_place(self, labels: Labels) -> tuple[int, int]:
        """Left and upper edge."""
        height, width = labels.shape
        for _ in range(DRAWS):
            left, top = random.randint(0, max(width - self.crop, 0)), random.randint(0, max(height - self.crop, 0))
            counts = np.bincount(labels[top : top + self.crop, left : left + self.crop].ravel(), minlength=256)[:IGNORED]
            if 0 < counts.max() <= self.most_of_one_class * counts.sum():
                break
        return left, top


@dataclass(frozen=True, kw_only=True)
class EvalResize:
    """The whole image with its short side resized, [3, H, W]; labels stay as they are, [H', W']."""

    short_side: int = 0
    """0: as the file has it."""

    def __call__(self, image: "Image", labels: Labels) -> tuple[Tensor, Tensor]:
        return self.of_image(image), torch.from_numpy(labels)

    def of_image(self, image: "Image") -> Tensor:
        from PIL import Image

        return as_input(image.resize(scaled_size(image.size, self.short_side), Image.Resampling.BILINEAR))


def scaled_size(size: tuple[int, int], short_side: int, scale: float = 1.0) -> tuple[int, int]:
    """Width and height with the short side at `short_side` (the long one at most four times that) times scale."""
    if short_side:
        scale *= min(short_side / min(size), LONGEST * short_side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def as_input(image: "Image") -> Tensor:
    """RGB -> [3, H, W], less ImageNet's mean, over its deviation."""
    pixels = np.asarray(image, dtype=np.float32) / 255
    return torch.from_numpy((pixels - MEAN) / DEVIATION).permute(2, 0, 1).contiguous()
