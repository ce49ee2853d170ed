"""Images that are made and not read: the same interface as a folder, and nothing to download."""

import zlib
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..registry import Registry

Image = NDArray[np.float32]

GENERATED: Registry[type["Generated"]] = Registry("generated data")


@dataclass(kw_only=True, eq=False)
class Generated(Dataset[tuple[Tensor, int]]):
    """Sample i is a function of (name, seed, split, i) alone: (image [3, H, W], pixels minus one half, label).

    Train and eval never share a sample: their random streams differ.
    """

    split: str
    samples: int
    seed: int = 0
    classes: tuple[str, ...] = field(init=False)
    image_size: int = field(init=False)

    def __post_init__(self) -> None:
        if self.split not in ("train", "val"):
            raise ValueError(f'split must be "train" or "val", got {self.split!r}')
        if self.samples < 1:
            raise ValueError(f"samples must be positive, got {self.samples}")
        # names of classes may change, their streams may not: the stream is named by what is drawn
        self.stream = zlib.crc32(f"{type(self).__name__}/{self.split}".encode())

    @abstractmethod
    def draw(self, random: Generator) -> tuple[Image, int]:
        """One sample: pixels [3, H, W] in 0..1, and its label."""

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        pixels, label = self.draw(self.random_of(index))
        return torch.from_numpy(pixels - 0.5), label

    def random_of(self, index: int) -> Generator:
        """The random numbers of one sample."""
        return np.random.default_rng((self.seed, self.stream, index))

    def write(self, root: str | Path) -> Path:
        """Write the samples as PNG files into root/split/class/: the layout that ImageFolder reads."""
        from PIL import Image as PillowImage

        folder = Path(root) / self.split
        for name in self.classes:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(len(self)):
            image, label = self[index]
            pixels = ((image + 0.5) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            PillowImage.fromarray(pixels).save(folder / self.classes[label] / f"{index:06d}.png")
        return folder
