"""The results of language models as a CSV file, a picture and sentences."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .language import DECODE, MIXERS, PREFILL, RANDOM, REAL, LanguageResult
from .machine import Machine, version_of
from .models import FAILED, MEASURED, OUT_OF_MEMORY, WRONG
from .report import DISTURBED, replace_csv, rounded
from .verdict import Bar

LANGUAGE_COLUMNS = (
    "what",
    "mixer",
    "size",
    "device",
    "threads",
    "dtype",
    "batch",
    "context",
    "cache_filled_with",
    "outcome",
    "tokens_per_second",
    "median_ms",
    "timed",
    "cache_mib",
    "peak_extra_mib",
    "relative_error",
    "others_cpu",
    "torch",
    "triton",
    "transformers",
    "flash_linear_attention",
    "nalaformer",
    "commit",
    "date",
)
RECURRENT = tuple(mixer for mixer in MIXERS if mixer != "softmax")
# a token after the longest context may take that many times the one after the shortest
FLAT = 1.1
LEAST_PREFILL_SPEEDUP = 5.0
COLOURS = {"linear": "#D55E00", "gated_delta": "#0072B2", "softmax": "#000000"}


def write_language_csv(results: Sequence[LanguageResult], path: str | Path, machine: Machine) -> Path:
    """One row per result; figures that were not measured are empty. An existing file is replaced as a whole."""
    date = datetime.now(UTC).date().isoformat()
    return replace_csv(path, LANGUAGE_COLUMNS, (_row(result, machine, date) for result in results))


def _row(result: LanguageResult, machine: Machine, date: str) -> dict[str, object]:
    measurement = result.measurement
    return {
        "what": measurement.what,
        "mixer": measurement.mixer,
        "size": measurement.size,
        "device": machine.device_name(measurement.device),
        "threads": machine.threads if measurement.device == "cpu" else "",
        "dtype": str(measurement.dtype).removeprefix("torch."),
        "batch": measurement.batch,
        "context": measurement.context,
        "cache_filled_with": measurement.filled,
        "outcome": f"{result.outcome}: {result.reason}" if result.outcome == FAILED else result.outcome,
        "tokens_per_second": rounded(result.tokens_per_second),
        "median_ms": rounded(result.median_ms),
        "timed": result.timed,
        "cache_mib": rounded(result.cache_mib),
        "peak_extra_mib": rounded(result.peak_extra_mib),
        "relative_error": "" if result.error is None else f"{result.error:.2g}",
        "others_cpu": "" if result.others_cpu is None else f"{result.others_cpu:.2f}",
        "torch": machine.torch,
        "triton": machine.triton,
        "transformers": version_of("transformers") or "none",
        "flash_linear_attention": version_of("flash-linear-attention") or "none",
        "nalaformer": machine.nalaformer,
        "commit": machine.commit,
        "date": date,
    }


def progress_line(result: LanguageResult) -> str:
    measurement = result.measurement
    filled = f", cache of {measurement.filled}" if measurement.filled else ""
    what = f"{measurement.what}, {measurement.mixer}, {measurement.context:,} tokens x {measurement.batch}{filled}"
    if result.outcome != MEASURED:
        why = f": {result.reason}" if result.outcome == FAILED else ""
        return f"{what}: {result.outcome}{why}" + (f" ({result.error:.2g} off)" if result.outcome == WRONG else "")
    memory = "" if result.cache_mib is None else f", cache {result.cache_mib:,.4g} MiB"
    return f"{what}: {result.median_ms:.4g} ms, {result.tokens_per_second:,.4g} tokens/s{memory}"


def language_bars(results: Sequence[LanguageResult]) -> list[Bar]:
    """The promises: flat decoding, constant memory, a fast prefill; one that was not measured is left out."""
    found = []
    decodes = [r for r in results if r.measurement.what == DECODE and r.measurement.filled == RANDOM and r.median_ms]
    for batch in sorted({r.measurement.batch for r in decodes}):
        for mixer in RECURRENT:
            own = [r for r in decodes if (r.measurement.mixer, r.measurement.batch) == (mixer, batch)]
            own.sort(key=lambda r: r.measurement.context)
            if len(own) < 2:
                continue
            first, last = own[0], own[-1]
            ratio = (last.median_ms or 0) / (first.median_ms or 1)
            span = f"{first.measurement.context:,} to {last.measurement.context:,} tokens, batch {batch}"
            promise = f"{mixer}: time per token flat from {span} (at most {FLAT:g}x)"
            found.append(Bar(promise=promise, measured=f"{ratio:.3f}x", is_met=ratio <= FLAT))
            sizes = sorted({r.cache_mib for r in own if r.cache_mib is not None})
            measured = " to ".join(f"{size:.4g}" for size in (sizes[0], sizes[-1])) + " MiB" if sizes else "nothing"
            promise = f"{mixer}: cache of one size from {span}"
            found.append(Bar(promise=promise, measured=measured, is_met=len(sizes) == 1))
    prefills = {r.measurement.mixer: r for r in results if r.measurement.what == PREFILL and r.median_ms}
    exact = prefills.get("softmax")
    for mixer in RECURRENT:
        ours = prefills.get(mixer)
        if ours is not None and exact is not None and ours.median_ms and exact.median_ms:
            ratio = exact.median_ms / ours.median_ms
            tokens = ours.measurement.context
            promise = f"{mixer}: a layer over {tokens:,} tokens at least {LEAST_PREFILL_SPEEDUP:g}x as fast as softmax"
            found.append(Bar(promise=promise, measured=f"{ratio:.2f}x", is_met=ratio >= LEAST_PREFILL_SPEEDUP))
    return found


def language_lines(results: Sequence[LanguageResult]) -> list[str]:
    """The promises, whether random caches cost what real ones do, and whatever went wrong, as sentences."""
    lines = [f"{bar.promise}: {bar.measured}, {'met' if bar.is_met else 'NOT met'}" for bar in language_bars(results)]
    pairs: dict[tuple[str, int, int], dict[str, float]] = {}
    for result in results:
        m = result.measurement
        if m.what == DECODE and result.median_ms:
            pairs.setdefault((m.mixer, m.batch, m.context), {})[m.filled] = result.median_ms
    for (mixer, batch, context), times in pairs.items():
        if REAL in times and RANDOM in times:
            ratio = times[RANDOM] / times[REAL]
            lines.append(f"{mixer}, {context:,} tokens x {batch}: a random cache takes {ratio:.3f}x the time of a real one")
    disturbed = [r for r in results if r.measurement.device == "cpu" and r.others_cpu and r.others_cpu > DISTURBED]
    if disturbed:
        lines.append(
            f"BUSY machine: in {len(disturbed)} of {len(results)} measurements other processes took over {DISTURBED:.0%} "
            "of the CPU time; times and what follows from them are worth little"
        )
    lines.extend(progress_line(r) for r in results if r.outcome in (WRONG, FAILED, OUT_OF_MEMORY))
    return lines


def draw_language(results: Sequence[LanguageResult], path: str | Path, machine: Machine) -> Path | None:
    """Write a PNG: tokens per second and memory of the cache against the context; None without a figure to draw."""
    shown = [r for r in results if r.measurement.what == DECODE and r.measurement.filled == RANDOM and r.median_ms]
    if not shown:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    batches = sorted({r.measurement.batch for r in shown})
    contexts = sorted({r.measurement.context for r in shown})
    panels = (("tokens_per_second", "tokens per second, all rows"), ("cache_mib", "memory of the cache (MiB)"))
    for number, (name, title) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 2, number)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for batch in batches:
            for mixer in MIXERS:
                own = [r for r in shown if (r.measurement.mixer, r.measurement.batch) == (mixer, batch)]
                own.sort(key=lambda r: r.measurement.context)
                if own:
                    label = f"{mixer}, batch {batch}"
                    style: dict[str, Any] = {
                        "color": COLOURS[mixer],
                        "linestyle": "-" if batch == batches[0] else "--",
                        "marker": "o",
                    }
                    places = [r.measurement.context for r in own]
                    axes.plot(places, [getattr(r, name) for r in own], label=label, markersize=4, **style)
        axes.set_xticks(contexts, [f"{c // 1024}K" if c >= 1024 else str(c) for c in contexts])
        axes.minorticks_off()
        axes.set_xlabel("context (tokens)")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(color="#E6E6E6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if number == 1:
            axes.legend(fontsize=8, frameon=False)
    first = shown[0].measurement
    dtype = str(first.dtype).removeprefix("torch.")
    figure.suptitle(f"Decoding, {first.size} layout, {dtype}, {machine.device_name(first.device)}", fontsize=12)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
