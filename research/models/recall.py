"""The causal model of recall, and of texts."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nalaformer.ops import short_convolution

from .attention import sequence_attention
from .parts import SEQUENCE_MODELS, AddedNorm, select_positions


@SEQUENCE_MODELS.register("recall")
class RecallModel(nn.Module):
    """Causal model of tokens as zoology compares mixers: blocks of [gated short convolution, attention], no positions, and no
    MLP unless `mlp_ratio` asks for one. Input and output embeddings are one.

    inputs [B, N] -> logits [B, N, vocabulary]. Padding must stand at the end, where no token looks.
    """

    def __init__(
        self,
        *,
        answers: str,
        outputs: int,
        length: int,
        vocabulary: int = 0,
        channels: int = 0,
        is_padded: bool = False,
        attention: str = "nalaformer",
        attention_options: dict[str, Any] | None = None,
        dim: int = 128,
        depth: int = 2,
        num_heads: int = 2,
        kernel_size: int = 3,
        mlp_ratio: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if answers != "tokens" or vocabulary < 1 or outputs != vocabulary:
            raise ValueError(
                f"the recall model answers with tokens of its input, got answers={answers!r}, {vocabulary} tokens and "
                f"{outputs} outputs; use sequence_classifier"
            )
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        layers: list[nn.Module] = []
        for _ in range(depth):
            mixer = sequence_attention(attention, dim=dim, num_heads=num_heads, causal=True, options=attention_options)
            layers += [Residual(GatedShortConvolution(dim, kernel_size), dim), Residual(mixer, dim)]
            if mlp_ratio:
                wide = int(mlp_ratio * dim)
                layers.append(Residual(nn.Sequential(nn.Linear(dim, wide), nn.GELU(), nn.Linear(wide, dim)), dim))
        self.layers = nn.ModuleList(layers)
        self.norm = AddedNorm(dim)

    def forward(self, inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """at: [B, A] positions, where only some are asked: [B, A, vocabulary]."""
        x, added = self.dropout(self.embedding(inputs)), None
        for layer in self.layers:
            x, added = layer(x, added)
        return F.linear(select_positions(self.norm(x, added)[1], at), self.embedding.weight)


class Residual(nn.Module):
    """x + layer(norm x), the sum left to the next norm."""

    def __init__(self, layer: nn.Module, dim: int) -> None:
        super().__init__()
        self.norm, self.layer = AddedNorm(dim), layer

    def forward(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, and what is still to be added to it: of the layer before, then of this one."""
        x, normed = self.norm(x, added)
        return x, self.layer(normed)


class GatedShortConvolution(nn.Module):
    """linear(x) * conv(x), the convolution depth-wise over the last few tokens."""

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim)
        self.convolution = nn.Conv1d(dim, dim, kernel_size, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        # taps of torch's convolution begin with the earliest token
        taps = self.convolution.weight[:, 0].flip(1)
        mixed, _, _ = short_convolution(x, taps, self.convolution.bias, sizes=(x.shape[-1], 0, 0))
        return self.gate(x) * mixed
