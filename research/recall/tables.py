"""The table of what conversions leave, made from the rows of the study."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from ..markdown import fill_tables, table

MARK = re.compile(r"(<!-- recovery of (\w+\.csv): begin -->).*?(<!-- recovery: end -->)", re.DOTALL)
TEACHER = "teacher"

Row = dict[str, str]


def to_markdown(rows: Sequence[Row]) -> str:
    """Methods by families, those that keep most first: percent of the teacher's accuracy, of the teacher its own."""
    asked = [row for row in rows if row["part"] == "recall" and row["accuracy"]]
    if not asked:
        return "Nothing has been measured yet."
    families = list(dict.fromkeys(row["task"] for row in asked))
    by_method: dict[str, list[Row]] = {}
    for row in asked:
        by_method.setdefault(row["method"], []).append(row)
    order = sorted(by_method, key=lambda name: (name != TEACHER, -mean(to_percent(row) for row in by_method[name])))
    lines = [[f"`{name}`", *(cell(by_method[name], family) for family in families)] for name in order]
    return f"{table(['', *families], lines)}\n\n{measured_with(asked)}"


def cell(rows: Sequence[Row], family: str) -> str:
    """By length, the mean over teachers and their spread."""
    by_length: dict[int, list[float]] = {}
    for row in rows:
        if row["task"] == family:
            by_length.setdefault(int(row["length"]), []).append(to_percent(row))
    return " / ".join(figure(values) for _, values in sorted(by_length.items())) or "-"


def figure(values: Sequence[float]) -> str:
    return f"{mean(values):.0f}" + (f" ± {stdev(values):.0f}" if len(values) > 1 else "")


def to_percent(row: Row) -> float:
    return 100 * float(row["accuracy"]) if row["method"] == TEACHER else float(row["recovery_percent"])


def measured_with(rows: Sequence[Row]) -> str:
    lengths = " / ".join(f"{length:,}" for length in sorted({int(row["length"]) for row in rows}))
    teachers = len({row["teacher_seed"] for row in rows})
    devices, versions, commits = ("; ".join(dict.fromkeys(row[name] for row in rows)) for name in ("device", "torch", "commit"))
    spread = ", mean ± standard deviation" if teachers > 1 else ""
    return (
        f"Percent of the teacher's accuracy, of the teacher itself its accuracy, at {lengths} tokens{spread}; "
        f"teachers: {teachers}; {devices}; torch {versions}; commit {commits}."
    )


def fill_page(text: str, folder: str | Path) -> str:
    """The text of a page with its tables as the files in `folder` say, between the marks that name them."""

    def write_table(found: re.Match[str]) -> str:
        with (Path(folder) / found.group(2)).open(newline="") as file:
            return f"{found.group(1)}\n\n{to_markdown(list(csv.DictReader(file)))}\n\n{found.group(3)}"

    return MARK.sub(write_table, text)


def fill(page: str | Path, folder: str | Path) -> None:
    """Write the tables of the files in `folder` between the marks of the page."""
    marks = "<!-- recovery of FILE.csv: begin --> and <!-- recovery: end -->"
    fill_tables(page, lambda text: fill_page(text, folder), has_marks=MARK.search, marks=marks)
