"""The paper's plot for trained networks: does attention sharpen as the query grows?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nalaformer.training.log import read_log

from .diagnose import Diagnosis, diagnose
from .entries import ENTRIES, TASKS, Entry
from .study import Job, check_steps, train_all

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NAME = "entropy_vs_norm_trained"
HOW_TO_READ = (
    "sharper: nats of entropy that attention loses when every query of the trained network grows from half to twice its norm "
    "and nothing else changes; 0 where the norm cancels. Spearman and drop compare queries as they are: their directions "
    "differ too, so entropy may fall without any effect of the norm itself."
)


def diagnose_trained(
    folder: Path,
    *,
    entries: Sequence[Entry] = ENTRIES,
    seed: int = 0,
    steps: int | None = None,
    workers: int | None = None,
    console: "Console | None" = None,
) -> dict[Entry, tuple[float, Diagnosis]]:
    """Accuracy at the demo's sharp task and what the queries do, of one network for each method.

    Runs that are in the folder already are not repeated; those of a demo are taken where it was made there.
    """
    check_steps(steps)
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}; take 0 or more")
    jobs = [Job(task=TASKS[0], entry=entry, seed=seed, steps=steps) for entry in entries]
    train_all(folder, jobs, workers, console)
    accuracies = [
        [row["accuracy"] for row in read_log(job.folder(folder) / "log.jsonl") if row["kind"] == "eval"][-1] for job in jobs
    ]
    return {job.entry: (accuracy, diagnose(job.folder(folder))) for job, accuracy in zip(jobs, accuracies, strict=True)}


def draw_trained(diagnosed: Mapping[Entry, tuple[float, Diagnosis]], folder: Path) -> Path:
    """PNG and SVG of the entropy against the query norm; the path of the PNG."""
    from .pictures import entropy_against_norm, write_plot

    write_plot(entropy_against_norm({entry.label: diagnosis for entry, (_, diagnosis) in diagnosed.items()}), folder, NAME)
    return folder / f"{NAME}.png"


def trained_table(diagnosed: Mapping[Entry, tuple[float, Diagnosis]]) -> "Table":
    from rich.table import Table

    table = Table(title="Networks trained to point at the nearest of 32 keys", title_justify="left")
    for name in ("attention", "pointing", "sharper", "Spearman", "drop"):
        table.add_column(name, justify="left" if name == "attention" else "right", no_wrap=True)
    for entry, (accuracy, found) in diagnosed.items():
        # no minus in front of a rounded zero
        figures = (round(number, 2) + 0.0 for number in (found.sharpening, found.correlation, found.drop))
        table.add_row(entry.label, f"{accuracy:.2f}", *(f"{number:.2f}" for number in figures))
    return table
