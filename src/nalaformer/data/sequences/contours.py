"""Contours of Pathfinder as geometry: chains of short strokes (paddles) that keep clear of each other.

Starting a whole image again when a contour is stuck costs hundreds of tries per image. Here the last 1 to 5 paddles are taken
back instead, and all images of a batch grow side by side: in each round each image places one paddle or takes some back.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .random_numbers import RandomKeys, child_keys, integers, uniforms

Floats = NDArray[np.float64]

# headings that are tried before an image counts as stuck
CANDIDATES = 8
MOST_TAKEN_BACK = 5
# rounds after which an image starts anew: a corner may hold no way out that five paddles back would open
PATIENCE = 240
# the densest images that can be had need tens; after this many none is to be expected
MOST_RESTARTS = 500
# further tries to place a short contour before the image goes without it, as published
RETRIES = 4
# where paddles lie that are not there: in no image, and near none
NOWHERE = -1e6


@dataclass(frozen=True, kw_only=True)
class ContourSpec:
    """Sizes in pixels."""

    size: int
    """Side of the image."""
    contour: int
    """Paddles of each of the two long contours."""
    distractors: int
    """Number of short contours, as far as there is room."""
    distractor_length: int
    """Paddles of a short contour."""
    paddle: float
    """Length of a paddle."""
    thickness: float
    margin: float
    """By how much a paddle is lengthened at both ends: a contour bends where its lengthened paddles meet. Other paddles stay
    their width (a pixel at least) further away than this."""
    seed_distance: float
    """Between the first ends of the two long contours."""
    continuity: float
    """A turn is drawn with weight cos^2(continuity * turn), zero where that angle passes 90 degrees."""
    padding: float
    """Free border."""
    match: float
    """Largest difference between the two distances of which the markers show one; see Contours."""

    @property
    def paddles(self) -> int:
        return 2 * self.contour + self.distractors * self.distractor_length

    def paddles_of_short_one(self, count: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where so many paddles stand, those of the short contour that is not whole yet."""
        return (count - 2 * self.contour) % self.distractor_length

    @property
    def predecessors(self) -> NDArray[np.int64]:
        """The paddle that each one continues; -1: it begins a contour. The two long contours take turns, as published."""
        long = np.concatenate(([-1, -1], np.arange(2 * self.contour - 2)))
        short = np.arange(2 * self.contour, self.paddles).reshape(self.distractors, self.distractor_length) - 1
        short[:, :1] = -1
        return np.concatenate((long, short.ravel()))


@dataclass
class Contours:
    """The paddles of a batch of images: tails and heads [B, P, 2] in pixels, even ones of the first 2 `contour` are contour A,
    odd ones contour B. Those of a short contour that found no room are NOWHERE.

    In every image the far ends of A and B are, up to `match` pixels, equally far from the first end of contour `anchor`: one of
    them belongs to a connected pair of markers, the other to an unconnected one. Which is shown is the label, so neither the
    distance of the markers nor anything else of the geometry tells it.
    """

    tails: Floats
    heads: Floats
    anchor: NDArray[np.int64]


def grow(keys: RandomKeys, spec: ContourSpec, margin: Floats) -> Contours:
    """Contours for each key; margin: [B], that of each image."""
    images, paddles = len(keys), spec.paddles
    tails, heads = np.zeros((images, paddles, 2)), np.zeros((images, paddles, 2))
    headings = np.zeros((images, paddles))
    count = np.zeros(images, np.int64)
    started = np.zeros(images, np.int64)
    restarts = np.zeros(images, np.int64)
    tries = np.zeros(images, np.int64)
    anchor = np.zeros(images, np.int64)
    predecessors = spec.predecessors
    active = np.arange(images)
    now = 0
    while len(active):
        drawn = uniforms(child_keys(keys[active], now), 3 * CANDIDATES + 1)
        now_at = count[active]
        growing = Growing(tails[active], heads[active], headings[active], now_at, predecessors[now_at], margin[active])
        tail, head, heading = propose(drawn, spec, growing)
        free = is_free(tail, head, spec, growing)
        fits, choice = free.any(axis=1), free.argmax(axis=1)
        placed, at = active[fits], count[active[fits]]
        which = np.flatnonzero(fits), choice[fits]
        tails[placed, at], heads[placed, at], headings[placed, at] = tail[which], head[which], heading[which]
        count[placed] += 1
        # a long contour that cannot go on is taken back
        failed, taken_back = active[~fits], 1 + integers(drawn[~fits, -1], MOST_TAKEN_BACK)
        is_long = count[failed] < 2 * spec.contour
        stuck, taken_back = failed[is_long], taken_back[is_long]
        count[stuck] = np.maximum(0, count[stuck] - taken_back)
        # a short one is begun anew, or left out
        tries[placed[spec.paddles_of_short_one(count[placed]) == 0]] = 0
        homeless = failed[~is_long]
        count[homeless] -= spec.paddles_of_short_one(count[homeless])
        tries[homeless] += 1
        without = homeless[tries[homeless] > RETRIES]
        left_out = count[without, None] + np.arange(spec.distractor_length)
        tails[without[:, None], left_out] = heads[without[:, None], left_out] = NOWHERE
        count[without] += spec.distractor_length
        tries[without] = 0
        # both long contours stand: do they have two equally distant pairs of ends?
        ended = placed[count[placed] == 2 * spec.contour]
        anchor[ended], difference = matching_ends(tails[ended], heads[ended], spec.contour)
        apart = ended[difference > spec.match]
        count[apart] -= 1 + integers(uniforms(child_keys(keys[apart], now), 3 * CANDIDATES + 1)[:, -1], spec.contour)
        now += 1
        given_up = active[(now - started[active] > PATIENCE) & (count[active] < paddles)]
        count[given_up], started[given_up], tries[given_up] = 0, now, 0
        restarts[given_up] += 1
        if len(given_up) and restarts.max() > MOST_RESTARTS:
            raise ValueError(
                f"{paddles} paddles (two contours of {spec.contour}, {spec.distractors} of {spec.distractor_length}) do not "
                f"fit into {spec.size} x {spec.size} pixels: an image was begun {MOST_RESTARTS} times in vain; choose shorter "
                "contours, fewer, or a larger image"
            )
        active = active[count[active] < paddles]
    return Contours(tails=tails, heads=heads, anchor=anchor)


class Growing(NamedTuple):
    """Images that lack paddles: those that stand, [B, P, 2] and [B, P], how many [B], and which one the next continues [B]."""

    tails: Floats
    heads: Floats
    headings: Floats
    placed: NDArray[np.int64]
    before: NDArray[np.int64]
    margin: Floats


def propose(drawn: Floats, spec: ContourSpec, growing: Growing) -> tuple[Floats, Floats, Floats]:
    """Candidates for the next paddle of each image: tails, heads [B, K, 2] and headings [B, K]."""
    tails, heads, headings, count, before, margin = growing
    first, second, third = (drawn[:, part * CANDIDATES : (part + 1) * CANDIDATES] for part in range(3))
    begins, image = before < 0, np.arange(len(before))
    heading = np.where(begins[:, None], 2 * np.pi * first, headings[image, before][:, None] + turns(first) / spec.continuity)
    direction = towards(heading)
    bend = heads[image, before] + margin[:, None] * towards(headings[image, before])
    tail = bend[:, None] + margin[:, None, None] * direction
    # contour A begins in the middle, B at the seed distance from it, short ones anywhere
    low = np.where(count == 0, min(2 * spec.seed_distance, spec.size / 2 - 1), spec.padding)[:, None]
    anywhere = np.stack((second, third), axis=-1) * (spec.size - 2 * low)[:, None] + low[:, None]
    beside = tails[:, :1] + spec.seed_distance * towards(2 * np.pi * second)
    start = np.where((count == 1)[:, None, None], beside, anywhere)
    tail = np.where(begins[:, None, None], start, tail)
    return tail, tail + spec.paddle * direction, heading


def towards(heading: Floats) -> Floats:
    """Unit vectors [..., 2]."""
    return np.stack((np.cos(heading), np.sin(heading)), axis=-1)


ANGLES = np.linspace(-np.pi / 2, np.pi / 2, 2001)
ANGLE_SHARE = 0.5 + (ANGLES + np.sin(ANGLES) * np.cos(ANGLES)) / np.pi


def turns(u: Floats) -> Floats:
    """Uniforms as angles with density cos^2 between -90 and 90 degrees."""
    return np.interp(u, ANGLE_SHARE, ANGLES)


def is_free(tail: Floats, head: Floats, spec: ContourSpec, growing: Growing) -> NDArray[np.bool_]:
    """Which candidates [B, K] lie inside the image and keep clear of all paddles but the one that they continue."""
    tails, heads, _, count, before, margin = growing
    ends = np.stack((tail, head))
    inside: NDArray[np.bool_] = np.all((ends >= spec.padding) & (ends <= spec.size - spec.padding), axis=(0, 3))
    most = int(count.max())
    if most == 0:
        return inside
    clearance = margin + max(spec.thickness, 1.0)
    number = np.arange(most)[None]
    matters = (number < count[:, None]) & (number != before[:, None])
    # only paddles whose middles are near can touch: few of them, and only those are measured
    old, new = (tails[:, :most] + heads[:, :most]) / 2, (tail + head) / 2
    apart = (new[:, :, None, 0] - old[:, None, :, 0]) ** 2 + (new[:, :, None, 1] - old[:, None, :, 1]) ** 2  # [B, K, P]
    near = (apart < ((spec.paddle + clearance) ** 2)[:, None, None]) & matters[:, None]
    image, candidate, paddle = np.nonzero(near)
    first = tail[image, candidate], head[image, candidate]
    second = tails[image, paddle], heads[image, paddle]
    distance = squared_distance(first[0], *second)
    for point, line in ((first[1], second), (second[0], first), (second[1], first)):
        distance = np.minimum(distance, squared_distance(point, *line))
    touches = distance < clearance[image] ** 2
    # shorter strokes cannot cross without an end of one coming near the other
    if spec.paddle >= 2 * clearance.min():
        touches |= are_crossing(*first, *second)
    inside[image[touches], candidate[touches]] = False
    return inside


def are_crossing(a: Floats, b: Floats, c: Floats, d: Floats) -> NDArray[np.bool_]:
    """Whether the strokes ab and cd cross: each has its ends on both sides of the other; all [n, 2]."""

    def side(start: Floats, end: Floats, point: Floats) -> Floats:
        (dx, dy), (rx, ry) = (end - start).T, (point - start).T
        return np.sign(dx * ry - dy * rx)

    crossing: NDArray[np.bool_] = (side(a, b, c) != side(a, b, d)) & (side(c, d, a) != side(c, d, b))
    return crossing


def squared_distance(point: Floats, start: Floats, end: Floats) -> Floats:
    """Squared distances from points to strokes; all [n, 2]."""
    (px, py), (sx, sy) = (point[..., 0], point[..., 1]), (start[..., 0], start[..., 1])
    dx, dy = end[..., 0] - sx, end[..., 1] - sy
    rx, ry = px - sx, py - sy
    along = np.clip((rx * dx + ry * dy) / (dx * dx + dy * dy), 0, 1)
    rx, ry = rx - along * dx, ry - along * dy
    return rx * rx + ry * ry


def matching_ends(tails: Floats, heads: Floats, contour: int) -> tuple[NDArray[np.int64], Floats]:
    """The contour from whose first end the two far ends are more nearly equally far, and by how much they differ."""
    firsts = tails[:, :2]
    far = heads[:, 2 * contour - 2 : 2 * contour]
    distance = np.linalg.norm(far[:, None] - firsts[:, :, None], axis=-1)  # [B, first end, far end]
    difference = np.abs(distance[:, :, 0] - distance[:, :, 1])
    anchor = difference.argmin(axis=1)
    return anchor, np.take_along_axis(difference, anchor[:, None], axis=1)[:, 0]
