"""Adapters: our attention with the call signature of the layer that it replaces."""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention
from ..attention.windows import MOST_PARTS

# a value at or below this masks a key when it is added to scores
HIDDEN = -50.0


class Adapter(nn.Module):
    """Our attention and the dropout of the replaced layer; None: that layer has no dropout after attention."""

    config: Any = None
    """The settings of the replaced layer in models of transformers, which may ask for attention weights."""

    def __init__(self, attention: Attention, dropout: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.dropout = attention, nn.Identity() if dropout is None else dropout


class TimmAttention(Adapter):
    """An adapter for the attention of timm's ViT and EVA."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Tensor | None = None
    ) -> Tensor:
        if rope is not None:
            raise ValueError("this attention was converted in a model without rotary positions, got rope")
        if is_causal:
            raise ValueError("this attention was converted for images and sees all tokens, got is_causal=True")
        return self.dropout(self.attention(x, key_mask=to_key_mask(attn_mask, x)))


class TimmWindowAttention(Adapter):
    """An adapter for the attention of timm's Swin: windows [B * count, tokens, C], with the mask of shifted ones."""

    def __init__(self, attention: Attention, dropout: nn.Module | None, window_size: tuple[int, int]) -> None:
        super().__init__(attention, dropout)
        self.window_size = window_size

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        groups = None if mask is None else window_groups(mask).repeat(x.shape[0] // mask.shape[0], 1)
        return self.dropout(self.attention(x, self.window_size, groups=groups, num_groups=MOST_PARTS))

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Set the window of another image size; learned tables of our attention are interpolated."""
        self.window_size = (window_size[0], window_size[1])


class TimmGridAttention(Adapter):
    """An adapter for the attention of timm's PVT: tokens of a grid."""

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        return self.dropout(self.attention(x, (feat_size[0], feat_size[1])))


class TorchAttention(Adapter):
    """An adapter for torch's layer in torchvision's ViT, called with the same tokens three times; it returns no weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        if key is not query or value is not query or need_weights:
            raise ValueError("this attention was converted for tokens that see each other, and has no weights to return")
        return self.attention(query), None


class TransformersAttention(Adapter):
    """An adapter for the attention of transformers' ViT; it returns None for the attention weights."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        reject_attention_weights(unused, self.config)
        if unused.get("is_causal"):
            raise ValueError("this attention was converted for tokens that all see each other, got is_causal=True")
        return self.attention(hidden_states, key_mask=to_key_mask(attention_mask, hidden_states)), None


class TransformersWindowAttention(TimmWindowAttention):
    """An adapter for the attention of transformers' Swin: windows, with the mask of shifted ones."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        reject_attention_weights(unused, self.config)
        return super().forward(hidden_states, attention_mask), None


class TorchvisionWindowAttention(Adapter):
    """An adapter for the attention of torchvision's Swin: images [B, H, W, C], which the layer splits into windows."""

    def forward(self, x: Tensor) -> Tensor:
        grid = (x.shape[1], x.shape[2])
        return self.dropout(self.attention(x.flatten(1, 2), grid)).unflatten(1, grid)


class TransformersNestedAttention(TransformersAttention):
    """An adapter for attention in transformers that returns no weights."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **unused: Any) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states, attention_mask)[0]


class DiffusersAttention(Adapter):
    """An adapter for self-attention over image tokens in the transformers of diffusers."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        if encoder_hidden_states is not None:
            raise ValueError("this attention was converted for the tokens of the image alone, got encoder_hidden_states")
        # here the mask is [batch, 1, tokens]
        mask = attention_mask[:, None] if attention_mask is not None and attention_mask.dim() == 3 else attention_mask
        return self.dropout(self.attention(hidden_states, key_mask=to_key_mask(mask, hidden_states)))


class TransformersGridAttention(TransformersAttention):
    """An adapter for SegFormer, whose tokens lie on a grid."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, height: int, width: int, attention_mask: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        reject_attention_weights(unused, self.config)
        if attention_mask is not None:
            raise ValueError("this attention was converted for whole images, got an attention_mask")
        return self.attention(hidden_states, (height, width)), None


def reject_attention_weights(asked: dict[str, Any], config: Any) -> None:
    """Raise ValueError if attention weights are requested, which a model of transformers returns before conversion."""
    wanted = asked.get("output_attentions")
    if wanted if wanted is not None else getattr(config, "output_attentions", False):
        raise ValueError(
            "converted attention computes no weights, got output_attentions=True; omit it, or look at the layers with "
            "nalaformer.analysis.record"
        )


def to_key_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a key mask [B, N] bool from an attention mask, bool or added to scores, that masks keys for all queries alike.

    mask: [B or 1, 1, 1, N], or with equal rows for all queries, as transformers builds it for padded texts.
    """
    if mask is None:
        return None
    if mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] > 1 and bool((mask == mask[:, :, :1]).all()):
        mask = mask[:, :, :1]
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
        raise ValueError(
            "linear attention can only mask a key for all queries: a mask must be [batch, 1, 1, tokens] or have equal rows, "
            f"got {tuple(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        visible = mask
    else:
        visible = mask == 0
        # values are unknown while compiling
        if not torch.compiler.is_compiling() and not bool((visible | (mask < HIDDEN)).all()):
            raise ValueError(
                "linear attention does not support a key bias: a mask must be bool, or 0 at visible keys and below "
                f"{HIDDEN:g} at masked ones, got numbers from {mask.min().item():g} to {mask.max().item():g}"
            )
    return visible[:, 0, 0].expand(x.shape[0], -1)


def window_groups(mask: Tensor) -> Tensor:
    """Return the parts of each window, [count, tokens], from Swin's mask [count, tokens, tokens] that is 0 inside a part."""
    visible = mask == 0
    first = visible.int().argmax(dim=-1)  # the first token of a part names it
    leads = first == torch.arange(first.shape[1], device=first.device)
    return (leads.cumsum(dim=-1) - 1).gather(1, first)
