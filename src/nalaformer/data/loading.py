"""Batches whose content is a function of seed and step alone: a run that is resumed sees what it would have seen.

Nothing is remembered between steps. The order of an epoch follows from (seed, epoch); the random state in which a sample is
augmented follows from (seed, epoch, place in the epoch), whichever worker makes it.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..child_processes import end_with_parent, shorten_socket_paths
from .bad_sample import BadSample


class Samples(Sized, Protocol):
    """What a loader reads: a length, and a sample for each index.

    It may have a function `collate`, from a list of samples to a batch, where they cannot simply be stacked; and
    `__getitems__`, for many samples at once. A sample that cannot be used raises BadSample.
    """

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples put together, and the files that could not be read on the way."""

    content: Any
    """What the dataset gives, put together; None where no sample could be read."""
    rejected: tuple[str, ...]
    """Why and which, for each file rejected."""

    def pin_memory(self) -> "Batch":
        """Called by the loader, so that copies to the device need not wait."""
        return replace(self, content=map_tensors(self.content, Tensor.pin_memory))


Batches = DataLoader[Batch]
# (place in the random stream, index of the sample)
Key = tuple[tuple[int, ...], int]


def steps_per_epoch(data: Sized, batch_size: int) -> int:
    """Whole batches only: every step averages over the same number of samples."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    steps = len(data) // batch_size
    if steps < 1:
        raise ValueError(
            f"an epoch must hold a whole batch, got {len(data)} samples and batch_size {batch_size}; use batch_size="
            f"{len(data)} or less, more data, or of text a smaller window"
        )
    return steps


def batches_from(
    step: int,
    data: Samples,
    *,
    seed: int,
    batch_size: int,
    last_step: int,
    rank: int = 0,
    ranks: int = 1,
    accumulate: int = 1,
    repeats: int = 1,
    workers: int = 0,
    pin_memory: bool = False,
) -> Batches:
    """Training batches of steps `step`..`last_step` - 1, `accumulate` for each step, this rank's share of `batch_size` samples.

    repeats > 1 is repeated augmentation: each image comes that many times in a row, each time augmented anew, and an epoch
    holds 1/repeats of the images.
    """
    share = batch_size // (ranks * accumulate)
    if share * ranks * accumulate != batch_size:
        raise ValueError(
            f"batch_size must divide into ranks x accumulate equal parts, got {batch_size} for {ranks} x {accumulate}"
        )
    if repeats < 1:
        raise ValueError(f"repeats must be positive, got {repeats}")
    plan = TrainingPlan(step, last_step, len(data), seed, batch_size, rank, ranks, accumulate, repeats)
    return _loader(SeededSamples(data, seed=seed, replace=True), plan, workers, pin_memory)


def batches_in_order(
    data: Samples, *, batch_size: int, rank: int = 0, ranks: int = 1, workers: int = 0, pin_memory: bool = False
) -> Batches:
    """Every sample once, in order; each rank gets its own and none comes twice."""
    mine = range(rank, len(data), ranks)
    plan = [[((index,), index) for index in mine[start : start + batch_size]] for start in range(0, len(mine), batch_size)]
    return _loader(SeededSamples(data, seed=0, replace=False), plan, workers, pin_memory)


class TrainingPlan:
    """Which samples make which batch: an iterable of lists of keys."""

    def __init__(
        self,
        step: int,
        last_step: int,
        samples: int,
        seed: int,
        batch_size: int,
        rank: int,
        ranks: int,
        accumulate: int,
        repeats: int,
    ) -> None:
        self.step, self.last_step, self.samples, self.seed, self.batch_size = step, last_step, samples, seed, batch_size
        self.rank, self.ranks, self.accumulate, self.repeats = rank, ranks, accumulate, repeats
        self.per_epoch = steps_per_epoch(range(samples), batch_size)

    def __len__(self) -> int:
        return (self.last_step - self.step) * self.accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for step in range(self.step, self.last_step):
            if step // self.per_epoch != epoch:
                epoch = step // self.per_epoch
                shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
                order = np.repeat(shuffled, self.repeats)[: self.samples]
            start = (step % self.per_epoch) * self.batch_size
            # the parts of one step lie side by side, so that their number does not change which samples the step sees
            places = range(start + self.rank, start + self.batch_size, self.ranks)
            share = len(places) // self.accumulate
            for part in range(self.accumulate):
                yield [((epoch, place), int(order[place])) for place in places[part * share : (part + 1) * share]]


class SeededSamples(Dataset[tuple[Any, tuple[str, ...]]]):
    """Samples by key, each made in a random state of its own; a corrupt one gives way to the next, or to none."""

    def __init__(self, data: Samples, *, seed: int, replace: bool) -> None:
        self.data, self.seed, self.replace = data, seed, replace

    def __getitem__(self, key: Key) -> tuple[Any, tuple[str, ...]]:
        place, index = key
        rejected: list[str] = []
        with random_state_of(self.seed, *place):
            # a data set in which nothing can be read must not turn for ever
            for tried in range(min(len(self.data), 100)):
                try:
                    return self.data[(index + tried) % len(self.data)], tuple(rejected)
                except BadSample as error:
                    rejected.append(str(error))
                    if not self.replace:
                        return None, tuple(rejected)
        raise ValueError(f"100 samples in a row cannot be used; the last: {rejected[-1]}")

    def __getitems__(self, keys: list[Key]) -> list[tuple[Any, tuple[str, ...]]]:
        """A batch; data that makes many samples at once, without augmentation, is asked for all of them."""
        together = getattr(self.data, "__getitems__", None)
        if together is None:
            return [self[key] for key in keys]
        return [(content, ()) for content in together([index for _, index in keys])]


def try_samples(data: Samples, *, seed: int, most: int, seconds: float) -> tuple[int, list[str]]:
    """Reads samples in random order, `most` at most and for so many seconds; how many, and why some cannot be used."""
    samples = SeededSamples(data, seed=seed, replace=False)
    rejected: list[str] = []
    tried = 0
    last = time.monotonic() + seconds
    for index in np.random.default_rng(seed).permutation(len(data))[:most].tolist():
        rejected.extend(samples[(index,), index][1])
        tried += 1
        if time.monotonic() > last:
            break
    return tried, rejected


class random_state_of:
    """Seeds Python's, numpy's and torch's random numbers by the key inside the block, and restores them after it."""

    def __init__(self, *key: int) -> None:
        self.words = np.random.SeedSequence(key).generate_state(4, np.uint32)

    def __enter__(self) -> None:
        self.before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        # torch.manual_seed would seed the devices too, in the middle of whatever they do
        seed_host(self.words)

    def __exit__(self, *_: object) -> None:
        random.setstate(self.before[0])
        np.random.set_state(self.before[1])
        torch.set_rng_state(self.before[2])


def seed_host(words: NDArray[Any]) -> None:
    """Seed Python, numpy and torch on the CPU from four 32-bit words."""
    random.seed(words.tobytes())
    np.random.seed(words[:2])
    torch.default_generator.manual_seed(int(words[2]) << 32 | int(words[3]))


def seed_everything(*key: int) -> None:
    """Seed Python, numpy and torch with all its devices from the numbers of the key."""
    words = np.random.SeedSequence(key).generate_state(4, np.uint32)
    torch.manual_seed(int(words[2]) << 32 | int(words[3]))
    seed_host(words)


def map_tensors(content: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same lists, tuples and dictionaries with every tensor replaced by its image under the function."""
    if isinstance(content, Tensor):
        return function(content)
    if isinstance(content, dict):
        return {name: map_tensors(part, function) for name, part in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(map_tensors(part, function) for part in content)
    return content


def put_together(samples: list[tuple[Any, tuple[str, ...]]], collate: Callable[[list[Any]], Any]) -> Batch:
    readable = [content for content, _ in samples if content is not None]
    rejected = tuple(line for _, lines in samples for line in lines)
    return Batch(content=collate(readable) if readable else None, rejected=rejected)


def workers_here(asked: int) -> int:
    """The number of processes that was asked for, but at most one for each core of this process, or two on a single core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(asked, max(2, cores or 1))


def _loader(data: SeededSamples, plan: Any, workers: int, pin_memory: bool) -> Batches:
    workers = workers_here(workers)
    if workers:
        shorten_socket_paths()
    # the collated batches are what the loader gives
    return DataLoader(
        cast(Dataset[Batch], data),
        batch_sampler=plan,
        num_workers=workers,
        # torch watches the worker's parent, which is the fork server and stays
        worker_init_fn=end_with_parent if workers else None,
        collate_fn=partial(put_together, collate=getattr(data.data, "collate", default_collate)),
        pin_memory=pin_memory,
        # workers that are forked from a process with threads may hang
        multiprocessing_context="forkserver" if workers else None,
        # its seed would be drawn from the global state, and a resumed run draws at another moment
        generator=torch.Generator().manual_seed(0),
    )
