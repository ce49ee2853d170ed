"""What mixes tokens: normalised linear attention, the delta rules, exact attention. All take and give [B, N, C]."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ...feature_maps import feature_map
from ...ops import LinearState, compute_dtype, linear_attention, recurrent_linear_attention, recurrent_step_
from .cache import RecurrentLayer
from .config import NaLaConfig
from .layers import ShortConvolution
from .tokens import Tokens


class RecurrentMixer(nn.Module):
    """projection(norm(mix(convolution(q, k, v))) * silu(gate)); the norm is over the channels of each head."""

    def __init__(self, config: NaLaConfig, *, key_heads: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.map_options is not None
        dim, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.head_dim = head_dim
        self.sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
        self.qkv_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.convolution = ShortConvolution(sum(self.sizes), config.short_convolution) if config.short_convolution else None
        self.map = feature_map(config.feature_map, num_heads=heads, head_dim=head_dim, **config.map_options)
        self.g_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, tokens: Tokens, layer: CacheLayerMixin | None) -> Tensor:
        assert layer is None or isinstance(layer, RecurrentLayer)
        qkv = self.qkv_proj(x)
        if self.convolution is not None:
            if tokens.key_mask is not None:
                qkv = torch.where(tokens.key_mask[..., None], qkv, 0)
            qkv = self.convolution(qkv, tokens, layer)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(self.sizes, dim=-1))
        out = self.mix(x, q, k, v, tokens, layer)
        if layer is not None:
            layer.seen += x.shape[1]
        return self.o_proj(self.norm(out).flatten(2) * F.silu(self.g_proj(x)))

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: RecurrentLayer | None) -> Tensor:
        """q [B, N, H, D]; k, v [B, N, K, D] -> [B, N, H, D]."""
        raise NotImplementedError


class LinearMixer(RecurrentMixer):
    """Normalised causal linear attention."""

    def __init__(self, config: NaLaConfig) -> None:
        assert config.num_key_value_heads is not None
        super().__init__(config, key_heads=config.num_key_value_heads)
        self.has_rotary = config.linear_rotary

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, layer: RecurrentLayer | None) -> Tensor:
        rotary = tokens.rotary if self.has_rotary else None
        if tokens.cu_seqlens is not None:
            places = None if rotary is None else rotary.flat()
            flat = (y.flatten(0, 1) for y in (q, k, v))
            out = linear_attention(*flat, feature_map=self.map, causal=True, rotary=places, cu_seqlens=tokens.cu_seqlens)
            return out.unflatten(0, q.shape[:2])
        if layer is None:
            return linear_attention(q, k, v, feature_map=self.map, causal=True, rotary=rotary, key_mask=tokens.key_mask)
        names = LinearState.__dataclass_fields__
        known = {name: tensor for name, tensor in layer.tensors.items() if name in names}
        state = LinearState(**known) if known else None
        if state is not None and q.shape[1] == 1 and tokens.key_mask is None and not torch.is_grad_enabled():
            return recurrent_step_(state, q, k, v, feature_map=self.map, rotary=rotary)
        out, state = recurrent_linear_attention(
            q, k, v, feature_map=self.map, state=state, rotary=rotary, key_mask=tokens.key_mask
        )
        layer.tensors.update(state.tensors())
        return out


class SoftmaxMixer(nn.Module):
    """Exact attention with rotary positions: torch's scaled_dot_product_attention."""

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.head_dim = config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.sizes = [size * config.head_dim for size in (heads, key_heads, key_heads)]
        self.is_grouped = heads != key_heads
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=False)

    def forward(self, x: Tensor, tokens: Tokens, layer: CacheLayerMixin | None) -> Tensor:
        parts = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        q, k = (tokens.rotary.rotate(y.to(compute_dtype(y))).to(y.dtype) for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if layer is not None:
            k, v = layer.update(k, v)
        is_causal = tokens.pairs is None and x.shape[1] > 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=tokens.pairs, is_causal=is_causal, enable_gqa=self.is_grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


MIXERS = {"linear": LinearMixer, "softmax": SoftmaxMixer}
"""The mixers by name; those of config.MIXER_NAMES."""
