"""Vectors as tokens: pointing at the nearest of many, which needs sharp attention, and counting and voting, which need flat."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import IGNORE, SEQUENCES, Arrays, SequenceData, SequenceFacts
from .random_numbers import child_keys, integers, normals, uniforms

KEYS, CLASSES, PROBES, CHOICES = range(4)


@dataclass(kw_only=True, eq=False)
class Probed(SequenceData):
    """`keys` tokens (direction; class, one of eight, as a unit vector; 0), then `probes` tokens that ask (...; 1).

    Inputs are [keys + probes, dimensions + classes + 1].
    """

    is_quick = True
    chance = 1 / 8
    classes = 8

    keys: int = 256
    probes: int = 16
    dimensions: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys < 2 or self.probes < 1 or self.dimensions < 2:
            raise ValueError(
                f"needs keys >= 2, probes >= 1, dimensions >= 2, got {self.keys}, {self.probes}, {self.dimensions}"
            )

    @property
    def facts(self) -> SequenceFacts:
        channels = self.dimensions + self.classes + 1
        return SequenceFacts(answers="tokens", outputs=8, length=self.keys + self.probes, channels=channels)

    def directions(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Random unit vectors of the keys: [B, keys, dimensions]."""
        drawn = normals(child_keys(self.random_keys(indices), KEYS), self.keys * self.dimensions)
        return unit(drawn.reshape(len(indices), self.keys, self.dimensions))

    def put_together(
        self,
        key_vectors: NDArray[np.float64],
        key_classes: NDArray[np.float64],
        probe_vectors: NDArray[np.float64],
        probe_classes: NDArray[np.float64],
        answers: NDArray[np.int64],
    ) -> Arrays:
        vectors = np.concatenate((key_vectors, probe_vectors), axis=1)
        classes = np.concatenate((key_classes, probe_classes), axis=1)
        asks = np.broadcast_to(np.arange(vectors.shape[1])[None, :, None] >= self.keys, (*vectors.shape[:2], 1))
        targets = np.full(vectors.shape[:2], IGNORE)
        targets[:, self.keys :] = answers
        return {"inputs": np.concatenate((vectors, classes, asks), axis=2).astype(np.float32), "targets": targets}


@SEQUENCES.register("pointing")
@dataclass(kw_only=True, eq=False)
class Pointing(Probed):
    """A probe is a noisy copy of some key; the answer is the class of the key that is nearest to it."""

    stream_name = "pointing"

    noise: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise < 0:
            raise ValueError(f"noise must not be negative, got {self.noise}")

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        keys, batch = self.random_keys(indices), len(indices)
        vectors = self.directions(indices)
        classes = integers(uniforms(child_keys(keys, CLASSES), self.keys), self.classes)
        chosen = integers(uniforms(child_keys(keys, CHOICES), self.probes), self.keys)
        noise = self.noise * normals(child_keys(keys, PROBES), self.probes * self.dimensions)
        near = np.take_along_axis(vectors, chosen[:, :, None], axis=1)
        probes = unit(near + noise.reshape(near.shape))
        # among unit vectors the nearest is the one with the largest product
        nearest = (probes @ vectors.transpose(0, 2, 1)).argmax(axis=2)
        answers = np.take_along_axis(classes, nearest, axis=1)
        blank = np.zeros((batch, self.probes, self.classes))
        return self.put_together(vectors, np.eye(self.classes)[classes], probes, blank, answers)


@SEQUENCES.register("pointing_control")
class Counting(Probed):
    """A probe shows a class; the answer is how many keys have it, 0 to 7. The other keys have none.

    The number for each class is drawn evenly, and the directions say nothing.
    """

    stream_name = "pointing_control"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys < 7 * self.classes:
            raise ValueError(f"keys must be at least {7 * self.classes}, so that every number fits, got {self.keys}")

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        keys, batch = self.random_keys(indices), len(indices)
        vectors = self.directions(indices)
        counts = integers(uniforms(child_keys(keys, CLASSES), self.classes), 8)
        # class c takes the first counts[c] of the next free places; what is left has no class; then all are shuffled
        ends = counts.cumsum(axis=1)
        kinds = (np.arange(self.keys)[None, :, None] >= ends[:, None]).sum(axis=2)
        order = uniforms(child_keys(keys, PROBES), self.keys).argsort(axis=1)
        kinds = np.take_along_axis(kinds, order, axis=1)
        asked = integers(uniforms(child_keys(keys, CHOICES), self.probes), self.classes)
        answers = np.take_along_axis(counts, asked, axis=1)
        none = np.zeros((batch, self.probes, self.dimensions))
        shown = np.eye(self.classes + 1)[kinds][:, :, : self.classes]
        return self.put_together(vectors, shown, none, np.eye(self.classes)[asked], answers)


@SEQUENCES.register("majority")
@dataclass(kw_only=True, eq=False)
class Majority(Probed):
    """Every key has a class; the answer of every probe is the class of most keys, `lead` more of them than chance gave it.

    The directions say nothing, and the probes show nothing.
    """

    stream_name = "majority"

    lead: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.keys // 2
        if not 1 <= self.lead <= most:
            raise ValueError(f"lead must be 1 to {most}, half of the keys, so that there is somebody to lead, got {self.lead}")

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        keys, batch = self.random_keys(indices), len(indices)
        classes = integers(uniforms(child_keys(keys, CLASSES), self.keys), self.classes)
        counts = (classes[:, :, None] == np.arange(self.classes)).sum(axis=1)
        # among classes that are even, each is as likely to win
        winners = (counts + uniforms(child_keys(keys, CHOICES), self.classes)).argmax(axis=1)[:, None]
        # the winner takes over keys of others, whichever come first in a random order: what it has already comes last
        order = uniforms(child_keys(keys, PROBES), self.keys) + (classes == winners)
        taken = order.argsort(axis=1).argsort(axis=1) < self.lead
        classes = np.where(taken, winners, classes)
        none = np.zeros((batch, self.probes, self.dimensions + self.classes))
        answers = np.broadcast_to(winners, (batch, self.probes))
        shown = np.eye(self.classes)[classes]
        return self.put_together(
            self.directions(indices), shown, none[..., : self.dimensions], none[..., self.dimensions :], answers
        )


def unit(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
