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
@dataclass(kw_only=True, eq=False)
class Induction(RandomTokens):
    """The last `answers` tokens have each occurred once before them, anywhere; the answer is the token that followed it then.

    One answer is what is usually asked; of more of them a model learns sooner.
    """

    stream_name = "induction"

    answers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        most = min(self.vocabulary - FIRST - 1, (self.length - 1) // 2)
        if not 1 <= self.answers <= most:
            raise ValueError(
                f"answers must be between 1 and {most}, so that {self.length} tokens of {self.vocabulary} kinds have room for "
                f"them, got {self.answers}; choose fewer, longer sequences or a larger vocabulary"
            )
        self.chance = 1 / (self.vocabulary - FIRST - self.answers)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        keys, kinds, asked = self.random_keys(indices), self.vocabulary - FIRST, self.answers
        before = self.length - asked
        # the last one before the questions is no place: a question would follow it
        places = uniforms(child_keys(keys, 0), before - 1).argsort(axis=1)[:, :asked]
        order = uniforms(child_keys(keys, 1), kinds).argsort(axis=1)
        cues, others = order[:, :asked], order[:, asked:]
        tokens = np.take_along_axis(others, integers(uniforms(child_keys(keys, 2), before), kinds - asked), axis=1)
        np.put_along_axis(tokens, places, cues, axis=1)
        targets = np.full((len(indices), self.length), IGNORE)
        targets[:, before:] = FIRST + np.take_along_axis(tokens, places + 1, axis=1)
        return {"inputs": FIRST + np.concatenate((tokens, cues), axis=1), "targets": targets}
