"""Caches of decoders as after prompts of any length, filled with random numbers: the cost of a step does not depend on them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nalaformer.attention.hybrid import GroupedState, HybridAttention, HybridState, empty_state, salient_tokens
from nalaformer.models.hybrid.attention import converted_attentions
from nalaformer.models.hybrid.cache import HybridCache
from nalaformer.models.hybrid.model import HybridForCausalLM

from .decoding_models import DecodeStudy


def ordinary_cache(model: Any, study: DecodeStudy, context: int, batch: int) -> tuple[Any, int]:
    """Return the cache of `generate` after `context` tokens, filled with random numbers, and its bytes."""
    if isinstance(model, HybridForCausalLM):
        cache: Any = random_cache(model, study, context, batch)
        return cache, cache.nbytes
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa")
    cache, room = DynamicCache(config=model.config), (batch, study.key_heads, context, study.head_dim)
    for layer in range(study.layers):
        cache.update(*(torch.randn(room, device=model.device, dtype=model.dtype) for _ in range(2)), layer)
    return cache, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.no_grad()
def random_cache(model: HybridForCausalLM, study: DecodeStudy, context: int, batch: int) -> HybridCache:
    """The cache that a prompt of `context` tokens would leave, filled with random numbers."""
    cache = HybridCache(model.config)
    for layer, attention in zip(cache.layers, converted_attentions(model), strict=True):
        like = next(model.parameters())
        layer.put(
            GroupedState(tuple(random_state(part, context, batch, like=like) for part in attention.hybrid.parts)), context
        )
    return cache


def random_state(hybrid: HybridAttention, context: int, batch: int, *, like: Tensor) -> HybridState:
    """A state after `context` tokens in the type and on the device of `like`."""
    settings = hybrid.settings
    q, k = (like.new_zeros(batch, 1, heads, hybrid.head_dim) for heads in (hybrid.num_heads, hybrid.num_key_heads))
    state = empty_state(q, k, k, feature_map=hybrid.map, settings=settings)
    size = settings.chunk_size
    state = state.with_room(salient_tokens(context, settings))
    for window in (state.keys.transpose(1, 2), state.values.transpose(1, 2), state.scores):
        window[:, 0 if context >= size else size : size + context % size].normal_()
    state.salient_keys.normal_()
    state.salient_values.normal_()
    # as many tokens as are in the sums, each with features that sum to about one
    state.linear.state.normal_(std=context**0.5)
    state.linear.key_sum.fill_(context / state.linear.key_sum.shape[-1])
    return replace(
        state,
        # as selection leaves them
        salient_scores=torch.rand_like(state.salient_scores).sort(descending=True).values,
        linear=replace(state.linear, count=torch.full_like(state.linear.count, context)),
        lengths=(context,) * batch,
    )
