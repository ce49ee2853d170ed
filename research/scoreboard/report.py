"""The file of a scoreboard, and what it says: each method at its best learning rate, mean and spread over seeds."""

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nalaformer.atomic_files import write_csv

from ..sequences import METRICS, Metric
from .inside import INSIDE

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, str]

# columns that older files do not have
ADDED = ("figure", *INSIDE, "multiply_adds")
COLUMNS = (
    "task", "method", "learning_rate", "seed", "steps", "settings", "dev", "test", "groups", "best_step", "outcome",
    "parameters", "state_size", "seconds", "steps_per_second", "loop", "chance", "shortcuts", "device", "torch", "triton",
    "nalaformer", "commit", "date", *ADDED,
)  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and {*rows[0], *ADDED} != set(COLUMNS):
        raise ValueError(f"{path} must be a scoreboard's file or a new one, got the columns {', '.join(rows[0])}")
    return [dict.fromkeys(ADDED, "") | row for row in rows]


def task_metric(rows: Sequence[Row]) -> Metric:
    """Return the metric of a task's runs; older files have accuracy alone."""
    return METRICS[rows[0].get("figure") or "accuracy"]


def save_rows(path: Path, rows: Sequence[Row]) -> None:
    write_csv(path, COLUMNS, rows)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A method at its best learning rate."""

    method: str
    learning_rate: str
    dev: float
    test: float
    spread: float
    """Standard deviation over seeds; 0 for one seed."""
    seeds: int
    parameters: int
    state_size: int
    steps: int
    multiply_adds: int | None = None
    """Of a sequence, where the model counts them."""
    rates: int = 1
    """Learning rates that were tried."""
    inside: tuple[float | None, ...] = (None,) * len(INSIDE)
    """Means over seeds of entropy_norm, entropy_drop and effective_rank; None where none are known."""
    settings: str = ""
    """In which it differs from others in the same file, as "batch_size=4"."""

    @property
    def standard_error(self) -> float:
        return self.spread / self.seeds**0.5


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Each method at the rate whose mean over seeds is best on dev, the best on test first. Test chooses nothing.

    The rates of a method are compared on the seeds that all of them have. Runs with other settings are no seeds of these: they
    stand for themselves. Runs of one seed, as on two machines, are one seed with their mean: they share weights and data.
    """
    found = []
    for method, steps, settings in dict.fromkeys((row["method"], row["steps"], row["settings"]) for row in rows):
        by_rate: dict[str, list[Row]] = {}
        for row in rows:
            if (row["method"], row["steps"], row["settings"]) == (method, steps, settings):
                by_rate.setdefault(row["learning_rate"], []).append(row)
        rate, best = best_rate(by_rate)
        tests = by_seed(best, "test")
        found.append(
            Standing(
                method=method,
                learning_rate=rate,
                dev=statistics.mean(by_seed(best, "dev")),
                test=statistics.mean(tests),
                spread=statistics.stdev(tests) if len(tests) > 1 else 0.0,
                seeds=len(tests),
                parameters=int(best[0]["parameters"]),
                state_size=int(best[0]["state_size"]),
                steps=int(steps),
                multiply_adds=int(best[0].get("multiply_adds") or 0) or None,
                rates=len(by_rate),
                inside=tuple(mean_if_any(row.get(name) for row in best) for name in INSIDE),
                # compare runs of equal length only: warm-up and more change with the steps
                settings=differing_settings([row["settings"] for row in rows if row["steps"] == steps])[settings],
            )
        )
    return sorted(found, key=lambda standing: standing.test, reverse=not rows or task_metric(rows).higher_is_better)


def by_seed(rows: Iterable[Row], name: str) -> list[float]:
    """A figure of each seed, the mean where it has several rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["seed"], []).append(float(row[name]))
    return [statistics.mean(values) for values in found.values()]


def mean_if_any(cells: Iterable[str | None]) -> float | None:
    known = [float(cell) for cell in cells if cell]
    return statistics.mean(known) if known else None


def best_rate(by_rate: dict[str, list[Row]]) -> tuple[str, list[Row]]:
    """The rate with the best figure on dev in the mean over the seeds that all rates have, and its rows.

    Of rates that are equal there, the one with more seeds.
    """
    common = set.intersection(*({row["seed"] for row in rows} for rows in by_rate.values()))

    is_higher = task_metric(next(iter(by_rate.values()))).higher_is_better

    def goodness(item: tuple[str, list[Row]]) -> tuple[float, int]:
        dev = statistics.mean(by_seed((row for row in item[1] if not common or row["seed"] in common), "dev"))
        return dev if is_higher else -dev, len({row["seed"] for row in item[1]})

    return max(by_rate.items(), key=goodness)


def differing_settings(settings: Sequence[str]) -> dict[str, str]:
    """For each description of settings, the fields in which they are not all the same."""
    flat = {}
    for text in dict.fromkeys(settings):
        parts = json.loads(text)
        flat[text] = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    names = dict.fromkeys(name for fields in flat.values() for name in fields)
    odd = [name for name in names if len({json.dumps(fields.get(name)) for fields in flat.values()}) > 1]
    return {
        text: ", ".join(f"{name.partition('.')[2]}={json.dumps(fields.get(name))}" for name in odd)
        for text, fields in flat.items()
    }


def scoreboard_table(title: str, rows: Sequence[Row]) -> "Table":
    """Methods with mean and spread; chance and shortcuts stand in the last lines."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    table.add_column("method")
    for name in (
        f"test {task_metric(rows).name}" if rows else "test",
        "± sd",
        "seeds",
        "dev",
        "best lr",
        "steps",
        "parameters",
        "state",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for each in standings(rows):
        table.add_row(
            # a method's options hold brackets, which are markup in plain strings
            Text(f"{each.method} ({each.settings})" if each.settings else each.method),
            f"{each.test:.4f}",
            f"{each.spread:.4f}" if each.seeds > 1 else "-",
            str(each.seeds),
            f"{each.dev:.4f}",
            each.learning_rate,
            f"{each.steps:,}",
            f"{each.parameters:,}",
            f"{each.state_size:,}" if each.state_size else "grows",
        )
    if rows:
        table.add_section()
        table.add_row("chance", rows[0]["chance"])
        for name, value in json.loads(rows[0]["shortcuts"] or "{}").items():
            table.add_row(f"shortcut: {name}", f"{value:.4g}")
    return table
