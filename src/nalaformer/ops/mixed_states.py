"""Compute linear attention with a state for each block of tokens, which every block of queries mixes in its own way.

    out_i = sum_j c_ij phi_q(q_i) . phi_k(k_j) v_j  /  ( sum_j c_ij phi_q(q_i) . phi_k(k_j)  +  eps * n )

c_ij = mixing[block of i, block of j] >= 0, so that tokens near each other may count more (MHLA, arXiv 2601.07832). There are as
many states as blocks, and the time stays linear in the number of tokens. It is plain torch, since all of it is matrix products.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .features import FeatureMapLike, compute_dtype, key_features, key_log_scale, outside_autocast, query_features, repeat_heads
from .kept_tensors import kept
from .rotary import Rotary


class Blocks(NamedTuple):
    """Describe how the tokens of a grid are split into M blocks of at most W tokens."""

    places: Tensor
    """Tokens of each block, [M, W]; -1 where it has fewer."""
    slots: Tensor
    """Place of each token in the flattened places, [N]."""

    def gather(self, x: Tensor) -> Tensor:
        """Gather [B, N, ...] to [B, M, W, ...], zero where a block has fewer tokens."""
        found = x.index_select(1, self.places.clamp(min=0).flatten()).unflatten(1, self.places.shape)
        is_token = (self.places >= 0).view(1, *self.places.shape, *[1] * (x.dim() - 2))
        return torch.where(is_token, found, torch.zeros((), dtype=x.dtype, device=x.device))

    def scatter(self, x: Tensor) -> Tensor:
        """Scatter [B, M, W, ...] to [B, N, ...]."""
        return x.flatten(1, 2).index_select(1, self.slots)

    @property
    def of_tokens(self) -> Tensor:
        """Return the block of each token, [N]."""
        return self.slots // self.places.shape[1]


def make_blocks(height: int, width: int, rows: int, columns: int, *, device: torch.device) -> Blocks:
    """Split a grid into rows x columns blocks of nearly equal size, and a single row of tokens into as many blocks."""
    if height == 1:
        rows, columns = 1, rows * columns
    (from_row, row, tall), (from_column, column, wide) = (
        _split_side(size, parts, device) for size, parts in ((height, rows), (width, columns))
    )
    y = from_row[:-1, None] + torch.arange(tall, device=device)  # [rows, tall]
    x = from_column[:-1, None] + torch.arange(wide, device=device)
    is_token = (y < from_row[1:, None])[:, None, :, None] & (x < from_column[1:, None])[None, :, None, :]
    places = torch.where(is_token, y[:, None, :, None] * width + x[None, :, None, :], -1).flatten(2).flatten(0, 1)
    inside = (torch.arange(height, device=device) - from_row[row])[:, None] * wide
    inside = inside + torch.arange(width, device=device) - from_column[column]
    slots = (row[:, None] * columns + column) * (tall * wide) + inside
    return Blocks(places, slots.flatten())


def _split_side(size: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return where each part of a side begins (and the last ends), the part of each cell, and the size of the largest part."""
    begins = -(-torch.arange(parts + 1, device=device) * size // parts)
    return begins, torch.arange(size, device=device) * parts // size, -(-size // parts)


# layers of one stage share their blocks, and the next step needs them again
blocks_of = kept(make_blocks, maxsize=32)


def mixed_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    mixing: Tensor,
    blocks: tuple[Blocks, Blocks],
    rotary: tuple[Rotary | None, Rotary | None] = (None, None),
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Compute attention of q [B, N, H, D]; k [B, M, K, D]; v [B, M, K, V] -> [B, N, H, V] in the type of q.

    mixing: [blocks, blocks], >= 0.

    blocks: of the queries and of the keys. Masks, rotary and eps as in `linear_attention`.
    """
    k, v = repeat_heads(q, k), repeat_heads(q, v)
    with outside_autocast(q):
        dtype = compute_dtype(q, k, v)
        mapped = feature_map.given(q, k, key_mask=key_mask, query_mask=query_mask, causal=False)
        scales = key_log_scale(mapped, k, key_mask, dtype)
        scale = None if scales is None else scales.amax(dim=1, keepdim=True)  # [B, 1, H, 1]
        keys = key_features(mapped, k, v, key_mask=key_mask, rotary=rotary[1], log_scale=scale, dtype=dtype)
        of_queries, of_keys = blocks
        values = of_keys.gather(keys.values)
        rotated, plain = of_keys.gather(keys.rotated), of_keys.gather(keys.plain)
        mixing = mixing.to(dtype)
        sums = torch.einsum("im,bmhf->bihf", mixing, plain.sum(2))
        streams = query_features(mapped, q, rotary[0], dtype, like=keys.plain)
        outputs = []
        for queries, part in zip(streams, values.chunk(len(streams), dim=-1), strict=True):
            states = torch.einsum("im,bmhfv->bihfv", mixing, torch.einsum("bmwhf,bmwhv->bmhfv", rotated, part))
            numerator = torch.einsum("biwhf,bihfv->biwhv", of_queries.gather(queries.rotated), states)
            denominator = torch.einsum("biwhf,bihf->biwh", of_queries.gather(queries.plain), sums)
            numerator, denominator = of_queries.scatter(numerator), of_queries.scatter(denominator)
            small = eps * keys.visible[:, None, None]
            for log_scale in (queries.log_scale, scale):
                small = small if log_scale is None else small * torch.exp(-log_scale[..., 0])
            denominator = denominator + small
            # a row that sees nothing gives zeros
            outputs.append(numerator / torch.where(denominator == 0, 1.0, denominator)[..., None])
        return torch.cat(outputs, dim=-1).to(q.dtype)
