"""Sequence data written once and read back as memory-mapped arrays: what takes minutes to make is made once."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from nalaformer.atomic_files import (
    atomic_folder,
    megabytes,
    refuse_content,
    refuse_full_disk,
    unfinished_folder,
    write_atomically,
)
from nalaformer.child_processes import worker_pool
from nalaformer.data.mapped_files import mapped
from nalaformer.folder_lock import refuse_in_use
from nalaformer.json_text import parse_json

from .base import SEQUENCES, SPLITS, Arrays, SequenceData, SequenceFacts, known_options, make_sequences

ABOUT = "about.json"
CHUNK = 1024
# lists finished chunks while others are missing; other chunk sizes have other names
FINISHED = f"finished_{CHUNK}.txt"


def write(
    name: str,
    folder: str | Path,
    *,
    split: str,
    samples: int,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    workers: int = 1,
    advance: Callable[[int], None] = lambda samples: None,
) -> Path:
    """Make the samples of a split and write them to folder/split; `advance` is told how many were made.

    The folder appears when everything is written. The same call after one that was stopped or killed keeps what that one had
    finished, and after one that has ended there is nothing to do.
    """
    options = options or {}
    data = make_sequences(name, split=split, samples=samples, seed=seed, options=options)
    target = Path(folder) / split
    about = make_manifest(data, name, options, samples)
    if about_if_any(target) == about:
        advance(len(data))
        return target
    with atomic_folder(target, keep_unfinished=True) as unfinished:
        try:
            finished = finished_chunks(unfinished, data, about)
            advance(sum(min(CHUNK, len(data) - start) for start in finished))
            arguments = {"split": split, "samples": samples, "seed": seed, **options}
            starts = [start for start in range(0, len(data), CHUNK) if start not in finished]
            with (unfinished / FINISHED).open("a") as record:
                for start, count in _make_chunks(name, arguments, unfinished, starts, workers):
                    record.write(f"{start}\n")
                    record.flush()
                    advance(count)
        except BaseException:
            # nothing to resume from
            if not read_finished(unfinished):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        (unfinished / FINISHED).unlink()
    return target


def plan_write(name: str, folder: str | Path, *, split: str, samples: int, seed: int, options: dict[str, Any]) -> str:
    """Describe what `write` would do. Raise what it would raise; write nothing."""
    data = make_sequences(name, split=split, samples=samples, seed=seed, options=options)
    target = Path(folder) / split
    about = make_manifest(data, name, options, samples)
    line = f"{split}: {len(data):,} sequences, {megabytes(count_bytes(data))}, {target}"
    if about_if_any(target) == about:
        return f"{line}; finished"
    refuse_content(target)
    refuse_in_use(target, beside=True)
    unfinished = unfinished_folder(target)
    if about_if_any(unfinished) == about:
        done = len(read_finished(unfinished))
        return f"{line}; goes on after {done} of {-(-len(data) // CHUNK)} pieces"
    refuse_full_disk(target, count_bytes(data), f"the {split} split")
    return f"{line}; new"


def make_manifest(data: SequenceData, name: str, options: dict[str, Any], asked: int) -> dict[str, Any]:
    """Return the manifest of the arrays. asked: requested samples; a file may have fewer."""
    about = {
        "name": name,
        "split": data.split,
        "seed": data.seed,
        "samples": len(data),
        "options": options,
        "facts": asdict(data.facts),
        "groups": data.groups,
        "group_lengths": data.group_lengths,
        "chance": data.chance,
        "shortcuts": data.shortcuts,
    }
    if asked != len(data):
        about["asked"] = asked
    # as JSON has it: lists, and no tuples
    return dict(json.loads(json.dumps(about)))


def about_if_any(folder: Path) -> dict[str, Any] | None:
    try:
        return read_about(folder)
    except (OSError, ValueError):
        return None


def count_bytes(data: SequenceData) -> int:
    return len(data) * sum(array.nbytes for array in data.batch([0]).values())


def finished_chunks(folder: Path, data: SequenceData, about: dict[str, Any]) -> set[int]:
    """Return the first samples of the chunks that an earlier call for the same data finished; remove other data."""
    if about_if_any(folder) == about:
        return read_finished(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    for array_name, array in data.batch([0]).items():
        path = folder / f"{array_name}.npy"
        open_memmap(path, "w+", dtype=array.dtype, shape=(len(data), *array.shape[1:])).flush()
        reserve(path)
    (folder / FINISHED).touch()
    # last: it says that the arrays are there
    write_atomically(folder / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
    return set()


def read_finished(folder: Path) -> set[int]:
    try:
        # an unfinished last line is half a number
        return {int(line) for line in (folder / FINISHED).read_text().split("\n")[:-1]}
    except FileNotFoundError:
        # chunks of another size, or a call that was killed at its very end
        return set()


def reserve(path: Path) -> None:
    """Take the room on the disk now: writing to a mapped file that finds none kills the process without a word."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _make_chunks(
    name: str, arguments: dict[str, Any], folder: Path, starts: list[int], workers: int
) -> Iterator[tuple[int, int]]:
    """Make the chunks, in any order; start and number of samples of each when it is on the disk."""
    if workers <= 1:
        for start in starts:
            yield start, _fill(name, arguments, folder, start)
        return
    with worker_pool(workers) as pool:
        jobs = {pool.submit(_fill, name, arguments, folder, start): start for start in starts}
        try:
            for job in as_completed(jobs):
                yield jobs[job], job.result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a process that makes sequences was killed, perhaps for want of memory; the same command with fewer workers "
                "goes on"
            ) from error


def _fill(name: str, arguments: dict[str, Any], folder: Path, start: int) -> int:
    """Make one chunk and write it to its place; return the number of its samples."""
    data = SEQUENCES[name](**arguments)
    stop = min(start + CHUNK, len(data))
    for array_name, array in data.batch(np.arange(start, stop)).items():
        target = open_memmap(folder / f"{array_name}.npy", "r+")
        target[start:stop] = array
        target.flush()
    return stop - start


class Stored(SequenceData):
    """A split of a folder that `write` has made; the first `samples` of it."""

    def __init__(self, folder: str | Path, *, split: str, samples: int | None = None) -> None:
        place = Path(folder) / split
        if not (place / ABOUT).is_file():
            made = [each for each in SPLITS if (Path(folder) / each / ABOUT).is_file()]
            raise ValueError(
                f"{place} must hold sequence data that `python -m research.sequences` wrote; "
                f"{folder} has {', '.join(made) or 'none'}"
            )
        about = read_about(place)
        try:
            self.options: dict[str, Any] = about["options"]
            available = about["samples"]
            super().__init__(split=split, samples=available if samples is None else min(samples, available), seed=about["seed"])
            self.name = self.stream_name = about["name"]
            # data whose name is no longer registered gets the default metric
            self.figure = SEQUENCES[self.name].figure if self.name in SEQUENCES.names() else SequenceData.figure
            self.groups = tuple(about["groups"])
            self.chance, self.shortcuts = about["chance"], about["shortcuts"]
            self._facts, self._lengths = SequenceFacts(**about["facts"]), tuple(about["group_lengths"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{place / ABOUT} is not as `python -m research.sequences` writes it: {type(error).__name__} {error}"
            ) from error
        # plain arrays only: nothing is unpickled
        self.arrays = {path.stem: mapped(path) for path in sorted(place.glob("*.npy"))}
        lengths = {name: len(array) if array.ndim else 0 for name, array in self.arrays.items()}
        if not lengths or set(lengths.values()) != {available}:
            raise ValueError(
                f"each array in {place} must have as many rows as {ABOUT} states samples, {available}, got "
                f"{lengths or 'no array'}; make the data again"
            )

    def check(self, options: dict[str, Any]) -> None:
        """Reject options that the sequences were not made with."""
        defaults = known_options(self.name) if self.name in SEQUENCES.names() else {}
        # as JSON has it: lists, and no tuples
        made, asked = (json.loads(json.dumps(each)) for each in (defaults | self.options, options))
        other = [
            f"{name} is {made.get(name)!r} there" for name, value in asked.items() if name not in made or made[name] != value
        ]
        if other:
            raise ValueError(
                f"the stored {self.name} ({self.split}) must have been made with the options {json.dumps(options)}, "
                f"but {', '.join(other)}; make it with them, or ask for data_options='{json.dumps(self.options)}'"
            )

    @property
    def facts(self) -> SequenceFacts:
        return self._facts

    @property
    def group_lengths(self) -> tuple[int, ...]:
        return self._lengths

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        return {name: np.asarray(array[indices]) for name, array in self.arrays.items()}


def read_about(place: Path) -> dict[str, Any]:
    """Read the manifest that `write` left beside the arrays."""
    try:
        about = parse_json((place / ABOUT).read_bytes())
        if not isinstance(about, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise ValueError(f"{place / ABOUT} cannot be read: {error}; make the data again") from error
    return about


def stored_name(folder: str | Path) -> str | None:
    """Return the name of the data in a folder; None if `write` has not made it."""
    for split in SPLITS:
        about = Path(folder) / split / ABOUT
        if about.is_file():
            return str(read_about(about.parent).get("name"))
    return None
