"""Time of each method's network against the number of tokens."""

import time
from collections.abc import Sequence

import torch

from ...recipes import build_model
from ...tasks import Sequences
from .entries import TASKS, Entry, demo_recipe

TOKENS = (1024, 4096, 16384)
ROUNDS = 3


@torch.no_grad()
def milliseconds(
    entries: Sequence[Entry], tokens: Sequence[int] = TOKENS, rounds: int = ROUNDS
) -> dict[Entry, tuple[float, ...]]:
    """The time of one sequence through the demo's network, with all threads: the shortest of some rounds.

    Every round times everything once. A neighbour that is busy for a moment spoils one round, and the others stand.
    """
    shortest = {(entry, length): float("inf") for entry in entries for length in tokens}
    networks = {entry: network(entry, max(tokens)) for entry in entries}
    channels = Sequences(demo_recipe(TASKS[0], entries[0], seed=0).task).facts()["channels"]
    inputs = {length: torch.randn(1, length, channels) for length in tokens}
    for _ in range(rounds):
        for entry, length in shortest:
            start = time.perf_counter()
            networks[entry](inputs[length])
            shortest[entry, length] = min(shortest[entry, length], 1e3 * (time.perf_counter() - start))
    return {entry: tuple(shortest[entry, length] for length in tokens) for entry in entries}


def network(entry: Entry, length: int) -> torch.nn.Module:
    """The demo's network, for sequences as long as that."""
    recipe = demo_recipe(TASKS[0], entry, seed=0)
    return build_model(recipe, Sequences(recipe.task).facts() | {"length": length}).eval()
