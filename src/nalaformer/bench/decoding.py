"""Memory and speed of decoding at long contexts: a converted decoder beside the softmax one with its cache.

Weights are random and caches are filled with random keys and values: neither changes what a step costs.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.hybrid import HybridSettings, recurrent_hybrid_attention
from ..models.hybrid.attention import converted_attentions
from ..models.hybrid.cache import HybridCache
from ..models.hybrid.model import HybridForCausalLM

MIB = 2**20
# a chunk leaves the window once in as many steps as it has tokens: two of them belong to every measurement
STEPS = 128


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """A decoder of the Llama family."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    key_heads: int = 8

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What one method costs at one context."""

    cache_mib: float
    """Of all that is remembered of the tokens."""
    ms_per_step: float
    tokens_per_second: float
    peak_mib: float | None
    """Most memory at any moment of the steps, weights included; None on a CPU."""


def build_decoder(shape: DecodeShape, *, device: str, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=2**18,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


@torch.no_grad()
def softmax_cache(model: Any, context: int, batch: int) -> Any:
    """transformers' growing cache with `context` random tokens."""
    from transformers import DynamicCache

    cache, config = DynamicCache(config=model.config), model.config
    head_dim = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        shape = (batch, config.num_key_value_heads, context, head_dim)
        keys, values = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


@torch.no_grad()
def hybrid_cache(model: HybridForCausalLM, shape: DecodeShape, context: int, batch: int) -> HybridCache:
    """Ours after `context` random tokens; one layer's state serves all, each with a copy of its own."""
    cache = HybridCache(model.config)
    hybrid = converted_attentions(model)[0].hybrid
    sizes = [(batch, shape.heads), (batch, shape.key_heads), (batch, shape.key_heads)]
    state, done = None, 0
    while done < context:
        tokens = min(4096, context - done)
        q, k, v = (torch.randn(b, tokens, h, shape.head_dim, device=model.device, dtype=model.dtype) for b, h in sizes)
        _, state = recurrent_hybrid_attention(q, k, v, feature_map=hybrid.map, settings=hybrid.settings, state=state)
        done += tokens
    assert state is not None
    everyone = torch.arange(batch, device=model.device)
    for layer in cache.layers:
        layer.put(state.select(everyone), context)
    return cache


def cache_bytes(cache: Any) -> int:
    if isinstance(cache, HybridCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.no_grad()
def measure_decoding(model: Any, cache: Any, *, batch: int, steps: int = STEPS) -> Decoding:
    """Greedy steps after the cache; the first few are not timed."""
    is_gpu = model.device.type == "cuda"
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    size = cache_bytes(cache)

    def step(token: torch.Tensor) -> torch.Tensor:
        return model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    for _ in range(4):
        token = step(token)
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        token = step(token)
    if is_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    return Decoding(
        cache_mib=size / MIB,
        ms_per_step=1e3 * seconds,
        tokens_per_second=batch / seconds,
        peak_mib=torch.cuda.max_memory_allocated() / MIB if is_gpu else None,
    )


def convert_for_decoding(model: Any, settings: HybridSettings) -> HybridForCausalLM:
    """The same decoder with hybrid attention, gates in its own type."""
    hybrid = HybridForCausalLM.convert(model, settings)
    for attention in converted_attentions(hybrid):
        if attention.hybrid.gate is not None:
            attention.hybrid.gate.to(dtype=model.dtype)
    return hybrid.eval()
