"""Attention from distant queries, which tokens receive after they have left the window."""

import torch
from torch import Tensor

WORKSPACE = 2**26


@torch.no_grad()
def distant_attention(q: Tensor, k: Tensor, *, chunk_size: int, scale: float | None = None) -> Tensor:
    """Return the largest softmax weight that any query at least two chunks later gives to each key: [B, N, K], 0 to 1.

    q: [B, N, H, D]; k: [B, N, K, D]. Time grows with N^2, memory does not: rows are computed in batches and discarded.
    """
    batch, tokens, heads, head_dim = q.shape
    key_heads = k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    place = torch.arange(tokens, device=q.device)
    received = torch.zeros(batch, key_heads, tokens, device=q.device)
    keys = k.float().permute(0, 2, 3, 1)[:, :, None]  # [B, K, 1, D, N]
    rows = max(1, WORKSPACE // max(1, batch * heads * tokens))
    for start in range(0, tokens, rows):
        some = q[:, start : start + rows].float().transpose(1, 2).unflatten(1, (key_heads, -1)) * scale
        row = place[start : start + rows, None]
        weights = (some @ keys).masked_fill(place > row, -torch.inf).softmax(-1)
        is_distant = place // chunk_size <= row // chunk_size - 2
        received = torch.maximum(received, weights.masked_fill(~is_distant, 0).amax((2, 3)))
    return received.transpose(1, 2)
