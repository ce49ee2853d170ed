"""What a run shows while it runs: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Loss, rate and time left. Without a console it is silent."""

    def __init__(self, console: "Console | None", *, title: str, done: int, total: int) -> None:
        self.console, self.title, self.first, self.total = console, title, done, total
        self.started = self.last_line = time.monotonic()
        self.bar: Any = None
        if console is not None and console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}  {task.fields[rate]}/s  left"),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.bar.add_task(title, total=total, completed=done, loss="-", rate="-")
            self.bar.start()

    def step(self, step: int, loss: float, samples: int) -> None:
        """After each step: its loss, and the samples that one step takes."""
        if self.console is None:
            return
        now = time.monotonic()
        done = step - self.first
        rate = in_digits(done * samples / max(now - self.started, 1e-9))
        if self.bar is not None:
            self.bar.update(self.task, completed=step, loss=f"{loss:.4g}", rate=f"{rate} samples")
        elif now - self.last_line > SECONDS_BETWEEN_LINES:
            self.last_line = now
            left = (self.total - step) * (now - self.started) / done
            self.console.print(
                f"{self.title}  step {step}/{self.total}  loss {loss:.4g}  {rate} samples/s  {left:.0f} s left",
                soft_wrap=True,
                markup=False,
                emoji=False,
            )

    def say(self, line: str) -> None:
        if self.console is not None:
            self.console.print(line, soft_wrap=True, markup=False, emoji=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def counted(console: "Console | None", description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that takes in how many more of `total` are done: a bar on a terminal, one line elsewhere."""
    if console is None or not console.is_terminal:
        if console is not None:
            console.print(description, soft_wrap=True, markup=False, emoji=False)
        yield lambda number: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda number: progress.advance(task, number)


def in_digits(rate: float) -> str:
    """Whole numbers, and two digits of what is below ten."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def figures_line(figures: dict[str, float]) -> str:
    """ "top1 0.953, loss 0.151"."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
