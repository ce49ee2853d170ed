"""A generated set in COCO's format: shapes that cover each other, of several sizes, crowds of small ones, and empty images."""

import colorsys
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ...field_types import check_ranges
from ..generated_folders import written_once
from .masks import Mask, encode_runs

CLASSES = ("disc", "square", "triangle", "cross")
# corners of each class around its centre, in units of its radius
CORNERS = (
    [(math.cos(math.tau * corner / 24), math.sin(math.tau * corner / 24)) for corner in range(24)],
    [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    [(0, -1), (0.95, 0.8), (-0.95, 0.8)],
    [
        *((-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3)),
        *((0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3)),
    ],
)
Canvas = NDArray[np.float64]
# part of an object that others may hide
MOST_COVERED = 0.6


@dataclass(frozen=True, kw_only=True)
class OverlappingShapes:
    """How the images are drawn. Image i of a split follows from (seed, split, i) alone.

    A class is told by its shape and, more easily, by its hues: a small network learns it in minutes.
    """

    shortest_side: int = 48
    """Images have sides between this and longest_side."""
    longest_side: int = 64
    """In pixels."""
    most_objects: int = 4
    """Objects in an image, at most."""
    empty: float = 0.1
    """Part of the images that shows nothing but background."""
    crowd: float = 0.1
    """Part of the images with a crowd of small shapes, annotated as one region."""

    def __post_init__(self) -> None:
        if not 48 <= self.shortest_side <= self.longest_side:
            raise ValueError(f"sides must be at least 48 pixels and in order, got {self.shortest_side} to {self.longest_side}")
        check_ranges(self, positive=("most_objects",), below_one=("empty", "crowd"))

    def folder(self, root: str | Path, *, train: int, val: int, seed: int) -> Path:
        """The set below `root`, written there if it is not there yet; other sizes and options have other names."""
        parts = (self.shortest_side, self.longest_side, self.most_objects, self.empty, self.crowd, train, val, seed)
        return written_once(
            Path(root) / "-".join(("overlapping_shapes", *map(str, parts))),
            lambda folder: self.write(folder, train=train, val=val, seed=seed),
        )

    def write(self, folder: Path, *, train: int, val: int, seed: int) -> None:
        """Images and annotation files of both splits."""
        from PIL import Image

        (folder / "annotations").mkdir()
        for number, (split, samples) in enumerate((("train", train), ("val", val))):
            (folder / split).mkdir()
            images: list[dict[str, Any]] = []
            annotations: list[dict[str, Any]] = []
            for index in range(samples):
                random = np.random.default_rng((seed, number, index))
                # the first image has an object, however few there are
                pixels, objects = self.draw(random, is_empty=index > 0 and random.random() < self.empty)
                name = f"{index:06d}.png"
                Image.fromarray(pixels).save(folder / split / name)
                images.append({"id": index, "file_name": name, "height": pixels.shape[0], "width": pixels.shape[1]})
                # from 1 on: evaluations of COCO take 0 for an object that was not found
                annotations += [{"id": len(annotations) + i, "image_id": index} | each for i, each in enumerate(objects, 1)]
            categories = [{"id": label + 1, "name": name} for label, name in enumerate(CLASSES)]
            content = {"images": images, "annotations": annotations, "categories": categories}
            (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))

    def draw(self, random: Generator, *, is_empty: bool) -> tuple[NDArray[np.uint8], list[dict[str, Any]]]:
        """An image [H, W, 3] and its annotations."""
        height, width = (int(side) for side in random.integers(self.shortest_side, self.longest_side + 1, size=2))
        canvas = background(random, height, width)
        if is_empty:
            return as_bytes(canvas, random), []
        annotations: list[dict[str, Any]] = []
        region = np.zeros((height, width), dtype=bool)
        if random.random() < self.crowd:
            label = int(random.integers(len(CLASSES)))
            region = draw_crowd(random, canvas, label)
            annotations.append(annotation(region, label, encode_runs(region), is_crowd=True))
        shapes: list[Shape] = []
        wanted = int(random.integers(1, self.most_objects + 1))
        for _ in range(10 * wanted):
            shape = draw_shape(random, height, width)
            mask = shape.mask
            if (mask & region).any() or any(other.is_lost_below(mask) for other in shapes):
                continue
            paint(random, canvas, mask, shape.label)
            shapes = [replace(other, visible=other.visible & ~mask) for other in shapes] + [shape]
            if len(shapes) == wanted:
                break
        return as_bytes(canvas, random), annotations + [shape.annotation() for shape in shapes]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One object, and what others leave of it."""

    label: int
    corners: NDArray[np.float64]
    """[N, 2]: x, y."""
    mask: Mask
    visible: Mask

    def is_lost_below(self, mask: Mask) -> bool:
        """Whether too little of it would be seen with another on top of it."""
        return bool((self.visible & ~mask).sum() < (1 - MOST_COVERED) * self.mask.sum())

    def annotation(self) -> dict[str, Any]:
        """A polygon, or runs of pixels where a part is covered: a part of a shape may lie in several pieces."""
        if (self.visible == self.mask).all():
            points = self.corners.round(2)
            (left, top), (right, bottom) = points.min(0).tolist(), points.max(0).tolist()
            box = {"bbox": [left, top, round(right - left, 2), round(bottom - top, 2)]}
            return annotation(self.visible, self.label, [points.ravel().tolist()], is_crowd=False) | box
        return annotation(self.visible, self.label, encode_runs(self.visible), is_crowd=False)


def annotation(mask: Mask, label: int, segmentation: Any, *, is_crowd: bool) -> dict[str, Any]:
    """The annotation as COCO writes it: the box lies around the pixels of the mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    left, top = int(columns[0]), int(rows[0])
    return {
        "category_id": label + 1,
        "bbox": [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
        "area": int(mask.sum()),
        "iscrowd": int(is_crowd),
        "segmentation": segmentation,
    }


def draw_shape(random: Generator, height: int, width: int) -> Shape:
    """Anywhere in the image, whole."""
    # sizes alike on a logarithmic scale, as in photographs
    radius = 5 * (0.38 * min(height, width) / 5) ** random.random()
    label = int(random.integers(len(CLASSES)))
    margin = 1.25 * radius
    centre = random.uniform((margin, margin), (width - margin, height - margin))
    corners = placed(label, centre, radius, random.uniform(-0.4, 0.4))
    mask = filled(corners, height, width)
    return Shape(label=label, corners=corners, mask=mask, visible=mask)


def draw_crowd(random: Generator, canvas: Canvas, label: int) -> Mask:
    """Paint many small shapes of one class close together: the region that they fill."""
    height, width = canvas.shape[:2]
    middle = random.uniform((18, 18), (width - 18, height - 18))
    region = np.zeros((height, width), dtype=bool)
    for _ in range(14):
        mask = filled(placed(label, middle + random.uniform(-14, 14, size=2), 4.0, random.uniform(-0.4, 0.4)), height, width)
        paint(random, canvas, mask, label)
        region |= mask
    return region


def placed(label: int, centre: NDArray[np.float64], radius: float, turn: float) -> NDArray[np.float64]:
    """Corners [N, 2] of a shape of that class."""
    rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    return centre + radius * np.array(CORNERS[label]) @ rotation


def filled(corners: NDArray[np.float64], height: int, width: int) -> Mask:
    """The pixels whose centres lie inside, by the even-odd rule."""
    y, x = np.mgrid[0:height, 0:width] + 0.5
    inside = np.zeros((height, width), dtype=bool)
    for (x1, y1), (x2, y2) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        if y1 != y2:
            inside ^= ((y1 > y) != (y2 > y)) & (x < x1 + (y - y1) * (x2 - x1) / (y2 - y1))
    return inside


def background(random: Generator, height: int, width: int) -> Canvas:
    """A slope of grey from corner to corner, with a tint."""
    across, down = np.linspace(0, 1, width)[None, :, None], np.linspace(0, 1, height)[:, None, None]
    first, second, third = random.uniform(50, 210, size=(3, 1)) + random.uniform(-15, 15, size=(3, 3))
    return first + (second - first) * across * 0.5 + (third - first) * down * 0.5


def paint(random: Generator, canvas: Canvas, mask: Mask, label: int) -> None:
    """A colour of the class: hues differ within a class, and brightness says nothing about it."""
    hue = (label / len(CLASSES) + random.uniform(-0.08, 0.08)) % 1
    canvas[mask] = 255 * np.array(colorsys.hsv_to_rgb(hue, random.uniform(0.5, 1), random.uniform(0.45, 1)))


def as_bytes(canvas: Canvas, random: Generator) -> NDArray[np.uint8]:
    """The image in bytes, with the noise of a camera."""
    return (canvas + random.normal(scale=6, size=canvas.shape)).clip(0, 255).astype(np.uint8)
