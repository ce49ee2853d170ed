"""Memory and speed of decoding at long contexts: converted decoders beside the softmax one with its cache.

Weights are random and caches are filled with random numbers: neither changes what a step costs. On a GPU every step is a CUDA
graph, for both sides, since Python alone takes longer than the device; eager steps stand in rows of their own, and so does what
users call, `generate`: the softmax model's steps are eager there, ours are graphs. What is timed was compared with the ordinary
eager model before, over some tokens after a prompt.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.hybrid import HybridSettings, hybrid_settings, salient_tokens
from ..models.hybrid.attention import converted_attentions
from ..models.hybrid.cache import HybridCache
from ..models.hybrid.decoder import SteppingDecoder
from ..models.hybrid.model import HybridForCausalLM
from ..models.hybrid.stepping import Stepping
from .language import LARGEST_ERROR
from .memory import MIB, peak_extra_mib
from .models import WRONG, failure_of, give_back_memory
from .random_caches import ordinary_cache, random_cache

CAPTURED, EAGER, PLAIN = "replays of a CUDA graph", "eager", "eager, in place"
GENERATE = "generate"
SOFTMAX = "softmax"
# before the clock starts
WARM_UPS = 4
CHECKED_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class DecodeStudy:
    """A decoder of the Llama family, its conversions, and what is measured of them."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    key_heads: int = 8
    chunk_size: int = 64
    salient_per_chunk: int = 4
    max_salient: int = 1024
    contexts: tuple[int, ...] = (8192, 32_768, 131_072)
    batches: tuple[int, ...] = (1, 8)
    """Samples that are decoded together; what does not fit is said so."""
    steps: int = 128
    """A chunk leaves the window once in as many steps as it has tokens: two of them belong to every measurement."""
    eager_steps: int = 12
    """Of the rows that are bound by the host, of the smallest batch; 0: no such rows."""
    generated: int = 128
    """Tokens of the rows of `generate`, of the smallest batch; 0: no such rows."""

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def methods(self) -> dict[str, HybridSettings | None]:
        """By name; None: softmax with a cache of all keys and values."""
        store = {"chunk_size": self.chunk_size, "salient_per_chunk": self.salient_per_chunk}
        capped = hybrid_settings("still", max_salient=self.max_salient, **store)
        return {
            SOFTMAX: None,
            f"still, at most {self.max_salient} salient": capped,
            "still, no cap": replace(capped, max_salient=0),
            "window": hybrid_settings("window", chunk_size=self.chunk_size),
        }


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What one method costs at one context."""

    timed: str
    """What a time is of: CAPTURED, EAGER, GENERATE, or PLAIN (a device without graphs)."""
    cache_mib: float
    """Of all that is remembered of the tokens, room for what comes included."""
    ms_per_step: float
    tokens_per_second: float
    peak_mib: float | None = None
    """Most memory at any moment of a step, weights included; None on a CPU, for eager steps and for generate."""
    note: str = ""


def run_decoding(
    study: DecodeStudy, *, device: str, add: Callable[..., None], say: Callable[[str], object], deadline: float
) -> None:
    """All methods at all contexts; `add` takes the columns of a row, and nothing is begun after the deadline."""
    results: dict[tuple[str, int, int], Decoding] = {}
    dtype, in_place = (torch.bfloat16, CAPTURED) if device == "cuda" else (torch.float32, PLAIN)
    for name, settings in study.methods.items():
        if time.monotonic() > deadline:
            say(f"decode: {name}: not begun, the time is over")
            continue
        row: dict[str, Any] = {"part": "decode", "method": name, "task": f"{study.layers} x {study.width}"}
        model = build_decoder(study, settings, device=device, dtype=dtype)
        try:
            row["error"] = checked_error(model, study)
            # written so that NaN is wrong too
            reason = "" if row["error"] <= LARGEST_ERROR[dtype] else WRONG
        except RuntimeError as failure:
            reason = failure_of(failure)
        if reason:
            add(**row, note=reason)
            say(f"decode: {name}: {reason}, error {row.get('error')}")
        for context, batch, timed in () if reason else _cases(study, in_place):
            if time.monotonic() > deadline:
                break
            row |= {"length": context, "batch": batch}
            try:
                found = {EAGER: measure_eager, GENERATE: measure_generate}.get(timed, measure)(model, study, context, batch)
            except RuntimeError as failure:  # what follows can still be measured
                add(**row, timed=timed, note=failure_of(failure))
                say(f"decode: {name}, {context} tokens, batch {batch}, {timed}: {failure_of(failure)}")
            else:
                if timed == in_place:
                    results[name, context, batch] = found
                add(**row, **asdict(found))
                say(
                    f"decode: {name}, {context} tokens, batch {batch}, {found.timed}: {found.cache_mib:,.1f} MiB, "
                    f"{found.ms_per_step:.3f} ms a step"
                )
            _give_back(device)
        del model
        _give_back(device)
    for line in comparison(results):
        say(line)


def comparison(results: dict[tuple[str, int, int], Decoding]) -> list[str]:
    """Each method beside softmax at the same context and batch; results by method, context and batch."""
    lines = []
    for (name, context, batch), found in results.items():
        softmax = results.get((SOFTMAX, context, batch))
        if name != SOFTMAX and softmax is not None:
            less = 100 * (1 - found.cache_mib / softmax.cache_mib)
            faster = 100 * (softmax.ms_per_step / found.ms_per_step - 1)
            lines.append(
                f"{name}, {context} tokens, batch {batch}: {less:.0f}% less cache than softmax, {faster:+.0f}% tokens a second"
            )
    return lines


def _give_back(device: str) -> None:
    # looking for what nobody holds any more takes long, and pays where it frees much
    if device == "cuda":
        give_back_memory()


def _cases(study: DecodeStudy, in_place: str) -> list[tuple[int, int, str]]:
    """Contexts, batches, and what is timed; what waits for the host comes last."""
    found = [(context, batch, in_place) for batch in study.batches for context in study.contexts]
    for timed, number in ((EAGER, study.eager_steps), (GENERATE, study.generated)):
        found += [(context, min(study.batches), timed) for context in study.contexts if number]
    return found


def build_decoder(study: DecodeStudy, settings: HybridSettings | None, *, device: str, dtype: torch.dtype) -> Any:
    """The softmax model, or the same one converted, with gates in its own type."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=study.width,
        intermediate_size=4 * study.width,
        num_hidden_layers=study.layers,
        num_attention_heads=study.heads,
        num_key_value_heads=study.key_heads,
        max_position_embeddings=2**18,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model = with_fused_norms(model.to(dtype))
    if settings is not None:
        model = HybridForCausalLM.convert(model, settings)
        # steps are what each measurement says
        model.stepping = None
        for attention in converted_attentions(model):
            if attention.hybrid.gate is not None:
                attention.hybrid.gate.to(dtype=dtype)
    return model.eval()


def with_fused_norms(model: Any) -> Any:
    """The same model with torch's RMSNorm: one kernel where transformers' takes six, in what both sides share."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


@contextmanager
def few_salient(model: Any) -> Iterator[None]:
    """Within, a cap on salient tokens is so low that the second chunk's must compete with the first one's."""
    attentions = [attention.hybrid for attention in converted_attentions(model)]
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
        # the same in the way of generate
        lent = deepcopy(cache)
        with steps_taken_over(model):
            found += [model(token, past_key_values=lent, use_cache=True).logits[:, 0] for token in after.split(1, 1)]
    else:
        from .fixed_layer import WAYS

        room = [torch.cat((x, x[:, :, :1]), dim=2) for layer in cache.layers for x in (layer.keys, layer.values)]
        after = after[:, :1]
        for name in WAYS:
            model.set_attn_implementation(name)
            found.append(make_fixed(model, room[::2], room[1::2]).step(after).clone())
        model.set_attn_implementation("sdpa")
    steps = [model(token, past_key_values=cache, use_cache=True).logits[:, 0] for token in after.split(1, 1)]
    # the softmax model takes one step, in every way
    expected = torch.stack(steps).double().repeat(len(found) // len(steps), 1, 1)
    error = (torch.stack(found).double() - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    return error.max().item()


def measure(model: Any, study: DecodeStudy, context: int, batch: int) -> Decoding:
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
    _give_back(model.device.type)
    token = torch.zeros(batch, dtype=torch.int64, device=model.device)
    seconds = seconds_per_step(lambda token: decoder.step(token).argmax(-1), token, study.steps)
    # replays allocate nothing that is counted, the same step without a graph does
    peak = torch.cuda.memory_allocated() / MIB + peak_extra_mib(decoder.run_step, device="cuda") if is_gpu else None
    return Decoding(
        timed=CAPTURED if is_gpu else PLAIN,
        cache_mib=size / MIB,
        ms_per_step=1e3 * seconds,
        tokens_per_second=batch / seconds,
        peak_mib=peak,
        note=note,
    )


@torch.no_grad()
def measure_eager(model: Any, study: DecodeStudy, context: int, batch: int) -> Decoding:
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
    return Decoding(timed=EAGER, cache_mib=size / MIB, ms_per_step=1e3 * seconds, tokens_per_second=batch / seconds, note=note)


@torch.no_grad()
def measure_generate(model: Any, study: DecodeStudy, context: int, batch: int) -> Decoding:
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
    note = f"{study.generated} tokens"
    return Decoding(
        timed=GENERATE, cache_mib=size / MIB, ms_per_step=1e3 * seconds, tokens_per_second=batch / seconds, note=note
    )


@contextmanager
def steps_taken_over(model: Any) -> Iterator[None]:
    """Within, steps of a converted model are a decoder's from the first one on, without graphs where there are none."""
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
    settings = converted_attentions(model)[0].hybrid.settings
    capacity = None if settings.largest_store else salient_tokens(longest, settings)
    return SteppingDecoder(model, cache, capacity=capacity)


def make_fixed(model: Any, keys: list[Tensor], values: list[Tensor]) -> Any:
    # transformers is imported where a model is there
    from .fixed_layer import FixedDecoder, FixedLayer

    layers = [FixedLayer(*pair) for pair in zip(keys, values, strict=True)]
    return FixedDecoder(model, layers, capture=model.device.type == "cuda")


def choose_way(model: Any, keys: Tensor, values: Tensor) -> str:
    """Let the softmax model attend in the faster way at this context; what was found."""
    from .fixed_layer import fastest_way

    heads = model.config.num_attention_heads
    query = torch.randn(len(keys), heads, 1, keys.shape[-1], device=keys.device, dtype=keys.dtype)
    name, note = fastest_way(query, keys, values)
    model.set_attn_implementation(name)
    return note
