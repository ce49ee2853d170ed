"""One attention by itself."""

from typing import Any

from torch import Tensor, nn

from .attention import sequence_attention
from .parts import SEQUENCE_MODELS, select_positions


@SEQUENCE_MODELS.register("one_attention")
class OneAttention(nn.Module):
    """One attention between two projections and nothing else: vectors [B, N, channels] -> [B, N, outputs]."""

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
        num_heads: int = 2,
    ) -> None:
        super().__init__()
        if answers != "tokens" or vocabulary:
            raise ValueError(
                f"one attention alone answers vectors, each by itself, got answers={answers!r} and {vocabulary} tokens; use "
                "sequence_classifier"
            )
        self.embedding = nn.Linear(channels, dim)
        self.attention = sequence_attention(attention, dim=dim, num_heads=num_heads, options=attention_options)
        self.head = nn.Linear(dim, outputs)

    def forward(self, inputs: Tensor, at: Tensor | None = None) -> Tensor:
        """at: [B, A] positions, where only some are asked: [B, A, outputs]."""
        return self.head(select_positions(self.attention(self.embedding(inputs)), at))
