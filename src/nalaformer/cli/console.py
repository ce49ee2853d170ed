"""Where the commands print."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# wide enough for every table; used where the output is no terminal that knows better
WIDTH = 100


def make_console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)
