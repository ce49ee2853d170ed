"""Sequence data written once and read back as memory-mapped arrays: what takes minutes to make is made once."""

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from ...whole_files import whole_folder
from .base import SEQUENCES, SPLITS, Arrays, SequenceData, SequenceFacts, known_options, make_sequences

ABOUT = "about.json"
CHUNK = 1024


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

    The folder appears when everything is written, or not at all.
    """
    options = options or {}
    data = make_sequences(name, split=split, samples=samples, seed=seed, options=options)
    target = Path(folder) / split
    with whole_folder(target) as unfinished:
        for array_name, array in data.batch([0]).items():
            open_memmap(unfinished / f"{array_name}.npy", "w+", dtype=array.dtype, shape=(len(data), *array.shape[1:])).flush()
        arguments = {"split": split, "samples": samples, "seed": seed, **options}
        starts = range(0, len(data), CHUNK)
        if workers <= 1:
            for start in starts:
                advance(_fill(name, arguments, unfinished, start))
        else:
            # forked from a process with threads, workers may hang
            with ProcessPoolExecutor(workers, mp_context=get_context("forkserver")) as pool:
                jobs = [pool.submit(_fill, name, arguments, unfinished, start) for start in starts]
                for job in as_completed(jobs):
                    advance(job.result())
        about = {
            "name": name,
            "split": split,
            "seed": seed,
            "samples": len(data),
            "options": options,
            "facts": asdict(data.facts),
            "groups": data.groups,
            "group_lengths": data.group_lengths,
            "chance": data.chance,
            "shortcuts": data.shortcuts,
        }
        (unfinished / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    return target


def _fill(name: str, arguments: dict[str, Any], folder: Path, start: int) -> int:
    """Make one piece and put it in its place; the number of its samples."""
    data = SEQUENCES[name](**arguments)
    stop = min(start + CHUNK, len(data))
    for array_name, array in data.batch(np.arange(start, stop)).items():
        open_memmap(folder / f"{array_name}.npy", "r+")[start:stop] = array
    return stop - start


class Stored(SequenceData):
    """A split of a folder that `write` has made; the first `samples` of it."""

    def __init__(self, folder: str | Path, *, split: str, samples: int | None = None) -> None:
        place = Path(folder) / split
        if not (place / ABOUT).is_file():
            made = [each for each in SPLITS if (Path(folder) / each / ABOUT).is_file()]
            raise ValueError(
                f"{place} must hold sequence data that `nalaformer data make` wrote; {folder} has {', '.join(made) or 'none'}"
            )
        about = json.loads((place / ABOUT).read_text())
        self.options: dict[str, Any] = about["options"]
        available = about["samples"]
        super().__init__(split=split, samples=available if samples is None else min(samples, available), seed=about["seed"])
        self.name = self.stream_name = about["name"]
        self.groups = tuple(about["groups"])
        self.chance, self.shortcuts = about["chance"], about["shortcuts"]
        self._facts, self._lengths = SequenceFacts(**about["facts"]), tuple(about["group_lengths"])
        # plain arrays only: nothing is unpickled
        self.arrays = {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(place.glob("*.npy"))}

    def check(self, options: dict[str, Any]) -> None:
        """Refuse options that the sequences were not made with."""
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


def stored_name(folder: str | Path) -> str | None:
    """What data a folder holds; None if `write` has not made it."""
    for split in SPLITS:
        about = Path(folder) / split / ABOUT
        if about.is_file():
            return str(json.loads(about.read_text())["name"])
    return None
