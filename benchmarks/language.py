"""Language models: tokens per second and memory against the context, and one layer's pass over a long prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nalaformer.machine import describe_machine
from nalaformer.ops import use_backend
from nalaformer.ops.graphs import NotCapturable
from nalaformer.timing import median_ms

from .cases import check_device
from .language_picture import draw_language
from .measurement import Measurement, Result
from .memory import MIB, peak_extra_mib
from .runner import Bar, Say, busy_lines, format_number, mistake_lines, run_plan, say_on_stdout
from .timing import OtherProcesses

if TYPE_CHECKING:
    from nalaformer.models.language import NaLaCache, NaLaConfig, NaLaForCausalLM

LANGUAGE_COLUMNS = (
    "what", "mixer", "size", "device", "threads", "dtype", "batch", "context", "cache_filled_with", "outcome",
    "tokens_per_second", "median_ms", "timed", "cache_mib", "peak_extra_mib", "relative_error", "others_cpu", "torch",
    "triton", "transformers", "flash_linear_attention", "nalaformer", "commit", "date",
)  # fmt: skip
DECODE, PREFILL = "decode", "prefill of one layer"
MIXERS = ("linear", "forgetting", "gated_delta", "softmax")
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
# tensors of a recurrent layer that are filled; counts and scales stay as a short prompt left them
RANDOM_TENSORS = {"state", "key_sum", "tail"}
GRAPH, EAGER = "replays of a CUDA graph", "eager calls"
RECURRENT = tuple(mixer for mixer in MIXERS if mixer != "softmax")
# a token after the longest context may take that many times the one after the shortest
FLAT = 1.1
LEAST_PREFILL_SPEEDUP = 5.0


@dataclass(frozen=True, kw_only=True)
class LanguageMeasurement(Measurement):
    """A token after a context, or a layer over a prompt."""

    what: str
    """DECODE: one token of the whole model after `context` tokens; PREFILL: one mixer over `context` tokens."""
    mixer: str
    batch: int
    context: int
    size: str
    """A name of nalaformer.models.language.SIZES."""
    filled: str = ""
    """What the cache of a DECODE holds: REAL or RANDOM."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration to change, for smaller networks."""
    largest_errors = LARGEST_ERROR

    @property
    def label(self) -> str:
        filled = f", cache of {self.filled}" if self.filled else ""
        return f"{self.what}, {self.mixer}, {self.context:,} tokens x {self.batch}{filled}"

    @property
    def units(self) -> int:
        return self.batch * (1 if self.what == DECODE else self.context)

    @property
    def subject(self) -> object:
        """The weights of a mixer are made once, and it is checked once."""
        return self.mixer, self.size, self.changes, self.device

    def build(self) -> "NaLaForCausalLM":
        return build_model(self)

    def check(self, built: "NaLaForCausalLM") -> float:
        return checked_error(self)

    def measure_call(self, built: "NaLaForCausalLM", *, seconds: float, memory: bool) -> dict[str, Any]:
        clocks, on_gpu = OtherProcesses(), self.device == "cuda"
        cache = make_cache(self, built) if self.what == DECODE else None
        call = make_prefill(self, built) if cache is None else make_step(self, built, cache)
        capture = on_gpu and cache is not None
        try:
            milliseconds = median_ms(call, device=self.device, seconds=seconds, capture=capture)
        except NotCapturable:
            capture = False
            milliseconds = median_ms(call, device=self.device, seconds=seconds, capture=False)
        return {
            "median_ms": milliseconds,
            "timed": GRAPH if capture else EAGER,
            "cache_mib": None if cache is None else cache.nbytes / MIB,
            "peak_extra_mib": peak_extra_mib(call, device=self.device) if memory and on_gpu else None,
            "others_cpu": clocks.share(),
        }

    def row(self, result: Result[Any]) -> dict[str, object]:
        own = {name: getattr(self, name) for name in ("what", "mixer", "size", "batch", "context")}
        return own | {"cache_filled_with": self.filled, "tokens_per_second": format_number(result.per_second)}

    def describe(self, result: Result[Any]) -> str:
        memory = "" if result.cache_mib is None else f", cache {result.cache_mib:,.4g} MiB"
        return f"{result.median_ms:.4g} ms, {result.per_second:,.4g} tokens/s{memory}"


LanguageResult = Result[LanguageMeasurement]


def plan_language(
    device: str,
    *,
    size: str | None = None,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    prefill: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[LanguageMeasurement]:
    """Return the plan of each mixer: the prefill of one layer, then decoding by batch and context."""
    check_device(device)
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
    device: str, out: str | Path | None = None, *, seconds: float = 0.5, say: Say = say_on_stdout, **plan: Any
) -> list[LanguageResult]:
    """Measure the plan and print each result; write a CSV file, a plot beside it, and a summary.

    out: default benchmarks/results/language_<device>.csv. plan: the options of `plan_language`.
    """
    path, machine = Path(out or f"benchmarks/results/language_{device}.csv"), describe_machine()
    results = run_plan(plan_language(device, **plan), path, LANGUAGE_COLUMNS, machine, seconds=seconds, say=say)
    shown = [r for r in results if r.measurement.what == DECODE and r.measurement.filled == RANDOM and r.median_ms]
    if shown:
        draw_language(shown, path.with_suffix(".png"), machine)
    for line in language_lines(results):
        say(line)
    say(f"results: {path}" + (f", picture: {path.with_suffix('.png')}" if shown else ""))
    return results


def configuration(measurement: LanguageMeasurement, **changes: Any) -> "NaLaConfig":
    from nalaformer.models.language import NaLaConfig

    return NaLaConfig.from_size(measurement.size, mixers=measurement.mixer, **{**measurement.changes, **changes})


def build_model(measurement: LanguageMeasurement, **changes: Any) -> "NaLaForCausalLM":
    """Random weights: speed does not depend on them."""
    from nalaformer.models.language import NaLaForCausalLM

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
    from nalaformer.models.language.cache import NaLaCache, RecurrentLayer

    from .softmax_decoding import FixedLayer

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
    """Feed one new token again and again: states advance in place, the last key and value are overwritten."""
    token = make_tokens(measurement, model, 1)

    def step() -> Tensor:
        with torch.no_grad():
            return model(token, past_key_values=cache).logits

    return step


def make_prefill(measurement: LanguageMeasurement, model: "NaLaForCausalLM") -> Callable[[], object]:
    """The first mixer with its projections over `context` tokens, without a cache."""
    from nalaformer.models.language.tokens import describe_tokens

    mixer = model.model.layers[0].mixer
    shape = (measurement.batch, measurement.context, model.config.hidden_size)
    hidden = torch.randn(shape, device=measurement.device, dtype=measurement.dtype)
    tokens = describe_tokens(model.model.rotary_emb, hidden, attention_mask=None, position_ids=None, cu_seqlens=None, past=0)

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


def language_bars(results: Sequence[LanguageResult]) -> list[Bar]:
    """Return the targets: flat decoding, constant memory, a fast prefill; skip those that were not measured."""
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
    lines = [bar.line for bar in language_bars(results)]
    pairs: dict[tuple[str, int, int], dict[str, float]] = {}
    for result in results:
        m = result.measurement
        if m.what == DECODE and result.median_ms:
            pairs.setdefault((m.mixer, m.batch, m.context), {})[m.filled] = result.median_ms
    for (mixer, batch, context), times in pairs.items():
        if REAL in times and RANDOM in times:
            ratio = times[RANDOM] / times[REAL]
            lines.append(f"{mixer}, {context:,} tokens x {batch}: a random cache takes {ratio:.3f}x the time of a real one")
    return lines + busy_lines(results) + mistake_lines(results)
