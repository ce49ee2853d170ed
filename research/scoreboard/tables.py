"""The tables of a page, made from the files of scoreboards."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from ..markdown import fill_tables, table
from .methods import METHODS_OF_THE_BOARD, methods_for, short_name
from .report import Row, Standing, read_rows, standings, task_metric
from .rows import ROWS

BEGIN, END = "<!-- tables of the scoreboard: begin -->", "<!-- tables of the scoreboard: end -->"
# a page may show a few methods on a few rows as well, which the mark names
IN_BRIEF = re.compile(r"(<!-- scoreboard of ([\w, ]+) by ([\w, ]+): begin -->).*?(<!-- scoreboard: end -->)", re.DOTALL)
HEAD = ("method", "test", "± sd", "seeds", "dev", "best rate", "steps", "parameters", "state", "norm-entropy", "drop", "rank")
PATTERN = "scoreboard_*.csv"
NONE = "No row has been measured yet."
# seeds of a figure that is whole
FULL = 3
PLAIN = METHODS_OF_THE_BOARD["relu"].label


def read_folder_rows(folder: str | Path) -> list[Row]:
    """The rows of all files of scoreboards in a folder."""
    return [row for path in sorted(Path(folder).glob(PATTERN)) for row in read_rows(path)]


def to_markdown(rows: Sequence[Row]) -> str:
    """All methods on all tasks in one table, then a section for each task, those of ROWS first and in their order."""
    titles = [name for name in ROWS if any(row["task"] == name for row in rows)]
    titles += [name for name in dict.fromkeys(row["task"] for row in rows) if name not in titles]
    if not titles:
        return NONE
    by_title = {title: [row for row in rows if row["task"] == title] for title in titles}
    missing = [f"`{name}`" for name in ROWS if name not in titles]
    unmeasured = [f"Rows that have not been measured yet: {', '.join(missing)}."] if missing else []
    sections = [section(title, of_title) for title, of_title in by_title.items()]
    return "\n\n".join([summary(by_title), *unmeasured, *sections])


def summary(by_title: dict[str, list[Row]]) -> str:
    """Methods by tasks: the mean over seeds on test, with its spread; what is missing is called so."""
    found = {title: standing_by_method(rows) for title, rows in by_title.items()}
    labels = [method.label for method in METHODS_OF_THE_BOARD.values()]
    lines = [
        [short_name(label), relative_state(label, found), *(cell(label, title, found[title]) for title in found)]
        for label in labels
    ]
    about = (
        "Test accuracy, or the figure that a row names, at the rate that is best on dev, mean ± standard deviation over seeds; "
        "in brackets the seeds, where there are fewer than three. State: numbers that attention remembers, relative to `relu`. "
        "The sections below have further forms."
    )
    heads = [title + named_figure(rows) for title, rows in by_title.items()]
    return f"{table(['method', 'state', *heads], lines)}\n\n{about}"


def in_brief(rows: Sequence[Row], titles: Sequence[str], methods: Sequence[str]) -> str:
    """Some methods on some tasks, by their names."""
    by_title = {title: [row for row in rows if row["task"] == title] for title in titles}
    found = {title: standing_by_method(of_title) for title, of_title in by_title.items()}
    labels = {name: METHODS_OF_THE_BOARD[name].label for name in methods}
    lines = [[f"`{name}`", *(cell(label, title, found[title]) for title in titles)] for name, label in labels.items()]
    heads = [f"`{title}`" + (named_figure(by_title[title]) if by_title[title] else "") for title in titles]
    return table(["", *heads], lines)


def standing_by_method(rows: Sequence[Row]) -> dict[str, Standing]:
    found: dict[str, Standing] = {}
    for each in standings(rows):
        # among several settings, take the one with most seeds
        if (known := found.get(each.method)) is None or each.seeds > known.seeds:
            found[each.method] = each
    return found


def named_figure(rows: Sequence[Row]) -> str:
    """Return what a heading adds where the metric is not accuracy."""
    figure = task_metric(rows)
    better = "" if figure.higher_is_better else ", lower is better"
    return "" if figure.name == "accuracy" else f" ({figure.name}{better})"


def cell(label: str, title: str, found: dict[str, Standing]) -> str:
    """The figure of a method on a task, or why there is none."""
    if label not in found:
        return "not measured" if title not in ROWS or label in labels_for(title) else "-"
    each = found[label]
    spread = f" ± {each.spread:.3f}" if each.seeds > 1 else ""
    return f"{each.test:.3f}{spread}" + (f" ({each.seeds})" if each.seeds < FULL else "")


def relative_state(label: str, found: dict[str, dict[str, Standing]]) -> str:
    """Return the state size relative to plain ReLU attention in the same model."""
    for standing in found.values():
        if label in standing and standing[label].state_size == 0:
            return "grows"
        if label in standing and PLAIN in standing:
            return f"{standing[label].state_size / standing[PLAIN].state_size:g}"
    return ""


def labels_for(title: str) -> list[str]:
    """The methods that have a form for a row."""
    return [method.label for method in methods_for(causal=ROWS[title].is_causal)]


def section(title: str, rows: Sequence[Row]) -> str:
    """One task: what it asks, the methods, chance and shortcuts, what is missing, and with what it was measured."""
    asks = f"{ROWS[title].asks}\n\n" if title in ROWS else ""
    levels = {"chance": float(rows[0]["chance"])}
    levels |= {f"shortcut: {name}": value for name, value in json.loads(rows[0]["shortcuts"] or "{}").items()}
    found = standings(rows)
    # only where models count them
    costs = ["multiply-adds"] if any(each.multiply_adds for each in found) else []
    head = [*HEAD, *costs]
    lines = [table_line(each)[: len(head)] for each in found]
    lines += [[name, f"{value:.4f}", *[""] * (len(head) - 2)] for name, value in levels.items()]
    measured = {row["method"] for row in rows}
    missing = [short_name(label) for label in (labels_for(title) if title in ROWS else []) if label not in measured]
    left = f"Not measured yet: {', '.join(missing)}.\n\n" if missing else ""
    return f"### {title}{named_figure(rows)}\n\n{asks}{table(head, lines)}\n\n{left}{measured_with(rows)}"


def table_line(each: Standing) -> list[str]:
    name = f"{short_name(each.method)} ({each.settings})" if each.settings else short_name(each.method)
    spread = f"{each.spread:.4f}" if each.seeds > 1 else "-"
    state = f"{each.state_size:,}" if each.state_size else "grows"
    sizes = (f"{each.steps:,}", f"{each.parameters:,}", state)
    rate = f"{each.learning_rate} of {each.rates}"
    # as many digits as a correlation, nats and a rank deserve; no minus in front of a rounded zero
    inside = ["" if value is None else f"{round(value, 2) + 0.0:.2f}" for value in each.inside]
    cost = f"{each.multiply_adds / 1e6:.1f} M" if each.multiply_adds else ""
    return [name, f"{each.test:.4f}", spread, str(each.seeds), f"{each.dev:.4f}", rate, *sizes, *inside, cost]


def measured_with(rows: Sequence[Row]) -> str:
    devices, commits, loops = ("; ".join(dict.fromkeys(row[name] for row in rows)) for name in ("device", "commit", "loop"))
    minutes = sum(float(row["seconds"]) for row in rows) / 60
    return f"{devices}; {loops}; commit {commits}; {len(rows)} runs, whose times add up to {minutes:.0f} minutes."


def fill_page(text: str, rows: Sequence[Row]) -> str:
    """The text of a page with its tables as the rows say, between the marks that it holds."""

    def brief(found: re.Match[str]) -> str:
        titles, methods = ([name.strip() for name in names.split(",")] for names in found.group(2, 3))
        return f"{found.group(1)}\n\n{in_brief(rows, titles, methods)}\n\n{found.group(4)}"

    text = IN_BRIEF.sub(brief, text)
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{to_markdown(rows)}\n\n{END}{after}" if begin and end else text


def fill(page: str | Path, folder: str | Path) -> None:
    """Write the tables of the files in `folder` between the marks of the page."""

    def has_marks(text: str) -> bool:
        return END in text.partition(BEGIN)[2] or IN_BRIEF.search(text) is not None

    rows = read_folder_rows(folder)
    fill_tables(page, lambda text: fill_page(text, rows), has_marks=has_marks, marks=f"{BEGIN} and {END}")
