"""Plot decoding against the context."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nalaformer.charts import new_figure, save_figure, tidy
from nalaformer.machine import Machine

from .measurement import Result
from .runner import dtype_name

# by mixer
COLOURS = {"linear": "#D55E00", "forgetting": "#009E73", "gated_delta": "#0072B2", "softmax": "#000000"}


def draw_language(shown: Sequence[Result[Any]], path: Path, machine: Machine) -> None:
    """Write a PNG: tokens per second and memory of the cache against the context."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = new_figure(10, 4.8)
    batches = sorted({r.measurement.batch for r in shown})
    contexts = sorted({r.measurement.context for r in shown})
    panels = (("per_second", "tokens per second, all rows"), ("cache_mib", "memory of the cache (MiB)"))
    for number, (name, title) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 2, number)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for batch in batches:
            for mixer in COLOURS:
                own = [r for r in shown if (r.measurement.mixer, r.measurement.batch) == (mixer, batch)]
                own.sort(key=lambda r: r.measurement.context)
                if own:
                    places, heights = [r.measurement.context for r in own], [getattr(r, name) for r in own]
                    style: dict[str, Any] = {"linestyle": "-" if batch == batches[0] else "--", "marker": "o", "markersize": 4}
                    axes.plot(places, heights, label=f"{mixer}, batch {batch}", color=COLOURS[mixer], **style)
        axes.set_xticks(contexts, [f"{c // 1024}K" if c >= 1024 else str(c) for c in contexts])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if name == "per_second" else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(in_digits))
        axes.minorticks_off()
        axes.set_xlabel("context (tokens)")
        axes.set_title(title, loc="left", fontsize=11)
        tidy(axes)
    # one legend: both axes show the same lines
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), fontsize=8, frameon=False)
    first = shown[0].measurement
    figure.suptitle(
        f"Decoding, {first.size} layout, {dtype_name(first.dtype)}, {machine.device_name(first.device)}", fontsize=12
    )
    save_figure(figure, path)


def in_digits(value: float, _: object) -> str:
    """A mark of a logarithmic axis: caches of small layouts take a part of a MiB, which is not 0."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
