"""The mixers of tokens: linear attention, delta rules, softmax attention. All map [B, N, C] to [B, N, C]."""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization
from transformers.cache_utils import CacheLayerMixin

from ...attention.fading import compute_log_decay, initial_decay
from ...attention.learned_contrast import LearnedContrast
from ...feature_maps import FeatureMap, feature_map
from ...ops import (
    LinearState,
    compute_dtype,
    delta_rule,
    delta_step_,
    linear_attention,
    recurrent_linear_attention,
    recurrent_step_,
    unit_features,
)
from ...ops.exporting import is_recorded
from .cache import RecurrentLayer
from .config import NaLaConfig
from .layers import RMSNorm, ShortConvolution
from .tokens import Tokens


class RecurrentMixer(nn.Module):
    """A mixer with a state: projection(norm(mix(convolution(q, k, v))) * silu(gate)), with a norm per head."""

    activates_values = False
    """True if v passes through SiLU."""

    def __init__(self, config: NaLaConfig, *, key_heads: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.map_options is not None
        dim, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.head_dim = head_dim
        self.sizes = (heads * head_dim, key_heads * head_dim, key_heads * head_dim)
        self.qkv_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.convolution = None
        if config.short_convolution:
            self.convolution = ShortConvolution(self.sizes, config.short_convolution, silu=int(self.activates_values))
        self.map = feature_map(config.feature_map, num_heads=heads, head_dim=head_dim, **config.map_options)
        self.g_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, tokens: Tokens, layer: CacheLayerMixin | None) -> Tensor:
        assert layer is None or isinstance(layer, RecurrentLayer)
        qkv = self.qkv_proj(x)
        if self.convolution is None:
            *first, last = qkv.split(self.sizes, dim=-1)
            parts = (*first, F.silu(last) if self.activates_values else last)
        else:
            if tokens.key_mask is not None:
                qkv = torch.where(tokens.key_mask[..., None], qkv, 0)
            parts = self.convolution(qkv, tokens, layer)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        out = self.mix(x, q, k, v, tokens, layer)
        if layer is not None:
            layer.seen += x.shape[1]
        gate = self.g_proj(x).view_as(out)
        return self.o_proj(self.norm(out, gate).flatten(2))

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: RecurrentLayer | None) -> Tensor:
        """Mix tokens: q [B, N, H, D]; k, v [B, N, K, D] -> [B, N, H, D]."""
        raise NotImplementedError

    def log_decay(self, x: Tensor) -> Tensor | None:
        """Return the log decay of each token, [B, N, K], or None for no decay."""
        return None


class DecayMixer(RecurrentMixer):
    """A mixer with decay: log_decay = -exp(A_log) softplus(W x + dt_bias) at each token, as in Mamba 2.

    x [B, N, C] -> [B, N, K], <= 0. Inherit from this class before the mixer that decays, and call `add_decay` last.
    """

    def add_decay(self, *, dim: int, heads: int) -> None:
        """Create the parameters of the decay, with the names of Mamba 2 and Gated DeltaNet."""
        self.a_proj = nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.reset_decay()

    def reset_decay(self) -> None:
        rate, step = initial_decay(len(self.A_log))
        initialization.copy_(self.A_log, rate)
        initialization.copy_(self.dt_bias, step)

    def log_decay(self, x: Tensor) -> Tensor:
        return compute_log_decay(self.a_proj(x), self.A_log, self.dt_bias)


class LinearMixer(RecurrentMixer):
    """Normalized causal linear attention, with a contrast if the config has one."""

    def __init__(self, config: NaLaConfig) -> None:
        assert config.num_key_value_heads is not None
        super().__init__(config, key_heads=config.num_key_value_heads)
        self.has_rotary = config.linear_rotary
        self.contrast = None
        if config.contrast == "learned":
            self.contrast = LearnedContrast(num_heads=config.num_attention_heads, offset=config.contrast_offset)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: RecurrentLayer | None) -> Tensor:
        rotary = tokens.rotary if self.has_rotary else None
        contrast_scale = None if self.contrast is None else self.contrast(q)
        decay = self.log_decay(x)
        rates: dict[str, Any] = {"contrast": contrast_scale, "log_decay": decay}
        if tokens.cu_seqlens is not None:
            places = None if rotary is None else rotary.flat()
            flat = [y.flatten(0, 1) for y in (q, k, v)]
            rates = {name: None if each is None else each.flatten(0, 1) for name, each in rates.items()}
            out = linear_attention(
                *flat, feature_map=self.map, causal=True, rotary=places, cu_seqlens=tokens.cu_seqlens, **rates
            )
            return out.unflatten(0, q.shape[:2])
        if layer is None:
            return linear_attention(
                q, k, v, feature_map=self.map, causal=True, rotary=rotary, key_mask=tokens.key_mask, **rates
            )
        given: dict[str, Any] = {"log_decay": decay, "key_mask": tokens.key_mask}
        out = attend_after_cache(layer, q, k, v, feature_map=self.map, rotary=rotary, **given)
        if contrast_scale is None:
            return out
        one, same = (y.new_ones(*y.shape[:-1], 1) for y in (q, k))
        mean = attend_after_cache(layer, one, same, v, feature_map=even_map(q.shape[2]), name="mean_", eps=0.0, **given)
        wide = widen(out)
        return (wide + contrast_scale[..., None] * (wide - widen(mean))).to(out.dtype)


@cache
def even_map(num_heads: int) -> FeatureMap:
    """Return a map that weighs all keys equally, so that attention gives the mean of the values."""
    return feature_map("relu", num_heads=num_heads, head_dim=1)


def attend_after_cache(
    layer: RecurrentLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    name: str = "",
    **given: Any,
) -> Tensor:
    """Attend from tokens after those of a cache and update the cache; its tensors have names that begin with `name`."""
    known = {field: layer.tensors[name + field] for field in LinearState.__dataclass_fields__ if name + field in layer.tensors}
    state = LinearState(**known) if known else None
    if state is not None and q.shape[1] == 1 and key_mask is None and not torch.is_grad_enabled():
        return recurrent_step_(state, q, k, v, log_decay=log_decay, **given)
    out, state = recurrent_linear_attention(q, k, v, state=state, key_mask=key_mask, log_decay=log_decay, **given)
    # contiguous, since the kernel of a single token updates them in place
    layer.tensors.update({name + field: tensor.contiguous() for field, tensor in state.tensors().items()})
    return out


class DecayedLinearMixer(DecayMixer, LinearMixer):
    """Normalized causal linear attention with decay: for query i, key j weighs exp(sum of log_decay from j + 1 to i)."""

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__(config)
        assert config.num_key_value_heads is not None
        self.add_decay(dim=config.hidden_size, heads=config.num_key_value_heads)


class DeltaMixer(RecurrentMixer):
    """DeltaNet with a feature map instead of SiLU on q and k: unit features, corrections weighted by beta = sigmoid(W x)."""

    activates_values = True

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__(config, key_heads=config.num_attention_heads)
        self.b_proj = nn.Linear(config.hidden_size, config.num_attention_heads, bias=False)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: RecurrentLayer | None) -> Tensor:
        tensors = [*unit_features(self.map, q, k), v, widen(self.b_proj(x)).sigmoid()]
        decay = self.log_decay(x)
        if tokens.cu_seqlens is not None:
            flat = (y.flatten(0, 1) for y in tensors)
            flat_decay = None if decay is None else decay.flatten(0, 1)
            out, _ = delta_rule(*flat, log_decay=flat_decay, cu_seqlens=tokens.cu_seqlens)
            return out.unflatten(0, q.shape[:2])
        state = None if layer is None else layer.tensors.get("state")
        if state is not None and q.shape[1] == 1 and tokens.key_mask is None and not torch.is_grad_enabled():
            return delta_step_(state, *tensors, log_decay=decay)
        out, state = delta_rule(*tensors, log_decay=decay, state=state, key_mask=tokens.key_mask)
        if layer is not None:
            layer.tensors["state"] = state
        return out


class GatedDeltaMixer(DecayMixer, DeltaMixer):
    """Gated DeltaNet: the delta rule with a state that decays by exp(log_decay) at each token."""

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__(config)
        self.add_decay(dim=config.hidden_size, heads=config.num_attention_heads)


class SoftmaxMixer(nn.Module):
    """Softmax attention with rotary positions: torch's scaled_dot_product_attention, or eager (attn_implementation)."""

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.sizes = [size * config.head_dim for size in (heads, key_heads, key_heads)]
        self.config = config
        self.is_grouped = heads != key_heads
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=False)

    @property
    def is_eager(self) -> bool:
        """True for eager attention; read at every call, since model.set_attn_implementation may change it."""
        chosen = self.config._attn_implementation
        if chosen not in (None, "sdpa", "eager"):
            raise ValueError(
                f"attn_implementation of `softmax` mixers must be 'sdpa' or 'eager', got {chosen!r}; functions that are "
                "registered with transformers, and paged ones, are not called"
            )
        return chosen == "eager"

    def forward(self, x: Tensor, tokens: Tokens, layer: CacheLayerMixin | None) -> Tensor:
        parts = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        # apply RoPE in float32
        queries = widen(q) if tokens.sharpness is None else widen(q) * tokens.sharpness
        q, k = (tokens.rotary.rotate(y).to(part.dtype) for y, part in ((queries, q), (widen(k), k)))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if layer is not None:
            k, v = layer.update(k, v)
        # torch 2.11 pads the mask of its fused attention on a GPU, so that a program would only support multiples of 8 tokens
        is_padded = tokens.pairs is not None and q.is_cuda and is_recorded()
        if self.is_eager or tokens.weights is not None or is_padded:
            out, weights = eager_attention(q, k, v, tokens.pairs)
            if tokens.weights is not None:
                tokens.weights.append(weights)
        else:
            # without a mask there are no earlier tokens, or one token that sees all
            is_causal = tokens.pairs is None and tokens.past == 0
            mask = tokens.pairs if tokens.pairs is None or tokens.pairs.dtype == torch.bool else tokens.pairs.to(q.dtype)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=self.is_grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def eager_attention(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(D)) v and its weights. q [B, H, N, D]; k, v [B, K, M, D]; pairs as in Tokens."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if pairs is None:
        length, total = q.shape[2], k.shape[2]
        pairs = torch.ones(length, total, dtype=torch.bool, device=q.device).tril(total - length)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~pairs, -math.inf) if pairs.dtype == torch.bool else scores + pairs
    weights = widen(scores).softmax(-1).to(q.dtype)
    return weights @ v, weights


def widen(x: Tensor) -> Tensor:
    """Return the tensor in float32; float64 stays float64."""
    return x.to(compute_dtype(x))


MIXERS = {
    "linear": LinearMixer,
    "forgetting": DecayedLinearMixer,
    "delta": DeltaMixer,
    "gated_delta": GatedDeltaMixer,
    "softmax": SoftmaxMixer,
}
"""The mixers by the names of config.MIXER_NAMES."""
