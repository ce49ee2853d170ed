"""Generated images of a few equal shapes in one colour: simple enough to be read back exactly."""

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from .base import GENERATION_DATA, GenerationData, GenerationDataConfig, as_values

SHAPES = ("circle", "square", "triangle", "cross", "ring")
"""The classes, by label."""
PALETTE = {
    "red": (220, 50, 50),
    "green": (50, 200, 70),
    "blue": (60, 90, 230),
    "yellow": (230, 210, 60),
    "magenta": (200, 60, 200),
    "cyan": (60, 210, 220),
}
BACKGROUND = (32, 32, 32)
SIDE = 32
SIZES = (7, 9)
MOST_THINGS = 3
# things lie in different cells of a grid of 3 x 3, so that none touches another and every cell is as likely as the others
CELLS, CELL, MARGIN = 3, 10, 1


@dataclass(frozen=True, kw_only=True, order=True)
class Thing:
    """Where a shape lies: the first row and column of its box, and the side of the box."""

    top: int
    left: int
    size: int

    @property
    def cell(self) -> int:
        """Number of the cell of the grid that its middle lies in, row by row."""
        row, column = ((start + self.size // 2 - MARGIN) // CELL for start in (self.top, self.left))
        return min(row, CELLS - 1) * CELLS + min(column, CELLS - 1)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What an image shows: one to three things of one shape and colour, in the order of their places."""

    shape: str
    colour: str
    things: tuple[Thing, ...]


@cache
def template(shape: str, size: int) -> NDArray[np.bool_]:
    """[size, size]: which pixels of its box a shape covers."""
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    radius = size / 2
    if shape == "square":
        covered = np.ones((size, size), dtype=np.bool_)
    elif shape == "triangle":
        covered = np.abs(x) <= (y + radius) / 2
    elif shape == "cross":
        covered = np.abs(np.abs(x) - np.abs(y)) <= 1
    else:
        distance = x**2 + y**2
        covered = distance <= radius**2
        if shape == "ring":
            covered = covered & (distance > (radius / 2) ** 2)
    covered.flags.writeable = False
    return np.asarray(covered)


def draw_scene(random: Generator) -> Scene:
    """A scene whose shape, colour, count, cells and sizes are all equally likely."""
    shape, colour = SHAPES[random.integers(len(SHAPES))], tuple(PALETTE)[random.integers(len(PALETTE))]
    things = []
    for cell in random.choice(CELLS**2, size=random.integers(1, MOST_THINGS + 1), replace=False):
        size = SIZES[random.integers(len(SIZES))]
        # the last pixel of a cell stays free
        top, left = (MARGIN + CELL * int(place) + int(random.integers(CELL - size)) for place in divmod(cell, CELLS))
        things.append(Thing(top=top, left=left, size=size))
    return Scene(shape=shape, colour=colour, things=tuple(sorted(things)))


def render(scene: Scene) -> NDArray[np.uint8]:
    """uint8 [32, 32, 3]."""
    image = np.empty((SIDE, SIDE, 3), dtype=np.uint8)
    image[:] = BACKGROUND
    for thing in scene.things:
        box = image[thing.top : thing.top + thing.size, thing.left : thing.left + thing.size]
        box[template(scene.shape, thing.size)] = PALETTE[scene.colour]
    return image


@GENERATION_DATA.register("shapes")
class Shapes(GenerationData):
    """Image i is a function of (seed, split, i) alone; train and val never share their random numbers."""

    class_names = SHAPES
    channels, height, width = 3, SIDE, SIDE

    def __init__(self, config: GenerationDataConfig, split: str) -> None:
        super().__init__(config, split)
        self.samples = config.train_samples if split == "train" else config.eval_samples
        self.stream = zlib.crc32(f"shapes/{split}".encode())

    @classmethod
    def recognises(cls, data: str) -> bool:
        return data == "shapes"

    def __len__(self) -> int:
        return self.samples

    def scene(self, index: int) -> Scene:
        """What image `index` shows."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        return draw_scene(np.random.default_rng((self.config.data_seed, self.stream, index)))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        scene = self.scene(index)
        return as_values(render(scene)), SHAPES.index(scene.shape)

    @staticmethod
    def judge(images: Tensor, labels: Tensor) -> dict[str, float]:
        """See `judge_shapes`."""
        from .shape_reader import judge_shapes

        return judge_shapes(images, torch.as_tensor(labels))
