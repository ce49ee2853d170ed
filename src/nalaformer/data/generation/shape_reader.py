"""Reads generated images of shapes back, without a network: what an image shows, or why it shows nothing."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .shapes import BACKGROUND, CELLS, MOST_THINGS, PALETTE, SHAPES, SIDE, SIZES, Scene, Thing, render, template

# a pixel is wrong where a channel is further from the drawing of what was read
LARGEST_DIFFERENCE = 80
# of an image; two drawings of one thing differ in more than twice as many
MOST_WRONG_PIXELS = 4
# fewer pixels are dirt: they count as wrong pixels, not as a thing
LEAST_PIXELS = 5


class Unreadable(ValueError):
    """An image that shows no scene of shapes; the message says why."""


def parse(image: Tensor) -> Scene:
    """The scene that an image shows, uint8 [3, 32, 32]; Unreadable where no drawing agrees with it in all but 4 pixels."""
    check_images(image[None])
    pixels = image.permute(1, 2, 0).cpu().numpy()
    colours = nearest_colours(pixels)
    counted = Counter(colours[colours > 0].tolist())
    if not counted:
        raise Unreadable("it is blank")
    (main, area), *others = counted.most_common()
    if others and others[0][1] >= LEAST_PIXELS:
        names = tuple(PALETTE)
        raise Unreadable(f"its things must have one colour, got {names[main - 1]} and {names[others[0][0] - 1]}")
    pieces = connected(colours == main)
    if not pieces:
        raise Unreadable(f"its {area} coloured pixels lie apart")
    if len(pieces) > MOST_THINGS:
        raise Unreadable(f"it must show 1 to {MOST_THINGS} things, got {len(pieces)}")
    found = [recognise(piece) for piece in pieces]
    shapes = {shape for shape, _ in found}
    if len(shapes) > 1:
        raise Unreadable(f"its things must have one shape, got {' and '.join(sorted(shapes))}")
    things = tuple(sorted(thing for _, thing in found))
    scene = Scene(shape=shapes.pop(), colour=tuple(PALETTE)[main - 1], things=things)
    wrong = int((np.abs(render(scene).astype(int) - pixels).max(axis=-1) > LARGEST_DIFFERENCE).sum())
    if wrong > MOST_WRONG_PIXELS:
        raise Unreadable(f"{wrong} pixels differ from the scene that is nearest, at most {MOST_WRONG_PIXELS} may")
    return scene


def check_images(images: Tensor) -> None:
    if images.dtype.is_floating_point or images.shape[1:] != (3, SIDE, SIDE):
        raise ValueError(f"images must be uint8 [N, 3, {SIDE}, {SIDE}], got {images.dtype} {list(images.shape)}")


def nearest_colours(pixels: NDArray[np.uint8]) -> NDArray[np.intp]:
    """[H, W, 3] -> [H, W]: 0 for the background, or the place in the palette, from 1."""
    known = np.array([BACKGROUND, *PALETTE.values()])
    return ((pixels[:, :, None].astype(int) - known) ** 2).sum(axis=-1).argmin(axis=-1)


def connected(covered: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """The pieces of a mask [H, W] that hang together, also by corners, without dirt."""
    numbers = np.where(covered, np.arange(1, covered.size + 1).reshape(covered.shape), 0)
    while True:
        # each pixel takes the largest number around it, until all of a piece have the same
        spread = np.pad(numbers, 1)
        windows = np.lib.stride_tricks.sliding_window_view(spread, (3, 3))
        spread = np.where(covered, windows.max(axis=(2, 3)), 0)
        if (spread == numbers).all():
            break
        numbers = spread
    names, counts = np.unique(numbers[covered], return_counts=True)
    return [numbers == name for name, count in zip(names, counts, strict=True) if count >= LEAST_PIXELS]


def recognise(piece: NDArray[np.bool_]) -> tuple[str, Thing]:
    """The shape and place of the drawing that differs from the piece in the fewest pixels."""
    area = int(piece.sum())
    first_row, first_column = (int(np.flatnonzero(piece.any(axis=axis))[0]) for axis in (1, 0))
    best, fewest = None, SIDE**2
    for size in SIZES:
        # a wrong pixel can move the box by one
        for top in range(max(0, first_row - 1), min(first_row + 1, SIDE - size) + 1):
            for left in range(max(0, first_column - 1), min(first_column + 1, SIDE - size) + 1):
                box = piece[top : top + size, left : left + size]
                differences = (templates(size) ^ box).sum(axis=(1, 2)) + area - box.sum()
                if differences.min() < fewest:
                    fewest = int(differences.min())
                    best = SHAPES[differences.argmin()], Thing(top=top, left=left, size=size)
    if best is None or fewest > MOST_WRONG_PIXELS:
        near = f", it differs from the nearest in {fewest} pixels" if best else ""
        raise Unreadable(f"a thing is none of {', '.join(SHAPES)}{near}")
    return best


@cache
def templates(size: int) -> NDArray[np.bool_]:
    """[shapes, size, size]."""
    return np.stack([template(shape, size) for shape in SHAPES])


def judge_shapes(images: Tensor, labels: Tensor) -> dict[str, float]:
    """How many samples show a scene, and how far their scenes are distributed from those that were learned from.

    images: uint8 [N, 3, 32, 32]; labels: int [N], the classes that were asked for.
    asked_and_valid: share of samples that can be read and show the asked shape. valid: share that can be read.
    asked: share of the readable ones that show the asked shape. *_distance: total variation sum |p - q| / 2 between the
    readable samples and the truth, in which each colour, count, cell and size is equally likely; 1 where none can be read.
    """
    check_images(images)
    if len(labels) != len(images) or not len(images):
        raise ValueError(f"each image needs a label, and there must be one or more, got {len(images)} and {len(labels)}")
    scenes, asked = [], 0
    for image, label in zip(images, labels.tolist(), strict=True):
        try:
            scene = parse(image)
        except Unreadable:
            continue
        scenes.append(scene)
        asked += SHAPES.index(scene.shape) == label
    things = [thing for scene in scenes for thing in scene.things]
    return {
        "asked_and_valid": asked / len(images),
        "valid": len(scenes) / len(images),
        "asked": asked / len(scenes) if scenes else 0.0,
        "colour_distance": distance_to_uniform((scene.colour for scene in scenes), PALETTE),
        "count_distance": distance_to_uniform((len(scene.things) for scene in scenes), range(1, MOST_THINGS + 1)),
        "position_distance": distance_to_uniform((thing.cell for thing in things), range(CELLS**2)),
        "size_distance": distance_to_uniform((thing.size for thing in things), SIZES),
        "samples": float(len(images)),
    }


def distance_to_uniform(found: Iterable[Hashable], values: Collection[Hashable]) -> float:
    """Total variation between the shares of the values found and equal shares; 1 where nothing was found."""
    counted = Counter(found)
    total = counted.total()
    return sum(abs(counted[value] / total - 1 / len(values)) for value in values) / 2 if total else 1.0
