"""Time and memory of one image against its tokens: what the benchmarks of super-resolution and image generation share."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nalaformer.charts import new_figure, save_figure, tidy
from nalaformer.machine import Machine, describe_machine

from .measurement import OUT_OF_MEMORY, CallMeasurement, Result
from .models import LARGEST_ERROR
from .runner import Say, busy_lines, dtype_name, format_number, mistake_lines, run_plan


@dataclass(frozen=True, kw_only=True)
class ImageMeasurement(CallMeasurement):
    """A network with one kind of attention on one image."""

    variant: str
    """The name of its attention."""
    largest_errors = LARGEST_ERROR

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The number of tokens of the image."""

    @property
    @abstractmethod
    def setting(self) -> str:
        """Setting that differs between measurements of one variant on one image."""

    def describe(self, result: Result[Any]) -> str:
        memory = "" if result.peak_extra_mib is None else f", {format_number(result.peak_extra_mib)} MiB"
        return f"{result.median_ms:.4g} ms{memory}"


M = TypeVar("M", bound=ImageMeasurement)


@dataclass(frozen=True, kw_only=True)
class ChartStyle:
    """Style of a benchmark's plot."""

    title: str
    tokens: str
    """What tokens are, below the axis."""
    colours: Mapping[str, str]
    """The colour of each variant."""
    dashes: Mapping[str, str]
    """The dashes of each setting."""


def run_image_costs(
    plan: Sequence[M],
    path: Path,
    columns: Sequence[str],
    style: ChartStyle,
    *,
    lines: Callable[[Sequence[Result[M]]], Sequence[str]],
    seconds: float,
    say: Say,
) -> list[Result[M]]:
    """Measure the plan, print each result and write its row; then print the lines and draw a plot beside the file."""
    machine = describe_machine()
    results = run_plan(plan, path, columns, machine, seconds=seconds, say=say)
    for line in (*busy_lines(results), *lines(results), *mistake_lines(results), f"results: {path}"):
        say(line)
    if any(result.is_right for result in results):
        say(f"picture: {draw_image_costs(results, path.with_suffix('.png'), machine, style)}")
    return results


def by_place(results: Sequence[Result[M]]) -> dict[tuple[int, str, str], Result[M]]:
    """Results by tokens, setting and variant."""
    return {(r.measurement.tokens, r.measurement.setting, r.measurement.variant): r for r in results}


def draw_image_costs(results: Sequence[Result[M]], path: Path, machine: Machine, style: ChartStyle) -> Path:
    """Write a PNG: peak memory and time against the tokens, both logarithmic."""
    figure = new_figure(10, 5.4)
    tokens = sorted({result.measurement.tokens for result in results})
    for number, (name, title) in enumerate((("peak_extra_mib", "peak memory (MiB)"), ("median_ms", "time (ms)")), 1):
        axes = figure.add_subplot(1, 2, number)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for variant, colour in style.colours.items():
            for setting, dashes in style.dashes.items():
                own = [r for r in results if (r.measurement.variant, r.measurement.setting) == (variant, setting)]
                shown = [r for r in own if getattr(r, name)]
                missing = [r.measurement.tokens for r in own if r.outcome == OUT_OF_MEMORY]
                label = f"{variant}, {setting}" + (f" (out of memory: {min(missing):,} tokens)" if missing else "")
                places, heights = [r.measurement.tokens for r in shown], [getattr(r, name) for r in shown]
                axes.plot(places, heights, dashes, color=colour, marker="o", markersize=4, label=label)
        axes.set_xticks(tokens, [f"{count / 1000:.3g}K" for count in tokens])
        axes.minorticks_off()
        axes.set_xlabel(style.tokens)
        axes.set_title(title, loc="left", fontsize=11)
        tidy(axes)
        if number == 1:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    first = results[0].measurement
    figure.suptitle(f"{style.title}, {dtype_name(first.dtype)}, {machine.device_name(first.device)}", fontsize=12)
    save_figure(figure, path)
    return path
