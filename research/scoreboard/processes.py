"""Many runs at a time: each process takes the next run, and whoever started them writes the rows."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from nalaformer.child_processes import worker_pool
from nalaformer.stopping import stop_requests

Result = TypeVar("Result")


class Labelled(Protocol):
    """Something to do that has a name."""

    @property
    def label(self) -> str: ...


Job = TypeVar("Job", bound=Labelled)


class Queue(Protocol[Job]):
    """Jobs in order; the next one may depend on results of earlier ones."""

    total: int

    def __len__(self) -> int: ...
    def take(self) -> Job | None: ...
    def mark_failed(self, run: Job, /) -> None: ...


Work = Callable[..., Result | None]


def finished_in_processes(
    order: Queue[Job],
    work: Work[Result],
    *,
    jobs: int,
    device: str,
    until: float,
    say: Callable[[str], None],
) -> Iterator[tuple[int, Job, Result]]:
    """Number, run and result as each ends; work(run, stop_file) gives None where it was put aside.

    A run that fails ends no other: those that are left are done first, and then the failures are raised as one error.
    """
    failures: list[str] = []
    aside = begun = 0
    with tempfile.TemporaryDirectory() as folder, worker_pool(jobs, context=context_for(device)) as pool:
        # a file says it to processes of every kind
        stop_file = Path(folder) / "stop"
        working: dict[Future[Result | None], tuple[int, Job]] = {}
        with stop_requests(stop_file.touch):
            while True:
                # the first of each process is always begun: however short the time, repeated calls come to an end
                while len(working) < jobs and not stop_file.exists():
                    if begun >= jobs and time.monotonic() > until:
                        break
                    run = order.take()
                    if run is None:
                        break
                    begun += 1
                    working[pool.submit(in_process, work, run, stop_file, jobs)] = begun, run
                if not working:
                    break
                for ended in wait(working, return_when=FIRST_COMPLETED).done:
                    number, run = working.pop(ended)
                    label = f"[{number}/{order.total}] {run.label}"
                    try:
                        result = ended.result()
                    except BrokenProcessPool as error:
                        raise ChildProcessError(
                            "a process that trains was killed, perhaps for want of memory; the same command with fewer jobs "
                            "goes on"
                        ) from error
                    except Exception as error:
                        order.mark_failed(run)
                        failures.append(f"{label}: {type(error).__name__}: {error}")
                        say(f"{label}: failed, {type(error).__name__}: {error}")
                        continue
                    if result is None:
                        aside += 1
                    else:
                        yield number, run, result
            is_stopped = stop_file.exists()
    if len(order) or aside:
        why = "stopped" if is_stopped else "the time is up"
        say(f"{why}; {aside} runs are put aside and {len(order)} are left, and the same command goes on")
    if failures:
        raise RuntimeError(f"{len(failures)} of {order.total} runs failed; rows of the others are kept. " + "; ".join(failures))


def context_for(device: str) -> str:
    """Return how processes start: CUDA fails in a process forked from one that has used it."""
    return "forkserver" if device == "cpu" else "spawn"


def in_process(work: Work[Result], run: Labelled, stop_file: Path, jobs: int) -> Result | None:
    """Run the work in a process: the cores are shared among the jobs."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    return work(run, stop_file)
