"""Shared parts of the small models: their registry, the norm between two layers, and the selection of answers."""

from torch import Tensor, nn

from nalaformer.attention import LayerNorm
from nalaformer.ops import add_layer_norm, layer_norm
from nalaformer.ops.rms_norm import product_dtype
from nalaformer.registry import Registry

SEQUENCE_MODELS: Registry[type[nn.Module]] = Registry("sequence model")


class AddedNorm(LayerNorm):
    """x + y, and its layer norm in the type that the product behind it computes in: one pass over both."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, y: [B, N, C]; without y the sum is x."""
        dtype = product_dtype(x)
        if y is None:
            return x, layer_norm(x, self.weight, self.bias, eps=self.eps, dtype=dtype)
        return add_layer_norm(x, y, self.weight, self.bias, eps=self.eps, dtype=dtype)


def select_positions(x: Tensor, at: Tensor | None) -> Tensor:
    """x: [B, N, C], at: [B, A] -> [B, A, C]; all of them without `at`."""
    return x if at is None else x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
