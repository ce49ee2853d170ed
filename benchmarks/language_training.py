"""Training steps of language models: tokens a second and peak memory, ours beside transformers' Llama of the same widths."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nalaformer.machine import describe_machine
from nalaformer.ops import use_backend
from nalaformer.registry import unknown_name
from nalaformer.timing import median_ms

from .cases import check_device
from .measurement import Measurement, Result
from .memory import MIB
from .runner import Say, format_number, mistake_lines, run_plan, say_on_stdout
from .timing import OtherProcesses

TRAINING_COLUMNS = (
    "model", "form", "size", "device", "threads", "dtype", "batch", "context", "outcome", "tokens_per_second", "median_ms",
    "peak_mib", "relative_error", "others_cpu", "torch", "triton", "transformers", "nalaformer", "commit", "date",
)  # fmt: skip
LLAMA = "llama"
MODELS = ("linear", "forgetting", "delta", "gated_delta", "softmax", LLAMA)
EAGER, BLOCKS, WHOLE = "eager", "blocks", "whole"
FORMS = {
    EAGER: "as it is",
    BLOCKS: "torch.compile of each block, which all share",
    WHOLE: "torch.compile of the model",
}
SHAPES = {"cpu": ((2, 128),), "cuda": ((16, 2048), (4, 8192), (1, 32768))}
SIZES = {"cpu": "nano", "cuda": "340m"}
# |gradient of the embedding - that of the definition in float32| / |.|, two blocks
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
CHECKED = (2, 150)
KERNELS_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class TrainingMeasurement(Measurement):
    """Steps of a model: forward, backward, AdamW; weights and activations in one type."""

    model: str
    """A mixer, or LLAMA."""
    form: str
    """A name of FORMS."""
    batch: int
    context: int
    size: str
    """A name of nalaformer.models.language.SIZES."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration to change, for smaller networks."""
    largest_errors = LARGEST_ERROR

    @property
    def label(self) -> str:
        return f"{self.model}, {self.form}, {self.batch} x {self.context:,} tokens"

    @property
    def units(self) -> int:
        return self.batch * self.context

    @property
    def is_ours(self) -> bool:
        return self.model != LLAMA

    @property
    def subject(self) -> object:
        """Each model is checked once, as it is."""
        return self.model, self.size, self.changes, self.device

    def check(self, built: None) -> float | None:
        return checked_error(self) if self.is_ours else None

    def measure_call(self, built: None, *, seconds: float, memory: bool) -> dict[str, Any]:
        clocks, step = OtherProcesses(), make_step(self)
        milliseconds = median_ms(step, device=self.device, seconds=seconds, capture=False)
        peak = None
        if memory and self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated() / MIB
        return {"median_ms": milliseconds, "peak_mib": peak, "others_cpu": clocks.share()}

    def row(self, result: Result[Any]) -> dict[str, object]:
        own = {name: getattr(self, name) for name in ("model", "form", "size", "batch", "context")}
        return own | {"tokens_per_second": format_number(result.per_second), "peak_mib": format_number(result.peak_mib)}

    def describe(self, result: Result[Any]) -> str:
        memory = "" if result.peak_mib is None else f", peak {result.peak_mib / 1024:.1f} GiB"
        return f"{result.per_second:,.0f} tokens/s, {result.median_ms:.4g} ms{memory}"


TrainingResult = Result[TrainingMeasurement]


def plan_training(
    device: str,
    *,
    size: str | None = None,
    models: Sequence[str] | None = None,
    forms: Sequence[str] | None = None,
    shapes: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[TrainingMeasurement]:
    """Return the plan, model by model: each is checked once. shapes: rows x tokens, such as "16x2048"."""
    check_device(device)
    for name, chosen, known in (("model", models, MODELS), ("form", forms, FORMS)):
        for given in chosen or ():
            if given not in known:
                raise unknown_name(name, given, known)
    common: dict[str, Any] = {"device": device, "size": size or SIZES[device], "changes": changes or {}}
    return [
        TrainingMeasurement(model=model, form=form, batch=batch, context=context, **common)
        for model in models or MODELS
        for form in forms or (EAGER,)
        for batch, context in ([parse_shape(text) for text in shapes] if shapes else SHAPES[device])
    ]


def parse_shape(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    if not (batch.isdigit() and context.isdigit() and int(batch) > 0 and int(context) > 1):
        raise ValueError(f"a shape must be rows x tokens, at least two tokens, as 16x2048, got {text!r}")
    return int(batch), int(context)


def run_training(
    device: str,
    out: str | Path | None = None,
    *,
    seconds: float = 1.5,
    profile: bool = False,
    say: Say = say_on_stdout,
    **plan: Any,
) -> list[TrainingResult]:
    """Measure the plan, say each figure as it comes, and write the CSV file after every one.

    out: default benchmarks/results/training_<device>.csv. profile: then the kernels of one step of the first measurement.
    plan: the options of `plan_training`.
    """
    path, machine = Path(out or f"benchmarks/results/training_{device}.csv"), describe_machine()
    measurements = plan_training(device, **plan)
    results = run_plan(measurements, path, TRAINING_COLUMNS, machine, seconds=seconds, say=say)
    for line in mistake_lines(results):
        say(line)
    if profile:
        say(f"one step of {measurements[0].label}:")
        for line in kernel_lines(make_step(measurements[0]), device):
            say(line)
    say(f"results: {path}")
    return results


def build_model(measurement: TrainingMeasurement, **changes: Any) -> Any:
    """Random weights: speed does not depend on them."""
    from nalaformer.models.language import NaLaConfig, NaLaForCausalLM

    torch.manual_seed(0)
    changes = {**measurement.changes, **changes}
    with torch.device(measurement.device):
        if measurement.model != LLAMA:
            model: Any = NaLaForCausalLM(NaLaConfig.from_size(measurement.size, mixers=measurement.model, **changes))
        else:
            from transformers import LlamaConfig, LlamaForCausalLM

            like = NaLaConfig.from_size(measurement.size, **changes)
            names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            widths = {name: getattr(like, name) for name in names}
            model = LlamaForCausalLM(
                LlamaConfig(**widths, tie_word_embeddings=True, max_position_embeddings=measurement.context, use_cache=False)
            )
    return model.to(measurement.dtype).train()


def make_tokens(measurement: TrainingMeasurement, model: Any) -> Tensor:
    shape = (measurement.batch, measurement.context)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return tokens.to(measurement.device)


def make_step(measurement: TrainingMeasurement) -> Callable[[], Tensor]:
    """One step as users write it."""
    gc.collect()
    # graphs of other shapes and models
    torch.compiler.reset()
    model = build_model(measurement)
    tokens = make_tokens(measurement, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def compute_loss(tokens: Tensor) -> Tensor:
        return model(tokens, labels=tokens).loss

    call: Callable[[Tensor], Tensor] = compute_loss
    if measurement.form == BLOCKS:
        for block in model.model.layers:
            block.compile()
    elif measurement.form == WHOLE:
        call = torch.compile(compute_loss)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def checked_error(measurement: TrainingMeasurement) -> float:
    """The gradient of the embedding through two blocks, against the definition in float32."""
    small = replace(measurement, batch=CHECKED[0], context=CHECKED[1])
    model = build_model(small, num_hidden_layers=2)
    tokens = make_tokens(small, model)
    weight = model.get_input_embeddings().weight
    (found,) = torch.autograd.grad(model(tokens, labels=tokens).loss, weight)
    model.float()
    weight = model.get_input_embeddings().weight
    with use_backend("reference"):
        (exact,) = torch.autograd.grad(model(tokens, labels=tokens).loss, weight)
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def kernel_lines(step: Callable[[], object], device: str) -> list[str]:
    """Profile one step and return its kernels, longest first: milliseconds, calls, name."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        step()
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU] if on_gpu else [ProfilerActivity.CPU]) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    times = []
    for event in found.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # on a GPU: kernels alone, not the calls that launched them
        if spent > 0 and not (on_gpu and event.self_cpu_time_total > 0):
            times.append((spent / 1000, event.count, event.key))
    times.sort(reverse=True)
    return [f"{spent:9.2f} ms {count:6} x {name[:100]}" for spent, count, name in times[:KERNELS_SHOWN]]
