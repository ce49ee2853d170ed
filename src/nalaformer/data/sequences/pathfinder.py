"""Pathfinder of the Long Range Arena: do the two discs lie on one contour?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import SEQUENCES, Arrays, SequenceData, SequenceFacts
from .contours import Contours, ContourSpec, Floats, grow
from .random_numbers import child_keys, uniforms

# images that grow side by side: few enough for the cache
PIECE = 512
GEOMETRY, CHOICES = 0, 1
PUBLISHED_CONTOUR = 14
# that are drawn at a time: few enough for the cache
MOST_PIXELS = 2**19
# logistic regressions on how far the strokes next to the discs point to the other disc
SHORTCUTS = {"stroke at each disc": 0.67, "three strokes at each disc": 0.70}
# pixels of the smaller image that the filter reaches to either side
LANCZOS = 3


@dataclass
class ContourScenes:
    """What an image shows."""

    contours: Contours
    labels: NDArray[np.int64]
    markers: Floats
    """[B, 2, 2]: centres of the two discs, in pixels."""

    def part(self, images: slice) -> "ContourScenes":
        of = self.contours
        some = Contours(tails=of.tails[images], heads=of.heads[images], anchor=of.anchor[images])
        return ContourScenes(contours=some, labels=self.labels[images], markers=self.markers[images])


@SEQUENCES.register("pathfinder")
@dataclass(kw_only=True, eq=False)
class Pathfinder(SequenceData):
    """Two long contours and some short ones; discs on two ends: of one contour (label 1) or of the two long ones (label 0).

    The defaults are the Long Range Arena's hard one of 32 pixels. `contour` 6 and 9 are the rungs below it. Each pixel is a
    token, its grey value; black pixels are token 0. As published, long contours, short ones and discs differ in brightness:
    `contrast`, `distractor_contrast` and 1, before an image is scaled to its brightest pixel. `match` is how far the distances
    of a connected and an unconnected pair of ends may differ, for contours of 14 paddles, and less in proportion for shorter
    ones.
    """

    stream_name = "pathfinder"
    chance = 0.5

    size: int = 32
    contour: int = 14
    distractors: int = 5
    distractor_length: int = 4
    paddle: float = 2.0
    thickness: float = 0.5
    margins: Sequence[float] = (1.0,)
    seed_distance: float = 7.0
    marker: float = 1.5
    continuity: float = 1.0
    contrast: float = 1.5
    distractor_contrast: float = 2.0
    antialias: int = 2
    match: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contour < 2 or self.distractors < 0 or self.distractor_length < 1:
            raise ValueError(
                "contours need 2 paddles or more, short ones 1 or more, got "
                f"{self.contour}, {self.distractors} x {self.distractor_length}"
            )
        if self.continuity < 1:
            raise ValueError(
                f"continuity must be at least 1, got {self.continuity:g}: contours would turn back on themselves by more than "
                "90 degrees, into the paddle before; choose 1 or more"
            )
        alike = ("size", "contour", "distractors", "distractor_length", "paddle", "thickness", "seed_distance", "continuity")
        self.spec = ContourSpec(
            **{name: getattr(self, name) for name in alike},
            margin=max(self.margins),
            padding=1.0,
            # ends of short contours are near each other: what is alike there is less
            match=self.match * self.contour / PUBLISHED_CONTOUR,
        )
        is_published = all(getattr(self, name) == getattr(Pathfinder, name) for name in (*alike, "match"))
        if is_published and tuple(self.margins) == Pathfinder.margins:
            self.shortcuts = SHORTCUTS
        nearest = min(self.margins)
        room = (self.size - 2) ** 2 / ((self.paddle + 2 * nearest) * 2 * (nearest + self.thickness))
        if self.spec.paddles > room:
            place = f"{self.size} x {self.size} pixels"
            raise ValueError(f"{self.spec.paddles} paddles do not fit into {place}; choose shorter or fewer contours")

    @property
    def facts(self) -> SequenceFacts:
        return SequenceFacts(answers="sequence", outputs=2, length=self.spec.size**2, vocabulary=256)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        pixels = np.zeros((len(indices), self.facts.length), np.uint8)
        labels = np.zeros(len(indices), np.int64)
        for start in range(0, len(indices), PIECE):
            piece = slice(start, start + PIECE)
            scene = self.scene(indices[piece])
            pixels[piece] = self.drawn(scene).reshape(len(scene.labels), -1)
            labels[piece] = scene.labels
        return {"inputs": pixels, "targets": labels}

    def scene(self, indices: NDArray[np.int64]) -> ContourScenes:
        """The geometry of the images, for those who want to look behind the pixels."""
        keys = self.random_keys(indices)
        chosen = uniforms(child_keys(keys, CHOICES), 2)
        margin = np.asarray(self.margins)[(chosen[:, 0] * len(self.margins)).astype(np.int64)]
        contours = grow(child_keys(keys, GEOMETRY), self.spec, margin)
        labels = (chosen[:, 1] < 0.5).astype(np.int64)
        image = np.arange(len(indices))
        far = np.where(labels == 1, contours.anchor, 1 - contours.anchor)
        last = 2 * self.spec.contour - 2
        markers = np.stack((contours.tails[image, contours.anchor], contours.heads[image, last + far]), axis=1)
        return ContourScenes(contours=contours, labels=labels, markers=markers)

    def drawn(self, scene: ContourScenes) -> NDArray[np.uint8]:
        """Images [B, size, size]."""
        some = max(1, MOST_PIXELS // (self.spec.size * self.antialias) ** 2)
        pieces = [self._drawn(scene.part(slice(start, start + some))) for start in range(0, len(scene.labels), some)]
        return np.concatenate(pieces) if pieces else np.zeros((0, self.spec.size, self.spec.size), np.uint8)

    def _drawn(self, scene: ContourScenes) -> NDArray[np.uint8]:
        """They are drawn `antialias` times as large and made smaller."""
        scale, long = self.antialias, 2 * self.spec.contour
        tails, heads, markers = (points * scale for points in (scene.contours.tails, scene.contours.heads, scene.markers))
        radius = self.spec.thickness * scale / 2
        light = np.zeros((len(scene.labels), self.spec.size, self.spec.size), np.float32)
        for strokes, thick, brightness in (
            ((tails[:, :long], heads[:, :long]), radius, self.contrast),
            ((tails[:, long:], heads[:, long:]), radius, self.distractor_contrast),
            # a stroke whose ends meet is a disc
            ((markers, markers), self.marker * scale, 1.0),
        ):
            canvas = np.zeros((len(light), self.spec.size * scale, self.spec.size * scale), np.float32)
            for start, end in zip(*(points.swapaxes(0, 1) for points in strokes), strict=True):
                stroke(canvas, start, end, thick)
            light = np.maximum(light, brightness * shrunk(canvas, scale))
        return np.round(255 * light / light.max(axis=(1, 2), keepdims=True)).astype(np.uint8)


@SEQUENCES.register("pathx")
@dataclass(kw_only=True, eq=False)
class PathX(Pathfinder):
    """Pathfinder of 128 pixels: 16,384 tokens."""

    stream_name = "pathx"

    size: int = 128
    distractors: int = 8
    paddle: float = 5.0
    thickness: float = 1.5
    margins: Sequence[float] = (2.0, 3.0)
    seed_distance: float = 20.0
    marker: float = 3.0
    continuity: float = 1.8
    contrast: float = 0.9
    distractor_contrast: float = 0.9
    match: float = 12.0


def stroke(canvas: NDArray[np.float32], start: Floats, end: Floats, radius: float) -> None:
    """Fill, on each image of the canvas [B, S, S], what lies within `radius` of its stroke; one whose ends meet is a disc."""
    middle, half = (start + end) / 2, (end - start) / 2
    reach = int(np.ceil(np.linalg.norm(half, axis=1).max() + radius)) + 1
    window = np.arange(-reach, reach + 1)
    corner = np.floor(middle).astype(np.int64)
    x, y = corner[:, :1] + window, corner[:, 1:] + window  # [B, W]
    # a pixel is painted where its centre lies within; at least half a pixel, so that thin strokes have no holes
    off_x, off_y = (x + 0.5 - middle[:, :1])[:, None, :], (y + 0.5 - middle[:, 1:])[:, :, None]
    hx, hy = half[:, 0, None, None], half[:, 1, None, None]
    along = np.clip((off_x * hx + off_y * hy) / (hx * hx + hy * hy + 1e-12), -1, 1)
    inside = (off_x - along * hx) ** 2 + (off_y - along * hy) ** 2 <= max(radius, 0.5) ** 2
    size = canvas.shape[1]
    image, row, column = np.nonzero(inside)
    row, column = y[image, row], x[image, column]
    seen = (row >= 0) & (row < size) & (column >= 0) & (column < size)
    canvas[image[seen], row[seen], column[seen]] = 1


def shrunk(canvas: NDArray[np.float32], scale: int) -> NDArray[np.float32]:
    """Images that are `scale` times smaller, by Lanczos' filter as published; what it makes of black and white stays within."""
    edge = LANCZOS * scale
    apart = (np.arange(-edge, scale + edge) + 0.5) / scale - 0.5
    weights = np.where(np.abs(apart) < LANCZOS, np.sinc(apart) * np.sinc(apart / LANCZOS), 0)
    weights /= weights.sum()
    rows = filtered(canvas, weights, scale)
    return np.clip(filtered(rows.swapaxes(1, 2), weights, scale).swapaxes(1, 2), 0, 1)


def filtered(images: NDArray[np.float32], weights: Floats, scale: int) -> NDArray[np.float32]:
    """Weighted means of rows around every `scale`-th one; beyond the edge all is black."""
    small = images.shape[1] // scale
    edge = (len(weights) - scale) // 2
    padded = np.pad(images, ((0, 0), (edge, edge), (0, 0)))
    total = np.zeros((len(images), small, images.shape[2]), np.float32)
    # not as a product of matrices: it would start threads in each of the processes that make data
    for tap, weight in enumerate(weights.astype(np.float32)):
        if weight:
            total += weight * padded[:, tap : tap + scale * small : scale]
    return total
