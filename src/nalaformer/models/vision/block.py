"""The transformer block of every backbone, and its feed-forward network."""

from collections.abc import Callable

import torch
from timm.layers import GELU, DropPath, LayerScale, get_act_layer, get_norm_layer
from torch import Tensor, nn

from ...attention import Attention, AttentionConfig, DepthwiseConv, LayerNorm
from ...attention.cells import cells_at, on_grid, put_back
from ...ops import scaled_residual
from ...watched_modules import is_watched

Grid = tuple[int, int]


class Block(nn.Module):
    """x += local(x); x += scale * attention(norm x); x += local(x); x += scale * feed_forward(norm x).

    Tokens [B, N, C] of a grid -> the same shape. local: depth-wise 3x3 convolutions: both, the first or none.
    """

    def __init__(
        self,
        attention: AttentionConfig,
        *,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        local_positions: int,
        feed_forward_mix: bool,
        layer_scale: float | None,
        drop_path: float,
        norm_eps: float,
        drop: float = 0.0,
        activation: str | type[nn.Module] = "gelu",
        norm: str | type[nn.Module] = "layernorm",
    ) -> None:
        super().__init__()
        self.local1 = DepthwiseConv(dim, 3) if local_positions > 0 else None
        self.norm1 = make_norm(norm, dim, norm_eps)
        self.attention = Attention(attention, dim=dim, num_heads=num_heads)
        self.scale1 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.local2 = DepthwiseConv(dim, 3) if local_positions > 1 else None
        self.norm2 = make_norm(norm, dim, norm_eps)
        self.feed_forward = FeedForward(dim, int(dim * mlp_ratio), mix=feed_forward_mix, activation=activation, drop=drop)
        self.scale2 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.dropout = nn.Dropout(drop) if drop > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: Grid, kept: Tensor | None = None) -> Tensor:
        """Apply the block. kept: [B, n], the only tokens that it changes and that see each other; convolutions see all."""
        if kept is not None:
            return self._forward_kept(x, grid, kept)
        if self.local1 is not None:
            x = self.local1(x, grid, plus=x)
        x = self._add(x, self.dropout(self.attention(self.norm1(x), grid)), self.scale1)
        if self.local2 is not None:
            x = self.local2(x, grid, plus=x)
        return self._add(x, self.feed_forward(self.norm2(x), grid), self.scale2)

    def _forward_kept(self, x: Tensor, grid: Grid, kept: Tensor) -> Tensor:
        nearby = x if self.local1 is None else self.local1(x, grid, plus=x)
        tokens = cells_at(nearby, kept)
        tokens = self._add(tokens, self.dropout(self.attention.forward_at(self.norm1(tokens), grid, kept)), self.scale1)
        if self.local2 is not None:
            nearby = put_back(x, tokens, kept)
            tokens = cells_at(self.local2(nearby, grid, plus=nearby), kept)
        tokens = self._add(tokens, self.feed_forward(self.norm2(tokens), grid, kept), self.scale2)
        return put_back(x, tokens, kept)

    @torch.no_grad()
    def received_attention(self, x: Tensor, grid: Grid) -> Tensor:
        """Return the attention that each token would receive in this block, [B, N]."""
        return self.attention.received_attention(self.norm1(x if self.local1 is None else self.local1(x, grid, plus=x)), grid)

    def scaled_layers(self) -> dict[str, nn.Module]:
        """Return the layer before each layer scale, with only dropout between: `nalaformer.fold` folds the scale into it."""
        return {"scale1": self.attention.projection, "scale2": self.feed_forward.fc2}

    def _add(self, x: Tensor, branch: Tensor, scale: nn.Module) -> Tensor:
        """Return x + drop_path(scale(branch)) in one pass over the tokens."""
        if is_watched(scale) or is_watched(self.drop_path):
            return x + self.drop_path(scale(branch))
        keep = None
        if isinstance(self.drop_path, DropPath) and self.training:
            # draw the random numbers of timm's module
            kept = 1 - self.drop_path.drop_prob
            keep = branch.new_empty(branch.shape[0]).bernoulli_(kept).div_(kept)
        return scaled_residual(x, branch, scale=scale.gamma if isinstance(scale, LayerScale) else None, keep=keep)


class FeedForward(nn.Module):
    """fc2(y + local(y)), y = activation(fc1(x)); without the convolution if mix is off; dropout before and after fc2."""

    def __init__(self, dim: int, hidden: int, *, mix: bool, activation: str | type[nn.Module], drop: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.activation = named_layer("act_layer", get_act_layer, activation)()
        self.local = DepthwiseConv(hidden, 3) if mix else None
        self.fc2 = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(drop) if drop > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: Grid, kept: Tensor | None = None) -> Tensor:
        """Apply the network. kept: the cells of the grid that hold the tokens of x; the others are empty."""
        x = self.fc1(x)
        if self.local is not None and kept is None and is_plain_gelu(self.activation):
            # the convolution applies GELU as it reads x
            return self.dropout(self.fc2(self.dropout(self.local(x, grid, residual=True, gelu=True))))
        x = self.activation(x)
        if self.local is not None and kept is not None:
            x = x + cells_at(self.local(on_grid(x, grid, kept), grid), kept)
        elif self.local is not None:
            x = self.local(x, grid, plus=x)
        return self.dropout(self.fc2(self.dropout(x)))


def is_plain_gelu(activation: nn.Module) -> bool:
    """True if a layer is torch's exact GELU without hooks."""
    is_gelu = type(activation) is GELU or (type(activation) is nn.GELU and activation.approximate == "none")
    return is_gelu and not is_watched(activation)


def make_norm(kind: str | type[nn.Module], dim: int, eps: float) -> nn.Module:
    # our LayerNorm is timm's on faster kernels
    return LayerNorm(dim, eps=eps) if kind == "layernorm" else named_layer("norm_layer", get_norm_layer, kind)(dim, eps=eps)


def named_layer(
    option: str, find: Callable[[str], type[nn.Module] | None], kind: str | type[nn.Module]
) -> Callable[..., nn.Module]:
    """Return a class as it is, or timm's class of that name."""
    if not isinstance(kind, str):
        return kind
    try:
        found = find(kind)
    except KeyError:
        found = None
    if found is None:
        raise ValueError(f'{option} must be a name that timm knows or a class, got {kind!r}; such as "silu" or "rmsnorm"')
    return found


def as_image(tokens: Tensor, grid: Grid) -> Tensor:
    """Return tokens as an image, [B, N, C] -> [B, C, H, W], a view in the memory format channels_last, for one image too."""
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def as_tokens(image: Tensor) -> Tensor:
    """Return the pixels of an image as tokens row by row, [B, C, H, W] -> [B, N, C]."""
    return image.flatten(2).transpose(1, 2)


def parameters_without_decay(model: nn.Module) -> set[str]:
    """Return the names of position tables, window biases, and parameters of feature maps, contrasts and block mixes."""
    return {
        name
        for name, _ in model.named_parameters()
        if set(name.split(".")[:-1]) & {"positions", "table", "relative_bias", "map", "contrast", "block_mix"}
    }
