"""The small parts of a block: the SwiGLU network and the short convolution."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization

from .cache import RecurrentLayer
from .tokens import Tokens


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ShortConvolution(nn.Module):
    """Each channel mixes its last few tokens: y_t = sum_s w_s x_{t-s}, s = 0 .. size - 1, within the sequence of t."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # outputs about as large as inputs; transformers' helper leaves weights alone that came from a file
        bound = 1 / math.sqrt(self.size)
        initialization.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, tokens: Tokens, layer: RecurrentLayer | None) -> Tensor:
        """x [B, N, C], zero where a token is padding -> [B, N, C]; the layer keeps the last size - 1 real tokens."""
        kept = None if layer is None else layer.tensors.get("tail")
        before = x.new_zeros(x.shape[0], self.size - 1, x.shape[2]) if kept is None else kept.to(x.dtype)
        padded = torch.cat((before, x), dim=1)
        if layer is not None:
            tail = self._tail(padded, tokens)
            if kept is None or torch.is_grad_enabled():
                # a copy: a view would hold all tokens of the piece in memory
                layer.tensors["tail"] = tail.clone()
            else:
                # in its place, as the states of single tokens: a CUDA graph of a step goes on
                kept.copy_(tail)
        weight = self.weight.to(x.dtype)
        if tokens.sequence is None:
            return F.conv1d(padded.transpose(1, 2), weight.flip(1)[:, None], groups=x.shape[2]).transpose(1, 2)
        # packed sequences, which have no cache: a token of another one does not count
        sequence = F.pad(tokens.sequence, (self.size - 1, 0))
        out = x * weight[:, 0]
        for back in range(1, self.size):
            window = slice(self.size - 1 - back, -back)
            is_own = sequence[:, window] == tokens.sequence
            out = out + torch.where(is_own[..., None], padded[:, window], 0) * weight[:, back]
        return out

    def _tail(self, padded: Tensor, tokens: Tokens) -> Tensor:
        """The last size - 1 real tokens; behind those of a row that ends with padding lie zeros."""
        if tokens.key_mask is None:
            return padded[:, padded.shape[1] - self.size + 1 :]
        places = torch.arange(1, tokens.key_mask.shape[1] + 1, device=padded.device)
        end = (tokens.key_mask * places).amax(1)  # tokens up to the last real one, 0 if there is none
        window = end[:, None] + torch.arange(self.size - 1, device=padded.device)
        return padded.gather(1, window[..., None].expand(-1, -1, padded.shape[2]))
