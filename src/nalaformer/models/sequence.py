"""Small models of sequences in which attention is the only thing that differs: classifiers and a recall model."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import METHODS, Attention, LayerNorm, build
from ..feature_maps import FEATURE_MAPS
from ..ops import add_layer_norm, layer_norm, short_convolution
from ..ops.rms_norm import product_dtype
from ..registry import Registry, unknown_name
from .delta_layer import DELTA_RULES, DeltaLayer

SEQUENCE_MODELS: Registry[type[nn.Module]] = Registry("sequence model")
# kinds of tokens up to which the gradient of an embedding is a product
MOST_IN_A_PRODUCT = 256


def sequence_attention(
    name: str, *, dim: int, num_heads: int, causal: bool = False, options: dict[str, Any] | None = None
) -> nn.Module:
    """The attention of a method, the plain layer with the feature map of that name, or a delta rule ("delta", "gated_delta").

    A delta rule is causal and takes feature_map (none by default) and the options of the map.
    Convolutions and positions inside attention are off unless asked for: they hide what the maps differ in.
    """
    if name in DELTA_RULES:
        if not causal:
            raise ValueError(f"the delta rule goes from token to token: {name} needs a causal model, such as recall")
        given = dict(options or {})
        map_name = given.pop("feature_map", None)
        return DeltaLayer(dim=dim, num_heads=num_heads, gated=name == "gated_delta", feature_map_name=map_name, **given)
    method, chosen = plain_method(name, {"causal": causal} | (options or {}))
    return build(method, dim=dim, num_heads=num_heads, **chosen)


def plain_method(name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method behind the name of a method or a feature map, and its options."""
    chosen = {"position": "none", "local_mix": "none"} | options
    if name in METHODS:
        if chosen.get("causal") and METHODS[name].map_options.get("variance") and "feature_map" not in chosen:
            # a variance over all tokens would look ahead
            chosen = {"variance": False} | chosen
        return name, chosen
    if name in FEATURE_MAPS.names():
        return "linear", {"feature_map": name} | chosen
    raise unknown_name("attention (a method or a feature map)", name, [*METHODS, *FEATURE_MAPS.names(), *DELTA_RULES])


def state_size(model: nn.Module) -> int:
    """Numbers that a model's attention remembers of a sequence: heads x features x values, over all layers; 0 for softmax,
    which remembers every token."""
    total = 0
    for layer in model.modules():
        if isinstance(layer, Attention) and layer.map is not None:
            heads, size = layer.num_heads, layer.head_dim
            token = torch.zeros(1, 1, heads, size, device=next(layer.parameters()).device)
            # some maps look at all tokens first
            features = layer.map.given(token, token, key_mask=None, causal=False).key(token).shape[-1]
            total += layer.config.num_states * heads * features * size
        elif isinstance(layer, DeltaLayer):
            total += layer.num_heads * layer.features * layer.head_dim
    return total


@SEQUENCE_MODELS.register("sequence_classifier")
class SequenceClassifier(nn.Module):
    """Pre-norm encoder with learned positions; the defaults are the small protocol of the Long Range Arena (Skyformer).

    answers: "sequence": the mean over the positions goes through an MLP, [B, N] -> [B, outputs]; "pair": two sequences,
    [B, 2, N] -> [B, outputs] from both means, their product and difference; "tokens": each position by itself,
    [B, N] -> [B, N, outputs].

    Inputs are tokens, or vectors [B, N, channels] where vocabulary is 0. Token 0 is no key where `hide_zero` is set: padding,
    and Skyformer's way with black pixels. As published the mean runs over all positions; mean_over="visible" leaves those out.
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
            raise ValueError(f'mean_over must be "all" (as published) or "visible", got {mean_over!r}')
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
            first, second = self.pooled(inputs.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
            return self.head(torch.cat((first, second, first * second, first - second), dim=-1))
        if self.answers == "sequence":
            return self.head(self.pooled(inputs))
        return self.head(positions_of(self.encoded(inputs)[0], at))

    def encoded(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, N, C], and which of them are real."""
        tokens, length = inputs.shape[1], self.positions.shape[0]
        if tokens > length:
            raise ValueError(f"sequences must have at most the {length} tokens the model was made for, got {tokens}")
        visible, positions = self.visible(inputs), self.positions[:tokens]
        if self.most_visible:
            places = (inputs == 0).to(torch.uint8).argsort(dim=1, stable=True)[:, : self.most_visible]
            is_too_long = (inputs != 0).sum(dim=1) > self.most_visible
            inputs, positions = inputs.gather(1, places), positions[places]
            positions = positions.masked_fill(is_too_long[:, None, None], torch.nan)
        x, added = self.dropout(self.embedding(inputs) + positions), None
        for block in self.blocks:
            x, added = block(x, added, visible)
        return self.norm(x, added)[1], visible

    def visible(self, inputs: Tensor) -> Tensor | None:
        """Which of the tokens that attention sees are real, [B, N]; None: all."""
        if not self.hide_zero:
            return None
        visible = inputs != 0
        if not self.most_visible:
            return visible
        return torch.arange(min(self.most_visible, inputs.shape[1]), device=inputs.device) < visible.sum(1, keepdim=True)

    def pooled(self, inputs: Tensor) -> Tensor:
        """[B, N] -> [B, C]."""
        x, visible = self.encoded(inputs)
        if visible is None or self.mean_over == "all":
            return x.mean(dim=1)
        weight = visible.to(x.dtype).unsqueeze(-1)
        return (x * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


class TokenEmbedding(nn.Embedding):
    """An embedding of few tokens whose gradient is a product on a GPU.

    torch adds up the gradients of equal tokens one by one, or sorts them: with a hundred thousand tokens of ten kinds that
    takes as long as a layer.
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        is_kind = tokens.reshape(-1, 1) == torch.arange(ctx.kinds, device=tokens.device)
        summed = is_kind.to(ctx.dtype).T @ gradient.flatten(0, -2).to(ctx.dtype)
        return None, summed.to(ctx.weight_dtype), None


class AddedNorm(LayerNorm):
    """x + y, and its layer norm in the type that the product behind it computes in: one pass over both."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x, y: [B, N, C]; without y the sum is x."""
        dtype = product_dtype(x)
        if y is None:
            return x, layer_norm(x, self.weight, self.bias, eps=self.eps, dtype=dtype)
        return add_layer_norm(x, y, self.weight, self.bias, eps=self.eps, dtype=dtype)


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


@SEQUENCE_MODELS.register("small_backbone")
class SmallBackbone(nn.Module):
    """A backbone as users train them, on small grey images [B, height, width]: patches, two stages with convolutions around
    attention, the second at half the resolution. Needs timm.
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
        embed_dims: tuple[int, ...] = (64, 128),
        depths: tuple[int, ...] = (2, 2),
        num_heads: tuple[int, ...] = (2, 4),
        patch_size: int = 2,
        drop_path_rate: float = 0.1,
    ) -> None:
        super().__init__()
        if answers != "sequence" or not channels:
            raise ValueError(
                f"a backbone names the class of an image, got answers={answers!r} and {vocabulary} tokens; use "
                "sequence_classifier, or data with rows of pixels, such as image_rows"
            )
        # imported where used: timm is an extra
        from .vision.backbone import Backbone
        from .vision.config import BackboneConfig

        method, options = plain_method(attention, attention_options or {})
        config = BackboneConfig(
            family="nalaformer",
            embed_dims=tuple(embed_dims),
            depths=tuple(depths),
            num_heads=tuple(num_heads),
            attention=method,
            attention_options=options,
            attention_stages="l" * len(depths),
            stem="patches",
            patch_size=patch_size,
            projection=None,
            final_norm=True,
            img_size=(length, channels),
            drop_path_rate=drop_path_rate,
        )
        self.backbone = Backbone(config, num_classes=outputs, in_chans=1)
        self.image_size = (length, channels)

    @property
    def multiply_adds(self) -> int:
        """Of one image: what models are compared at."""
        from .vision.multiply_adds import count_multiply_adds

        return count_multiply_adds(self.backbone, self.image_size)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, height, width] -> [B, outputs]."""
        return self.backbone(inputs.unsqueeze(1))


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
        return self.head(positions_of(self.attention(self.embedding(inputs)), at))


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
        return F.linear(positions_of(self.norm(x, added)[1], at), self.embedding.weight)


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


def positions_of(x: Tensor, at: Tensor | None) -> Tensor:
    """x: [B, N, C], at: [B, A] -> [B, A, C]; all of them without `at`."""
    return x if at is None else x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
