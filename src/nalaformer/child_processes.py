"""Processes that work for this one and end with it, however it ends."""

import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

# the path of a socket has at most so many bytes, and multiprocessing puts its sockets into a folder of the temporary folder
LONGEST_SOCKET_PATH = 103
SHORT_FOLDER = "/tmp"


def shorten_socket_paths() -> None:
    """Call before workers start: processes that talk to each other need sockets, whatever the temporary folder is called."""
    path = os.path.join(tempfile.gettempdir(), "pymp-12345678", "listener-12345678")
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH and os.path.isdir(SHORT_FOLDER):
        before = tempfile.tempdir
        tempfile.tempdir = SHORT_FOLDER
        try:
            # made on the first call, kept for this process and its children, and removed at the end
            multiprocessing.util.get_temp_dir()
        finally:
            tempfile.tempdir = before


@contextmanager
def worker_pool(workers: int, *, context: str = "forkserver") -> Iterator[ProcessPoolExecutor]:
    """A pool of processes. What leaves the block early ends them at once; jobs that have not begun are dropped.

    context: not "fork": forked from a process with threads, workers may hang.
    """
    shorten_socket_paths()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(context), initializer=end_with_parent)
    try:
        yield pool
    except BaseException:
        # public only from Python 3.14 on; without it the pool would wait for the jobs in progress
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    else:
        pool.shutdown()


def end_with_parent(worker: int = 0) -> None:
    """Called in a worker: it leaves Ctrl-C to its parent, and ends when its parent is gone, even by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        # a pipe that the system closes with the parent
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
