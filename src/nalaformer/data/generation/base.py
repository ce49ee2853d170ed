"""What a generator of images learns from: one interface for all kinds of data, and their names."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ...field_types import check_field_types, check_ranges
from ...registry import Registry, unknown_name

SPLITS = ("train", "val")


@dataclass(frozen=True, kw_only=True)
class GenerationDataConfig:
    """Which images a generator learns from."""

    data: str
    """"shapes" (generated), a folder of images in a folder per class, a folder of `nalaformer data encode`, or a .npz file."""
    image_size: int = 256
    """Side of the images of a folder, after the square in their middle was cut out; the others have a size of their own."""
    flip: bool = False
    """Mirror half of the training images of a folder or .npz file, left to right."""
    holdout: float = 0.0
    """Share of each class's images that is held out where a folder has no val/ or a .npz file no test part; 0: it must."""
    train_samples: int = 100_000
    """Shapes only: how many images there are before they repeat."""
    eval_samples: int = 2_000
    """Shapes only: images of the val split."""
    data_seed: int = 0
    """Decides which shapes are drawn, and which images are held out."""

    def __post_init__(self) -> None:
        check_field_types(self)
        positive = ("image_size", "train_samples", "eval_samples")
        check_ranges(self, positive=positive, not_negative=("data_seed",), below_one=("holdout",), sides=("image_size",))


class GenerationData(Dataset[tuple[Tensor, int]]):
    """Items (image, label): float32 [channels, height, width], pixels in [-1, 1] or scaled latents, and a number of a class.

    A kind that can tell without a network how good samples are has `judge(images, labels)`, uint8 [N, 3, H, W] and int [N],
    whose first figure is the better the higher it is.
    """

    class_names: tuple[str, ...]
    channels: int
    height: int
    width: int

    def __init__(self, config: GenerationDataConfig, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f'split must be "train" or "val", got {split!r}')
        self.config, self.split = config, split

    @classmethod
    def recognises(cls, data: str) -> bool:
        """Whether the name or path is data of this kind."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Return lines about the data that the reader of a run should know."""
        return []

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise NotImplementedError

    def mirrored(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[H, W, ...]: every second training image left to right, where that is asked for."""
        # the loader has seeded them for this sample
        if self.split == "train" and self.config.flip and np.random.randint(2):
            return pixels[:, ::-1]
        return pixels


GENERATION_DATA: Registry[type[GenerationData]] = Registry("data to generate images from")
"""All kinds by name; at most one of them recognises a path."""


def open_generation_data(config: GenerationDataConfig, split: str) -> GenerationData:
    """The train or val split of the data that the config names."""
    for name in GENERATION_DATA.names():
        if GENERATION_DATA[name].recognises(config.data):
            return GENERATION_DATA[name](config, split)
    if Path(config.data).exists():
        raise ValueError(f"data must be a folder, a .npz file or the name of generated data, got the file {config.data}")
    kinds = "a folder with a folder of images for each class, a folder of `nalaformer data encode`, or a .npz file"
    # recipes for data of one's own have a placeholder, which is no slip of the pen
    if get_close_matches(config.data, ["shapes"], cutoff=0.7):
        raise ValueError(f"{unknown_name('data', config.data, ['shapes'])}; or a path: of {kinds}")
    raise ValueError(
        f"data must be the path of {kinds}, or shapes, got {config.data!r}, which is none; give its path, such as "
        "data=/path/to/images"
    )


def as_values(pixels: NDArray[np.uint8]) -> Tensor:
    """uint8 [H, W] or [H, W, C] -> float32 [C, H, W] in [-1, 1]."""
    image = torch.from_numpy(np.array(pixels if pixels.ndim == 3 else pixels[..., None]))
    return image.permute(2, 0, 1).float() / 127.5 - 1


def as_pixels(values: Tensor) -> Tensor:
    """[..., C, H, W] in [-1, 1] -> uint8 [..., 3, H, W]: what samples are judged as; grey is repeated for each colour."""
    pixels = ((values.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    if pixels.shape[-3] == 1:
        pixels = pixels.expand(*pixels.shape[:-3], 3, *pixels.shape[-2:])
    if pixels.shape[-3] != 3:
        raise ValueError(
            f"images have one channel or three, got {pixels.shape[-3]}; decode latents with their autoencoder first"
        )
    return pixels
