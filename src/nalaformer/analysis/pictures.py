"""Plots of the comparison."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from ..charts import save_figure
from .compare import Row

# Okabe and Ito's colors are distinct for the color-blind; lines of the same color differ in their dashes.
BLACK, VERMILION, BLUE = "#000000", "#D55E00", "#0072B2"
OTHER_COLOURS = ("#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")
GREY = "#767676"
Dashes = tuple[int, tuple[float, ...]]
SOLID: Dashes = (0, ())
DASHED: Dashes = (0, (5, 2))
DOTTED: Dashes = (0, (1.2, 1.6))
DASH_DOTTED: Dashes = (0, (6, 2, 1.5, 2))
OTHER_DASHES = (SOLID, DASHED, DOTTED, DASH_DOTTED)
FONT = 9.5

Style = dict[str, Any]


def draw_entropy_against_norm(rows: Sequence[Row], path: str | Path, *, num_tokens: int) -> Path:
    """Write a PNG or SVG: entropy of attention (nats) against query norm, a line per method, log N as reference."""
    if not rows:
        raise ValueError("a plot needs at least one row, got none")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # without pyplot: no global state, no display, nothing to close
    figure = Figure(figsize=(9.6, 5.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    highest, lowest = math.log(num_tokens), min(min(row.entropy) for row in rows)
    margin = 0.05 * (highest - lowest)
    axes.set_xscale("log")
    axes.set_xlim(0.1, 10)
    axes.set_ylim(lowest - margin, highest + margin)

    axes.axhline(highest, color=GREY, linewidth=1, linestyle=DOTTED, zorder=1)
    note = f"log N = {highest:.2f} nats: all {num_tokens} tokens alike"
    axes.annotate(note, (0.105, highest), xytext=(0, 4), textcoords="offset points", color=GREY, fontsize=FONT)
    styles = line_styles([row.label for row in rows])
    for row, style in zip(rows, styles, strict=True):
        axes.plot(row.norms, row.entropy, **style)
    # labels at the ends of lines, since a legend of this length is slow to read
    heights = space_labels([row.entropy[-1] for row in rows], gap=1.02 * margin, highest=highest + margin / 2)
    for row, style, height in zip(rows, styles, heights, strict=True):
        strong = style["linewidth"] > 2
        # a thin line from the end of the curve to its label, then a sample of the curve before the text
        axes.plot(
            (row.norms[-1], 11.2), (row.entropy[-1], height), color=style["color"], linewidth=0.7, alpha=0.8, clip_on=False
        )
        axes.plot((11.2, 13.4), (height, height), clip_on=False, **style)
        axes.text(
            14.0,
            height,
            row.label,
            verticalalignment="center",
            fontsize=FONT,
            # pale text is hard to read, so only strong colors are used for text
            color=style["color"] if strong else "#333333",
            fontweight="bold" if strong else "normal",
        )

    axes.set_title("Does attention sharpen as the query grows?", loc="left", fontsize=13, pad=12)
    axes.set_xlabel("query norm ‖q‖ (logarithmic)")
    axes.set_ylabel("entropy of the attention weights (nats)")
    axes.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes.minorticks_off()
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
    return path


def line_styles(labels: Sequence[str]) -> list[Style]:
    """Return the styles: softmax black, norm-aware maps in two strong colors, all others thinner, each distinct."""
    styles: list[Style] = []
    for label in labels:
        if label == "softmax":
            style: Style = {"color": BLACK, "linestyle": SOLID, "linewidth": 2.6, "zorder": 5}
        elif label.startswith("norm_aware"):
            dashes = DASHED if "cosine" in label else SOLID
            style = {"color": BLUE if "head" in label else VERMILION, "linestyle": dashes, "linewidth": 2.2, "zorder": 4}
        else:
            number = sum(other["zorder"] == 3 for other in styles)
            dashes = OTHER_DASHES[number // len(OTHER_COLOURS) % len(OTHER_DASHES)]
            style = {"color": OTHER_COLOURS[number % len(OTHER_COLOURS)], "linestyle": dashes, "linewidth": 1.5, "zorder": 3}
        styles.append(style)
    return styles


def space_labels(heights: Sequence[float], *, gap: float, highest: float) -> list[float]:
    """Return positions of labels near these heights: in the same order, at least `gap` apart, none above `highest`."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    # groups of touching labels move together, around the mean of their targets (least squares)
    groups: list[list[float]] = []
    for place, i in enumerate(order):
        groups.append([heights[i] - place * gap])
        while len(groups) > 1 and mean(groups[-2]) > mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    wanted = [mean(group) for group in groups for _ in group]
    placed = [0.0] * len(heights)
    for place, (i, base) in enumerate(zip(order, wanted, strict=True)):
        placed[i] = min(base + place * gap, highest - (len(order) - 1 - place) * gap)
    return placed
