"""Files and folders that are whole or not there, whatever happens to the process that writes them."""

import csv
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .folder_lock import LOCK, only_writer

UNFINISHED = ".writing_"
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A file to write, which gets its name `path` at the end; after an error the old one stays and nothing is beside it."""
    aside = path.with_name(f".{path.name}_{os.getpid()}")
    try:
        yield aside
        sync(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """The file has its old content or the new one, whatever happens."""
    with atomic_file(path) as aside:
        aside.write_bytes(content)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """These columns of the rows, as a whole file in the place of an old one; what a row does not have is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as aside, aside.open("w", newline="") as file:
        # one kind of line ends on every machine, so that files of results can be compared line by line
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def sync(path: Path) -> None:
    """A file reaches the disk; so does a folder, in which the names of its files live."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Everything below the folder reaches the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def put_in_place(aside: Path, path: Path, *, wait_for_disk: bool = True) -> None:
    """Rename a folder that was written aside, once all of it has reached the disk; an older one of that name goes."""
    if wait_for_disk:
        sync_tree(aside)
    if path.is_dir() and any(path.iterdir()):
        remove_folder(path)
    aside.replace(path)
    sync(path.absolute().parent)


def remove_folder(path: Path) -> None:
    """Rename first: a half-deleted folder must not look like a whole one."""
    gone = path.with_name(f".removing_{path.name}_{os.getpid()}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def atomic_folder(path: str | Path, *, keep_unfinished: bool = False, wait_for_disk: bool = True) -> Iterator[Path]:
    """A folder to write into, which gets its name `path` at the end; after an error nothing is left of it.

    A folder of that name that holds something, or that another process is writing, is refused before anything is written.
    keep_unfinished: what was written before an error stays aside, and the next call finds it in its folder.
    wait_for_disk: False for many small files that can be made again; a machine that loses power may lose some of them.
    """
    path = Path(path)
    refuse_content(path)
    aside = unfinished_folder(path)
    with only_writer(path, beside=True), clear_disk_errors(path):
        # another process may have finished it in the meantime
        refuse_content(path)
        # what a killed process has left
        if not keep_unfinished:
            shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(exist_ok=True)
            yield aside
            put_in_place(aside, path, wait_for_disk=wait_for_disk)
        except BaseException:
            if not keep_unfinished:
                shutil.rmtree(aside, ignore_errors=True)
            raise


def unfinished_folder(path: Path) -> Path:
    """Where `atomic_folder` writes before the folder is whole."""
    return path.absolute().with_name(f"{UNFINISHED}{path.absolute().name}")


def refuse_content(path: Path) -> None:
    """A folder to be written must not exist, or be empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} must not exist or be an empty folder, got one with content; choose another, or remove it")


def refuse_unwritable(path: Path) -> None:
    """Before long work: a file that could not be written where it is asked for."""
    if path.is_dir():
        raise ValueError(f"{path} must be a file to write, got a folder; name a file in it")
    refuse_place(path, existing_part(path.absolute().parent))


def existing_part(path: Path) -> Path:
    """The path, or the nearest of those above it that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def refuse_place(path: Path, place: Path) -> None:
    """Refuse a place where the path cannot be made: a file, or a folder that this user may not write to."""
    if not place.is_dir():
        raise ValueError(f"{path} must lie in a folder, got the file {place} in its way; choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{path} must lie where files can be written, got {place} without that right; choose another place")


def is_leftover(path: Path) -> bool:
    """Whether it is a lock, or what a killed process has left unfinished."""
    name = path.name
    return name.startswith(".") and (name.endswith(LOCK) or name.startswith(UNFINISHED) or name.rpartition("_")[2].isdigit())


@contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """A disk that is full while `path` is written is an OSError that names it and says what to do."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise OSError(
            errno.ENOSPC, f"{path} could not be written, the disk is full; make room there, then run the same command again"
        ) from error


def is_full_disk(error: Exception) -> bool:
    if isinstance(error, OSError):
        # numpy counts what it could write and drops the number of the error
        return error.errno in FULL or "requested and" in str(error)
    # safetensors has errors of its own, in which the system's stand as text
    numbers = re.findall(r"(?:os error|code:) (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else []
    return any(int(number) in FULL for number in numbers)


def free_bytes(folder: Path) -> int:
    """On the disk that the folder is on, or will be."""
    return shutil.disk_usage(existing_part(folder)).free


def refuse_full_disk(folder: Path, needed: int, what: str) -> None:
    """Before hours of work: a folder that cannot be made, and what will surely not fit."""
    place = existing_part(folder)
    refuse_place(folder, place)
    if not shutil.disk_usage(place).total:
        raise ValueError(f"{folder} must lie on a disk, got {place}, where no files are kept; choose another place")
    free = free_bytes(folder)
    if free < needed:
        raise ValueError(
            f"{what} needs about {megabytes(needed)} on the disk of {folder}, got {megabytes(free)}; make room, or choose a "
            "folder on another disk"
        )


def megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"
