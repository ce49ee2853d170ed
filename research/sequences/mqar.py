"""Multi-query associative recall in zoology's protocol (Arora et al., 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import IGNORE, SEQUENCES, Arrays, SequenceData, SequenceFacts
from .random_numbers import RandomKeys, child_keys, integers, uniforms

# (tokens, pairs), each as often as it stands here: 100k of the first kind and 20k of each other, in the published mixture
TRAIN = ((64, 4),) * 5 + ((128, 8), (256, 16), (256, 32), (256, 64))
TEST = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
KEYS, VALUES, PLACES, FILLER = range(4)


@SEQUENCES.register("mqar")
@dataclass(kw_only=True, eq=False)
class AssociativeRecall(SequenceData):
    """k1 v1 k2 v2 ... then, among other tokens, each key once more: at that position the answer is its value.

    Keys are distinct tokens of the lower half of the vocabulary, values distinct ones of the upper half. Key j is asked at an
    even offset d from the end of the pairs, drawn with weight (d / 2)^(power - 1), no offset twice. `mixture` lists kinds
    (tokens, pairs); sample i is of kind i modulo their number. By default the published training mixture in the train split
    and the published test lengths in the others. Shorter sequences are padded with token 0, which nothing asks about.
    """

    is_quick = True
    stream_name = "mqar"

    vocabulary: int = 8192
    mixture: Sequence[Sequence[int]] | None = None
    power: float = 0.01
    random_filler: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        mixture = (TRAIN if self.split == "train" else TEST) if self.mixture is None else self.mixture
        # the kind of each sample in turn
        self.turns = tuple((int(tokens), int(pairs)) for tokens, pairs in mixture)
        for tokens, pairs in self.turns:
            if pairs < 1 or tokens % 2 or 4 * pairs > tokens:
                raise ValueError(f"a kind is (tokens, pairs), tokens even and at least 4 pairs, got ({tokens}, {pairs})")
            if pairs >= self.vocabulary // 2:
                raise ValueError(f"{pairs} pairs need a vocabulary above {2 * pairs}, got {self.vocabulary}")
        self.kinds = tuple(dict.fromkeys(self.turns))
        self.groups = tuple(f"{tokens} tokens, {pairs} pairs" for tokens, pairs in self.kinds)
        # the answer is one of the values
        self.chance = 2 / self.vocabulary

    @property
    def facts(self) -> SequenceFacts:
        longest = max(tokens for tokens, _ in self.kinds)
        return SequenceFacts(answers="tokens", outputs=self.vocabulary, length=longest, vocabulary=self.vocabulary)

    @property
    def group_lengths(self) -> tuple[int, ...]:
        return tuple(tokens for tokens, _ in self.kinds)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        inputs = np.zeros((len(indices), self.facts.length), np.int32)
        targets = np.full(inputs.shape, IGNORE, np.int32)
        place = indices % len(self.turns)
        group = np.array([self.kinds.index(kind) for kind in self.turns])[place]
        keys = self.random_keys(indices)
        # distinct tokens are found by sorting half a vocabulary of random numbers: chunks keep that small
        for number, (tokens, pairs) in enumerate(self.kinds):
            rows = np.flatnonzero(group == number)
            for start in range(0, len(rows), 256):
                piece = rows[start : start + 256]
                inputs[piece, :tokens], targets[piece, :tokens] = self.make_kind(keys[piece], tokens, pairs)
        return {"inputs": inputs, "targets": targets, "group": group}

    def make_kind(self, keys: RandomKeys, tokens: int, pairs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        half = self.vocabulary // 2
        # token 0 stays free
        asked = 1 + distinct(child_keys(keys, KEYS), half - 1, pairs)
        values = half + distinct(child_keys(keys, VALUES), self.vocabulary - half, pairs)
        if self.random_filler:
            inputs = integers(uniforms(child_keys(keys, FILLER), tokens), self.vocabulary)
        else:
            inputs = np.zeros((len(keys), tokens), np.int64)
        inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = asked, values
        room = (tokens - 2 * pairs) // 2
        weight = np.arange(1, room + 1, dtype=np.float64) ** (self.power - 1.0)
        places = 2 * pairs + 2 * distinct(child_keys(keys, PLACES), room, pairs, weight)
        np.put_along_axis(inputs, places, asked, axis=1)
        targets = np.full(inputs.shape, IGNORE)
        np.put_along_axis(targets, places, values, axis=1)
        return inputs, targets


def distinct(keys: RandomKeys, below: int, count: int, weight: NDArray[np.floating[Any]] | None = None) -> NDArray[np.int64]:
    """`count` different numbers below `below` for each key, drawn one after the other with these weights: [B, count]."""
    # exponential clocks: the order in which they ring is that of drawing without replacement
    clocks = -np.log1p(-uniforms(keys, below))
    if weight is not None:
        clocks /= weight
    first = (
        np.argpartition(clocks, count - 1, axis=1)[:, :count] if count < below else np.tile(np.arange(below), (len(keys), 1))
    )
    order = np.take_along_axis(clocks, first, axis=1).argsort(axis=1)
    return np.take_along_axis(first, order, axis=1)
