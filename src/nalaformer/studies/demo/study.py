"""Train every method, then look at what it learned and what it costs."""

import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...child_processes import worker_pool
from ...ops import use_backend
from ...recipes import make_trainer
from ...training.log import read_log
from .cost import Cost, cost_of
from .diagnose import Diagnosis, diagnose
from .entries import ENTRIES, Entry, demo_recipe

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the demo has found out about one method."""

    entry: Entry
    accuracies: tuple[float, ...]
    """On the eval split at the end, one for each seed."""
    curves: tuple[tuple[tuple[int, float], ...], ...]
    """(step, accuracy) of each evaluation, for each seed."""
    diagnosis: Diagnosis
    """Of the best seed."""
    cost: Cost
    parameters: int

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """All findings, and what they were found with."""

    found: tuple[Finding, ...]
    chance: float
    steps: int
    batch_size: int
    tokens: int
    seconds: float

    def findings(self) -> list[str]:
        """In words, only what the figures bear."""
        by_label = {finding.entry.label: finding for finding in self.found}
        lines = []
        softmax, relu = by_label.get("softmax"), by_label.get("linear (ReLU)")
        if softmax and relu:
            lines.append(
                f"Softmax reaches {softmax.accuracy:.2f}, plain linear attention {relu.accuracy:.2f} (chance "
                f"{self.chance:.2f}): the gap that the other methods are to close."
            )
        nala, shell = by_label.get("NaLaFormer"), by_label.get("ReLU, NaLa's shell")
        if nala and shell:
            sides = (
                f"NaLaFormer reaches {nala.accuracy:.2f}, its LayerNorm and gate around a plain ReLU map {shell.accuracy:.2f}"
            )
            more = nala.accuracy - shell.accuracy
            # the spread of a few seeds is wide: a difference within it is none
            spread = max(max(f.accuracies) - min(f.accuracies) for f in (nala, shell))
            verdict = "no difference beyond the seeds'" if abs(more) <= spread else f"the map itself makes {more:+.2f}"
            lines.append(f"{sides}: {verdict}.")
        lines.append(
            f"{len(self.found[0].accuracies)} seeds, {self.steps} steps of {self.batch_size} images each: a small budget, "
            "where methods differ in how soon they learn as much as in what they can learn."
        )
        return lines


def run_demo(
    folder: Path,
    *,
    seeds: int = 2,
    steps: int | None = None,
    entries: Sequence[Entry] = ENTRIES,
    workers: int | None = None,
    console: "Console | None" = None,
) -> DemoResult:
    """Runs that are there already are not repeated; a stopped demo goes on. workers: runs side by side, one per core."""
    if seeds < 1:
        raise ValueError(f"seeds must be positive, got {seeds}")
    began = time.monotonic()
    jobs = [(number, seed) for seed in range(seeds) for number in range(len(entries))]
    train_all(folder, entries, jobs, steps, workers, console)
    found = []
    for number, entry in enumerate(entries):
        runs = [run_folder(folder, entry, seed) for seed in range(seeds)]
        curves = [tuple((r["step"], r["top1"]) for r in read_log(run / "log.jsonl") if r["kind"] == "eval") for run in runs]
        accuracies = tuple(curve[-1][1] for curve in curves)
        best = runs[max(range(seeds), key=lambda seed: accuracies[seed])]
        if console is not None:
            console.print(f"looking at {entry.label} ({number + 1} of {len(entries)})")
        diagnosis = diagnose(best)
        cost = cost_of(entry)
        found.append(
            Finding(
                entry=entry,
                accuracies=accuracies,
                curves=tuple(curves),
                diagnosis=diagnosis,
                cost=cost,
                parameters=diagnosis.parameters,
            )
        )
    recipe = demo_recipe(entries[0], seed=0, steps=steps)
    return DemoResult(
        found=tuple(found),
        chance=1 / len(found[0].diagnosis.classes),
        steps=recipe.training.steps,
        batch_size=recipe.training.batch_size,
        tokens=found[0].diagnosis.tokens,
        seconds=time.monotonic() - began,
    )


def run_folder(folder: Path, entry: Entry, seed: int) -> Path:
    name = "".join(letter if letter.isalnum() else "_" for letter in entry.label.lower())
    return folder / "runs" / f"{name}_seed{seed}"


def train_all(
    folder: Path,
    entries: Sequence[Entry],
    jobs: list[tuple[int, int]],
    steps: int | None,
    workers: int | None,
    console: "Console | None",
) -> None:
    """One process per core, one thread each: networks this small gain nothing from more threads."""
    total = demo_recipe(entries[0], seed=0, steps=steps).training.steps
    workers = min(len(jobs), workers or os.cpu_count() or 1)
    if workers == 1:
        for number, seed in jobs:
            train_one(entries[number], seed, steps, run_folder(folder, entries[number], seed))
        return
    with worker_pool(workers, context="spawn") as pool:
        waiting = {
            job: pool.submit(train_one, entries[job[0]], job[1], steps, run_folder(folder, entries[job[0]], job[1]))
            for job in jobs
        }
        watch(folder, entries, waiting, total, console)
        for future in waiting.values():
            future.result()


def train_one(entry: Entry, seed: int, steps: int | None, folder: Path) -> None:
    """What a process of the demo does."""
    torch.set_num_threads(1)
    # tokens are few here: what saves memory for many only costs time
    with use_backend("reference"):
        make_trainer(demo_recipe(entry, seed=seed, steps=steps), folder).fit()


def watch(
    folder: Path,
    entries: Sequence[Entry],
    waiting: dict[tuple[int, int], "Future[None]"],
    total: int,
    console: "Console | None",
) -> None:
    """A bar for each run, fed from its log, until all have ended."""
    if console is None:
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars = {
            (number, seed): progress.add_task(f"{entries[number].label}, seed {seed}", total=total, last="")
            for number, seed in waiting
        }
        finished: set[tuple[int, int]] = set()
        while len(finished) < len(waiting):
            for job, future in waiting.items():
                if job in finished:
                    continue
                rows = read_log(run_folder(folder, entries[job[0]], job[1]) / "log.jsonl")
                losses = [row for row in rows if row["kind"] == "step"]
                evals = [row for row in rows if row["kind"] == "eval"]
                if losses:
                    rate = f"loss {losses[-1]['loss']:.3f}" + (f"  accuracy {evals[-1]['top1']:.2f}" if evals else "")
                    progress.update(bars[job], completed=losses[-1]["step"], last=rate)
                if future.done():
                    finished.add(job)
                    if not console.is_terminal and evals:
                        label = f"{entries[job[0]].label}, seed {job[1]}"
                        console.print(f"trained {label}: accuracy {evals[-1]['top1']:.3f} ({len(finished)} of {len(waiting)})")
            time.sleep(0.5)
