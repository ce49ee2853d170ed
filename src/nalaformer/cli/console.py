"""Where the commands print."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

# wide enough for every table of ours; used where the output is no terminal that knows better
WIDTH = 100


def make_console(*, stderr: bool = False, width: int | None = None) -> "Console":
    """A console that prints text as it is.

    Names of files, runs and classes come from users: brackets in them are no markup, and `:cat:` is no emoji.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, stderr=stderr)
    if console.is_terminal:
        return console
    return Console(highlight=False, markup=False, emoji=False, stderr=stderr, width=width or WIDTH)


@contextmanager
def progress_bar(
    console: "Console", description: str, *, total: float | None = None, count: str = "{task.completed:.0f}/{task.total}"
) -> "Iterator[tuple[Progress, TaskID]]":
    """A bar on a terminal, which goes away at the end; nothing elsewhere. count: what rich shows of the work behind the bar."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn(count), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(description, total=total)


def table_of(*headings: str) -> "Table":
    from rich.table import Table

    table = Table()
    for heading in headings:
        table.add_column(heading)
    return table


def print_table(title: str, table: "Table") -> None:
    """A title and a table below it.

    A path in the title is never broken over two lines. Where the output is no terminal, neither are names in the cells: the
    table becomes as wide as they are, so that a search finds them.
    """
    from rich.measure import Measurement

    console = make_console()
    console.print(title, soft_wrap=True)
    if not console.is_terminal:
        unbounded = make_console(width=1_000_000)
        console = make_console(width=max(WIDTH, Measurement.get(unbounded, unbounded.options, table).maximum))
    console.print(table)
