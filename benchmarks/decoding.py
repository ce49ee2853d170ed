"""Memory and speed of decoding at long contexts: converted decoders beside the softmax one with its cache.

Weights are random and caches are filled with random numbers: neither changes what a step costs. On a GPU every step is a CUDA
graph, for both sides, since Python alone takes longer than the device; eager steps stand in rows of their own, and so does what
users call, `generate`: the softmax model's steps are eager there, ours are graphs. What is timed was compared with the ordinary
eager model before, over some tokens after a prompt.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nalaformer.models.hybrid.attention import converted_attentions
from nalaformer.models.hybrid.cache import HybridCache
from nalaformer.models.hybrid.decoder import SteppingDecoder
from nalaformer.models.hybrid.model import HybridForCausalLM
from nalaformer.models.hybrid.stepping import Stepping

from .decoding_models import SOFTMAX, DecodeStudy, build_decoder
from .language import LARGEST_ERROR
from .measurement import Measurement, Result, give_back_memory
from .memory import MIB, peak_extra_mib
from .random_caches import ordinary_cache, random_cache
from .softmax_decoding import WAYS, FixedDecoder, FixedLayer, fastest_way

CAPTURED, EAGER, PLAIN = "replays of a CUDA graph", "eager", "eager, in place"
GENERATE = "generate"
# before the clock starts
WARM_UPS = 4
CHECKED_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class DecodeMeasurement(Measurement):
    """Cost of one decoding step of one method at one context."""

    study: DecodeStudy
    method: str
    context: int
    batch: int
    timed: str
    """What a time is of: CAPTURED, EAGER, GENERATE, or PLAIN (a device without graphs)."""
    largest_errors = LARGEST_ERROR

    @property
    def label(self) -> str:
        return f"decode: {self.method}, {self.context} tokens, batch {self.batch}, {self.timed}"

    @property
    def units(self) -> int:
        return self.batch

    @property
    def subject(self) -> object:
        return self.study, self.method, self.device

    def build(self) -> Any:
        return build_decoder(self.study, self.study.methods[self.method], device=self.device, dtype=self.dtype)

    def check(self, built: Any) -> float:
        return checked_error(built, self.study)

    def measure_call(self, built: Any, *, seconds: float, memory: bool) -> dict[str, Any]:
        """The number of steps is the study's, whatever the seconds."""
        of_this = {EAGER: measure_eager, GENERATE: measure_generate}.get(self.timed, measure_in_place)
        return of_this(built, self.study, self.context, self.batch)

    def row(self, result: Result[Any]) -> dict[str, object]:
        return {
            **{"part": "decode", "method": self.method, "task": f"{self.study.layers} x {self.study.width}"},
            **{"length": self.context, "batch": self.batch, "timed": self.timed, "cache_mib": result.cache_mib},
            **{"ms_per_step": result.median_ms, "tokens_per_second": result.per_second, "peak_mib": result.peak_mib},
        }

    def describe(self, result: Result[Any]) -> str:
        return f"{result.cache_mib:,.1f} MiB, {result.median_ms:.3f} ms a step"


def plan_decoding(study: DecodeStudy, device: str) -> list[DecodeMeasurement]:
    """All methods at all contexts; what waits for the host comes last."""
    in_place = CAPTURED if device == "cuda" else PLAIN
    cases = [(context, batch, in_place) for batch in study.batches for context in study.contexts]
    for timed, number in ((EAGER, study.eager_steps), (GENERATE, study.generated)):
        cases += [(context, min(study.batches), timed) for context in study.contexts if number]
    return [
        DecodeMeasurement(study=study, method=method, context=context, batch=batch, timed=timed, device=device)
        for method in study.methods
        for context, batch, timed in cases
    ]


def comparison(results: Sequence[Result[DecodeMeasurement]]) -> list[str]:
    """Each method's steps in place beside those of softmax at the same context and batch."""
    found = {
        (r.measurement.method, r.measurement.context, r.measurement.batch): r
        for r in results
        if r.measurement.timed in (CAPTURED, PLAIN) and r.cache_mib and r.median_ms
    }
    lines = []
    for (method, context, batch), ours in found.items():
        softmax = found.get((SOFTMAX, context, batch))
        if method != SOFTMAX and softmax is not None:
            less = 100 * (1 - (ours.cache_mib or 0) / (softmax.cache_mib or 1))
            faster = 100 * ((softmax.median_ms or 0) / (ours.median_ms or 1) - 1)
            gained = f"{less:.0f}% less cache than softmax, {faster:+.0f}% tokens a second"
            lines.append(f"{method}, {context} tokens, batch {batch}: {gained}")
    return lines


@contextmanager
def few_salient(model: Any) -> Iterator[None]:
    """Lowers the cap on salient tokens, so that those of the second chunk must compete with those of the first."""
    attentions = [part for attention in converted_attentions(model) for part in attention.hybrid.parts]
    before = [hybrid.settings for hybrid in attentions]
    for hybrid in attentions:
        cap = min(hybrid.settings.max_salient, hybrid.settings.salient_per_chunk)
        hybrid.settings = replace(hybrid.settings, max_salient=cap)
    try:
        yield
    finally:
        for hybrid, settings in zip(attentions, before, strict=True):
            hybrid.settings = settings


@torch.no_grad()
def checked_error(model: Any, study: DecodeStudy) -> float:
    """The largest |logits in place - logits of the eager model| / |.| of tokens after a prompt; a chunk leaves on the way."""
    # the third chunk is filled after half of the steps, and the second one leaves
    prompt = 3 * study.chunk_size - CHECKED_STEPS // 2
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (2, prompt + CHECKED_STEPS), device=model.device)
    with few_salient(model):
        return _error(model, tokens, prompt)


def _error(model: Any, tokens: Tensor, prompt: int) -> float:
    cache = model(tokens[:, :prompt], use_cache=True, logits_to_keep=1).past_key_values
    found: list[Tensor] = []
    after = tokens[:, prompt:]
    if isinstance(model, HybridForCausalLM):
        decoder = make_stepping(model, cache, tokens.shape[1])
        found = [decoder.step(token).clone() for token in after.unbind(1)]
        # then the same tokens as generate feeds them
        lent = deepcopy(cache)
        with steps_taken_over(model):
            found += [model(token, past_key_values=lent, use_cache=True).logits[:, 0] for token in after.split(1, 1)]
    else:
        room = [torch.cat((x, x[:, :, :1]), dim=2) for layer in cache.layers for x in (layer.keys, layer.values)]
        after = after[:, :1]
        for name in WAYS:
            model.set_attn_implementation(name)
            found.append(make_fixed(model, room[::2], room[1::2]).step(after).clone())
        model.set_attn_implementation("sdpa")
    # with gradients a converted model takes the way of prompts, which shares nothing with steps in place
    with torch.enable_grad():
        steps = [model(token, past_key_values=cache, use_cache=True).logits[:, 0].detach() for token in after.split(1, 1)]
    # the softmax model takes one step, in every way
    expected = torch.stack(steps).double().repeat(len(found) // len(steps), 1, 1)
    error = (torch.stack(found).double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    return error.max().item()


def measure_in_place(model: Any, study: DecodeStudy, context: int, batch: int) -> dict[str, Any]:
    """Greedy steps after `context` tokens, in memory of fixed size."""
    is_gpu, note = model.device.type == "cuda", ""
    if isinstance(model, HybridForCausalLM):
        cache = random_cache(model, study, context, batch)
        decoder: Any = make_stepping(model, cache, context + WARM_UPS + study.steps)
        del cache
        size = decoder.cache.nbytes
    else:
        room = (batch, study.key_heads, context + 1, study.head_dim)
        tensors = [torch.randn(room, device=model.device, dtype=model.dtype) for _ in range(2 * study.layers)]
        if is_gpu:
            note = choose_way(model, tensors[0], tensors[1])
        decoder = make_fixed(model, tensors[::2], tensors[1::2])
        size = decoder.nbytes
        del tensors
    if is_gpu:
        give_back_memory()
    token = torch.zeros(batch, dtype=torch.int64, device=model.device)
    seconds = seconds_per_step(lambda token: decoder.step(token).argmax(-1), token, study.steps)
    # replays allocate nothing that is counted, the same step without a graph does
    peak = torch.cuda.memory_allocated() / MIB + peak_extra_mib(decoder.run_step, device="cuda") if is_gpu else None
    return {"cache_mib": size / MIB, "median_ms": 1e3 * seconds, "peak_mib": peak, "note": note}


@torch.no_grad()
def measure_eager(model: Any, study: DecodeStudy, context: int, batch: int) -> dict[str, Any]:
    """A few eager steps with the cache that `generate` uses; on a GPU they are bound by the host."""
    cache, size = ordinary_cache(model, study, context, batch)

    def step(token: Tensor) -> Tensor:
        return model(token[:, None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

    token = torch.zeros(batch, dtype=torch.int64, device=model.device)
    seconds = seconds_per_step(step, token, study.eager_steps)
    note = f"{study.eager_steps} steps"
    if isinstance(model, HybridForCausalLM):
        first = context + WARM_UPS
        note += f", in which {(first + study.eager_steps) // study.chunk_size - first // study.chunk_size} chunks left"
    return {"cache_mib": size / MIB, "median_ms": 1e3 * seconds, "note": note}


@torch.no_grad()
def measure_generate(model: Any, study: DecodeStudy, context: int, batch: int) -> dict[str, Any]:
    """`generate` as users call it, after as many tokens as are in the cache: its second call, when graphs are there."""
    tokens, size, seconds = torch.zeros(batch, context + 1, dtype=torch.int64, device=model.device), 0, 0.0
    with steps_taken_over(model):
        for number in (WARM_UPS, study.generated):
            cache, size = ordinary_cache(model, study, context, batch)
            given = {"attention_mask": torch.ones_like(tokens), "past_key_values": cache}
            _finish(model)
            start = time.perf_counter()
            model.generate(tokens, **given, max_new_tokens=number, do_sample=False)
            _finish(model)
            seconds = (time.perf_counter() - start) / number
    return {"cache_mib": size / MIB, "median_ms": 1e3 * seconds, "note": f"{study.generated} tokens"}


@contextmanager
def steps_taken_over(model: Any) -> Iterator[None]:
    """Lets a decoder take all steps of a converted model; without graphs where the device has none."""
    if isinstance(model, HybridForCausalLM):
        model.stepping = Stepping(after=0, capture=None if model.device.type == "cuda" else False)
    try:
        yield
    finally:
        if isinstance(model, HybridForCausalLM):
            model.stepping = None


def seconds_per_step(step: Callable[[Tensor], Tensor], token: Tensor, steps: int) -> float:
    """Each step takes the token that the one before has found; by the clock, the host included."""
    for _ in range(WARM_UPS):
        token = step(token)
    _finish(token)
    start = time.perf_counter()
    for _ in range(steps):
        token = step(token)
    _finish(token)
    return (time.perf_counter() - start) / steps


def _finish(work: Any) -> None:
    """Wait for the device of a tensor or model."""
    if work.device.type == "cuda":
        torch.cuda.synchronize()


def make_stepping(model: HybridForCausalLM, cache: HybridCache, longest: int) -> SteppingDecoder:
    """Ours with room for `longest` tokens."""
    return SteppingDecoder(model, cache, capacity=longest)


def make_fixed(model: Any, keys: list[Tensor], values: list[Tensor]) -> Any:
    layers = [FixedLayer(*pair) for pair in zip(keys, values, strict=True)]
    return FixedDecoder(model, layers, capture=model.device.type == "cuda")


def choose_way(model: Any, keys: Tensor, values: Tensor) -> str:
    """Let the softmax model attend in the faster way at this context; what was found."""
    heads = model.config.num_attention_heads
    query = torch.randn(len(keys), heads, 1, keys.shape[-1], device=keys.device, dtype=keys.dtype)
    name, note = fastest_way(query, keys, values)
    model.set_attn_implementation(name)
    return note
