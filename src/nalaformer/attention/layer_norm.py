"""LayerNorm over the channels with an optional gate."""

from torch import Tensor, nn

from ..ops import layer_norm


class LayerNorm(nn.LayerNorm):
    """[..., C] -> [..., C]: normalized, scaled and shifted; times silu(gate) if a gate is passed."""

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__(channels, eps=eps)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps, gate=gate)
