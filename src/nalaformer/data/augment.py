"""From an image file's pixels to the network's input, by timm's transforms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from ..field_types import check_field_types, check_ranges

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images are varied. By default they are only cropped and flipped."""

    auto_augment: str = ""
    """timm's name of an automatic augmentation, e.g. "rand-m9-mstd0.5-inc1"; empty: none."""
    color_jitter: float = 0.0
    """Strength of random brightness, contrast and saturation; automatic augmentation replaces it."""
    random_erasing: float = 0.0
    """Probability that a rectangle is replaced by noise."""
    smallest_crop: float = 0.08
    """Least part of the image's area that a random crop keeps."""
    flip: float = 0.5
    """Probability of a horizontal flip."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_ranges(self, not_negative=("color_jitter",), shares=("random_erasing", "smallest_crop", "flip"))


def training_transform(size: int, augmentation: Augmentation) -> "Callable[[Image], Tensor]":
    from timm.data import create_transform

    transform = create_transform(
        size,
        is_training=True,
        scale=(augmentation.smallest_crop, 1.0),
        hflip=augmentation.flip,
        color_jitter=augmentation.color_jitter,
        auto_augment=augmentation.auto_augment or None,
        interpolation="bicubic",
        re_prob=augmentation.random_erasing,
        re_mode="pixel",
    )
    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = posterize
    return cast("Callable[[Image], Tensor]", transform)


def posterize(image: "Image", bits: int, **_: object) -> "Image":
    """Keep the highest bits of each channel; none leaves black.

    timm asks Pillow for 0 bits at its strongest, which Pillow has refused since version 13.
    """
    from PIL import ImageOps

    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else image.point(lambda value: 0)


def eval_transform(size: int, *, crop: float = 0.9) -> "Callable[[Image], Tensor]":
    """Resize the short side to size / crop, cut the centre, normalise."""
    from timm.data import create_transform

    transform = create_transform(size, is_training=False, interpolation="bicubic", crop_pct=crop)
    return cast("Callable[[Image], Tensor]", transform)
