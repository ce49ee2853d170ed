"""Files and folders that are whole or not there, whatever happens to the process that writes them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_and_sync(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """The file has its old content or the new one, whatever happens."""
    aside = path.with_name(f".{path.name}_{os.getpid()}")
    write_and_sync(aside, content)
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A rename lives in the folder, and the folder must reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into, which gets its name `path` at the end; after an error nothing is left of it.

    A folder of that name that holds something is refused before anything is written.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} must not exist or be an empty folder, got one with content; choose another, or remove it")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = path.absolute().with_name(f".writing_{path.absolute().name}_{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for folder, _, names in os.walk(aside):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        aside.replace(path)
        sync_folder(path.absolute().parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
