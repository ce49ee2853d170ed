"""Measure language models: tokens per second and memory against the context, and one layer's pass over a long prompt."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops import use_backend
from .cases import DTYPES
from .machine import describe_machine
from .memory import MIB, peak_extra_mib
from .models import FAILED, MEASURED, OUT_OF_MEMORY, WRONG, give_back_memory, is_out_of_memory
from .timing import OtherProcesses, median_ms

if TYPE_CHECKING:
    from ..models.language import NaLaCache, NaLaConfig, NaLaForCausalLM

DECODE, PREFILL = "decode", "prefill of one layer"
MIXERS = ("linear", "gated_delta", "softmax")
CONTEXTS = {"cpu": (1024, 4096, 16384), "cuda": (1024, 4096, 16384, 65536, 131072)}
BATCHES = {"cpu": (1,), "cuda": (1, 8)}
SIZES = {"cpu": "tiny", "cuda": "340m"}
PREFILL_TOKENS = {"cpu": 8192, "cuda": 131072}
# |step after a cache - the whole without one, in float32 by the definition| / |.| over the logits of two blocks
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
CHECKED_TOKENS = 150
# up to here a cache is filled by a pass over a prompt as well as with random numbers, to show that both cost the same
LONGEST_REAL_PROMPT = 1024
REAL, RANDOM = "prompt", "random numbers"
# of a recurrent layer; counts and scales keep what a short prompt has left
RANDOM_TENSORS = {"state", "key_sum", "tail"}


@dataclass(frozen=True, kw_only=True)
class LanguageMeasurement:
    """One thing to measure."""

    what: str
    """DECODE: one token of the whole model after `context` tokens; PREFILL: one mixer over `context` tokens."""
    mixer: str
    batch: int
    context: int
    device: str
    size: str
    """A name of nalaformer.models.language.SIZES."""
    filled: str = ""
    """What the cache of a DECODE holds: REAL or RANDOM."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, for smaller networks."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.device]


@dataclass(frozen=True, kw_only=True)
class LanguageResult:
    """What was measured; figures only where the outcome is MEASURED."""

    measurement: LanguageMeasurement
    outcome: str
    reason: str = ""
    error: float | None = None
    """Of the logits of a small network with this mixer on this device, against the definition."""
    median_ms: float | None = None
    timed: str = ""
    """What a time is: of replays of a CUDA graph, or of eager calls."""
    cache_mib: float | None = None
    peak_extra_mib: float | None = None
    """Beyond weights and cache; None on a CPU."""
    others_cpu: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        if not self.median_ms:
            return None
        tokens = 1 if self.measurement.what == DECODE else self.measurement.context
        return 1e3 * tokens * self.measurement.batch / self.median_ms


def plan_language(
    device: str,
    *,
    size: str | None = None,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    prefill: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[LanguageMeasurement]:
    """What will be measured of each mixer: the prefill of one layer, then decoding by batch and context."""
    if device not in CONTEXTS:
        raise ValueError(f"device must be one of {', '.join(CONTEXTS)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device was found, got device 'cuda'; use --device cpu")
    contexts, batches = sorted(set(contexts or CONTEXTS[device])), sorted(set(batches or BATCHES[device]))
    if contexts[0] < 2 or batches[0] < 1:
        raise ValueError(f"contexts must be at least 2 tokens and batches at least 1, got {contexts} and {batches}")
    common: dict[str, Any] = {"device": device, "size": size or SIZES[device], "changes": changes or {}}
    found, tokens = [], prefill or PREFILL_TOKENS[device]
    # by mixer, whose weights are made once
    for mixer in MIXERS:
        found.append(LanguageMeasurement(what=PREFILL, mixer=mixer, batch=1, context=tokens, **common))
        for batch in batches:
            for context in contexts:
                for filled in (REAL, RANDOM) if context <= LONGEST_REAL_PROMPT else (RANDOM,):
                    place: dict[str, Any] = {"batch": batch, "context": context, "filled": filled}
                    found.append(LanguageMeasurement(what=DECODE, mixer=mixer, **place, **common))
    return found


def run_language(
    device: str, out: str | Path | None = None, *, seconds: float = 0.5, say: Callable[[str], object] | None = None, **plan: Any
) -> list[LanguageResult]:
    """Measure the plan, say each figure as it comes; CSV file, picture beside it, and what the figures say.

    out: default benchmarks/results/language_<device>.csv. plan: the options of `plan_language`.
    """
    from .language_report import draw_language, language_lines, progress_line, write_language_csv

    say = say or _say_on_stdout
    machine, measurements = describe_machine(), plan_language(device, **plan)
    path = Path(out or f"benchmarks/results/language_{device}.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = str(DTYPES[device]).removeprefix("torch.")
    say(f"{machine.device_name(device)}, {dtype}, torch {machine.torch}, commit {machine.commit}")
    results: list[LanguageResult] = []
    errors: dict[str, float] = {}
    model: NaLaForCausalLM | None = None
    for number, measurement in enumerate(measurements, 1):
        if measurement.mixer not in errors:
            errors[measurement.mixer] = _attempt_error(measurement)
        if model is not None and list(set(model.config.mixer_of_layers)) != [measurement.mixer]:
            model = None
            give_back_memory()
        if model is None:
            model = build_model(measurement)
        results.append(measure_language(measurement, model, error=errors[measurement.mixer], seconds=seconds))
        # whatever stops a long run, what it has measured stays
        write_language_csv(results, path, machine)
        say(f"[{number}/{len(measurements)}] {progress_line(results[-1])}")
    picture = draw_language(results, path.with_suffix(".png"), machine)
    for line in language_lines(results):
        say(line)
    say(f"results: {path}" + (f", picture: {picture}" if picture else ""))
    return results


def _say_on_stdout(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _attempt_error(measurement: LanguageMeasurement) -> float:
    try:
        return checked_error(measurement)
    except ModuleNotFoundError:
        raise
    except Exception:  # the compilers of kernels have no common class of errors; what does not run is not right
        return float("nan")


def measure_language(
    measurement: LanguageMeasurement, model: "NaLaForCausalLM", *, error: float, seconds: float = 0.5
) -> LanguageResult:
    """Time and memory, where the mixer was found right; too little memory and a failure are outcomes."""
    # written so that NaN is wrong too
    if not error <= LARGEST_ERROR[measurement.dtype]:
        return LanguageResult(measurement=measurement, outcome=WRONG, error=error)
    try:
        result = _measure(measurement, model, error=error, seconds=seconds)
    except ModuleNotFoundError:
        raise
    except Exception as failure:  # as above: what follows can still be measured
        outcome = OUT_OF_MEMORY if is_out_of_memory(failure) else FAILED
        reason = " ".join(str(failure).split())[:300]
        result = LanguageResult(measurement=measurement, outcome=outcome, reason=reason, error=error)
    give_back_memory()
    return result


def _measure(measurement: LanguageMeasurement, model: "NaLaForCausalLM", *, error: float, seconds: float) -> LanguageResult:
    clocks, cache = OtherProcesses(), None
    if measurement.what == DECODE:
        cache = make_cache(measurement, model)
        call = make_step(measurement, model, cache)
    else:
        call = make_prefill(measurement, model)
    device, timed = measurement.device, "eager calls"
    try:
        capture = device == "cuda" and measurement.what == DECODE
        milliseconds = median_ms(call, device=device, seconds=seconds, capture=capture)
        timed = "replays of a CUDA graph" if capture else timed
    except RuntimeError as failure:
        if device != "cuda" or is_out_of_memory(failure):
            raise
        milliseconds = median_ms(call, device=device, seconds=seconds, capture=False)
    return LanguageResult(
        measurement=measurement,
        outcome=MEASURED,
        error=error,
        median_ms=milliseconds,
        timed=timed,
        cache_mib=None if cache is None else cache.nbytes / MIB,
        peak_extra_mib=peak_extra_mib(call, device=device) if device == "cuda" else None,
        others_cpu=clocks.share(),
    )


def configuration(measurement: LanguageMeasurement, **changes: Any) -> "NaLaConfig":
    from ..models.language import NaLaConfig

    return NaLaConfig.from_size(measurement.size, mixers=measurement.mixer, **{**measurement.changes, **changes})


def build_model(measurement: LanguageMeasurement, **changes: Any) -> "NaLaForCausalLM":
    """Random weights: speed does not depend on them."""
    from ..models.language import NaLaForCausalLM

    torch.manual_seed(0)
    with torch.device(measurement.device):
        model = NaLaForCausalLM(configuration(measurement, **changes)).eval()
    model.to(dtype=measurement.dtype)
    return model


def make_tokens(measurement: LanguageMeasurement, model: "NaLaForCausalLM", length: int) -> Tensor:
    size = (measurement.batch, length)
    tokens = torch.randint(0, model.config.vocab_size, size, generator=torch.Generator().manual_seed(0))
    return tokens.to(measurement.device)


@torch.no_grad()
def make_cache(measurement: LanguageMeasurement, model: "NaLaForCausalLM") -> "NaLaCache":
    """The cache after `context` tokens; exact layers hold memory for all of them and one more."""
    from ..models.language.cache import NaLaCache, RecurrentLayer
    from .fixed_layer import FixedLayer

    cache = NaLaCache(model.config)
    is_real = measurement.filled == REAL
    model(make_tokens(measurement, model, measurement.context if is_real else 2), past_key_values=cache, logits_to_keep=1)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, RecurrentLayer):
            layer.seen = measurement.context
            if not is_real:
                for name in RANDOM_TENSORS & set(layer.tensors):
                    layer.tensors[name].normal_()
            continue
        assert layer.keys is not None
        assert layer.values is not None
        heads, channels = layer.keys.shape[1], layer.keys.shape[3]
        room = (measurement.batch, heads, measurement.context + 1, channels)
        keys, values = (torch.randn(room, device=layer.keys.device, dtype=layer.keys.dtype) for _ in range(2))
        if is_real:
            keys[:, :, :-1], values[:, :, :-1] = layer.keys, layer.values
        cache.layers[number] = FixedLayer(keys, values)
    return cache


def make_step(measurement: LanguageMeasurement, model: "NaLaForCausalLM", cache: "NaLaCache") -> Callable[[], object]:
    """One new token, again and again: states go on in place, the last place of keys and values is written anew."""
    token = make_tokens(measurement, model, 1)

    def step() -> Tensor:
        with torch.no_grad():
            return model(token, past_key_values=cache).logits

    return step


def make_prefill(measurement: LanguageMeasurement, model: "NaLaForCausalLM") -> Callable[[], object]:
    """The first mixer with its projections over `context` tokens, without a cache."""
    from ..models.language.tokens import describe_tokens

    mixer = model.model.layers[0].mixer
    shape = (measurement.batch, measurement.context, model.config.hidden_size)
    hidden = torch.randn(shape, device=measurement.device, dtype=measurement.dtype)
    tokens = describe_tokens(model.config, hidden, attention_mask=None, position_ids=None, cu_seqlens=None, past=0)

    def prefill() -> Tensor:
        with torch.no_grad():
            return mixer(hidden, tokens, None)

    return prefill


@torch.no_grad()
def checked_error(measurement: LanguageMeasurement) -> float:
    """Logits of single tokens after a cached prompt, two blocks, against the whole by the definition in float32."""
    model = build_model(measurement, num_hidden_layers=2)
    tokens = make_tokens(measurement, model, CHECKED_TOKENS)
    cache = model(tokens[:, :-2], use_cache=True).past_key_values
    found = torch.cat([model(token, past_key_values=cache).logits for token in tokens[:, -2:].split(1, dim=1)], dim=1)
    with use_backend("reference"):
        expected = model.float()(tokens, use_cache=False).logits[:, -2:].double()
    return ((found.double() - expected).norm() / expected.norm()).item()
