"""Processes of tests, forked from one that has imported torch and us: to import them anew takes seconds of work each time."""

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from nalaformer.child_processes import shorten_socket_paths
from nalaformer.recipes import evaluate_run

# conftest.py names what the fork server imports; it runs nothing itself, so its children may use autograd
shorten_socket_paths()
SERVER = multiprocessing.get_context("forkserver")
RANKS = 2
LONGEST = 120.0


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start a process that calls a function of a helper."""
    process = SERVER.Process(target=function, args=arguments)
    process.start()
    return process


def run_on_ranks(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function of a helper in two processes with the variables of torchrun; an error in one is raised here."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    ranks = torch.multiprocessing.start_processes(
        _as_rank, (port, function, arguments), nprocs=RANKS, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + LONGEST
    # each call returns when one of them has ended
    while not ranks.join(max(0.0, deadline - time.monotonic())):
        if time.monotonic() > deadline:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"the ranks have not ended after {LONGEST:.0f} seconds: they wait for each other")


def _as_rank(rank: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}
    torch.set_num_threads(1)
    function(*arguments)


def metrics_on_ranks(run: Path, folder: Path) -> list[dict[str, float]]:
    """Evaluate a run in two processes and return what each has found."""
    run_on_ranks(_write_metrics, run, folder)
    return [json.loads((folder / f"metrics_{rank}").read_text()) for rank in range(RANKS)]


def _write_metrics(run: Path, folder: Path) -> None:
    metrics = evaluate_run(run, device="cpu").metrics
    (folder / f"metrics_{os.environ['RANK']}").write_text(json.dumps(metrics))
