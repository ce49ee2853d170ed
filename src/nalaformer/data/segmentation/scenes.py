"""Generated landscapes, written as ADE20K writes: things overlap, and every colour may be of any class.

Sun and ball are the same disk: only what is around them tells one from the other.
"""

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator

from .layouts import ADE20K_NAMES

if TYPE_CHECKING:
    from PIL.Image import Image

SCENE_CLASSES = ("sky", "ground", "mountain", "house", "tree", "sun", "ball")
SKY, GROUND, MOUNTAIN, HOUSE, TREE, SUN, BALL = range(1, 8)
UNLABELLED = 0
# width and height; none is a multiple of 32 after halving
SIZES = ((256, 192), (224, 192), (288, 208))


def write_scenes(folder: Path, *, train: int, val: int, seed: int = 0) -> None:
    """Write scenes of each split in the layout of ADE20K; scene i follows from (seed, split, i) alone."""
    rows = [f"{number}\t0\t0\t0\t{name}\n" for number, name in enumerate(SCENE_CLASSES, 1)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADE20K_NAMES).write_text("Idx\tRatio\tTrain\tVal\tName\n" + "".join(rows))
    for split, count in (("training", train), ("validation", val)):
        images, masks = folder / "images" / split, folder / "annotations" / split
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        for index in range(count):
            image, mask = draw_scene(np.random.default_rng((seed, zlib.crc32(split.encode()), index)))
            image.save(images / f"scene_{index:06d}.jpg", quality=92)
            mask.save(masks / f"scene_{index:06d}.png")


def draw_scene(random: Generator) -> "tuple[Image, Image]":
    """A scene and its mask, ids from 1, 0 where it is unlabelled."""
    return _Scene(random).finish()


class _Scene:
    """Draws each thing into image and mask at once, later ones in front."""

    def __init__(self, random: Generator) -> None:
        from PIL import Image, ImageDraw

        self.random = random
        self.width, self.height = SIZES[random.integers(len(SIZES))]
        self.mask = Image.new("L", (self.width, self.height), SKY)
        self.image = Image.new("RGB", (self.width, self.height), self.colour())
        self.layers = ImageDraw.Draw(self.image), ImageDraw.Draw(self.mask)
        self.horizon = int(self.height * random.uniform(0.4, 0.65))

    def finish(self) -> "tuple[Image, Image]":
        from PIL import Image

        random = self.random
        if random.random() < 0.7:
            self.disk(SUN, self.place(0.1, 0.9), int(random.uniform(0.08, 0.6) * self.horizon))
        for _ in range(random.integers(0, 3)):
            self.mountain()
        self.paint(GROUND, "rectangle", (0, self.horizon, self.width, self.height))
        things = (
            [self.house] * random.integers(0, 3) + [self.tree] * random.integers(0, 4) + [self.ball] * random.integers(0, 3)
        )
        random.shuffle(things)
        for draw in things:
            draw()
        if random.random() < 0.2:
            self.blot()
        pixels = np.asarray(self.image).astype(np.float64)
        light = np.linspace(random.uniform(0.7, 1.0), random.uniform(0.7, 1.0), self.height)[:, None, None]
        pixels = pixels * light + random.normal(0, 10, pixels.shape)
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), self.mask

    def colour(self) -> tuple[int, int, int]:
        red, green, blue = self.random.integers(30, 256, 3).tolist()
        return red, green, blue

    def place(self, least: float, most: float) -> int:
        """A place along the width."""
        return int(self.width * self.random.uniform(least, most))

    def paint(self, number: int, shape: str, where: object, colour: tuple[int, int, int] | None = None) -> None:
        for layer, fill in zip(self.layers, (colour or self.colour(), number), strict=True):
            getattr(layer, shape)(where, fill=fill)

    def disk(self, number: int, x: int, y: int, radius: int = 0) -> None:
        radius = radius or int(self.height * self.random.uniform(0.05, 0.1))
        self.paint(number, "ellipse", (x - radius, y - radius, x + radius, y + radius))

    def mountain(self) -> None:
        x, half = self.place(0, 1), self.place(0.12, 0.3)
        top = int(self.horizon * self.random.uniform(0.2, 0.7))
        self.paint(MOUNTAIN, "polygon", [(x - half, self.horizon), (x + half // 4, top), (x + half, self.horizon)])

    def foot(self) -> int:
        """Where a thing stands, on the ground."""
        return self.horizon + int((self.height - self.horizon) * self.random.uniform(0.1, 0.8))

    def house(self) -> None:
        x, foot, colour = self.place(0.05, 0.8), self.foot(), self.colour()
        width, height = self.place(0.12, 0.25), int(self.height * self.random.uniform(0.15, 0.3))
        roof = [(x - 4, foot - height), (x + width // 2, foot - height - height // 2), (x + width + 4, foot - height)]
        self.paint(HOUSE, "rectangle", (x, foot - height, x + width, foot), colour)
        self.paint(HOUSE, "polygon", roof)
        glass, side = self.colour(), width // 5
        for left in (x + side, x + 3 * side):
            self.paint(HOUSE, "rectangle", (left, foot - 3 * height // 4, left + side, foot - height // 2), glass)

    def tree(self) -> None:
        x, foot, height = self.place(0.05, 0.95), self.foot(), int(self.height * self.random.uniform(0.1, 0.2))
        half, crown = max(2, height // 10), int(height * self.random.uniform(0.5, 0.8))
        self.paint(TREE, "rectangle", (x - half, foot - height, x + half, foot))
        colour = self.colour()
        for shift in (-crown // 2, crown // 2, 0):
            centre = foot - height - (crown // 2 if shift == 0 else 0)
            box = (x + shift - crown // 2, centre - crown // 2, x + shift + crown // 2, centre + crown // 2)
            self.paint(TREE, "ellipse", box, colour)

    def ball(self) -> None:
        self.disk(BALL, self.place(0.05, 0.95), self.foot())

    def blot(self) -> None:
        """A patch that nobody has labelled."""
        x, y, side = self.place(0, 0.8), int(self.height * self.random.uniform(0, 0.8)), self.place(0.05, 0.2)
        self.paint(UNLABELLED, "rectangle", (x, y, x + side, y + side))
