"""torch's nn.MultiheadAttention through the fused function, which a recorder can see, unlike the layer's own code."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_readable(module: nn.Module) -> bool:
    """True for torch's layer without overrides, if all keys are those of tokens."""
    is_plain = type(module).forward is nn.MultiheadAttention.forward
    return is_plain and getattr(module, "bias_k", None) is None and not getattr(module, "add_zero_attn", False)


def fused_forward(module: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a function that computes the layer's forward in evaluation mode."""

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        has_batch = query.dim() == 3
        tokens_first = has_batch and not module.batch_first
        inputs = [x.transpose(0, 1) if tokens_first else x if has_batch else x[None] for x in (query, key, value)]
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for x, weight, bias in zip(inputs, *projections(module), strict=True)
        )
        # is_causal only describes attn_mask, which must be given
        mask = merged_mask(attn_mask, key_padding_mask, q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        out = module.out_proj(out)
        out = out.transpose(0, 1) if tokens_first else out if has_batch else out[0]
        if not need_weights:
            return out, None
        logits = q.shape[-1] ** -0.5 * q @ k.mT
        weights = (logits if mask is None else logits + mask).softmax(-1)
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if has_batch else weights[0]

    return forward


def projections(module: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Return the weights and the biases of queries, keys and values."""
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return weights, (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)


def merged_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return both masks as one that is added to the logits of q [B, H, N, D]; True masks in torch's layer."""
    masks = []
    if attn_mask is not None:
        # [N, M], or [B * H, N, M]
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, q.shape[:2]))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[..., None, None, :])
    added = [
        torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask.to(q.dtype)
        for mask in masks
    ]
    return added[0] if len(added) == 1 else added[0] + added[1] if added else None
