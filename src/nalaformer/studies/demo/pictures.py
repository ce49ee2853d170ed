"""The report's pictures, as PNG bytes."""

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...analysis.pictures import BLACK, BLUE, GREY, OTHER_COLOURS, VERMILION
from .study import DemoResult, Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# softmax black, plain linear grey, NaLaFormer strong: the three that the eye should find first
COLOURS = {"softmax": BLACK, "linear (ReLU)": GREY, "NaLaFormer": VERMILION, "ReLU, NaLa's shell": BLUE}


def colours(result: DemoResult) -> dict[str, str]:
    others = iter(OTHER_COLOURS * len(result.found))
    return {finding.entry.label: COLOURS.get(finding.entry.label) or next(others) for finding in result.found}


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # without pyplot: no global state, no display, nothing to close
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def as_png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def learning_curves(result: DemoResult) -> bytes:
    """Accuracy against steps: the mean over seeds, and a band from the lowest to the highest."""
    figure = new_figure(9, 4.6)
    axes = figure.add_subplot()
    for finding in result.found:
        colour = colours(result)[finding.entry.label]
        steps = [step for step, _ in finding.curves[0]]
        heights = np.array([[accuracy for _, accuracy in curve] for curve in finding.curves])
        axes.plot(steps, heights.mean(0), color=colour, linewidth=2, marker="o", markersize=3, label=finding.entry.label)
        axes.fill_between(steps, heights.min(0), heights.max(0), color=colour, alpha=0.12, linewidth=0)
    axes.axhline(result.chance, color=GREY, linewidth=1, linestyle=":")
    axes.annotate("chance", (0, result.chance), xytext=(2, 3), textcoords="offset points", color=GREY, fontsize=9)
    axes.set(xlabel="optimiser steps", ylabel="accuracy on full grids", ylim=(0, 1.02))
    axes.set_title("Learning curves (band: lowest to highest seed)", loc="left")
    _finish(axes)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return as_png(figure)


def entropy_against_norm(result: DemoResult) -> bytes:
    """Entropy of the trained networks' attention against the norm of their queries."""
    figure = new_figure(9, 4.6)
    axes = figure.add_subplot()
    for finding in result.found:
        diagnosis = finding.diagnosis
        axes.plot(
            diagnosis.norms,
            diagnosis.entropies,
            color=colours(result)[finding.entry.label],
            linewidth=2,
            label=finding.entry.label,
        )
    highest = math.log(result.tokens)
    axes.axhline(highest, color=GREY, linewidth=1, linestyle=":")
    axes.annotate(
        f"log {result.tokens}: all cells alike",
        (0, highest),
        xytext=(2, -12),
        textcoords="offset points",
        color=GREY,
        fontsize=9,
    )
    axes.set(xlabel="query norm in the trained network", ylabel="entropy of attention (nats)")
    axes.set_title("Entropy against query norm, all layers and heads, best seed", loc="left")
    _finish(axes)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return as_png(figure)


def attention_maps(result: DemoResult) -> bytes:
    """Samples, and where the marked cell looks in each method; the answer's cell is framed."""
    rows, columns = len(result.found[0].diagnosis.images), len(result.found) + 1
    figure = new_figure(1.45 * columns, 1.6 * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False)
    for row in range(rows):
        _show_sample(grid[row][0], result.found[0], row)
        for column, finding in enumerate(result.found, 1):
            axes = grid[row][column]
            axes.imshow(finding.diagnosis.maps[row].numpy(), cmap="magma", vmin=0)
            _frame_answer(axes, finding.diagnosis.answers[row], finding.diagnosis.maps[row].shape[1])
            if row == 0:
                axes.set_title(finding.entry.label.replace(", ", ",\n").replace(" (", "\n("), fontsize=8)
    for axes in grid.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    return as_png(figure)


def _show_sample(axes: Any, finding: Finding, row: int) -> None:
    image = finding.diagnosis.images[row]
    axes.imshow(image.permute(1, 2, 0).numpy().clip(0, 1))
    cells = finding.diagnosis.maps[row].shape[1]
    _frame_answer(axes, finding.diagnosis.answers[row], cells, size=image.shape[1] / cells)
    if row == 0:
        axes.set_title("image", fontsize=8)


def _frame_answer(axes: Any, answer: int, cells: int, size: float = 1.0) -> None:
    from matplotlib.patches import Rectangle

    y, x = divmod(answer, cells)
    axes.add_patch(Rectangle((x * size - 0.5, y * size - 0.5), size, size, fill=False, edgecolor="#56B4E9", linewidth=1.6))


def _finish(axes: Any) -> None:
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
