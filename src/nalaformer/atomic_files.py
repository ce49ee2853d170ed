"""Write files and folders that are complete or absent, even if the process that writes them is killed."""

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
    """Yield a temporary path that is renamed to `path` at the end; after an error only the old file is left."""
    aside = path.with_name(f".{path.name}_{os.getpid()}")
    with clear_disk_errors(path):
        try:
            yield aside
            sync(aside)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file's content at once: a reader sees the old content or the new one, never a part."""
    with atomic_file(path) as aside:
        aside.write_bytes(content)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write these columns of the rows as one atomic file; values that a row lacks are empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as aside, aside.open("w", newline="") as file:
        # one kind of line ends on every machine, so that files of results can be compared line by line
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk; a folder holds the names of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush everything below the folder to disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def put_in_place(aside: Path, path: Path, *, wait_for_disk: bool = True) -> None:
    """Flush a folder that was written aside and rename it to `path`; an older folder of that name is removed."""
    if wait_for_disk:
        sync_tree(aside)
    if path.is_dir() and any(path.iterdir()):
        remove_folder(path)
    aside.replace(path)
    sync(path.absolute().parent)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so that a half-deleted folder never looks complete."""
    gone = path.with_name(f".removing_{path.name}_{os.getpid()}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def atomic_folder(path: str | Path, *, keep_unfinished: bool = False, wait_for_disk: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` at the end; after an error it is removed.

    Raises ValueError before anything is written if `path` has content, or if another process is writing it.
    keep_unfinished: after an error the temporary folder stays, and the next call yields it again.
    wait_for_disk: False for many small files that can be made again; a power failure may lose some of them.
    """
    path = Path(path)
    refuse_content(path)
    aside = unfinished_folder(path)
    with only_writer(path, beside=True), clear_disk_errors(path):
        # another process may have finished it in the meantime
        refuse_content(path)
        # a killed process may have left a folder with this name
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
    """Return the folder in which `atomic_folder` writes before it is complete."""
    return path.absolute().with_name(f"{UNFINISHED}{path.absolute().name}")


def refuse_content(path: Path) -> None:
    """Check that a folder to be written does not exist or is empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} must not exist or be an empty folder, got one with content; choose another, or remove it")


def refuse_unwritable(path: Path) -> None:
    """Check before long work that the file can be written."""
    if path.is_dir():
        raise ValueError(f"{path} must be a file to write, got a folder; name a file in it")
    check_place(path, existing_part(path.absolute().parent))


def existing_part(path: Path) -> Path:
    """Return the path itself, or the nearest parent that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def check_place(path: Path, place: Path) -> None:
    """Reject a `place` where the path cannot be made: a file, or a folder that this user may not write to."""
    if not place.is_dir():
        raise ValueError(f"{path} must lie in a folder, got the file {place} in its way; choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{path} must lie where files can be written, got {place} without that right; choose another place")


def is_leftover(path: Path) -> bool:
    """True if the path is a lock, or an unfinished file or folder of a killed process."""
    name = path.name
    return name.startswith(".") and (name.endswith(LOCK) or name.startswith(UNFINISHED) or name.rpartition("_")[2].isdigit())


@contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Raise an OSError that names `path` and the fix if the disk is full."""
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
        # numpy counts what it could write and drops the errno
        return error.errno in FULL or "requested and" in str(error)
    # safetensors has its own error class, which holds the system's error number only in its text
    numbers = re.findall(r"(?:os error|code:) (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else []
    return any(int(number) in FULL for number in numbers)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk that holds the folder, or will hold it."""
    return shutil.disk_usage(existing_part(folder)).free


def refuse_full_disk(folder: Path, needed: int, what: str) -> None:
    """Check before long work that the folder can be made and that `needed` bytes fit on its disk."""
    place = existing_part(folder)
    check_place(folder, place)
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
