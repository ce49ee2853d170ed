"""Whole backbones: the fast path must give the reference's logits; then images per second, memory, a table and two bars."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nalaformer.machine import describe_machine
from nalaformer.ops import use_backend

from .cases import check_device
from .measurement import CallMeasurement, Result, is_memory_error
from .runner import Bar, Say, busy_lines, cell, format_number, mistake_lines, run_plan, say_on_stdout

MODEL_COLUMNS = (
    "model", "variant", "device", "threads", "dtype", "batch", "image_size", "direction", "outcome", "images_per_second",
    "median_ms", "peak_extra_mib", "peak_extra_means", "relative_error", "others_cpu", "torch", "triton", "timm",
    "nalaformer", "commit", "date",
)  # fmt: skip
FORWARD, TRAINING = "forward", "training"
DIRECTIONS = (FORWARD, TRAINING)
# |ours - reference| / |reference| over all logits; roundings of a dozen blocks add up
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# the numbers of pixels of a step are about the same: what changes with the size is the attention. On a GPU they are enough
# that no variant waits for the host to launch its kernels
BATCHES = {"cpu": {224: 2, 512: 1, 1024: 1, 2048: 1}, "cuda": {224: 512, 512: 96, 1024: 24, 2048: 6}}
DEFAULT_SIZES = {"cpu": (224,), "cuda": (224, 512, 1024, 2048)}
# the bars stand at these: a run that is stopped early has them
FIRST_SIZES = (224, 1024)
# ten calls or more of anything that takes up to 0.3 s, three of what is slower; the whole plan of a GPU in minutes
SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class ModelVariant:
    """A backbone, some parts of it changed, and the backend of its linear stages."""

    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "auto"
    has_linear_stages: bool = True

    @property
    def is_compared(self) -> bool:
        """True if there is a reference path other than its own."""
        return self.has_linear_stages and self.backend != "reference"


LINEAR, REFERENCE, SOFTMAX, RELEASED = "linear", "linear, reference path", "softmax", "released"
MALA, MALA_REFERENCE, RALA, RALA_REFERENCE = "mala", "mala, reference path", "rala", "rala, reference path"
MODEL_VARIANTS = {
    LINEAR: ModelVariant(model="nalaformer_t_linear"),
    REFERENCE: ModelVariant(model="nalaformer_t_linear", backend="reference"),
    SOFTMAX: ModelVariant(model="nalaformer_t", changes={"attention_stages": "vvvv"}, has_linear_stages=False),
    RELEASED: ModelVariant(model="nalaformer_t"),
    MALA: ModelVariant(model="mavit_t_linear"),
    MALA_REFERENCE: ModelVariant(model="mavit_t_linear", backend="reference"),
    RALA: ModelVariant(model="ravlt_t_linear"),
    RALA_REFERENCE: ModelVariant(model="ravlt_t_linear", backend="reference"),
}
# image size, against what, how many times as fast in training
BARS = ((224, REFERENCE, 3.0), (1024, SOFTMAX, 2.0))


@dataclass(frozen=True, kw_only=True)
class BackboneMeasurement(CallMeasurement):
    """A backbone at an image size, forward or in training."""

    image_size: int
    batch: int
    direction: str
    largest_errors = LARGEST_ERROR
    what_counts = "parameters and images are held before and do not count; activations and gradients count"

    @property
    def units(self) -> int:
        return self.batch

    def row(self, result: Result[Any]) -> dict[str, object]:
        own = {name: getattr(self, name) for name in ("batch", "image_size", "direction")}
        return own | {"images_per_second": format_number(result.per_second)}

    def describe(self, result: Result[Any]) -> str:
        memory = "" if result.peak_extra_mib is None else f", {result.peak_extra_mib:,.0f} MiB"
        return f"{result.per_second:.4g} images/s, {result.median_ms:.4g} ms{memory}"


def make_backbone_call(
    model: nn.Module, images: Tensor, direction: str, context: Callable[[], AbstractContextManager[object]]
) -> Callable[[], object]:
    """Logits without gradients, or the gradients of cross entropy; the network and its loss are called within `context`."""
    parameters, labels = list(model.parameters()), torch.arange(len(images), device=images.device)

    def forward() -> object:
        with torch.no_grad(), context():
            return model(images)

    def step() -> object:
        with context():
            logits = model(images)
            loss = F.cross_entropy(logits.float(), labels % logits.shape[1])
        return torch.autograd.grad(loss, parameters)

    return forward if direction == FORWARD else step


def checked_image_sizes(sizes: Sequence[int]) -> Sequence[int]:
    if not sizes or min(sizes) < 32:
        raise ValueError(f"image sizes must be at least 32, the stride of the last stage, got {list(sizes)}")
    return sizes


@dataclass(frozen=True, kw_only=True)
class ModelMeasurement(BackboneMeasurement):
    """A variant of ours."""

    variant: str
    """A name of MODEL_VARIANTS."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backbone, on top of the variant's: smaller networks for a look."""

    @property
    def label(self) -> str:
        return f"{self.image_size} px x {self.batch}, {self.variant}, {self.direction}"

    def check(self, built: None) -> float | None:
        return relative_error(self) if MODEL_VARIANTS[self.variant].is_compared else None

    def make_call(self, built: None) -> Callable[[], object]:
        # not captured: a training step as users run it, and what Python costs is part of it
        model = build_variant(self).train(self.direction == TRAINING)
        backend = MODEL_VARIANTS[self.variant].backend
        return make_backbone_call(model, make_images(self, self.batch), self.direction, lambda: use_backend(backend))

    def small(self) -> Self:
        return replace(self, image_size=64, batch=2)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Self:
        # JSON has no tuples
        changes = {name: tuple(value) if isinstance(value, list) else value for name, value in values["changes"].items()}
        return cls(**(values | {"changes": changes}))

    def row(self, result: Result[Any]) -> dict[str, object]:
        return {"model": MODEL_VARIANTS[self.variant].model, "variant": self.variant} | super().row(result)


ModelResult = Result[ModelMeasurement]


def plan_models(
    device: str, sizes: Sequence[int] | None = None, *, changes: Mapping[str, Any] | None = None
) -> list[ModelMeasurement]:
    """Return the plan in order: first what the bars need."""
    check_device(device)
    sizes = checked_image_sizes(DEFAULT_SIZES[device] if sizes is None else sizes)
    everything = [
        ModelMeasurement(
            variant=variant,
            image_size=size,
            batch=BATCHES[device].get(size, 2),
            direction=direction,
            device=device,
            changes=changes or {},
        )
        for size in sorted(dict.fromkeys(sizes), key=lambda size: (size not in FIRST_SIZES, size))
        for direction in (TRAINING, FORWARD)
        for variant in MODEL_VARIANTS
    ]
    return sorted(everything, key=lambda m: not _is_for_bars(m))


def _is_for_bars(measurement: ModelMeasurement) -> bool:
    of_bars = measurement.image_size in FIRST_SIZES and measurement.direction == TRAINING
    return of_bars and measurement.variant in (LINEAR, REFERENCE, SOFTMAX)


def run_models(
    device: str,
    out: str | Path | None = None,
    sizes: Sequence[int] | None = None,
    *,
    seconds: float = SECONDS,
    changes: Mapping[str, Any] | None = None,
    say: Say = say_on_stdout,
) -> list[ModelResult]:
    """Measure the plan, say each figure as it comes, write the CSV file after every one; then table and bars, as plain text.

    out: default benchmarks/results/models_<device>.csv. seconds: of timing per measurement. say: default a line on stdout.
    """
    path = Path(out or f"benchmarks/results/models_{device}.csv")
    plan = plan_models(device, sizes, changes=changes)
    results = run_plan(plan, path, MODEL_COLUMNS, describe_machine(), seconds=seconds, say=say)
    for line in (*models_table(results), *model_bar_lines(results), f"results: {path}"):
        say(line)
    return results


def build_variant(measurement: ModelMeasurement) -> nn.Module:
    """The network with the same random weights every time."""
    from nalaformer.models.vision import build

    variant = MODEL_VARIANTS[measurement.variant]
    torch.manual_seed(0)
    return build(variant.model, **{**variant.changes, **measurement.changes}).to(measurement.device, measurement.dtype)


def make_images(measurement: ModelMeasurement, number: int) -> Tensor:
    """Standard normal [number, 3, size, size]."""
    generator = torch.Generator().manual_seed(0)
    size = (number, 3, measurement.image_size, measurement.image_size)
    return torch.randn(size, generator=generator).to(measurement.device, measurement.dtype)


def relative_error(measurement: ModelMeasurement) -> float | None:
    """The error of one image's logits against the reference path; None where that path has too little memory."""
    model, image = build_variant(measurement).eval(), make_images(measurement, 1)
    with torch.no_grad():
        try:
            with use_backend("reference"):
                expected = model(image).double()
        except (RuntimeError, MemoryError) as error:
            if not is_memory_error(error):
                raise
            return None
        with use_backend(MODEL_VARIANTS[measurement.variant].backend):
            found = model(image).double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()


def models_table(results: Sequence[ModelResult]) -> list[str]:
    """A line per image size and variant; "-" where nothing was measured."""
    found = {(r.measurement.image_size, r.measurement.variant, r.measurement.direction): r for r in results}
    lines: list[tuple[str, ...]] = [("px", "batch", "variant", "forward im/s", "training im/s", "forward MiB", "training MiB")]
    for size in sorted({r.measurement.image_size for r in results}):
        for name in MODEL_VARIANTS:
            own = [found.get((size, name, direction)) for direction in DIRECTIONS]
            batch = next((str(result.measurement.batch) for result in own if result is not None), "-")
            figures = (cell(result, field) for field in ("per_second", "peak_extra_mib") for result in own)
            lines.append((str(size), batch, name, *figures))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]


def model_bars(results: Sequence[ModelResult]) -> list[Bar]:
    """Return the targets for training; skip those that were not measured; one without both results is not met."""
    training = {(r.measurement.image_size, r.measurement.variant): r for r in results if r.measurement.direction == TRAINING}
    found = []
    for size, peer_name, least in BARS:
        ours, peer = training.get((size, LINEAR)), training.get((size, peer_name))
        if ours is None or peer is None:
            continue
        promise = f"{size} px, training of {LINEAR} at least {least:g}x as fast as {peer_name}"
        if ours.per_second and peer.per_second:
            ratio = ours.per_second / peer.per_second
            found.append(Bar(promise=promise, measured=f"{ratio:.2f}x", is_met=ratio >= least))
        else:
            # even where only the peer has too little memory: no figure, no claim
            measured = f"{LINEAR}: {ours.outcome}, {peer_name}: {peer.outcome}"
            found.append(Bar(promise=promise, measured=measured, is_met=False))
    return found


def model_bar_lines(results: Sequence[ModelResult]) -> list[str]:
    """The bars, and whatever went wrong, as sentences."""
    lines = busy_lines(results)
    verdicts = {bar.promise: bar for bar in model_bars(results)}
    lines.extend(bar.line for bar in verdicts.values())
    for size, peer, least in BARS:
        if not any(promise.startswith(f"{size} px") for promise in verdicts):
            lines.append(f"{size} px, the bar of {least:g}x over {peer}: not measured in this run")
    return lines + mistake_lines(results)
