"""Plots of the report."""

import io
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nalaformer.analysis.pictures import BLACK, BLUE, GREY, OTHER_COLOURS, VERMILION
from nalaformer.atomic_files import write_atomically
from nalaformer.charts import new_figure, tidy

from .cost import TOKENS
from .diagnose import FACTORS, Diagnosis
from .entries import OURS, TASKS
from .intervals import mean_interval
from .study import DemoResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PURPLE = "#7B1FA2"
# softmax black, plain linear grey, NaLaFormer, ours and the best of the others strong: those that the eye should find first
COLOURS = {"softmax": BLACK, "linear (ReLU)": GREY, "NaLaFormer": VERMILION, "Hedgehog": BLUE, OURS.label: PURPLE}
# colours are not the only code: every line has its own marker too
MARKERS = "osv^D<>PX*"
DPI = 110


def looks(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each method."""
    others = cycle(OTHER_COLOURS)
    return {
        label: {"color": COLOURS.get(label) or next(others), "marker": MARKERS[number % len(MARKERS)]}
        for number, label in enumerate(labels)
    }


def as_bytes(figure: "Figure", form: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form)
    return buffer.getvalue()


def write_plot(figure: "Figure", folder: Path, name: str) -> bytes:
    """Write a PNG and an SVG to the folder; return the PNG's bytes."""
    png = as_bytes(figure, "png")
    write_atomically(folder / f"{name}.png", png)
    write_atomically(folder / f"{name}.svg", as_bytes(figure, "svg"))
    return png


def scores(result: DemoResult) -> "Figure":
    """Accuracy of every method at both tasks: each seed a dot, the 95% interval of the mean a bar."""
    figure = new_figure(9, 0.42 * len(result.found) + 1.4, dpi=DPI)
    columns = figure.subplots(1, len(TASKS), sharey=True, squeeze=False)[0]
    found = sorted(result.found, key=lambda f: sum(f.accuracies["pointing"]))
    for axes, task in zip(columns, TASKS, strict=True):
        for height, finding in enumerate(found):
            colour = looks(result.labels)[finding.entry.label]["color"]
            values = finding.accuracies[task.name]
            interval = mean_interval(values)
            if math.isfinite(interval.half):
                ends = [max(0, interval.middle - interval.half), min(1, interval.middle + interval.half)]
                axes.plot(ends, [height, height], color=colour, linewidth=6, alpha=0.3, solid_capstyle="butt")
            axes.plot(values, [height] * len(values), "o", color=colour, markersize=5)
            axes.annotate(f"{interval.middle:.2f}", (1.02, height), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        axes.axvline(result.chance[task.name], color=GREY, linewidth=1, linestyle=":")
        axes.set(yticks=range(len(found)), xlim=(0, 1.01), xlabel="accuracy (dotted: chance)")
        axes.set_yticklabels([finding.entry.label for finding in found])
        for text in axes.get_yticklabels():
            text.set_fontweight("bold" if text.get_text() == OURS.label else "normal")
        axes.set_title(f"{task.name}: needs {task.needs} attention", loc="left", fontsize=11)
        tidy(axes, grid="x")
    return figure


def learning_curves(result: DemoResult) -> "Figure":
    """Accuracy against steps: the mean over seeds, and a band from the lowest to the highest."""
    figure = new_figure(9, 3.8, dpi=DPI)
    columns = figure.subplots(1, len(TASKS), sharey=True, squeeze=False)[0]
    for axes, task in zip(columns, TASKS, strict=True):
        for finding in result.found:
            look = looks(result.labels)[finding.entry.label]
            curves = finding.curves[task.name]
            steps = [step for step, _ in curves[0]]
            heights = [[curve[point][1] for curve in curves] for point in range(len(steps))]
            middle = [sum(each) / len(each) for each in heights]
            axes.plot(steps, middle, **look, linewidth=2, markersize=4, label=finding.entry.label)
            low, high = ([side(each) for each in heights] for side in (min, max))
            axes.fill_between(steps, low, high, color=look["color"], alpha=0.12, linewidth=0)
        axes.axhline(result.chance[task.name], color=GREY, linewidth=1, linestyle=":")
        axes.set(xlabel="optimiser steps", ylim=(0, 1.02))
        axes.set_title(task.name, loc="left", fontsize=11)
        tidy(axes, grid="y")
    columns[0].set_ylabel("accuracy (band: all seeds)")
    figure.legend(*columns[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside right center")
    return figure


def entropy_against_norm(diagnoses: Mapping[str, Diagnosis]) -> "Figure":
    """Plot entropy of networks by label. Left: the same queries scaled. Right: unscaled, ordered by their norm."""
    figure = new_figure(9, 4.2, dpi=DPI)
    turned, as_they_are = figure.subplots(1, 2, sharey=True)
    styles = looks(diagnoses)
    for label, diagnosis in diagnoses.items():
        turned.plot(FACTORS, diagnosis.grown, **styles[label], linewidth=2, markersize=4, label=label)
        as_they_are.plot(diagnosis.norms, diagnosis.entropies, **styles[label], linewidth=1.5, markersize=3)
    for axes in (turned, as_they_are):
        axes.set_xscale("log", base=2)
        tidy(axes, grid="y")
    turned.set(xlabel="queries multiplied by", ylabel="entropy of attention (nats)")
    turned.set_title("The same query, shorter and longer", loc="left", fontsize=11)
    as_they_are.set(xlabel="query norm in the trained network")
    as_they_are.set_title("All queries as they are", loc="left", fontsize=11)
    figure.legend(*turned.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside right center")
    return figure


def attention_maps(result: DemoResult) -> "Figure":
    """Plot the attention of 16 probes of one sequence: a row for each, keys ordered from the nearest to the farthest."""
    columns = 4
    rows = -(-len(result.found) // columns)
    figure = new_figure(9, 2.2 * rows + 0.3, dpi=DPI)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, finding in zip(grid.flat, result.found, strict=False):
        axes.set_axis_on()
        shown = axes.imshow(finding.diagnosis.by_nearness.numpy(), cmap="magma", vmin=0, vmax=1, aspect="auto")
        on_nearest = finding.diagnosis.mean_by_nearness[0].item()
        axes.set_title(f"{finding.entry.label}\n{on_nearest:.2f} on the nearest", fontsize=8, loc="left")
        axes.set(xticks=[], yticks=[])
    for axes in grid[-1]:
        axes.set_xlabel("nearest key ... farthest", fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("16 probes", fontsize=8)
    figure.colorbar(shown, ax=grid, label="weight", shrink=0.7)
    return figure


def cost_against_tokens(result: DemoResult) -> "Figure":
    figure = new_figure(9, 4, dpi=DPI)
    axes = figure.add_subplot()
    for finding in result.found:
        look = looks(result.labels)[finding.entry.label]
        axes.plot(TOKENS, finding.milliseconds, **look, linewidth=2, markersize=5, label=finding.entry.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="tokens", ylabel="milliseconds for one sequence", xticks=TOKENS)
    axes.set_xticklabels([f"{tokens:,}" for tokens in TOKENS])
    tidy(axes, grid="y")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


PICTURES: "dict[str, Callable[[DemoResult], Figure]]" = {
    "scores": scores,
    "entropy_against_norm": lambda result: entropy_against_norm({f.entry.label: f.diagnosis for f in result.found}),
    "attention_maps": attention_maps,
    "learning_curves": learning_curves,
    "cost_against_tokens": cost_against_tokens,
}
