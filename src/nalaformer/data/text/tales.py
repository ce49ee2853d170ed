"""Generated text: short tales in a few hundred words of English, with questions whose answers stand earlier in the tale.

Generated, not written by anybody: for trying things out, where nothing is to be downloaded. Tale i is a function of
(seed, split, i) alone.
"""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.random import Generator

NAMES = ("Ada", "Bo", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kai", "Lena", "Milo", "Nora", "Otto", "Pia")
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "silver")
THINGS = ("key", "box", "lamp", "book", "cup", "coat", "drum", "map", "ring", "rope", "shell", "stone")
PLACES = ("kitchen", "garden", "cellar", "attic", "harbour", "market", "school", "tower", "forest", "mill", "stable", "library")
WEATHER = (
    "It rained.",
    "The sun was out.",
    "A cold wind blew.",
    "Snow fell all day.",
    "The night was clear.",
    "Fog lay on the fields.",
)
MOODS = ("glad", "tired", "hungry", "proud", "afraid", "curious")


class Tales(Sequence[str]):
    """A number of tales; those of "train" and "val" differ."""

    def __init__(self, *, split: str, documents: int, seed: int = 0) -> None:
        if split not in ("train", "val"):
            raise ValueError(f'split must be "train" or "val", got {split!r}')
        if documents < 1:
            raise ValueError(f"documents must be positive, got {documents}")
        self.documents, self.seed, self.stream = documents, seed, zlib.crc32(f"tales/{split}".encode())

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < self.documents:
            raise IndexError(f"tale {index} of {self.documents}")
        return tale(np.random.default_rng((self.seed, self.stream, index)))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(self.documents))


def tale(random: Generator) -> str:
    """Three to six people, each with a thing and a place; then what happened, and who has what where."""

    def some(words: Sequence[str], count: int) -> list[str]:
        return [words[i] for i in random.permutation(len(words))[:count]]

    people = int(random.integers(3, 7))
    who, what, where = some(NAMES, people), some(THINGS, people), some(PLACES, people)
    colour = [COLOURS[i] for i in random.integers(len(COLOURS), size=people)]
    lines = [WEATHER[random.integers(len(WEATHER))]]
    for i in range(people):
        verb = ("took", "carried", "brought")[random.integers(3)]
        lines.append(f"{who[i]} {verb} the {colour[i]} {what[i]} to the {where[i]}.")
        if random.random() < 0.4:
            lines.append(f"{who[i]} was {MOODS[random.integers(len(MOODS))]}.")
    if random.random() < 0.5:
        giver, taker = random.permutation(people)[:2]
        lines.append(f"Then {who[giver]} met {who[taker]} in the {where[taker]} and they talked for a while.")
    for i in random.permutation(people)[: 1 + people // 2]:
        kind = random.integers(3)
        if kind == 0:
            lines.append(f"Where is the {what[i]}? The {what[i]} is in the {where[i]}.")
        elif kind == 1:
            lines.append(f"Who has the {what[i]}? {who[i]} has the {what[i]}.")
        else:
            lines.append(f"What colour is the {what[i]}? The {what[i]} is {colour[i]}.")
    return " ".join(lines) + "\n"
