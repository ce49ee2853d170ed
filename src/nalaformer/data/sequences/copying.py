"""Repeating what was seen: a whole sequence, or what followed one token."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import IGNORE, SEQUENCES, Arrays, SequenceData, SequenceFacts
from .random_numbers import child_keys, integers, uniforms

SEPARATOR, FIRST = 1, 2


@dataclass(kw_only=True, eq=False)
class RandomTokens(SequenceData):
    """Token 1 separates, tokens 2.. are drawn evenly."""

    is_quick = True
    length: int = 256
    vocabulary: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 4 or self.vocabulary < 4:
            raise ValueError(f"length and vocabulary must be at least 4, got {self.length} and {self.vocabulary}")

    @property
    def facts(self) -> SequenceFacts:
        return SequenceFacts(answers="tokens", outputs=self.vocabulary, length=self.length, vocabulary=self.vocabulary)


@SEQUENCES.register("copying")
class Copying(RandomTokens):
    """x_1 ... x_n | x_1 ... x_n: from the separator on, the next token is asked. n = length / 2."""

    stream_name = "copying"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length % 2:
            raise ValueError(f"length must be even: both halves are the same, got {self.length}")
        self.chance = 1 / (self.vocabulary - FIRST)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        half = self.length // 2
        content = FIRST + integers(uniforms(self.random_keys(indices), half), self.vocabulary - FIRST)
        separator = np.full((len(indices), 1), SEPARATOR)
        targets = np.full((len(indices), self.length), IGNORE)
        targets[:, half:] = content
        return {"inputs": np.concatenate((content, separator, content[:, :-1]), axis=1), "targets": targets}


@SEQUENCES.register("induction")
class Induction(RandomTokens):
    """The last token has occurred once before, anywhere; the answer is the token that followed it then."""

    stream_name = "induction"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chance = 1 / (self.vocabulary - FIRST - 1)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        keys, rows = self.random_keys(indices), np.arange(len(indices))
        choice = self.vocabulary - FIRST
        drawn = uniforms(child_keys(keys, 0), 2)
        cue, place = integers(drawn[:, 0], choice), integers(drawn[:, 1], self.length - 2)
        # any token but the cue
        others = (cue[:, None] + 1 + integers(uniforms(child_keys(keys, 1), self.length), choice - 1)) % choice
        others[rows, place], others[:, -1] = cue, cue
        targets = np.full(others.shape, IGNORE)
        targets[:, -1] = FIRST + others[rows, place + 1]
        return {"inputs": FIRST + others, "targets": targets}
