"""Generated photographs: sharp edges, fine patterns that repeat, smooth shading and grain, written to disk as PNG files."""

import zlib
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ..generated_folders import written_once

SCENES = "scenes"
"""The name by which they are asked for."""
VERSION = 1
"""Increased when the drawings change: each version has its own folder."""
OVERSAMPLING = 3
"""Pixels are means over so many points in each direction, as those of a camera are."""
Plane = NDArray[np.float32]


def write_scenes(root: str | Path, *, train: int, val: int, size: int, seed: int = 0) -> Path:
    """Write root/scenes_.../train/*.png and val/*.png where they are not there yet; returns that folder.

    Image i is a function of (seed, split, i, size) alone. Of several processes one writes and the others wait.
    """
    from PIL import Image

    def write(folder: Path) -> None:
        for split, count in (("train", train), ("val", val)):
            (folder / split).mkdir()
            for index in range(count):
                stream = zlib.crc32(f"{SCENES}/{split}".encode())
                pixels = draw_scene(np.random.default_rng((seed, stream, index)), size)
                Image.fromarray(pixels).save(folder / split / f"{index:04d}.png")

    return written_once(Path(root) / f"{SCENES}_v{VERSION}_{train}+{val}_of_{size}_seed{seed}", write)


def draw_scene(random: Generator, size: int) -> NDArray[np.uint8]:
    """[size, size, 3]: a background, then things in front of one another, each of two shaded colours; grain at the end."""
    points = size * OVERSAMPLING
    y, x = np.mgrid[:points, :points].astype(np.float32) / points
    things = int(random.integers(7, 12))
    # which of the colours below a point has
    paint = np.zeros((points, points), dtype=np.intp)
    for thing in range(1, 2 * things, 2):
        inside = shape(random, x, y)
        paint = np.where(inside, thing + texture(random, x, y, size), paint)
    colours = random.uniform(0.05, 0.95, size=(2 * things + 1, 3)).astype(np.float32)
    angle, strength = random.uniform(0, 2 * np.pi, size=len(colours)), random.uniform(0, 0.4, size=len(colours))
    towards_x, towards_y = ((strength * direction).astype(np.float32)[paint] for direction in (np.cos(angle), np.sin(angle)))
    light = 1 + towards_x * (x - 0.5) + towards_y * (y - 0.5)
    image = light[..., None] * colours[paint]
    pixels = image.reshape(size, OVERSAMPLING, size, OVERSAMPLING, 3).mean(axis=(1, 3))
    grain = random.normal(scale=0.006, size=(size, size, 1))
    return np.asarray(np.clip((pixels + grain) * 255, 0, 255).round(), dtype=np.uint8)


def shape(random: Generator, x: Plane, y: Plane) -> NDArray[np.bool_]:
    """An ellipse or a rectangle anywhere, turned."""
    place = random.uniform(0.1, 0.9, size=2).astype(np.float32)
    u, v = turned(random, x - place[0], y - place[1])
    width, height = random.uniform(0.08, 0.4, size=2)
    if random.random() < 0.5:
        return np.asarray((u / width) ** 2 + (v / height) ** 2 < 1)
    return np.asarray((np.abs(u) < width) & (np.abs(v) < height))


def texture(random: Generator, x: Plane, y: Plane, size: int) -> NDArray[np.bool_]:
    """Nothing, stripes, tiles or dots; their period is from 8 to 24 pixels."""
    u, v = turned(random, x, y)
    period = random.uniform(8, 24) / size
    kind = random.integers(4)
    if kind == 0:
        return np.zeros(x.shape, dtype=np.bool_)
    a, b = (each / period - np.floor(each / period) for each in (u, v))
    if kind == 1:
        return np.asarray(a < 0.5)
    if kind == 2:
        return np.asarray((a < 0.75) & (b < 0.75))
    return np.asarray((a - 0.5) ** 2 + (b - 0.5) ** 2 < 0.1)


def turned(random: Generator, x: Plane, y: Plane) -> tuple[Plane, Plane]:
    angle = random.uniform(0, np.pi)
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return cosine * x + sine * y, cosine * y - sine * x
