"""The short strokes (paddles) that Pathfinder's contours are made of: few different ones, each a stamp on whole pixels.

As in the published images, ends lie on pixels and directions are those of the pixels around: a stroke looks the same wherever
it lies, so its grey values tell its direction. Points and steps are (row, column); a heading of 0 points along the row.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .rasters import FULL, Bytes, dilate, resize

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# directions of strokes that begin a contour: whole degrees
BEGINNINGS = 360
# approximate place where contours begin; the effect of a rounding error depends on it
MIDDLE = 15


@dataclass(frozen=True, kw_only=True)
class PaddleShape:
    """Sizes in pixels."""

    length: int
    thickness: float
    margin: int
    """By how much a stroke is lengthened at both ends: a contour bends where its lengthened strokes meet. The room that a
    stroke takes is wider by it too."""
    continuity: float
    """A turn is drawn with weight cos^2(continuity * turn), zero where that angle passes 90 degrees."""
    antialias: int
    """How many times as large strokes are drawn before they are made smaller."""

    @property
    def reach(self) -> int:
        """From a step's pivot to the far end of its stroke."""
        return self.length + self.margin

    @property
    def radius(self) -> int:
        """Radius of a stamp, without its middle."""
        return self.reach + int(np.ceil(self.thickness))


class Paddles:
    """All strokes of a shape: first those that begin a contour, one for each degree, then those that continue one.

    A stroke that begins a contour is placed by its first end. One that continues it is placed by its far end, one of the pixels
    around the pivot where the contour bends.
    """

    def __init__(self, shape: PaddleShape) -> None:
        self.shape = shape
        self.around = pixels_around(shape.reach)
        """[K, 2]: where far ends can lie, seen from a pivot."""
        begin = np.radians(np.arange(BEGINNINGS) - 180)
        self.heading = np.concatenate((begin, np.arctan2(self.around[:, 0], self.around[:, 1])))
        drawn = np.concatenate((begin, self.heading[BEGINNINGS:] + np.pi))
        large = np.stack([large_stroke(shape, each) for each in drawn])
        small = 2 * shape.radius + 1
        room = resize(dilate(large, shape.margin * shape.antialias), small)
        wide = dilate(np.pad(room, ((0, 0), *((shape.margin, shape.margin),) * 2)), shape.margin)
        self.light: Bytes = flat(resize(large, small))
        """[360 + K, S * S]: how bright a stroke makes the pixels around its place."""
        self.room: Bytes = flat(room)
        """The same of the room that it takes."""
        self.wide_room: Bytes = flat(wide)
        """That room widened by the margin, on a stamp that is larger by it: far ends of other strokes stay outside."""
        self.step = exact_step(self.heading, shape.length + 2 * shape.margin)
        """[360 + K, 2]: from the pivot of a stroke to the next one, which is rounded up."""
        head = whole_step(begin, shape.length, MIDDLE)
        self.first_pivot = head + whole_step(begin + np.pi, shape.reach, MIDDLE)
        """[360, 2]: from the place of a stroke that begins a contour to its pivot."""
        self.first_head = head
        turn = np.abs(self.heading[:, None] - self.heading[None, BEGINNINGS:])
        turn = np.minimum(np.minimum(turn, 2 * np.pi - turn) * shape.continuity, np.pi / 2)
        self.turn_weight: Floats = np.cos(turn) ** 2
        """[360 + K, K]: how likely one stroke follows another."""
        self.first_room = self._first_room(room[:BEGINNINGS])
        """[360, n, 2]: pixels that must be free where a contour begins, seen from its place; some are named twice."""
        self.may_begin = self._may_begin()
        """[360]: directions in which a contour may begin."""

    def _first_room(self, rooms: Bytes) -> Ints:
        """Return, as published, the pixels that the stroke fills, moved by one, as far as a smaller stamp holds them."""
        reach, radius = self.shape.reach, self.shape.radius
        seen = slice(radius - reach - 1, radius + reach)
        filled = [np.argwhere(room[seen, seen] == FULL) - reach for room in rooms]
        most = max(len(each) for each in filled)
        return np.stack([np.resize(each, (most, 2)) if len(each) else np.zeros((most, 2), np.int64) for each in filled])

    def _may_begin(self) -> NDArray[np.bool_]:
        """Return True for directions that may begin, as published; with strokes of 2 pixels, only up and to the left.

        Whether a place is free is asked of all pixels of the image. Where one of them, in a corner say, has none of the pixels
        that a direction needs inside the image, the answer is minus infinity, and the generator takes the whole image as full.
        """
        row, column = self.first_room[..., 0], self.first_room[..., 1]
        below, right = row >= 0, column >= 0
        corners = [(up & left).any(axis=1) for up in (below, row <= 0) for left in (right, column <= 0)]
        found: NDArray[np.bool_] = np.logical_and.reduce(corners)
        # other shapes may have no such direction
        return found if found.any() else np.ones_like(found)

    def ends(self, paddle: Ints, place: Ints) -> tuple[Floats, Floats]:
        """First and far ends [..., 2] of strokes [...] at places [..., 2]."""
        along = self.shape.length * np.stack((np.sin(self.heading), np.cos(self.heading)), axis=-1)[paddle]
        begins = (paddle < BEGINNINGS)[..., None]
        return np.where(begins, place, place - along), np.where(begins, place + along, place)


@cache
def make_paddles(shape: PaddleShape) -> Paddles:
    return Paddles(shape)


def flat(images: Bytes) -> Bytes:
    return images.reshape(len(images), -1)


def exact_step(heading: Floats, distance: float) -> Floats:
    """Steps [n, 2]. Near the edge, what rounds a step along a row decides about a pixel: not left to numpy's vector units."""
    return np.array([(distance * math.sin(each), distance * math.cos(each)) for each in heading])


def whole_step(heading: Floats, distance: float, origin: int) -> Ints:
    """Steps in whole pixels [n, 2], rounded up where they begin at this row and column."""
    return np.ceil(origin + exact_step(heading, distance)).astype(np.int64) - origin


def pixels_around(radius: int) -> Ints:
    """The different pixels of a circle around one, at arcs of about a pixel: [K, 2]."""
    angle = np.radians(np.arange(0, 360, 180 / (np.pi * radius)))
    exact = radius * np.stack((np.sin(angle), np.cos(angle)), axis=-1)
    return np.unique(np.floor(exact + 1e-9).astype(np.int64), axis=0)


def large_stroke(shape: PaddleShape, heading: float) -> Bytes:
    """A stroke from the middle of its stamp, `antialias` times as large."""
    middle = shape.radius * shape.antialias
    side = 2 * middle + 1
    row, column = whole_step(np.array([heading]), shape.length * shape.antialias, middle)[0]
    width = round(shape.thickness * shape.antialias)
    canvas = np.zeros((side, side), np.uint8)
    if width <= 1:
        # a pixel for each row, or for each column, of the longer side
        longest, shorter = max(abs(row), abs(column)), min(abs(row), abs(column))
        along = np.arange(longest + 1)
        # a stroke that rounding leaves no length is a point
        across = (2 * shorter * along + longest) // max(1, 2 * longest)
        steps = (across, along) if abs(column) >= abs(row) else (along, across)
        canvas[middle + np.sign(row) * steps[0], middle + np.sign(column) * steps[1]] = FULL
        return canvas
    y, x = np.mgrid[-middle : middle + 1, -middle : middle + 1]
    share = np.clip((y * row + x * column) / max(1, row * row + column * column), 0, 1)
    canvas[(y - share * row) ** 2 + (x - share * column) ** 2 <= (width / 2) ** 2] = FULL
    return canvas
