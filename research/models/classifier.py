"""The encoder that classifies sequences, pairs of them, or each token."""

from typing import Any

import torch
from torch import Tensor, nn

from nalaformer.registry import unknown_name

from .attention import sequence_attention
from .parts import SEQUENCE_MODELS, AddedNorm, select_positions
from .token_embedding import TokenEmbedding


@SEQUENCE_MODELS.register("sequence_classifier")
class SequenceClassifier(nn.Module):
    """Pre-norm encoder with learned positions; the defaults are the small protocol of the Long Range Arena (Skyformer).

    answers: "sequence": the mean over the positions goes through an MLP, [B, N] -> [B, outputs]; "pair": two sequences,
    [B, 2, N] -> [B, outputs] from both means, their product and difference; "tokens": each position by itself,
    [B, N] -> [B, N, outputs].

    Inputs are tokens, or vectors [B, N, channels] where vocabulary is 0. Token 0 is no key where `hide_zero` is set: padding,
    and Skyformer's way with black pixels. The mean runs over all positions (Skyformer counts hidden ones as zeros);
    mean_over="visible" leaves those out.
    Nothing then depends on them, and most_visible=n computes n tokens of each sequence instead of all: every one that is not 0.
    A sequence that has more gets NaN.
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
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 2,
        mlp_dim: int = 128,
        dropout: float = 0.1,
        hide_zero: bool = False,
        mean_over: str = "all",
        most_visible: int = 0,
    ) -> None:
        super().__init__()
        if answers not in ("sequence", "pair", "tokens"):
            raise unknown_name("kind of answers", answers, ("sequence", "pair", "tokens"))
        if mean_over not in ("all", "visible"):
            raise ValueError(f'mean_over must be "all" or "visible", got {mean_over!r}')
        self.answers, self.mean_over = answers, mean_over
        self.hide_zero = vocabulary > 0 and (hide_zero or is_padded)
        if most_visible and not (self.hide_zero and mean_over == "visible" and answers != "tokens"):
            raise ValueError(
                f"most_visible={most_visible} leaves out what is hidden: it needs hide_zero=True, mean_over='visible' and "
                f"answers for whole sequences, got hide_zero={self.hide_zero}, mean_over={mean_over!r} and answers={answers!r}"
            )
        self.most_visible = most_visible
        self.embedding = TokenEmbedding(vocabulary, dim) if vocabulary else nn.Linear(channels, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(length, dim))
        if vocabulary:
            nn.init.normal_(self.embedding.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                sequence_attention(attention, dim=dim, num_heads=num_heads, options=attention_options),
                dim=dim,
                mlp_dim=mlp_dim,
                dropout=dropout,
            )
            for _ in range(depth)
        )
        self.norm = AddedNorm(dim)
        wide = 4 * dim if answers == "pair" else dim
        self.head = nn.Sequential(nn.Linear(wide, mlp_dim), nn.ReLU(), nn.Linear(mlp_dim, outputs))

    def forward(self, inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """Logits. at: [B, A] positions, where only some of a model of tokens are wanted: [B, A, outputs]."""
        if self.answers == "pair":
            first, second = self.pool(inputs.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
            return self.head(torch.cat((first, second, first * second, first - second), dim=-1))
        if self.answers == "sequence":
            return self.head(self.pool(inputs))
        return self.head(select_positions(self.encode(inputs)[0], at))

    def encode(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, N, C], and which of them are real."""
        tokens, length = inputs.shape[1], self.positions.shape[0]
        if tokens > length:
            raise ValueError(f"sequences must have at most the {length} tokens the model was made for, got {tokens}")
        visible, positions = self.visible(inputs), self.positions[:tokens]
        if self.most_visible:
            places = (inputs == 0).to(torch.uint8).argsort(dim=1, stable=True)[:, : self.most_visible]
            is_too_long = (inputs != 0).sum(dim=1) > self.most_visible
            inputs = inputs.gather(1, places)
            # not positions[places], whose gradient sorts all places of the batch
            rows = positions.expand(len(places), -1, -1)
            positions = rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))
            positions = positions.masked_fill(is_too_long[:, None, None], torch.nan)
        x, added = self.dropout(self.embedding(inputs) + positions), None
        for block in self.blocks:
            x, added = block(x, added, visible)
        return self.norm(x, added)[1], visible

    def visible(self, inputs: Tensor) -> Tensor | None:
        """Return a mask of the tokens that attention sees, [B, N]; None: all."""
        if not self.hide_zero:
            return None
        visible = inputs != 0
        if not self.most_visible:
            return visible
        return torch.arange(min(self.most_visible, inputs.shape[1]), device=inputs.device) < visible.sum(1, keepdim=True)

    def pool(self, inputs: Tensor) -> Tensor:
        """[B, N] -> [B, C]."""
        x, visible = self.encode(inputs)
        if visible is None or self.mean_over == "all":
            return x.mean(dim=1)
        weight = visible.to(x.dtype).unsqueeze(-1)
        return (x * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


class EncoderBlock(nn.Module):
    """x += attention(norm x); x += mlp(norm x). What a layer adds is left to the next norm, which reads x anyway."""

    def __init__(self, attention: nn.Module, *, dim: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = AddedNorm(dim), attention
        self.mlp_norm = AddedNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp_dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, added: Tensor | None, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, and what is still to be added to it: of the block before, then of this one."""
        x, normed = self.attention_norm(x, added)
        x, normed = self.mlp_norm(x, self.dropout(self.attention(normed, key_mask=visible)))
        return x, self.dropout(self.mlp(normed))
