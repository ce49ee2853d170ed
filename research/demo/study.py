"""Train every method, then look at what it learned and what it costs."""

import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nalaformer.analysis.compare import LEAST_DROP
from nalaformer.child_processes import worker_pool
from nalaformer.ops import use_backend
from nalaformer.recipes import make_trainer
from nalaformer.training.log import read_log

from .cost import TOKENS, milliseconds
from .diagnose import Diagnosis, diagnose
from .entries import ENTRIES, OURS, TASKS, DemoTask, Entry, demo_recipe
from .intervals import difference_interval

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Results of one method in the demo."""

    entry: Entry
    accuracies: dict[str, tuple[float, ...]]
    """For each task, on held-out sequences at the end, one for each seed."""
    curves: dict[str, tuple[tuple[tuple[int, float], ...], ...]]
    """For each task and seed (step, accuracy) of each evaluation."""
    diagnosis: Diagnosis
    """The diagnosis of the first seed's pointing network."""
    milliseconds: tuple[float, ...]
    """One core's time for one sequence, for each of TOKENS."""


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """All findings, and what they were found with."""

    found: tuple[Finding, ...]
    chance: dict[str, float]
    steps: dict[str, int]
    batch_size: int
    seconds: float

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(finding.entry.label for finding in self.found)

    @property
    def seeds(self) -> int:
        return len(self.found[0].accuracies[TASKS[0].name])

    def findings(self) -> list[str]:
        """Findings in words, as far as the results support them."""
        lines = [
            self.on_pointing(),
            *self.on_ours(),
            self.advice(),
            *self.against("linear (ReLU)"),
            self.on_majority(),
            self.on_norms(),
            self.on_cost(),
        ]
        return [line for line in lines if line]

    def on_pointing(self) -> str:
        softmax, *linear = sorted(self.found, key=lambda f: (f.entry.label != "softmax", -mean(f, "pointing")))
        if softmax.entry.label != "softmax" or not linear:
            return ""
        verbs = [" reaches", *[""] * len(linear)]
        order = ", ".join(f"{f.entry.label}{verb} {mean(f, 'pointing'):.2f}" for f, verb in zip(linear, verbs, strict=False))
        return (
            f"Pointing needs sharp attention: softmax reaches {mean(softmax, 'pointing'):.2f}. Of the methods that take linear "
            f"time, {order}."
        )

    def on_ours(self) -> list[str]:
        """The map of our own beside softmax and beside the best published one in linear time: whoever leads is named."""
        by_label = {finding.entry.label: finding for finding in self.found}
        ours, softmax = by_label.pop(OURS.label, None), by_label.pop("softmax", None)
        if ours is None:
            return []
        best = max(self.published, key=lambda f: mean(f, "pointing"), default=None)
        return [f"At pointing {verdict(ours, rival, 'pointing')}" for rival in (softmax, best) if rival is not None]

    @property
    def published(self) -> list[Finding]:
        """The methods in linear time that are not ours."""
        return [finding for finding in self.found if finding.entry.label != "softmax" and not is_ours(finding.entry)]

    @property
    def ours_is_recommended(self) -> bool:
        """True if the seeds support it: at pointing it leads plain linear attention, no published map in linear time leads it,
        and softmax does not lead it at the flat task."""
        by_label = {finding.entry.label: finding for finding in self.found}
        ours, softmax, plain = (by_label.get(label) for label in (OURS.label, "softmax", "linear (ReLU)"))
        if ours is None or softmax is None or plain is None:
            return False
        is_led = any(leads(rival, ours, "pointing") for rival in self.published)
        return leads(ours, plain, "pointing") and not is_led and not leads(softmax, ours, "majority")

    def advice(self) -> str:
        """Sentence on when to choose our own map, as far as the intervals support one; empty with one seed."""
        by_label = {finding.entry.label: finding for finding in self.found}
        ours, softmax, plain = (by_label.get(label) for label in (OURS.label, "softmax", "linear (ReLU)"))
        if ours is None or softmax is None or plain is None or self.seeds < 2:
            return ""
        if self.ours_is_recommended:
            best = max(self.published, key=lambda f: mean(f, "pointing"))
            name = f"{best.entry.label} ({mean(best, 'pointing'):.2f})"
            reason = f"it leads the best published map in linear time, {name}"
            if not leads(ours, best, "pointing"):
                reason = f"{self.seeds} seeds show no published map in linear time ahead of it. {name} may be as good or better"
            sharper = " Where the time of softmax is no matter, it points better." if leads(softmax, ours, "pointing") else ""
            return f"Where sharp lookups matter and softmax costs too much, we recommend {OURS.label}: {reason}.{sharper}"
        ahead = [rival.entry.label for rival in self.published if leads(rival, ours, "pointing")]
        if ahead:
            return f"For sharp lookups in linear time these figures speak for {in_words(ahead)}, not for {OURS.label}."
        if leads(softmax, ours, "majority"):
            return f"These figures do not speak for {OURS.label}: softmax leads it at the task that needs flat attention."
        return f"These figures do not speak for {OURS.label}: it does not lead linear (ReLU) at pointing."

    def against(self, other: str) -> list[str]:
        """NaLaFormer beside another method and beside the best published one in linear time."""
        by_label = {finding.entry.label: finding for finding in self.found}
        nala = by_label.get("NaLaFormer")
        linear = [finding for finding in self.published if finding is not nala]
        if nala is None or not linear:
            return []
        best = max(linear, key=lambda f: mean(f, "pointing"))
        rivals = {f.entry.label: f for f in (by_label.get(other), best) if f is not None}
        return [f"At pointing {verdict(nala, rival, 'pointing')}" for rival in rivals.values()]

    def on_majority(self) -> str:
        by_label = {finding.entry.label: finding for finding in self.found}
        softmax = by_label.get("softmax")
        if softmax is None:
            return ""
        against = {
            f.entry.label: difference_interval(f.accuracies["majority"], softmax.accuracies["majority"]) for f in self.found
        }
        behind = [f"{label} ({each.middle:+.2f})" for label, each in against.items() if each.is_negative]
        told = f"behind it by more than the seeds' spread: {', '.join(behind)}" if behind else "no other is behind it"
        return f"The majority needs flat attention: softmax reaches {mean(softmax, 'majority'):.2f}; {told}."

    def on_norms(self) -> str:
        sharpen = {f.entry.label: f.diagnosis.sharpening for f in self.found}
        does = [f"{label} (by {nats:.2f} nats)" for label, nats in sharpen.items() if nats >= LEAST_DROP]
        does_not = [label for label, nats in sharpen.items() if nats < LEAST_DROP]
        sides = (("sharpens in", does), ("stays as it is in", does_not))
        told = "; it ".join(f"{how} {', '.join(labels)}" for how, labels in sides if labels)
        return f"When queries of the trained networks grow from half to twice their norm, attention {told}."

    def on_cost(self) -> str:
        by_label = {finding.entry.label: finding for finding in self.found}
        shown = [by_label[label] for label in ("softmax", "NaLaFormer", OURS.label) if label in by_label]
        if "softmax" not in by_label or len(shown) < 2:
            return ""
        times = [[three_digits(number) for number in finding.milliseconds] for finding in shown]
        short = in_words([f"{each[0]} ms with {finding.entry.label}" for finding, each in zip(shown, times, strict=True)])
        long = in_words([f"{each[-1]} ms" for each in times])
        return f"A sequence of {TOKENS[0]:,} tokens takes one core {short}; one of {TOKENS[-1]:,} tokens takes {long}."


def is_ours(entry: Entry) -> bool:
    """A map of our own, with or without its contrast."""
    return entry.attention == OURS.attention


def mean(finding: Finding, task: str) -> float:
    return statistics.mean(finding.accuracies[task])


def leads(one: Finding, other: Finding, task: str) -> bool:
    """Return True if the whole interval of the difference favors the first."""
    return difference_interval(one.accuracies[task], other.accuracies[task]).is_positive


def verdict(one: Finding, other: Finding, task: str) -> str:
    """Return a sentence about the leader, as far as the interval of the difference supports one."""
    difference = difference_interval(one.accuracies[task], other.accuracies[task])
    first, second = (f"{each.entry.label} ({mean(each, task):.2f})" for each in (one, other))
    seeds = len(one.accuracies[task])
    if seeds < 2:
        return f"one seed cannot tell whether {first} and {second} differ; ask for more with --seeds."
    if not (difference.is_positive or difference.is_negative):
        return f"{seeds} seeds show no difference between {first} and {second}."
    if difference.is_negative:
        first, second = second, first
    low, high = sorted(abs(difference.middle + side * difference.half) for side in (-1, 1))
    return f"{first} leads {second} by {low:.2f} to {high:.2f} (95% interval over seeds)."


def in_words(parts: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def three_digits(number: float) -> str:
    """4.57, 63.1, 1,110."""
    return f"{float(f'{number:.3g}'):,.15g}"


def run_demo(
    folder: Path,
    *,
    seeds: int = 3,
    steps: int | None = None,
    entries: Sequence[Entry] = ENTRIES,
    workers: int | None = None,
    console: "Console | None" = None,
) -> DemoResult:
    """Run what is missing, so that a stopped demo resumes. workers: runs side by side, one per core."""
    if seeds < 1:
        raise ValueError(f"seeds must be positive, got {seeds}; two or more have an interval")
    check_steps(steps)
    began = time.monotonic()
    jobs = [Job(task=task, entry=entry, seed=seed, steps=steps) for seed in range(seeds) for task in TASKS for entry in entries]
    train_all(folder, jobs, workers, console)
    if console is not None:
        console.print("looking at what was learned, and timing sequences of up to 16,384 tokens")
    # a sign that moves, on a terminal: half a minute of silence looks like a fault
    with console.status("timing") if console is not None else nullcontext():
        times = milliseconds(entries)
    found, chance = [], {}
    for entry in entries:
        curves = {}
        for task in TASKS:
            logs = [
                [row for row in read_log(job.folder(folder) / "log.jsonl") if row["kind"] == "eval"]
                for job in jobs
                if (job.task, job.entry) == (task, entry)
            ]
            chance[task.name] = logs[0][-1]["chance"]
            curves[task.name] = tuple(tuple((row["step"], row["accuracy"]) for row in log) for log in logs)
        found.append(
            Finding(
                entry=entry,
                accuracies={name: tuple(curve[-1][1] for curve in each) for name, each in curves.items()},
                curves=curves,
                diagnosis=diagnose(Job(task=TASKS[0], entry=entry, seed=0, steps=steps).folder(folder)),
                milliseconds=times[entry],
            )
        )
    return DemoResult(
        found=tuple(found),
        chance=chance,
        steps={task.name: steps or task.steps for task in TASKS},
        batch_size=demo_recipe(TASKS[0], entries[0], seed=0).training.batch_size,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training."""

    task: DemoTask
    entry: Entry
    seed: int
    steps: int | None

    @property
    def label(self) -> str:
        return f"{self.task.name}: {self.entry.label}, seed {self.seed}"

    @property
    def total(self) -> int:
        return self.steps or self.task.steps

    def folder(self, parent: Path) -> Path:
        name = "".join(letter if letter.isalnum() else "_" for letter in self.entry.label.lower())
        return parent / "runs" / f"{self.task.name}_{name}_seed{self.seed}"

    def run(self, parent: Path) -> None:
        """Train and write one run in a process of the demo."""
        torch.set_num_threads(1)
        # tokens are few here: what saves memory for many only costs time
        with use_backend("reference"):
            recipe = demo_recipe(self.task, self.entry, seed=self.seed, steps=self.steps)
            make_trainer(recipe, self.folder(parent)).fit()


def check_steps(steps: int | None) -> None:
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be positive, got {steps}; leave them out for those of the demo")


def train_all(folder: Path, jobs: Sequence[Job], workers: int | None, console: "Console | None") -> None:
    """One process per core, one thread each: networks this small gain nothing from more threads."""
    workers = min(len(jobs), workers or os.cpu_count() or 1)
    # a bar moves only while another process works
    if workers == 1 and (console is None or not console.is_terminal):
        for number, job in enumerate(jobs, start=1):
            job.run(folder)
            tell(console, folder, job, f"{number} of {len(jobs)}")
        return
    with worker_pool(workers, context="spawn") as pool:
        waiting = [(job, pool.submit(job.run, folder)) for job in jobs]
        watch(folder, waiting, console)
        for _, future in waiting:
            future.result()


def tell(console: "Console | None", folder: Path, job: Job, place: str) -> None:
    """One line about a run that has ended; nothing about one that failed."""
    evals = [row for row in read_log(job.folder(folder) / "log.jsonl") if row["kind"] == "eval"]
    if console is not None and evals:
        console.print(f"{job.label}: accuracy {evals[-1]['accuracy']:.3f} ({place})")


def watch(folder: Path, waiting: "Sequence[tuple[Job, Future[None]]]", console: "Console | None") -> None:
    """One bar over all steps, and a line for each run that ends, until all have."""
    if console is None:
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"training {len(waiting)} networks", total=sum(job.total for job, _ in waiting))
        running = list(waiting)
        ended = 0
        while running:
            for job, future in list(running):
                if future.done():
                    running.remove((job, future))
                    ended += job.total
                    tell(console, folder, job, f"{len(waiting) - len(running)} of {len(waiting)}")
            steps = [read_log(job.folder(folder) / "log.jsonl") for job, _ in running]
            here = sum(max((row["step"] for row in rows if row["kind"] == "step"), default=0) for rows in steps)
            progress.update(bar, completed=ended + here)
            time.sleep(0.5)
