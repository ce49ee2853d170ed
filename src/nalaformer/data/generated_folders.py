"""Generated data that lies on the disk, in the format of real data, so that the real reader reads it."""

import time
from collections.abc import Callable
from pathlib import Path

from ..atomic_files import atomic_folder
from ..folder_lock import InUse

# to write it takes seconds; whoever holds it longer has died on another host
MOST_SECONDS = 600.0


def written_once(folder: str | Path, write: Callable[[Path], None]) -> Path:
    """The folder, written by the first who asks for it; other processes wait until it is whole."""
    folder = Path(folder)
    start = time.monotonic()
    while not is_written(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_folder(folder) as aside:
                write(aside)
        except InUse:
            if time.monotonic() - start > MOST_SECONDS:
                raise
            time.sleep(0.1)
        except ValueError:
            # another process was quicker between our look and our lock
            if not is_written(folder):
                raise
    return folder


def is_written(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
