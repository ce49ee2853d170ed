"""Plots of a model's attention: for the page, and as PNG and SVG beside it."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...charts import new_figure, save_figure
from ..pictures import BLUE, OTHER_COLOURS, VERMILION

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

# the page replaces this color by that of its text, so that plots are readable on dark and light pages
INK, PAPER = "#101010", "#fefefe"
HEAD_COLORS = (BLUE, *OTHER_COLOURS[:4])
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
FONTS: Any = {"svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
COLUMNS = 4
SHEET: Any = {"dpi": 130, "paper": PAPER}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Entropy against query norm in one layer."""

    name: str
    kind: str
    norms: Tensor
    """The mean norm of the queries in each of P bins of equal size, ordered by norm, [H, P]."""
    entropy: Tensor
    """The mean entropy of their attention in bits, [H, P]."""
    largest: float
    """The entropy of equal weights in bits."""


def draw_curve(axes: Any, curve: Curve) -> None:
    """Draw one layer: a line with its own markers for each head, and equal weights as a dotted line."""
    for head, (norms, entropy) in enumerate(zip(curve.norms.tolist(), curve.entropy.tolist(), strict=True)):
        axes.plot(
            norms,
            entropy,
            color=HEAD_COLORS[head % len(HEAD_COLORS)],
            marker=MARKERS[head % len(MARKERS)],
            markersize=3.2,
            linewidth=1.1,
            alpha=0.9,
        )
        # the number of the head at the end of its line, so that color is not the only code
        axes.annotate(
            str(head + 1),
            (norms[-1], entropy[-1]),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=INK,
        )
    axes.axhline(curve.largest, color=INK, linewidth=0.8, linestyle=":")
    # show at least a tenth of the scale, since a magnified variation would look like a fall
    lowest = min(curve.entropy.min().item(), 0.9 * curve.largest)
    # the entropy of a single token is 0
    if curve.largest > 0:
        axes.set_ylim(lowest - 0.02 * curve.largest, 1.02 * curve.largest)
    axes.set_title(f"{curve.name}\n{curve.kind}", loc="left", fontsize=8.5, color=INK)
    finish(axes)


def finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=8)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
    axes.set_facecolor("none")


def draw_curves(curves: Sequence[Curve], title: str) -> "Figure":
    """Draw all layers of a model on one sheet."""
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure = new_figure(2.7 * columns + 0.4, 2.15 * rows + 0.6, **SHEET)
    for number, curve in enumerate(curves):
        draw_curve(figure.add_subplot(rows, columns, number + 1), curve)
    figure.suptitle(title, x=0.01, horizontalalignment="left", color=INK, fontsize=11)
    figure.supxlabel("query norm ‖q‖", color=INK, fontsize=9)
    figure.supylabel("entropy of attention (bits); dotted: equal weights", color=INK, fontsize=9)
    return figure


def draw_one_curve(curve: Curve) -> "Figure":
    figure = new_figure(2.75, 2.1, **SHEET)
    axes = figure.add_subplot()
    draw_curve(axes, curve)
    axes.set_xlabel("query norm ‖q‖", fontsize=8)
    axes.set_ylabel("entropy (bits)", fontsize=8)
    return figure


def draw_depth(models: Sequence[tuple[str, Sequence[Sequence[float]]]]) -> "Figure":
    """Draw entropy relative to its largest value in each layer: a mark for each head, a line through the means.

    models: a name and, for each layer, a value for each head.
    """
    figure = new_figure(8, 2.9, **SHEET)
    axes = figure.add_subplot()
    deepest = max(len(each) for _, each in models) - 1
    for number, (name, layers) in enumerate(models):
        color, marker, line = ((VERMILION, "o", "-"), (BLUE, "s", "--"))[number % 2]
        # as on the slider, the same relative depth has the same place
        places = [1 + deepest * layer / max(1, len(layers) - 1) for layer in range(len(layers))]
        for place, heads in zip(places, layers, strict=True):
            axes.plot([place] * len(heads), heads, linestyle="none", marker=marker, color=color, markersize=4, alpha=0.45)
        means = [sum(heads) / len(heads) for heads in layers]
        axes.plot(places, means, color=color, linestyle=line, linewidth=1.8, marker=marker, markersize=5, label=name)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(-0.03, 1.06)
    axes.set_xlabel("layer")
    axes.set_xticks(range(1, deepest + 2))
    axes.set_ylabel("entropy / entropy of equal weights")
    finish(axes)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="lower left")
    return figure


def draw_maps(picture: "Image", maps: Sequence[tuple[str, Tensor]], title: str) -> "Figure":
    """Draw the image, and each (name, map [height, width]) over it; each map has its own scale, with numbers."""
    columns = min(5, len(maps) + 1)
    rows = -(-(len(maps) + 1) // columns)
    figure = new_figure(2.1 * columns, 2.6 * rows + 0.8, **SHEET)
    extent = (0, picture.width, picture.height, 0)
    grey = picture.convert("L")
    first = figure.add_subplot(rows, columns, 1)
    first.imshow(picture, extent=extent)
    first.plot(picture.width / 2, picture.height / 2, marker="s", markersize=9, markerfacecolor="none", color="#3df0ff")
    first.set_title("framed: the middle patch", loc="left", fontsize=8, color=INK)
    first.set_axis_off()
    for number, (name, heat) in enumerate(maps, 2):
        axes = figure.add_subplot(rows, columns, number)
        axes.imshow(grey, extent=extent, cmap="gray")
        shown = axes.imshow(heat.numpy(), extent=extent, cmap="inferno", alpha=0.75, vmin=0, interpolation="nearest")
        axes.set_title(f"{name}\nlargest {heat.max():.2g}", loc="left", fontsize=8, color=INK)
        axes.set_axis_off()
    bar = figure.colorbar(shown, ax=figure.axes, location="bottom", shrink=0.4, aspect=40, pad=0.02)
    bar.set_ticks([0, heat.max().item()], labels=["0", "largest weight of each map"])
    bar.ax.tick_params(labelsize=8, colors=INK)
    figure.suptitle(title, x=0.01, horizontalalignment="left", color=INK, fontsize=11)
    return figure


def as_written(figure: "Figure") -> "Figure":
    """Disable formulas in texts, since names from users may hold dollars."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
    return figure


def as_inline_svg(figure: "Figure", label: str) -> str:
    """Return the plot as an element of a page: text in the page's color and fonts, no background, no links."""
    from html import escape

    from matplotlib import rc_context

    buffer = io.StringIO()
    # clip paths are named by content and salt, and two plots of a page must not share a name
    with rc_context({**FONTS, "svg.hashsalt": label}):
        as_written(figure).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def save_png_and_svg(figure: "Figure", path: Path) -> list[Path]:
    """Write both files, named by their suffix."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}{suffix}") for suffix in (".png", ".svg")]
    for file in files:
        with rc_context({**FONTS, "svg.hashsalt": path.name}):
            save_figure(as_written(figure), file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files
