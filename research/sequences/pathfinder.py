"""Pathfinder of the Long Range Arena: do the two discs lie on one contour?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import SEQUENCES, Arrays, SequenceData, SequenceFacts
from .contours import Contours, ContourSpec, grow
from .paddles import Floats, Ints, Paddles, PaddleShape, make_paddles
from .random_numbers import child_keys, integers, uniforms
from .rasters import FULL, Bytes, resize

# images that are made side by side: few enough for the cache
PIECE = 256
GEOMETRY, CHOICES = 0, 1
# gradient-boosted trees on 20,000 images, judged by 20,000 others: what can be had without following a contour
SHORTCUTS = {"places of the discs": 0.67, "and the stroke at each": 0.70, "and three strokes at each": 0.75}


@dataclass
class ContourScenes:
    """Contents of images."""

    contours: Contours
    margin: Ints
    """[B]: that of the strokes of each image."""
    labels: NDArray[np.int64]
    origin: NDArray[np.int64]
    """[B]: the contour at whose first end a disc lies, 0 or 1."""
    markers: Ints
    """[B, 2, 2]: (row, column) of the two discs."""


@SEQUENCES.register("pathfinder")
@dataclass(kw_only=True, eq=False)
class Pathfinder(SequenceData):
    """Two long contours and some short ones; discs on two ends: of one contour (label 1) or of the two long ones (label 0).

    The defaults are the Long Range Arena's hard one of 32 pixels, and images are grown and drawn as published. `contour` 6
    and 9, with `distractor_length` 2 and 3, are the rungs below it. Each pixel is a token, its grey value; black pixels are
    token 0. Long contours, short ones and discs differ in brightness: `contrast`, `distractor_contrast` and 1, before an image
    is scaled to its brightest pixel. Each image draws one of the `margins`.
    """

    stream_name = "pathfinder"
    chance = 0.5

    size: int = 32
    contour: int = 14
    distractors: int = 5
    distractor_length: int = 4
    paddle: int = 2
    thickness: float = 0.5
    margins: Sequence[int] = (1,)
    seed_distance: int = 7
    marker: float = 1.5
    continuity: float = 1.0
    contrast: float = 1.5
    distractor_contrast: float = 2.0
    antialias: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contour < 2 or self.distractors < 0 or self.distractor_length < 1:
            raise ValueError(
                "contours need 2 strokes or more, short ones 1 or more, got "
                f"{self.contour}, {self.distractors} x {self.distractor_length}"
            )
        if self.paddle < 1 or not self.margins or min(self.margins) < 1:
            raise ValueError(
                f"strokes lie on whole pixels: paddle and margins must be 1 or more, got {self.paddle} and {list(self.margins)}"
            )
        alike = ("size", "contour", "distractors", "distractor_length", "seed_distance")
        self.spec = ContourSpec(**{name: getattr(self, name) for name in alike})
        drawn = ("paddle", "thickness", "continuity")
        is_published = all(getattr(self, name) == getattr(Pathfinder, name) for name in (*alike, *drawn))
        if is_published and tuple(self.margins) == Pathfinder.margins:
            self.shortcuts = SHORTCUTS
        nearest = min(self.margins)
        room = (self.size - 2) ** 2 / ((self.paddle + 2 * nearest) * 2 * (nearest + self.thickness))
        if 2 * self.contour > room:
            place = f"{self.size} x {self.size} pixels"
            raise ValueError(f"two contours of {self.contour} strokes do not fit into {place}; choose shorter ones")

    @property
    def facts(self) -> SequenceFacts:
        return SequenceFacts(answers="sequence", outputs=2, length=self.spec.size**2, vocabulary=256)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        pixels = np.zeros((len(indices), self.facts.length), np.uint8)
        labels = np.zeros(len(indices), np.int64)
        for start in range(0, len(indices), PIECE):
            piece = slice(start, start + PIECE)
            scene = self.scene(indices[piece])
            pixels[piece] = self.draw(scene).reshape(len(scene.labels), -1)
            labels[piece] = scene.labels
        return {"inputs": pixels, "targets": labels}

    def paddles(self, margin: int) -> Paddles:
        """The strokes of images that have this margin."""
        alike = {name: getattr(self, name) for name in ("thickness", "continuity", "antialias")}
        return make_paddles(PaddleShape(length=self.paddle, margin=margin, **alike))

    def scene(self, indices: NDArray[np.int64]) -> ContourScenes:
        """Return the strokes of the images, from which the pixels are drawn."""
        keys = self.random_keys(indices)
        chosen = uniforms(child_keys(keys, CHOICES), 3)
        margin = np.asarray(self.margins)[integers(chosen[:, 0], len(self.margins))]
        labels, origin = integers(chosen[:, 1], 2), integers(chosen[:, 2], 2)
        strokes = self.spec.strokes
        contours = Contours(np.zeros((len(keys), strokes), np.int64), np.zeros((len(keys), strokes, 2), np.int64))
        for each in np.unique(margin):
            those = np.flatnonzero(margin == each)
            grown = grow(child_keys(keys[those], GEOMETRY), self.spec, self.paddles(int(each)))
            contours.paddle[those], contours.place[those] = grown.paddle, grown.place
        image, last = np.arange(len(keys)), 2 * self.spec.contour - 2
        other = np.where(labels == 1, origin, 1 - origin)
        markers = np.stack((contours.place[image, origin], contours.place[image, last + other]), axis=1)
        return ContourScenes(contours=contours, margin=margin, labels=labels, origin=origin, markers=markers)

    def draw(self, scene: ContourScenes) -> Bytes:
        """Images [B, size, size]."""
        light = self.discs(scene.markers)
        long = 2 * self.spec.contour
        for margin in np.unique(scene.margin):
            those = np.flatnonzero(scene.margin == margin)
            paddles, contours = self.paddles(int(margin)), scene.contours.part(those)
            for strokes, contrast in ((slice(long), self.contrast), (slice(long, None), self.distractor_contrast)):
                stamped = self.stamp_strokes(paddles, contours.paddle[:, strokes], contours.place[:, strokes])
                light[those] = np.maximum(light[those], contrast * stamped)
        brightest = light.max(axis=(1, 2), keepdims=True)
        return np.floor(light * (FULL / np.maximum(brightest, 1e-9)) + 0.5).astype(np.uint8)

    def stamp_strokes(self, paddles: Paddles, paddle: Ints, place: Ints) -> Bytes:
        """Strokes [B, P] on black images [B, size, size]."""
        radius, size = paddles.shape.radius, self.spec.size
        side = size + 2 * radius
        canvas = np.zeros((len(paddle), side * side), np.uint8)
        line = np.arange(2 * radius + 1)
        square = (line[:, None] * side + line).ravel()
        for stroke in range(paddle.shape[1]):
            those = np.flatnonzero(paddle[:, stroke] >= 0)
            where = those[:, None], (place[those, stroke] @ np.array([side, 1]))[:, None] + square
            canvas[where] = np.maximum(canvas[where], paddles.light[paddle[those, stroke]])
        inner = slice(radius, radius + size)
        return canvas.reshape(-1, side, side)[:, inner, inner]

    def discs(self, places: Ints) -> Floats:
        """Return the brightness of discs at places [B, D, 2]: [B, size, size]."""
        light = np.zeros((len(places), self.spec.size, self.spec.size))
        line = np.arange(self.spec.size * self.antialias)
        for place in places.swapaxes(0, 1) * self.antialias:
            apart = (line[:, None] - place[:, None, None, 0]) ** 2 + (line - place[:, None, None, 1]) ** 2
            large = np.where(apart <= (self.marker * self.antialias) ** 2, FULL, 0).astype(np.uint8)
            light = np.maximum(light, resize(large, self.spec.size))
        return light


@SEQUENCES.register("pathx")
@dataclass(kw_only=True, eq=False)
class PathX(Pathfinder):
    """Pathfinder of 128 pixels: 16,384 tokens."""

    stream_name = "pathx"

    size: int = 128
    distractors: int = 8
    paddle: int = 5
    thickness: float = 1.5
    margins: Sequence[int] = (2, 3)
    seed_distance: int = 20
    marker: float = 3.0
    continuity: float = 1.8
    contrast: float = 0.9
    distractor_contrast: float = 0.9
