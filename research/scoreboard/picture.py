"""Plot of the scoreboard: recall against pointing, and the perplexity of texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nalaformer.analysis.pictures import BLACK, BLUE, GREY, VERMILION
from nalaformer.atomic_files import atomic_file
from nalaformer.charts import new_figure, tidy

from .methods import METHODS_OF_THE_BOARD
from .report import Row
from .tables import standing_by_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECALL, POINTING, TEXTS = "mqar_80", "pointing_256", "manuals"
# points with a name beside them, and its side; the others are dots
NAMED = {
    **{"softmax": "left", "channel_softmax_contrast": "below", "channel_softmax": "above", "hedgehog": "below"},
    **{"nala_learned_contrast": "left", "nala": "left", "sign_split": "left", "relu": "right", "flatten_map": "left"},
}
# a name's offset from its dot in points, and its alignment
SIDES = {
    **{"left": ((-8, 0), "right", "center"), "right": ((8, 0), "left", "center")},
    **{"above": ((0, 7), "center", "bottom"), "below": ((12, -8), "right", "top")},
}
OURS = "channel_softmax"
# key of the PNG's text, which holds the plotted values: a test reads it to see if the plot is up to date
TEXT = "Description"


@dataclass(frozen=True)
class Figures:
    """Mean and spread over seeds by method: of the two lookups, and of texts."""

    lookups: dict[str, tuple[float, ...]]
    texts: dict[str, tuple[float, ...]]

    @property
    def text(self) -> str:
        lookups, texts = ({name: [round(x, 4) for x in of] for name, of in part.items()} for part in (self.lookups, self.texts))
        return json.dumps({"lookups": lookups, "texts": texts})


def values_to_plot(rows: Sequence[Row]) -> Figures:
    """Return the values to plot of the methods that have a name on the board."""
    found = {title: standing_by_method([row for row in rows if row["task"] == title]) for title in (RECALL, POINTING, TEXTS)}
    lookups: dict[str, tuple[float, ...]] = {}
    texts: dict[str, tuple[float, ...]] = {}
    for name, method in METHODS_OF_THE_BOARD.items():
        recall, pointing, text = (found[title].get(method.label) for title in (RECALL, POINTING, TEXTS))
        if recall is not None and pointing is not None:
            lookups[name] = (recall.test, recall.spread, pointing.test, pointing.spread)
        if text is not None:
            texts[name] = (text.test, text.spread)
    return Figures(lookups=lookups, texts=dict(sorted(texts.items(), key=lambda item: item[1])))


def color_for(name: str) -> str:
    if name == "softmax":
        return BLACK
    if name.startswith(OURS):
        return VERMILION
    return BLUE if "nala" in name else GREY


def draw_plot(figures: Figures) -> "Figure":
    figure = new_figure(11, 4.6, dpi=130)
    lookups, texts = figure.subplots(1, 2, width_ratios=(1.25, 1))
    for name, (recall, recall_spread, pointing, pointing_spread) in figures.lookups.items():
        draw_point(lookups, name, (recall, pointing), (recall_spread, pointing_spread))
    lookups.set(
        xlim=(0, 1.06), ylim=(0, 1.09), xlabel="recall of 80 pairs, accuracy", ylabel="nearest of 256 directions, accuracy"
    )
    lookups.set_title("Two lookups: most maps do one of them", loc="left", fontsize=11)
    tidy(lookups)
    names = list(reversed(figures.texts))
    for height, name in enumerate(names):
        mean, spread = figures.texts[name]
        texts.errorbar(
            mean, height, xerr=spread or None, fmt="s" if name == "softmax" else "o", color=color_for(name), markersize=7
        )
        texts.annotate(
            f"{mean:.1f}", (mean + spread, height), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8
        )
    texts.set(yticks=range(len(names)), xlabel="perplexity, lower is better")
    texts.margins(x=0.12)
    texts.set_yticklabels(names, fontsize=8)
    texts.set_title("Texts: heads that forget come near exact attention", loc="left", fontsize=11)
    tidy(texts, grid="x")
    return figure


def draw_point(axes: Any, name: str, at: tuple[float, float], spread: tuple[float, float]) -> None:
    is_named = name in NAMED
    size, alpha = (7.0, 1.0) if is_named else (4.0, 0.6)
    style = {"color": color_for(name), "alpha": alpha, "elinewidth": 1.0, "markersize": size}
    axes.errorbar(*at, xerr=spread[0] or None, yerr=spread[1] or None, fmt="s" if name == "softmax" else "o", **style)
    if is_named:
        place, across, along = SIDES[NAMED[name]]
        axes.annotate(
            name, at, xytext=place, textcoords="offset points", ha=across, va=along, fontsize=8, color=color_for(name)
        )


def draw(rows: Sequence[Row], path: str | Path) -> None:
    """Write the plot as a PNG file whose text holds the plotted values."""
    figures = values_to_plot(rows)
    with atomic_file(Path(path)) as aside:
        draw_plot(figures).savefig(aside, format="png", metadata={TEXT: figures.text})
