"""An embedding of few kinds of tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# kinds of tokens up to which the gradient is a product
MOST_IN_A_PRODUCT = 256


class TokenEmbedding(nn.Embedding):
    """An embedding of few tokens whose gradient is a product on a GPU.

    torch adds up the gradients of equal tokens one by one, or sorts them, which is slow for a hundred thousand tokens of ten
    kinds.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.device.type == "cpu" or self.num_embeddings > MOST_IN_A_PRODUCT:
            return super().forward(tokens)
        return embedding_by_product(tokens, self.weight)


def embedding_by_product(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]: tokens [...], weight [V, C] -> [..., C]."""
    device = tokens.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    rows: Tensor = EmbeddingByProduct.apply(tokens, weight, dtype)
    return rows


class EmbeddingByProduct(torch.autograd.Function):
    """dtype: what the product of the gradient computes in."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.kinds, ctx.dtype, ctx.weight_dtype = weight.shape[0], dtype, weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        is_kind = tokens.reshape(-1, 1) == torch.arange(ctx.kinds, device=tokens.device)
        summed = is_kind.to(ctx.dtype).T @ gradient.flatten(0, -2).to(ctx.dtype)
        return None, summed.to(ctx.weight_dtype), None
