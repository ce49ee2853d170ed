"""The results of whole backbones as a CSV file, a table and the two bars, in plain text."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from .machine import Machine, version_of
from .models import (
    DIRECTIONS,
    FAILED,
    LINEAR,
    MEASURED,
    MODEL_VARIANTS,
    OUT_OF_MEMORY,
    REFERENCE,
    SOFTMAX,
    TRAINING,
    WRONG,
    ModelResult,
)
from .report import DISTURBED, replace_csv, rounded
from .verdict import Bar

MODEL_COLUMNS = (
    "model",
    "variant",
    "device",
    "threads",
    "dtype",
    "batch",
    "image_size",
    "direction",
    "outcome",
    "images_per_second",
    "median_ms",
    "peak_extra_mib",
    "peak_extra_means",
    "relative_error",
    "others_cpu",
    "torch",
    "triton",
    "timm",
    "nalaformer",
    "commit",
    "date",
)
PEAK_EXTRA_MEANS = {
    "cpu": "resident memory of a fresh process: peak (VmHWM) minus before the call; parameters and images are held before "
    "and do not count; activations and gradients count",
    "cuda": "torch allocator: peak (max_memory_allocated) minus before the call; parameters and images are held before and "
    "do not count; activations and gradients count",
}
# image size, against what, how many times as fast in training
BARS = ((224, REFERENCE, 3.0), (1024, SOFTMAX, 2.0))


def write_models_csv(results: Sequence[ModelResult], path: str | Path, machine: Machine) -> Path:
    """One row per result; figures that were not measured are empty. An existing file is replaced as a whole."""
    date = datetime.now(UTC).date().isoformat()
    return replace_csv(path, MODEL_COLUMNS, (models_csv_row(result, machine, date) for result in results))


def models_csv_row(result: ModelResult, machine: Machine, date: str) -> dict[str, object]:
    measurement = result.measurement
    return {
        "model": MODEL_VARIANTS[measurement.variant].model,
        "variant": measurement.variant,
        "device": machine.device_name(measurement.device),
        "threads": machine.threads if measurement.device == "cpu" else "",
        "dtype": str(measurement.dtype).removeprefix("torch."),
        "batch": measurement.batch,
        "image_size": measurement.image_size,
        "direction": measurement.direction,
        "outcome": f"{result.outcome}: {result.reason}" if result.outcome == FAILED else result.outcome,
        "images_per_second": rounded(result.images_per_second),
        "median_ms": rounded(result.median_ms),
        "peak_extra_mib": rounded(result.peak_extra_mib),
        "peak_extra_means": PEAK_EXTRA_MEANS[measurement.device],
        "relative_error": "" if result.error is None else f"{result.error:.2g}",
        "others_cpu": "" if result.others_cpu is None else f"{result.others_cpu:.2f}",
        "torch": machine.torch,
        "triton": machine.triton,
        "timm": version_of("timm") or "none",
        "nalaformer": machine.nalaformer,
        "commit": machine.commit,
        "date": date,
    }


def progress_line(result: ModelResult) -> str:
    measurement = result.measurement
    what = f"{measurement.image_size} px x {measurement.batch}, {measurement.variant}, {measurement.direction}"
    if result.outcome != MEASURED:
        return f"{what}: {result.outcome}" + (f": {result.reason}" if result.outcome == FAILED else "")
    memory = "" if result.peak_extra_mib is None else f", {result.peak_extra_mib:,.0f} MiB"
    return f"{what}: {result.images_per_second:.4g} images/s, {result.median_ms:.4g} ms{memory}"


def models_table(results: Sequence[ModelResult]) -> list[str]:
    """A line per image size and variant; "-" where nothing was measured."""
    found = {(r.measurement.image_size, r.measurement.variant, r.measurement.direction): r for r in results}
    lines: list[tuple[str, ...]] = [("px", "batch", "variant", "forward im/s", "training im/s", "forward MiB", "training MiB")]
    for size in sorted({r.measurement.image_size for r in results}):
        for name in MODEL_VARIANTS:
            cells = [found.get((size, name, direction)) for direction in DIRECTIONS]
            batch = next((str(cell.measurement.batch) for cell in cells if cell is not None), "-")
            speeds = (model_figure(cell, "images_per_second") for cell in cells)
            memory = (model_figure(cell, "peak_extra_mib") for cell in cells)
            lines.append((str(size), batch, name, *speeds, *memory))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]


def model_figure(result: ModelResult | None, field: str) -> str:
    if result is None:
        return "-"
    if result.outcome != MEASURED:
        return result.outcome
    value = getattr(result, field)
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def model_bars(results: Sequence[ModelResult]) -> list[Bar]:
    """The promises for training; one that this run did not measure is left out, one without both figures is not met."""
    training = {(r.measurement.image_size, r.measurement.variant): r for r in results if r.measurement.direction == TRAINING}
    found = []
    for size, peer_name, least in BARS:
        ours, peer = training.get((size, LINEAR)), training.get((size, peer_name))
        if ours is None or peer is None:
            continue
        promise = f"{size} px, training of {LINEAR} at least {least:g}x as fast as {peer_name}"
        if ours.images_per_second and peer.images_per_second:
            ratio = ours.images_per_second / peer.images_per_second
            found.append(Bar(promise=promise, measured=f"{ratio:.2f}x", is_met=ratio >= least))
        else:
            # even where only the peer has too little memory: no figure, no claim
            measured = f"{LINEAR}: {ours.outcome}, {peer_name}: {peer.outcome}"
            found.append(Bar(promise=promise, measured=measured, is_met=False))
    return found


def model_bar_lines(results: Sequence[ModelResult]) -> list[str]:
    """The bars, and whatever went wrong, as sentences."""
    lines = []
    disturbed = [r for r in results if r.measurement.device == "cpu" and r.others_cpu and r.others_cpu > DISTURBED]
    if disturbed:
        lines.append(
            f"BUSY machine: in {len(disturbed)} of {len(results)} measurements other processes took over {DISTURBED:.0%} "
            "of the CPU time; times and what follows from them are worth little"
        )
    verdicts = {bar.promise: bar for bar in model_bars(results)}
    lines.extend(f"{bar.promise}: {bar.measured}, {'met' if bar.is_met else 'NOT met'}" for bar in verdicts.values())
    for size, peer, least in BARS:
        if not any(promise.startswith(f"{size} px") for promise in verdicts):
            lines.append(f"{size} px, the bar of {least:g}x over {peer}: not measured in this run")
    for result in results:
        if result.outcome == WRONG:
            lines.append(f"WRONG and not timed: {progress_line(result)}, relative error {result.error:.2g} of the logits")
        if result.outcome in (FAILED, OUT_OF_MEMORY):
            lines.append(progress_line(result))
    return lines
