"""The tables of a page, made from the files of scoreboards: nobody copies a figure by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

from ...atomic_files import write_atomically
from .methods import short_name
from .report import Row, Standing, read_rows, standings
from .rows import ROWS

BEGIN, END = "<!-- tables of the scoreboard: begin -->", "<!-- tables of the scoreboard: end -->"
HEAD = ("method", "test", "± sd", "seeds", "dev", "best rate", "steps", "parameters", "state")
PATTERN = "scoreboard_*.csv"
NONE = "No row has been measured yet."


def rows_of(folder: str | Path) -> list[Row]:
    """The rows of all files of scoreboards in a folder."""
    return [row for path in sorted(Path(folder).glob(PATTERN)) for row in read_rows(path)]


def markdown(rows: Sequence[Row]) -> str:
    """A section for each task, those of ROWS first and in their order."""
    titles = [name for name in ROWS if any(row["task"] == name for row in rows)]
    titles += [name for name in dict.fromkeys(row["task"] for row in rows) if name not in titles]
    return "\n\n".join(section(title, [row for row in rows if row["task"] == title]) for title in titles) or NONE


def section(title: str, rows: Sequence[Row]) -> str:
    """One task: what it asks, the methods, chance and shortcuts, and with what it was measured."""
    asks = f"{ROWS[title].asks}\n\n" if title in ROWS else ""
    levels = {"chance": float(rows[0]["chance"])}
    levels |= {f"shortcut: {name}": value for name, value in json.loads(rows[0]["shortcuts"] or "{}").items()}
    lines = [line_of(each) for each in standings(rows)] + [
        [name, f"{value:.4f}", *[""] * (len(HEAD) - 2)] for name, value in levels.items()
    ]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [list(HEAD), ["---"] * len(HEAD), *lines])
    return f"### {title}\n\n{asks}{table}\n\n{measured_with(rows)}"


def line_of(each: Standing) -> list[str]:
    name = f"{short_name(each.method)} ({each.settings})" if each.settings else short_name(each.method)
    spread = f"{each.spread:.4f}" if each.seeds > 1 else "-"
    state = f"{each.state_size:,}" if each.state_size else "grows"
    sizes = (f"{each.steps:,}", f"{each.parameters:,}", state)
    return [name, f"{each.test:.4f}", spread, str(each.seeds), f"{each.dev:.4f}", each.learning_rate, *sizes]


def measured_with(rows: Sequence[Row]) -> str:
    devices, commits = (", ".join(dict.fromkeys(row[name] for row in rows)) for name in ("device", "commit"))
    minutes = sum(float(row["seconds"]) for row in rows) / 60
    return f"{devices}; commit {commits}; {len(rows)} runs, {minutes:.0f} minutes of runs in all."


def fill(page: str | Path, folder: str | Path) -> None:
    """Write the tables of the files in `folder` between the marks of the page."""
    path = Path(page)
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path} must hold the marks {BEGIN} and {END}, between which its tables stand")
    write_atomically(path, f"{before}{BEGIN}\n\n{markdown(rows_of(folder))}\n\n{END}{after}".encode())
