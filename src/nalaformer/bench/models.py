"""Measure whole backbones: first whether the fast path gives the reference's logits, then images per second and memory."""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import use_backend
from .cases import DTYPES
from .fresh_process import in_fresh_process
from .machine import describe_machine
from .memory import can_measure, peak_extra_mib
from .timing import OtherProcesses, median_ms

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
MEASURED, WRONG, OUT_OF_MEMORY, FAILED = "measured", "wrong", "out of memory", "failed"


@dataclass(frozen=True, kw_only=True)
class ModelVariant:
    """A backbone, some parts of it changed, and the backend of its linear stages."""

    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "auto"
    has_linear_stages: bool = True

    @property
    def is_compared(self) -> bool:
        """Whether there is a reference path that it does not already take."""
        return self.has_linear_stages and self.backend != "reference"


LINEAR, REFERENCE, SOFTMAX, RELEASED = "linear", "linear, reference path", "softmax", "released"
MODEL_VARIANTS = {
    LINEAR: ModelVariant(model="nalaformer_t_linear"),
    REFERENCE: ModelVariant(model="nalaformer_t_linear", backend="reference"),
    SOFTMAX: ModelVariant(model="nalaformer_t", changes={"attention_stages": "vvvv"}, has_linear_stages=False),
    RELEASED: ModelVariant(model="nalaformer_t"),
}


@dataclass(frozen=True, kw_only=True)
class ModelMeasurement:
    """One thing to measure."""

    variant: str
    """A name of MODEL_VARIANTS."""
    image_size: int
    batch: int
    direction: str
    device: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options of the backbone, on top of the variant's: smaller networks for a look."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.device]


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """What was measured; figures only where the outcome is MEASURED."""

    measurement: ModelMeasurement
    outcome: str
    """MEASURED, WRONG, OUT_OF_MEMORY or FAILED."""
    reason: str = ""
    """Of a failure."""
    error: float | None = None
    """Of the logits against the reference path; None: there is none, or it ran out of memory."""
    median_ms: float | None = None
    peak_extra_mib: float | None = None
    """Beyond parameters and images; activations and gradients count. None also where the system cannot tell."""
    others_cpu: float | None = None
    """Share of the machine's CPU time that other processes took meanwhile; None where the system cannot tell."""

    @property
    def images_per_second(self) -> float | None:
        return 1e3 * self.measurement.batch / self.median_ms if self.median_ms else None


def plan_models(
    device: str, sizes: Sequence[int] | None = None, *, changes: Mapping[str, Any] | None = None
) -> list[ModelMeasurement]:
    """What will be measured, in order: first what the bars need."""
    if device not in BATCHES:
        raise ValueError(f"device must be one of {', '.join(BATCHES)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device was found, got device 'cuda'; use --device cpu")
    sizes = DEFAULT_SIZES[device] if sizes is None else sizes
    if not sizes or min(sizes) < 32:
        raise ValueError(f"image sizes must be at least 32, the stride of the last stage, got {list(sizes)}")
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
    say: Callable[[str], object] | None = None,
) -> list[ModelResult]:
    """Measure the plan, say each figure as it comes, write the CSV file after every one; then table and bars, as plain text.

    out: default benchmarks/results/models_<device>.csv. seconds: of timing per measurement. say: default a line on stdout.
    """
    from .models_report import model_bar_lines, models_table, progress_line, write_models_csv

    say = say or _say_on_stdout
    machine = describe_machine()
    measurements = plan_models(device, sizes, changes=changes)
    path = Path(out or f"benchmarks/results/models_{device}.csv")
    # a path that cannot be written should say so now and not after minutes
    path.parent.mkdir(parents=True, exist_ok=True)
    threads = f", {machine.threads} threads" if device == "cpu" else ""
    dtype = str(DTYPES[device]).removeprefix("torch.")
    say(f"{machine.device_name(device)}{threads}, {dtype}, torch {machine.torch}, commit {machine.commit}")
    results = []
    for number, measurement in enumerate(measurements, 1):
        results.append(measure_model(measurement, seconds=seconds))
        # whatever stops a long run, what it has measured stays
        write_models_csv(results, path, machine)
        say(f"[{number}/{len(measurements)}] {progress_line(results[-1])}")
    for line in (*models_table(results), *model_bar_lines(results)):
        say(line)
    say(f"results: {path}")
    return results


def _say_on_stdout(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def measure_model(measurement: ModelMeasurement, *, seconds: float = SECONDS, memory: bool = True) -> ModelResult:
    """Correctness, then time and memory; too little memory and a failure are outcomes."""
    try:
        result = _measure(measurement, seconds=seconds, memory=memory)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # a compiler's errors have no common class, and what follows can still be measured
        # the error itself must not live on: its frames hold the activations that did not fit
        outcome = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        result = ModelResult(measurement=measurement, outcome=outcome, reason=" ".join(str(error).split())[:300])
    give_back_memory()
    return result


def _measure(measurement: ModelMeasurement, *, seconds: float, memory: bool) -> ModelResult:
    error = None
    if MODEL_VARIANTS[measurement.variant].is_compared:
        error = relative_error(measurement)
        give_back_memory()
    # written so that NaN is wrong too
    if error is not None and not error <= LARGEST_ERROR[measurement.dtype]:
        return ModelResult(measurement=measurement, outcome=WRONG, error=error)
    clocks = OtherProcesses()
    mebibytes = None
    if memory and measurement.device == "cpu" and can_measure("cpu"):
        target = f"{__name__}:call_in_fresh_process"
        mebibytes, milliseconds = in_fresh_process(target, to_plain(measurement), seconds=seconds)
    else:
        call = make_model_call(measurement)
        # not captured: a training step as users run it, and what Python costs is part of it
        milliseconds = median_ms(call, device=measurement.device, seconds=seconds, capture=False)
        if memory and can_measure(measurement.device):
            mebibytes = peak_extra_mib(call, device=measurement.device)
    return ModelResult(
        measurement=measurement,
        outcome=MEASURED,
        error=error,
        median_ms=milliseconds,
        peak_extra_mib=mebibytes,
        others_cpu=clocks.share(),
    )


def make_model_call(measurement: ModelMeasurement) -> Callable[[], object]:
    """The call that is measured: logits without gradients in eval mode, or cross entropy and its gradients in train mode."""
    variant = MODEL_VARIANTS[measurement.variant]
    model = build_variant(measurement).train(measurement.direction == TRAINING)
    images = make_images(measurement, measurement.batch)
    if measurement.direction == FORWARD:

        def forward() -> object:
            with torch.no_grad(), use_backend(variant.backend):
                return model(images)

        return forward
    parameters = list(model.parameters())
    labels = torch.arange(measurement.batch, device=measurement.device)

    def step() -> object:
        with use_backend(variant.backend):
            logits = model(images)
            loss = F.cross_entropy(logits.float(), labels % logits.shape[1])
            return torch.autograd.grad(loss, parameters)

    return step


def build_variant(measurement: ModelMeasurement) -> nn.Module:
    """The network with the same random weights every time."""
    from ..models.vision import build

    variant = MODEL_VARIANTS[measurement.variant]
    torch.manual_seed(0)
    return build(variant.model, **{**variant.changes, **measurement.changes}).to(measurement.device, measurement.dtype)


def make_images(measurement: ModelMeasurement, number: int) -> Tensor:
    """Standard normal [number, 3, size, size]."""
    generator = torch.Generator().manual_seed(0)
    size = (number, 3, measurement.image_size, measurement.image_size)
    return torch.randn(size, generator=generator).to(measurement.device, measurement.dtype)


def relative_error(measurement: ModelMeasurement) -> float | None:
    """Of the logits of one image against those of the reference path; None where that path has too little memory."""
    model, image = build_variant(measurement).eval(), make_images(measurement, 1)
    with torch.no_grad():
        try:
            with use_backend("reference"):
                expected = model(image).double()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        with use_backend(MODEL_VARIANTS[measurement.variant].backend):
            found = model(image).double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-6)).item()


def is_out_of_memory(error: BaseException) -> bool:
    """On a GPU torch has a class for it, on a CPU only words, which also come back from a fresh process."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "MemoryError")
    is_named_so = any(word in str(error) for word in words)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and is_named_so)


def failure_of(error: BaseException) -> str:
    """What a row says of a measurement that broke off."""
    return OUT_OF_MEMORY if is_out_of_memory(error) else f"{FAILED}: {' '.join(str(error).split())[:300]}"


def give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def to_plain(measurement: ModelMeasurement) -> dict[str, object]:
    """The measurement as plain values, for another process."""
    return {**vars(measurement), "changes": dict(measurement.changes)}


def call_in_fresh_process(*, changes: dict[str, Any], **measurement: Any) -> Callable[[], object]:
    """The call of `to_plain`'s measurement, after a small one that starts threads and libraries."""
    # what was a tuple came as a list
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    small = measurement | {"image_size": 64, "batch": 2}
    make_model_call(ModelMeasurement(**small, changes=changes))()
    return make_model_call(ModelMeasurement(**measurement, changes=changes))
