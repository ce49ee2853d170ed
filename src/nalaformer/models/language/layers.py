"""Small parts of a block: norm, SwiGLU network and short convolution."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization

from ...ops import add_rms_norm, gated_linear, rms_norm, short_convolution, short_convolution_step_
from ...watched_modules import is_watched
from .cache import RecurrentLayer
from .tokens import Tokens


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the channels, times silu(gate) if a gate is passed."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return rms_norm(x, self.weight, eps=self._eps, gate=gate)

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y, and its norm."""
        if is_as_torch_made_it(self):
            return add_rms_norm(x, y, self.weight, eps=self._eps)
        total = x + y
        return total, self(total)

    @property
    def _eps(self) -> float:
        assert self.eps is not None
        return self.eps


class SwiGLU(nn.Module):
    """The feed-forward network down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if is_plain(self.down_proj):
            return gated_linear(gate, up, self.down_proj.weight)
        return self.down_proj(F.silu(gate) * up)


def is_plain(linear: nn.Module) -> bool:
    """True if a call only multiplies by the weight: no adapter, hook, shard or quantized weight."""
    return type(linear) is nn.Linear and linear.bias is None and is_as_torch_made_it(linear)


def is_as_torch_made_it(module: nn.Module) -> bool:
    """True if a call does only what torch defines: hooks gather shards or move weights, and must be called."""
    return not is_watched(module) and type(module.weight) in (nn.Parameter, Tensor)


class ShortConvolution(nn.Module):
    """A causal convolution of each channel: y_t = sum_s w_s x_{t-s}, s = 0 .. size - 1, within the sequence of t."""

    def __init__(self, parts: tuple[int, int, int], size: int, *, silu: int = 0) -> None:
        """Build the layer. parts: the channels of q, k and v; silu: how many of the three pass through SiLU, counted from v."""
        super().__init__()
        self.parts, self.size, self.silu = parts, size, silu
        self.weight = nn.Parameter(torch.empty(sum(parts), size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # outputs are about as large as inputs; transformers' helper does not change weights that came from a file
        bound = 1 / math.sqrt(self.size)
        initialization.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, tokens: Tokens, layer: RecurrentLayer | None) -> tuple[Tensor, Tensor, Tensor]:
        """Convolve x [B, N, C], zero at padding -> q, k, v; the layer retains the last size - 1 real tokens."""
        kept = None if layer is None else layer.tensors.get("tail")
        closed = tokens.closed
        if closed is not None:
            # close the gaps, since padding between real tokens would take the places of earlier ones
            x = torch.zeros_like(x).scatter(1, closed[..., None].expand_as(x), x)
        with_gradients = torch.is_grad_enabled()
        if kept is not None and x.shape[1] == 1 and tokens.key_mask is None and not with_gradients and self.size > 1:
            out = short_convolution_step_(kept, x, self.weight, sizes=self.parts, silu=self.silu)
            q, k, v = out.split(self.parts, dim=-1)
            return q, k, v
        parts = short_convolution(x, self.weight, sizes=self.parts, silu=self.silu, before=kept, sequence=tokens.sequence)
        if layer is not None:
            tail = self._tail(x, kept, tokens)
            if kept is None or with_gradients:
                layer.tensors["tail"] = tail
            else:
                # copy in place, so that a CUDA graph of a step stays valid
                kept.copy_(tail)
        if closed is not None:
            q, k, v = (part.gather(1, closed[..., None].expand_as(part)) for part in parts)
            return q, k, v
        return parts

    def _tail(self, x: Tensor, kept: Tensor | None, tokens: Tokens) -> Tensor:
        """Return a copy of the last size - 1 real tokens; rows that end with padding have zeros behind them."""
        before = x.new_zeros(x.shape[0], self.size - 1, x.shape[2]) if kept is None else kept.to(x.dtype)
        if tokens.key_mask is None:
            # copy only the end of a longer input
            joined = torch.cat((before, x[:, max(0, x.shape[1] - self.size + 1) :]), dim=1)
            return joined[:, joined.shape[1] - self.size + 1 :].clone()
        padded = torch.cat((before, x), dim=1)
        if tokens.closed is not None:
            end = tokens.key_mask.sum(1)
        else:
            places = torch.arange(1, tokens.key_mask.shape[1] + 1, device=x.device)
            end = (tokens.key_mask * places).amax(1)  # tokens up to the last real one, 0 if there is none
        window = end[:, None] + torch.arange(self.size - 1, device=x.device)
        return padded.gather(1, window[..., None].expand(-1, -1, x.shape[2]))
