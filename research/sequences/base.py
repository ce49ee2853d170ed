"""Base class of sequence data: samples by index, in batches as fast as arrays allow."""

import inspect
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from nalaformer.registry import Registry, unknown_name

from .answer_metrics import IGNORE
from .random_numbers import RandomKeys, sample_keys

__all__ = ["IGNORE", "SEQUENCES", "SPLITS", "Arrays", "SequenceData", "SequenceFacts"]

SPLITS = ("train", "val", "test")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class SequenceFacts:
    """The facts about the data that a model's shape depends on."""

    answers: str
    """"sequence": one class per sequence; "pair": one per pair of sequences; "tokens": one at each position that asks."""
    outputs: int
    """Number of classes, of tokens to choose from, or of channels of answers that are vectors."""
    length: int
    """Tokens of a sequence, padding included."""
    vocabulary: int = 0
    """Number of different tokens; 0: inputs are vectors."""
    channels: int = 0
    """Channels of vector inputs."""
    is_padded: bool = False
    """Token 0 stands for nothing."""


@dataclass(kw_only=True, eq=False)
class SequenceData(Dataset[dict[str, Tensor]]):
    """Sample i is a function of (name, seed, split, i) alone: however it is batched, and however many others there are.

    A sample is a dictionary: `inputs` [N] tokens or [N, C] vectors ([2, N] for pairs), `targets` (a class, [N] with IGNORE
    where nothing is asked, or vectors [N, outputs]), `group` (an index into `groups`: metrics are reported for each
    separately).
    """

    split: str
    samples: int
    seed: int = 0
    stream_name: str = field(init=False)
    """The name of the random stream; data that differs only in how it is shown shares it."""
    groups: tuple[str, ...] = field(default=("all",), init=False)
    chance: float = field(init=False)
    """The figure of guessing."""
    shortcuts: dict[str, float] = field(default_factory=dict, init=False)
    """Measured results of shortcuts that do not solve the task, by name."""
    figure = "accuracy"
    """Metric of the answers: a name in METRICS."""
    is_quick = False
    """True where a core makes tens of thousands of samples in seconds, so that keeping them saves nothing."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {self.split!r}")
        if self.samples < 1:
            raise ValueError(f"samples must be positive, got {self.samples}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @property
    @abstractmethod
    def facts(self) -> SequenceFacts: ...

    @abstractmethod
    def make(self, indices: NDArray[np.int64]) -> Arrays:
        """The samples of these indices, stacked."""

    @property
    def group_lengths(self) -> tuple[int, ...]:
        """For each group, the number of tokens after which its sequences hold nothing but padding."""
        return (self.facts.length,) * len(self.groups)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Arrays:
        """Samples stacked to arrays: many at once are much faster than one by one."""
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.ndim != 1 or (len(chosen) and not (chosen.min() >= 0 and chosen.max() < self.samples)):
            raise IndexError(f"indices must be a row of numbers from 0 to {self.samples - 1}, got {chosen}")
        arrays = self.make(chosen)
        return {"group": np.zeros(len(chosen), np.int64)} | arrays

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """Return a batch at once, for loaders."""
        tensors = {name: as_tensor(array) for name, array in self.batch(indices).items()}
        return [{name: tensor[row] for name, tensor in tensors.items()} for row in range(len(indices))]

    @property
    def stream(self) -> int:
        return zlib.crc32(f"{self.stream_name}/{self.split}".encode())

    def random_keys(self, indices: NDArray[np.int64]) -> RandomKeys:
        """The random key of each sample."""
        return sample_keys(self.seed, self.stream, indices)

    def generator_for(self, index: int) -> Generator:
        """The random numbers of one sample, for generators that go one by one."""
        return np.random.default_rng((self.seed, self.stream, index))


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Integers as int64, which embeddings and losses take; vectors and masks as they are."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.long()


SEQUENCES: Registry[type[SequenceData]] = Registry("sequence data")


def known_options(name: str) -> dict[str, Any]:
    """The options of the data of that name, with what they are by default."""
    parameters = inspect.signature(SEQUENCES[name]).parameters.values()
    return {each.name: each.default for each in parameters if each.name not in ("split", "samples", "seed")}


def make_sequences(
    name: str, *, split: str, samples: int, seed: int = 0, options: dict[str, Any] | None = None
) -> SequenceData:
    """The data of that name; options as people type them: names and types are looked at first."""
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise ValueError(f'options of {name} must be an object, as {{"length": 256}}, got {options!r}')
    known = known_options(name)
    for option, value in options.items():
        if option not in known:
            raise unknown_name(f"option of {name}:", option, known)
        if not is_alike(value, known[option]):
            raise ValueError(
                f"{option} of {name} must be of the kind of {known[option]!r}, which it is by default, got {value!r}"
            )
    try:
        return SEQUENCES[name](split=split, samples=samples, seed=seed, **options)
    # a list in a list, for one, may hold anything
    except TypeError as error:
        raise ValueError(f"{name} cannot be made with the options {options}: {error}; known: {known}") from error


def is_alike(value: object, default: object) -> bool:
    """Return True if a value has the type of the default; an int passes for a float."""
    if default is None or default is inspect.Parameter.empty:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    for kind in (int, str):
        if isinstance(default, kind):
            return isinstance(value, kind)
    if isinstance(default, float):
        return isinstance(value, int | float)
    return isinstance(value, Sequence) and not isinstance(value, str)
