"""Compute the decay over splits of tokens, which causal attention's launches pass to kernels that have no decay."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call, TokenLayout


class Splits(NamedTuple):
    """Hold where the splits of a call begin and end, among the tokens of a sample or of all packed ones.

    Values per token are [B, K, N], or [K, T] if packed. Sums over tokens are differences of running sums, in float64: running
    sums of a long text in float32 have no digits left for a token.
    """

    start: Tensor
    """First tokens, [count], or [S, count] if packed."""
    stop: Tensor
    token_split: Tensor
    """Place of the token's split in those, flattened, [N] or [T]."""

    @classmethod
    def build(cls, call: Call, layout: TokenLayout, count: int, split_size: int) -> "Splits":
        first = torch.arange(count, device=call.device) * split_size
        tokens = torch.arange(call.num_rows, device=call.device)
        if layout.cu_seqlens is None:
            return cls(first, (first + split_size).clamp(max=call.num_rows), tokens // split_size)
        bounds = layout.cu_seqlens.long()
        begin, end = bounds[:-1, None], bounds[1:, None]
        start = torch.minimum(begin + first, end)
        sample = torch.searchsorted(bounds, tokens, right=True) - 1
        return cls(start, torch.minimum(start + split_size, end), sample * count + (tokens - bounds[sample]) // split_size)

    def since_start(self, x: Tensor) -> Tensor:
        """Return the sum from the start of the token's split to the token itself."""
        running = running_sum(x)
        return running[..., 1:] - running[..., self.start.flatten()[self.token_split]]

    def after(self, x: Tensor) -> Tensor:
        """Return the sum over the tokens of its split after the token."""
        running = running_sum(x)
        return running[..., self.stop.flatten()[self.token_split]] - running[..., 1:]

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over each split, [count, B * K], the layout of the sums of splits."""
        running = running_sum(x)
        total = running[..., self.stop] - running[..., self.start]
        # [B, K, count], or [K, S, count]
        return total.flatten(0, 1).T if self.start.dim() == 1 else total.permute(2, 1, 0).flatten(1)

    def per_token(self, x: Tensor, kv_heads: int) -> Tensor:
        """Return for each token the value of its split: x [count, B * K] -> [B, K, N] or [K, T]."""
        by_head = x.unflatten(1, (-1, kv_heads))  # [count, B or S, K]
        if self.start.dim() == 1:
            return by_head.permute(1, 2, 0)[..., self.token_split]
        return by_head.permute(2, 1, 0).flatten(1)[:, self.token_split]


def running_sum(x: Tensor) -> Tensor:
    """Return [..., N + 1] in float64, beginning with zero."""
    return F.pad(x.double().cumsum(-1), (1, 0))


def key_factors(splits: Splits, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decay from each key to the end of its split, and over each split, [count, B * K]; float32."""
    return splits.after(log_decay).exp().float(), split_factors(splits, log_decay)


def split_factors(splits: Splits, log_decay: Tensor) -> Tensor:
    return splits.total(log_decay).exp().float().contiguous()


def sums_over_later_tokens(splits: Splits, by_token: Tensor, before: Tensor, after: Tensor, kv_heads: int) -> Tensor:
    """Return the gradients of decays, each of which reaches all tokens after it: by_token added up from the end of each sample.

    A decay is a factor of everything before it. So the total over the later splits is the product of the sums before them with
    their gradient, which is free of the rounding of single tokens: before, after [count, B * K, PARTS, D, V + 2].
    """
    here = by_token + splits.after(by_token)
    # without the number of keys
    later = torch.einsum("srpdv,srpdv->sr", after[:-1, ..., :-1], before[1:, ..., :-1])
    return (here + splits.per_token(F.pad(later, (0, 0, 0, 1)), kv_heads)).float()
