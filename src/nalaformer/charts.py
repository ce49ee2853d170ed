"""Matplotlib plots without pyplot: no global state, no display, nothing to close."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic_files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, *, dpi: int = 150, paper: str = "white") -> "Figure":
    """Return an empty figure; width and height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained", facecolor=paper)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path, **options: Any) -> None:
    """Write the figure as an atomic file; the suffix of `path` gives the format."""
    with atomic_file(path) as aside:
        figure.savefig(aside, format=path.suffix.removeprefix("."), **options)


def tidy(axes: Any, *, grid: str = "both") -> None:
    """Draw a pale grid behind the lines, and no frame above or to the right."""
    axes.grid(axis=grid, color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
