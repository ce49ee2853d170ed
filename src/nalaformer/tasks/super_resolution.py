"""Enlarging images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import notes_of_ignored
from ..data.images import files_below, has_image_name
from ..data.super_resolution import (
    SCENES,
    EvalImages,
    ImagePairs,
    Patches,
    enlarge,
    find_pairs,
    to_eight_bits,
    write_scenes,
)
from ..field_types import check_field_types, check_ranges
from .base import TASKS, Answer, Loss, SummedMetrics
from .image_quality import WINDOW, luma, psnr, ssim

if TYPE_CHECKING:
    from PIL.Image import Image

SCALES = (2, 3, 4)
SIDES = ("patch_size", "eval_crop", "image_size")


@dataclass(frozen=True, kw_only=True)
class SuperResolutionConfig:
    """Which images, how many times larger, and how they are learned."""

    data: str
    """A folder of photographs (with train/ and val/, with HR/ and LR/ in them, DIV2K's, or plain), or "scenes": generated."""
    scale: int = 2
    """How many times larger: 2, 3 or 4."""
    patch_size: int = 192
    """Side of the training patches in the large image; rounded down to a multiple of the scale."""
    patches_per_image: int = 100
    """Random patches of each image in an epoch."""
    eval_crop: int = 0
    """Evaluate the middle of each image, so many pixels of the large one wide and high; 0: the whole."""
    kept_mib: int = 2048
    """Memory of each process for decoded images; those that do not fit are read again each time."""
    train_samples: int = 32
    """Generated images to learn from."""
    eval_samples: int = 8
    """Generated images to evaluate on."""
    image_size: int = 160
    """Side of generated images."""
    data_seed: int = 0
    """Seed of generated images."""
    generated_folder: str = "runs/data"
    """Folder into which generated images are written, once."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.scale not in SCALES:
            raise ValueError(f"scale must be 2, 3 or 4, got {self.scale}")
        positive = ("patches_per_image", "train_samples", "eval_samples")
        check_ranges(self, positive=positive, not_negative=("kept_mib", "data_seed"), sides=SIDES)
        for name in ("patch_size", "image_size"):
            if getattr(self, name) < self.scale:
                raise ValueError(f"{name} must be at least the scale, {self.scale}, got {getattr(self, name)}")
        if self.eval_crop and self.eval_crop < self.smallest:
            raise ValueError(f"eval_crop must be 0 or at least {self.smallest}, what SSIM needs, got {self.eval_crop}")

    @property
    def smallest(self) -> int:
        """Side of a large image below which SSIM has no window, and no room for an incomplete last pixel of the small one."""
        return WINDOW + 2 * self.scale + self.scale - 1


@dataclass(frozen=True, kw_only=True)
class SuperResolutionAnswers:
    """What may be chosen when a model enlarges images."""

    tile: int = 0
    """Side of the tiles, in pixels of the input, that are enlarged one by one; 0: the whole image at once."""
    overlap: int = 16
    """Pixels of the input that neighbouring tiles share; each pixel is taken from the tile in whose middle it lies."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.tile < 0 or self.overlap < 0 or (self.tile and self.tile <= self.overlap):
            raise ValueError(f"a tile must be larger than the overlap, got tile={self.tile} and overlap={self.overlap}")


@TASKS.register("super_resolution")
class SuperResolutionTask:
    """Mean absolute error on random patches; PSNR and SSIM on whole images."""

    Config = SuperResolutionConfig
    AnswerOptions = SuperResolutionAnswers
    headings = ("input", "output")
    has_pictures = True

    def __init__(self, config: SuperResolutionConfig) -> None:
        self.config = config

    @cached_property
    def folder(self) -> Path:
        """Where the images lie; generated ones are written there first."""
        config = self.config
        if config.data != SCENES:
            return Path(config.data)
        count = {"train": config.train_samples, "val": config.eval_samples}
        return write_scenes(config.generated_folder, **count, size=config.image_size, seed=config.data_seed)

    def pairs(self, split: str) -> ImagePairs:
        config = self.config
        files = find_pairs(self.folder, split, scale=config.scale)
        return ImagePairs(files, scale=config.scale, kept_mib=config.kept_mib)

    @cached_property
    def train_data(self) -> Patches:
        return Patches(self.pairs("train"), size=self.config.patch_size, per_image=self.config.patches_per_image)

    @cached_property
    def eval_data(self) -> EvalImages:
        scale = self.config.scale
        return EvalImages(self.pairs("val"), crop=self.config.eval_crop, smallest=WINDOW + 2 * scale)

    def notes(self) -> list[str]:
        """Return a line about the files of the folder that are not read."""
        return notes_of_ignored(path for path in files_below(self.folder) if path.is_file() and not has_image_name(path))

    def facts(self) -> dict[str, Any]:
        return {"scale": self.config.scale}

    @staticmethod
    def create_model(name: str, options: dict[str, Any], facts: dict[str, Any]) -> nn.Module:
        """The network of that name for the scale of the data."""
        from ..models.vision import build_super_resolution

        return build_super_resolution(name, scale=facts["scale"], **options)

    @staticmethod
    def backbone(model: nn.Module) -> nn.Module:
        """Everything but the last convolution: the part that networks of all scales share."""
        features = model.features
        assert isinstance(features, nn.Module)
        return features

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """mean |model(low) - high|, pixels in 0..1; parts: none."""
        low, high = batch
        return Loss(total=F.l1_loss(model(low / 255).float(), high / 255), weight=len(low))

    def metrics(self) -> "ImageQuality":
        return ImageQuality(self.config.scale)

    @torch.no_grad()
    def answer(self, model: nn.Module, image: "Image", facts: dict[str, Any], options: SuperResolutionAnswers) -> Answer:
        """Values: (width, height) of the picture, which is the answer."""
        from PIL import Image as PillowImage

        low = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(next(model.parameters()).device) / 255
        try:
            large = enlarge_in_tiles(model, low, scale=facts["scale"], tile=options.tile, overlap=options.overlap)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the device has too little memory for {options.tile or max(image.size)} pixels of side at once; enlarge in "
                "tiles by --set tile=256, or smaller ones"
            ) from error
        picture = PillowImage.fromarray(to_eight_bits(large[0].float()).permute(1, 2, 0).cpu().numpy())
        sizes = [f"{each.width} x {each.height}" for each in (image, picture)]
        rows = ({"width": picture.width, "height": picture.height},)
        return Answer(cells=tuple(sizes), values=picture.size, rows=rows, picture=picture)


def enlarge_in_tiles(model: Callable[[Tensor], Tensor], image: Tensor, *, scale: int, tile: int, overlap: int) -> Tensor:
    """[B, 3, H, W] -> [B, 3, scale H, scale W]; tile 0: at once.

    Where two tiles overlap, each gives the half that is nearer to its middle.
    """
    if not tile:
        return model(image)
    height, width = image.shape[2:]
    large = None
    for top, rows in spans(height, tile, overlap):
        for left, columns in spans(width, tile, overlap):
            part = model(image[..., top : top + tile, left : left + tile])
            if large is None:
                large = part.new_empty((*part.shape[:2], scale * height, scale * width))
            inside = part[..., scale * (rows.start - top) : scale * (rows.stop - top), :]
            inside = inside[..., scale * (columns.start - left) : scale * (columns.stop - left)]
            large[..., scale * rows.start : scale * rows.stop, scale * columns.start : scale * columns.stop] = inside
    assert large is not None
    return large


def spans(length: int, tile: int, overlap: int) -> list[tuple[int, range]]:
    """Where tiles start along a side, and which pixels each gives; every tile is whole, or the side is shorter than one."""
    last = max(0, length - tile)
    starts = [*range(0, last, tile - overlap), last]
    # the border between two tiles is the middle of what they share
    borders = [0, *((before + tile + after) // 2 for before, after in pairwise(starts)), length]
    return [(start, range(*borders[number : number + 2])) for number, start in enumerate(starts)]


class ImageQuality(SummedMetrics):
    """PSNR (dB) and SSIM, averaged over the images, and those of bicubic interpolation beside them.

    As papers measure: the image is rounded to 8 bits, `scale` pixels are cut from each border, and luma is compared.
    """

    def __init__(self, scale: int) -> None:
        self.scale = scale
        # psnr, ssim, those of bicubic interpolation, images
        self.sums = torch.zeros(5, dtype=torch.float64)

    def update(self, model: nn.Module, batch: list[tuple[Tensor, Tensor]]) -> None:
        for low, high in batch:
            small = low[None] / 255
            figures = []
            for large in (model(small)[0].float(), enlarge(small[0].float(), self.scale)):
                found, wanted = (self.judged(image) for image in (to_eight_bits(large), high))
                figures += [psnr(found, wanted), ssim(found, wanted)]
            self.sums += torch.tensor([*figures, 1.0], dtype=torch.float64)

    def judged(self, image: Tensor) -> Tensor:
        """Luma of an 8-bit image without its border."""
        return luma(image)[self.scale : -self.scale, self.scale : -self.scale]

    def result(self) -> dict[str, float]:
        *sums, images = self.sums.tolist()
        if not images:
            raise ValueError("PSNR needs at least one image, got none that could be read")
        names = ("psnr", "ssim", "bicubic_psnr", "bicubic_ssim")
        return {name: value / images for name, value in zip(names, sums, strict=True)} | {"images": images}
