"""Compute the causal convolution of a joint projection of q, k and v: each channel over its last few tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import runs_kernels

# sizes that the GPU kernels support
FUSED_SIZES = (2, 3, 4)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sizes: tuple[int, int, int],
    silu: int = 0,
    before: Tensor | None = None,
    sequence: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix the last few tokens of each channel, y_t = bias + sum_s weight_s x_{t-s}, and return the parts q, k and v.

    x: [B, N, C]; weight: [C, S]; bias: [C] -> [B, N, sizes[i]], C = sum of the sizes, any of which may be 0. silu: that many of
    the parts, counted from the last, pass through SiLU. before: [B, S - 1, C], the tokens before the first, zeros by default.
    sequence: [B, N], the number of the packed sequence of each token, not negative: a token sees only its own sequence. It
    excludes `before`.
    """
    assert before is None or sequence is None
    size = weight.shape[1]
    # plain torch runs training in chunks, with gradients through the state between them
    is_constant = before is None or not torch.is_grad_enabled()
    if size in FUSED_SIZES and is_constant and runs_kernels(x) and x.numel() > 0:
        from .kernels.tokenwise import short_convolution_op

        silu_from = sum(sizes[: 3 - silu])
        x = x if x.stride(-1) == 1 else x.contiguous()
        before = before if before is None or before.stride(-1) == 1 else before.contiguous()
        sequence = None if sequence is None else sequence.contiguous()
        q, k, v = short_convolution_op.convolve(x, weight, bias, before, sequence, *sizes[:2], silu_from)
        return q, k, v
    weight = weight.to(x.dtype)
    padded = F.pad(x, (0, 0, size - 1, 0)) if before is None else torch.cat((before.to(x.dtype), x), dim=1)
    if sequence is None:
        out = F.conv1d(padded.transpose(1, 2), weight.flip(1)[:, None], groups=x.shape[2]).transpose(1, 2)
    else:
        out = _convolve_packed(padded, weight, sequence)
    if bias is not None:
        out = out + bias.to(x.dtype)
    q, k, v = (F.silu(part) if number >= 3 - silu else part for number, part in enumerate(out.split(sizes, dim=-1)))
    return q, k, v


def _convolve_packed(padded: Tensor, weight: Tensor, sequence: Tensor) -> Tensor:
    """Convolve packed sequences: a token of another sequence does not count."""
    size = weight.shape[1]
    numbers = F.pad(sequence, (size - 1, 0), value=-1)
    out = padded[:, size - 1 :] * weight[:, 0]
    for back in range(1, size):
        window = slice(size - 1 - back, -back)
        is_own = numbers[:, window] == sequence
        out = out + torch.where(is_own[..., None], padded[:, window], 0) * weight[:, back]
    return out


def short_convolution_step_(tail: Tensor, x: Tensor, weight: Tensor, *, sizes: tuple[int, int, int], silu: int = 0) -> Tensor:
    """Convolve one token x [B, 1, C] after tail [B, S - 1, C], which is shifted by it; no gradients."""
    size = weight.shape[1]
    if size in FUSED_SIZES and runs_kernels(x) and tail.is_contiguous():
        from .kernels.tokenwise import short_convolution_op

        return short_convolution_op.step(x if x.stride(-1) == 1 else x.contiguous(), weight, tail, sum(sizes[: 3 - silu]))
    parts = short_convolution(x, weight, sizes=sizes, silu=silu, before=tail)
    tail.copy_(torch.cat((tail[:, 1:], x.to(tail.dtype)), dim=1))
    return torch.cat(parts, dim=-1)
