"""Worker processes that end with their parent, however it ends."""

import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

# the path of a socket is limited to this many bytes, and multiprocessing puts its sockets below the temporary folder
LONGEST_SOCKET_PATH = 103
SHORT_FOLDER = "/tmp"


def shorten_socket_paths() -> None:
    """Put the sockets of multiprocessing into a folder with a short path; call this before workers start."""
    path = os.path.join(tempfile.gettempdir(), "pymp-12345678", "listener-12345678")
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH and os.path.isdir(SHORT_FOLDER):
        before = tempfile.tempdir
        tempfile.tempdir = SHORT_FOLDER
        try:
            # the folder is made on the first call, serves this process and its children, and is removed at exit
            multiprocessing.util.get_temp_dir()
        finally:
            tempfile.tempdir = before


@contextmanager
def worker_pool(workers: int, *, context: str = "forkserver") -> Iterator[ProcessPoolExecutor]:
    """Yield a process pool. An exception in the block terminates the workers and drops the jobs that wait.

    context: not "fork", since workers forked from a process with threads may hang.
    """
    shorten_socket_paths()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(context), initializer=end_with_parent)
    try:
        yield pool
    except BaseException:
        # the workers are public only from Python 3.14 on; without them the pool would wait for the jobs in progress
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    else:
        pool.shutdown()


def end_with_parent(worker: int = 0) -> None:
    """Make a worker ignore Ctrl-C and exit when its parent ends, even by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        # the system closes this pipe when the parent ends
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
