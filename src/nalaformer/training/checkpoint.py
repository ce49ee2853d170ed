"""Checkpoints that are whole or not there: a folder per step, written aside, synced, and renamed into its place.

    step_00000100/
      model.safetensors, ...    tensors by name; nothing is pickled
      state.json                everything that is no tensor
      manifest.json             sha256 of each file; written last

A process that is killed at any moment leaves at most a folder that starts with a dot, which the next one removes. Which is the
newest follows from the step in its name. A file with a flipped bit is found by its sha256, and the folder before it serves.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..atomic_files import put_in_place, remove_folder
from ..json_text import parse_json

NAME = re.compile(r"step_(\d{8,})")
MANIFEST, STATE = "manifest.json", "state.json"


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not those that were written."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What one folder holds."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """File name without ending -> tensors by name."""
    state: dict[str, Any]
    """Plain values: numbers, strings, lists, dictionaries."""


@contextmanager
def reading_run(folder: str | Path) -> Iterator[None]:
    """Put around what is made of a checkpoint's state: a part that is missing or unknown is one ValueError with the folder."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    # a state that another version or anybody else wrote: parts are missing, have other types, or make another model
    except (LookupError, TypeError, AttributeError, AssertionError, RuntimeError, ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"{folder} must hold a run that this version of nalaformer can read, got {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; a newer version may have written it: update nalaformer, or train it anew"
        ) from error


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := NAME.fullmatch(path.name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def clean(self) -> None:
        """Remove what killed processes have left."""
        if self.folder.is_dir():
            for path in self.folder.glob(".*"):
                shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        """Write all files aside, then rename the folder: before the rename there is nothing, after it everything."""
        from safetensors.torch import save

        aside = self.folder / f".writing_{self.path(step).name}_{os.getpid()}"
        try:
            aside.mkdir(parents=True)
            contents = {
                # a copy: tensors may share memory, which the format does not write
                f"{name}.safetensors": save({key: value.detach().cpu().contiguous().clone() for key, value in group.items()})
                for name, group in checkpoint.tensors.items()
            }
            contents[STATE] = json.dumps(checkpoint.state, indent=1, allow_nan=True).encode()
            digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
            contents[MANIFEST] = json.dumps({"sha256": digests}, indent=1).encode()
            for name, content in contents.items():
                (aside / name).write_bytes(content)
            put_in_place(aside, self.path(step))
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.folder} ({error.strerror or error}); earlier "
                "ones are untouched: make room there, then run the same command again"
            ) from error
        return self.path(step)

    def remove(self, step: int) -> None:
        remove_folder(self.path(step))

    def put_aside(self, *, after: int) -> None:
        """Rename the checkpoints beyond that step, none of which is whole: they count no more, and their bytes stay."""
        for step in self.steps():
            if step > after:
                aside = self.folder / f"damaged_{self.path(step).name}"
                shutil.rmtree(aside, ignore_errors=True)
                self.path(step).rename(aside)

    def prune(self, *, keep: int, also: int | None = None) -> None:
        """Remove all but the newest `keep` and the one of step `also`."""
        for step in self.steps()[:-keep]:
            if step != also:
                self.remove(step)

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of that step, every byte compared with its sha256."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        folder = self.path(step)
        contents = dict(verified_files(folder))
        if STATE not in contents:
            raise DamagedCheckpoint(f"{folder} has no {STATE}")
        try:
            state = parse_json(contents.pop(STATE))
            tensors = {name.removesuffix(".safetensors"): load(content) for name, content in contents.items()}
        # a manifest may fit files that we have not written
        except (ValueError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{folder} is damaged: {error}") from error
        return Checkpoint(tensors=tensors, state=state)

    def newest(self) -> tuple[int, Checkpoint] | None:
        """The newest that is whole, with a warning for each newer one that is not; None if there is none."""
        for step in reversed(self.steps()):
            try:
                return step, self.load(step)
            except DamagedCheckpoint as error:
                warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=2)
        return None


def verified_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file that the manifest lists."""
    try:
        digests = parse_json((folder / MANIFEST).read_bytes())["sha256"]
        for name, digest in digests.items():
            # a manifest is no permission to read elsewhere
            if Path(name).name != name:
                raise DamagedCheckpoint(f"{folder / MANIFEST} names a file outside of its folder: {name!r}")
            content = (folder / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise DamagedCheckpoint(f"{folder / name} is damaged: its sha256 is not the one that was written")
            yield name, content
    except DamagedCheckpoint:
        raise
    except (OSError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {error}") from error
