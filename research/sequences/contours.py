"""Contours of Pathfinder, grown as published: chains of strokes on a grid of pixels whose room is taken pixel by pixel.

An image begins anew when one of its two long contours is stuck, which costs some tens of tries (the published generator takes
330: it also tries directions that it rejects). Here many tries of many images grow side by side, and of each image the first
that succeeds counts: which others grow beside it changes nothing.
"""

from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .paddles import BEGINNINGS, Floats, Ints, Paddles
from .random_numbers import RandomKeys, child_keys, integers, uniform_at
from .rasters import FULL

Bools = NDArray[np.bool_]

# tries that grow side by side: few enough for the cache
SIDE_BY_SIDE = 1024
# tries for one image; the published form needs some tens
MOST_TRIES = 200_000
# times that a stroke is drawn again before its contour counts as stuck
DRAWS = 3
# further tries to place a short contour before the image goes without it
RETRIES = 4
# how much of a pixel may be taken where a contour begins
FREE = 76
# two strokes meet where their rooms add up to this
MEETING = 459
# numbers of the random stream that a stroke, or the beginning of a contour, may draw
NUMBERS = 2 * DRAWS
LONG_ONES, SHORT_ONES = 0, 1


@dataclass(frozen=True, kw_only=True)
class ContourSpec:
    """Sizes in pixels."""

    size: int
    """Side of the image."""
    contour: int
    """Strokes of each of the two long contours."""
    distractors: int
    """Number of short contours, as far as there is room."""
    distractor_length: int
    """Strokes of a short contour."""
    seed_distance: int
    """Between the first ends of the two long contours."""
    padding: int = 1
    """Border that is taken."""

    @property
    def strokes(self) -> int:
        return 2 * self.contour + self.distractors * self.distractor_length


@dataclass
class Contours:
    """The strokes of images, [B, P]: even ones of the first 2 `contour` are contour A, odd ones contour B; then the short ones.

    paddle: which of the Paddles, -1 where a short contour found no room; place [B, P, 2]: where it lies.
    """

    paddle: Ints
    place: Ints

    def part(self, images: slice | Ints) -> "Contours":
        return Contours(paddle=self.paddle[images], place=self.place[images])


class Room:
    """Occupied pixels of many images: bytes, with a fully occupied border."""

    def __init__(self, spec: ContourSpec, paddles: Paddles, count: int) -> None:
        shape = paddles.shape
        self.spec, self.paddles = spec, paddles
        # stamps, and the pixels around a pivot that lies outside, stay within
        self.border = max(shape.radius + shape.margin, shape.reach + shape.margin + 2)
        self.side = spec.size + 2 * self.border
        inner = self.border + spec.padding
        empty = np.full((1, self.side, self.side), FULL, np.uint8)
        empty[:, inner:-inner, inner:-inner] = 0
        self.taken = empty.reshape(1, -1).repeat(count, axis=0)
        inner += shape.margin
        empty[:] = FULL
        empty[:, inner:-inner, inner:-inner] = 0
        self.wide = empty.reshape(1, -1).repeat(count, axis=0)
        self.stamp = self.square(shape.radius)
        self.wide_stamp = self.square(shape.radius + shape.margin)
        self.around = paddles.around @ np.array([self.side, 1])

    def square(self, radius: int) -> Ints:
        """Pixels of a square, seen from its middle: [S * S]."""
        line = np.arange(-radius, radius + 1)
        return (line[:, None] * self.side + line).ravel()

    def at(self, place: Ints) -> Ints:
        """The number of the pixel at a place: [...]."""
        return (place[..., 0] + self.border) * self.side + place[..., 1] + self.border

    def is_inside(self, place: Ints) -> Bools:
        return np.asarray(((place >= 0) & (place < self.spec.size)).all(axis=-1))

    def part(self, images: Ints) -> "Room":
        """A copy of some images."""
        part = copy(self)
        part.taken, part.wide = self.taken[images], self.wide[images]
        return part

    def put(self, images: Ints, part: "Room") -> None:
        self.taken[images], self.wide[images] = part.taken, part.wide

    def take(self, images: Ints, strokes: "Strokes") -> None:
        """Take the room of one stroke in each of the images."""
        at = self.at(strokes.place)[:, None]
        for taken, stamp, room in (
            (self.taken, self.stamp, self.paddles.room),
            (self.wide, self.wide_stamp, self.paddles.wide_room),
        ):
            where = images[:, None] * taken.shape[1] + at + stamp
            flat = taken.reshape(-1)
            flat[where] = np.maximum(flat[where], room[strokes.paddle])

    def is_free(self, images: Ints, paddle: Ints, place: Ints) -> Bools:
        """Return True where a stroke meets no occupied pixels."""
        where = images[:, None] * self.taken.shape[1] + self.at(place)[:, None] + self.stamp
        rooms = self.taken.reshape(-1)[where].astype(np.int16) + self.paddles.room[paddle]
        return rooms.max(axis=1, initial=0) < MEETING


class Strokes(NamedTuple):
    """The last stroke of one contour in each of some images: which, where, and the pivot from which it was drawn."""

    paddle: Ints
    place: Ints
    pivot: Ints

    def part(self, images: Ints | Bools) -> "Strokes":
        return Strokes(self.paddle[images], self.place[images], self.pivot[images])


class Middle(NamedTuple):
    """Places where contour A may begin: directions [n]; for each a rectangle's first place [n, 2] and its sides [n, 2]."""

    paddle: Ints
    first: Ints
    sides: Ints


def grow(keys: RandomKeys, spec: ContourSpec, paddles: Paddles) -> Contours:
    """Contours for each key."""
    long = long_contours(child_keys(keys, LONG_ONES), spec, paddles)
    short = short_contours(child_keys(keys, SHORT_ONES), spec, paddles, long)
    return Contours(
        paddle=np.concatenate((long.paddle, short.paddle), axis=1), place=np.concatenate((long.place, short.place), axis=1)
    )


# ---- long contours


def long_contours(keys: RandomKeys, spec: ContourSpec, paddles: Paddles) -> Contours:
    """The two long contours of each image, by the first try that succeeds."""
    found = Contours(
        paddle=np.zeros((len(keys), 2 * spec.contour), np.int64), place=np.zeros((len(keys), 2 * spec.contour, 2), np.int64)
    )
    middle = middle_places(spec, paddles)
    left, tried = np.arange(len(keys)), 0
    while len(left):
        if tried > MOST_TRIES:
            raise ValueError(
                f"two contours of {spec.contour} strokes do not fit into {spec.size} x {spec.size} pixels: an image was begun "
                f"{MOST_TRIES:,} times in vain; choose shorter contours or a larger image"
            )
        tries = max(1, SIDE_BY_SIDE // len(left))
        numbers = tried + np.arange(tries)
        of_tries = child_keys(keys[left].repeat(tries), np.tile(numbers, len(left)))
        contours, succeeded = tried_contours(of_tries, spec, paddles, middle)
        succeeded = succeeded.reshape(len(left), tries)
        whole = succeeded.any(axis=1)
        first = (np.arange(len(left)) * tries + succeeded.argmax(axis=1))[whole]
        found.paddle[left[whole]], found.place[left[whole]] = contours.paddle[first], contours.place[first]
        left, tried = left[~whole], tried + tries
    return found


def tried_contours(keys: RandomKeys, spec: ContourSpec, paddles: Paddles, middle: Middle) -> tuple[Contours, Bools]:
    """One try for each key, and which of them came to an end."""
    room = Room(spec, paddles, len(keys))
    begun, fits = two_beginnings(keys, room, middle)
    last = list(begun)
    paddle = np.zeros((len(keys), 2 * spec.contour), np.int64)
    place = np.zeros((len(keys), 2 * spec.contour, 2), np.int64)
    growing = np.flatnonzero(fits)
    for number in range(2 * spec.contour):
        which = number % 2
        if number >= 2:
            growing = gone_on(keys, number, room, growing, last[which])
        paddle[:, number], place[:, number] = last[which].paddle, last[which].place
    return Contours(paddle=paddle, place=place), np.isin(np.arange(len(keys)), growing)


def middle_places(spec: ContourSpec, paddles: Paddles) -> Middle:
    """Return places as far from the edge as two seed distances, or as the size allows."""
    needed = paddles.first_room
    for edge in range(min(2 * spec.seed_distance, spec.size // 2), -1, -1):
        first = edge - needed.min(axis=1)
        sides = spec.size - edge - needed.max(axis=1) - first
        fits = np.flatnonzero((sides > 0).all(axis=1) & paddles.may_begin)
        if len(fits):
            return Middle(fits, first[fits], sides[fits])
    raise ValueError(
        f"strokes of {paddles.shape.length} pixels do not fit into {spec.size} x {spec.size} pixels; choose shorter ones"
    )


def two_beginnings(keys: RandomKeys, room: Room, middle: Middle) -> tuple[tuple[Strokes, Strokes], Bools]:
    """The first strokes of A and B, and which tries have both."""
    paddles, spec = room.paddles, room.spec
    numbers = uniform_at(keys[:, None], np.arange(3 + 2 * DRAWS))
    choice = integers(numbers[:, 0], len(middle.paddle))
    paddle = middle.paddle[choice]
    place = middle.first[choice] + (numbers[:, 1:3] * middle.sides[choice]).astype(np.int64)
    first = Strokes(paddle, place, place + paddles.first_pivot[paddle])
    angle = np.radians(integers(numbers[:, 3 + DRAWS :], 360))
    beside = place[:, None] + spec.seed_distance * np.stack((np.sin(angle), np.cos(angle)), axis=-1)
    places = np.rint(beside).astype(np.int64)
    choices = integers(numbers[:, 3 : 3 + DRAWS], BEGINNINGS)
    inside = begins_inside(room, choices, places)
    chosen = np.arange(len(keys)), inside.argmax(axis=1)
    paddle, place = choices[chosen], places[chosen]
    return (first, Strokes(paddle, place, place + paddles.first_pivot[paddle])), np.asarray(inside.any(axis=1))


def begins_inside(room: Room, paddle: Ints, place: Ints) -> Bools:
    """Return True where a contour that begins with this stroke lies inside the image so far."""
    paddles = room.paddles
    ends = (place, place + paddles.first_head[paddle], place + paddles.first_pivot[paddle])
    return np.logical_and.reduce([room.is_inside(each) for each in ends])


def gone_on(keys: RandomKeys, number: int, room: Room, growing: Ints, last: Strokes) -> Ints:
    """Extend one contour in each of the growing images; return those that could. `last` and the room change."""
    drawn = uniform_at(keys[growing, None], NUMBERS * number + np.arange(DRAWS))
    strokes, fits = next_strokes(room, growing, last.part(growing), drawn)
    growing, strokes = growing[fits], strokes.part(fits)
    # the room of a stroke is taken when the next one stands, which lies next to it
    room.take(growing, last.part(growing))
    for kept, new in zip(last, strokes, strict=True):
        kept[growing] = new
    return growing


def next_strokes(room: Room, images: Ints, last: Strokes, drawn: Floats) -> tuple[Strokes, Bools]:
    """A stroke after the last of a contour in each of the images, and which of them have one. drawn: uniforms [n, DRAWS]."""
    paddles = room.paddles
    pivot = np.ceil(last.pivot + paddles.step[last.paddle]).astype(np.int64)
    around = room.wide.reshape(-1)[images[:, None] * room.wide.shape[1] + room.at(pivot)[:, None] + room.around]
    # a pixel that is half taken is half as likely
    upto = ((FULL - around) * paddles.turn_weight[last.paddle]).cumsum(axis=1)
    choice = (upto[:, None] <= drawn[:, :, None] * upto[:, None, -1:]).sum(axis=2)
    alive = upto[:, -1] > 1e-4 * FULL
    chosen = np.zeros(len(images), np.int64)
    fits = np.zeros(len(images), bool)
    for draw in range(drawn.shape[1]):
        at = np.flatnonzero(alive & ~fits)
        chosen[at] = np.minimum(choice[at, draw], len(paddles.around) - 1)
        fits[at] = room.is_free(images[at], chosen[at] + BEGINNINGS, pivot[at] + paddles.around[chosen[at]])
    return Strokes(chosen + BEGINNINGS, pivot + paddles.around[chosen], pivot), fits


# ---- short contours


def short_contours(keys: RandomKeys, spec: ContourSpec, paddles: Paddles, long: Contours) -> Contours:
    """Draw the short contours that find room beside the long ones."""
    paddle = np.full((len(keys), spec.distractors, spec.distractor_length), -1)
    place = np.zeros((*paddle.shape, 2), np.int64)
    everyone = np.arange(len(keys))
    room = Room(spec, paddles, len(keys))
    # as published, others may come near the end of A: all strokes but its last one are in the way
    for number in range(2 * spec.contour):
        if number != 2 * spec.contour - 2:
            room.take(everyone, Strokes(long.paddle[:, number], long.place[:, number], long.place[:, number]))
    for number in range(spec.distractors):
        left = everyone
        for retry in range(1 + RETRIES):
            some, attempt = room.part(left), child_keys(keys[left], number * (1 + RETRIES) + retry)
            contours, fits = tried_short_contour(attempt, some)
            found = left[fits]
            paddle[found, number], place[found, number] = contours.paddle[fits], contours.place[fits]
            room.put(found, some.part(np.flatnonzero(fits)))
            left = left[~fits]
    return Contours(paddle=paddle.reshape(len(keys), -1), place=place.reshape(len(keys), -1, 2))


def tried_short_contour(keys: RandomKeys, room: Room) -> tuple[Contours, Bools]:
    """One short contour in each image, whose room is taken, and which of them came to an end."""
    length = room.spec.distractor_length
    last, fits = one_beginning(keys, room)
    paddle, place = np.zeros((len(keys), length), np.int64), np.zeros((len(keys), length, 2), np.int64)
    growing = np.flatnonzero(fits)
    for number in range(length):
        if number:
            growing = gone_on(keys, number, room, growing, last)
        paddle[:, number], place[:, number] = last.paddle, last.place
    room.take(growing, last.part(growing))
    return Contours(paddle=paddle, place=place), np.isin(np.arange(len(keys)), growing)


def one_beginning(keys: RandomKeys, room: Room) -> tuple[Strokes, Bools]:
    """The first stroke of a short contour, anywhere in each image, and which images have a place for it."""
    paddles, size = room.paddles, room.spec.size
    paddle, pixel = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    fits, left = np.zeros(len(keys), bool), np.arange(len(keys))
    places = room.at(np.moveaxis(np.indices((size, size)), 0, -1)).ravel()
    for draw in range(DRAWS):
        numbers = uniform_at(keys[left, None], np.array([2 * draw, 2 * draw + 1]))
        paddle[left] = integers(numbers[:, 0], BEGINNINGS)
        is_taken = room.taken[left] > FREE
        # the pixels that its direction needs, around each place
        needed = paddles.first_room[paddle[left]] @ np.array([room.side, 1])
        blocked = np.zeros((len(left), size * size), bool)
        for pixel_of in needed.T:
            blocked |= np.take_along_axis(is_taken, places + pixel_of[:, None], axis=1)
        blocked |= ~paddles.may_begin[paddle[left], None]
        free = (~blocked).cumsum(axis=1, dtype=np.int32)
        count = free[:, -1]
        pixel[left] = (free <= (numbers[:, 1] * count).astype(np.int64)[:, None]).sum(axis=1)
        place = np.stack((pixel[left] // size, pixel[left] % size), axis=-1)
        fits[left] = (count > 0) & begins_inside(room, paddle[left], place)
        # one that leads outside is drawn again; where nothing is free, nothing will be
        left = left[(count > 0) & ~fits[left]]
    place = np.stack((pixel // size, pixel % size), axis=-1)
    return Strokes(paddle, place, place + paddles.first_pivot[paddle]), fits
