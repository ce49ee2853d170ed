"""A lock that lets one process at a time write a file or folder.

The lock is the kernel's (flock), so it ends with its process. The text in the lock file names the holder for people; it
also replaces the lock on file systems without locks, and names holders on other machines.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

LOCK = ".lock"


class InUse(ValueError):
    """Raised when another process writes to the same place."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds a lock."""

    host: str
    pid: int
    started: str
    """The start time in the system's clock ticks, since a later process may get the same pid."""
    since: str
    """The time when it took the lock."""


@contextmanager
def only_writer(path: str | Path, *, beside: bool = False) -> Iterator[None]:
    """Lock the folder until the end of the block; raise InUse if another process writes it.

    beside: put the lock beside `path` instead of in it: for a file, and for a folder that appears when it is complete.
    """
    path = Path(path)
    file = lock_file(path, beside=beside)
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _take(path, file)
    try:
        yield
    finally:
        # remove the file before the lock is released, so that no other process can take the lock in between
        with suppress(FileNotFoundError):
            file.unlink()
        os.close(descriptor)


def lock_file(path: Path, *, beside: bool = False) -> Path:
    return path.absolute().with_name(f".{path.absolute().name}{LOCK}") if beside else path / LOCK


def refuse_in_use(path: str | Path, *, beside: bool = False) -> None:
    """Raise InUse if another process writes there now; creates nothing."""
    if lock_file(Path(path), beside=beside).exists():
        with only_writer(path, beside=beside):
            pass


def _take(path: Path, file: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            is_locked = _try_lock(descriptor)
            if is_locked and not _is_at(descriptor, file):
                # the holder removed the file after we had opened it
                os.close(descriptor)
                continue
            _check_holder(path, file, _read_holder(descriptor), is_locked)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, (json.dumps(asdict(_this_process())) + "\n").encode(), 0)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        return descriptor


def _check_holder(path: Path, file: Path, holder: Holder | None, is_locked: bool | None) -> None:
    if holder is not None and holder.host != socket.gethostname():
        # locks may not reach other machines, depending on the file system, so holding ours proves nothing
        raise InUse(
            f"{path} is written by process {holder.pid} on the host {holder.host} (since {holder.since}), which cannot be seen "
            f"from here; if it has ended, remove {file}, else choose another folder"
        )
    if is_locked is False or (is_locked is None and holder is not None and is_running(holder.pid, holder.started)):
        who = f"process {holder.pid} on {holder.host} (since {holder.since})" if holder else "another process"
        raise InUse(f"{path} is written by {who}; wait until it ends, stop it, or choose another folder")


def _try_lock(descriptor: int) -> bool | None:
    """True if we got the lock; None on systems without locks."""
    try:
        import fcntl
    except ModuleNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # some cluster file systems are mounted without locks
    except OSError:
        return None
    return True


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> Holder | None:
    """Return the holder; None if the file is new, or if its holder was killed before it wrote its name."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _this_process() -> Holder:
    pid = os.getpid()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(host=socket.gethostname(), pid=pid, started=process_start(pid), since=since)


def is_running(pid: int, started: str) -> bool:
    """True if the process with that pid and start time still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    now = process_start(pid)
    return not now or not started or now == started


def process_start(pid: int) -> str:
    """Return the clock ticks from boot to the start of the process, or "" where the system does not tell."""
    try:
        # the name of the program stands in brackets and may contain spaces
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
