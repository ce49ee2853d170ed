"""Time of each method's network against the number of tokens."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nalaformer.recipes import build_model

from ..sequence_task import Sequences
from .entries import TASKS, Entry, demo_recipe

TOKENS = (1024, 4096, 16384)
# the first warms up
ROUNDS = 2


@torch.no_grad()
def milliseconds(
    entries: Sequence[Entry], tokens: Sequence[int] = TOKENS, rounds: int = ROUNDS
) -> dict[Entry, tuple[float, ...]]:
    """Measure the processor time of one sequence through the demo's network on one core, the shortest of some rounds.

    By the clock on the wall, a machine that other programs keep busy was seen to take a hundred times as long; processor time
    counts what the network itself needs.
    """
    shortest = {(entry, length): float("inf") for entry in entries for length in tokens}
    networks = {entry: network(entry, max(tokens)) for entry in entries}
    channels = Sequences(demo_recipe(TASKS[0], entries[0], seed=0).task).facts()["channels"]
    inputs = {length: torch.randn(1, length, channels) for length in tokens}
    with one_thread():
        for _ in range(rounds):
            for entry, length in shortest:
                start = time.thread_time()
                networks[entry](inputs[length])
                shortest[entry, length] = min(shortest[entry, length], 1e3 * (time.thread_time() - start))
    return {entry: tuple(shortest[entry, length] for length in tokens) for entry in entries}


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes in the thread that calls, whose time can be told."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def network(entry: Entry, length: int) -> torch.nn.Module:
    """The demo's network, for sequences as long as that."""
    recipe = demo_recipe(TASKS[0], entry, seed=0)
    return build_model(recipe, Sequences(recipe.task).facts() | {"length": length}).eval()
