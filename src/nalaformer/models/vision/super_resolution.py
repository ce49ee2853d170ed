"""A light super-resolution network in the layout of SwinIR-light, with any attention of the library in its blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...attention import METHODS, AttentionConfig, LayerNorm, configure
from ...registry import check_options, unknown_name
from .block import Block, as_image, as_tokens, parameters_without_decay

SCALES = (2, 3, 4)
# Swin's attention: softmax inside windows, shifted in every second block, with a learned bias for each offset
WINDOWS = "softmax_windows"
WINDOW = 8
ATTENTIONS = (*METHODS, WINDOWS)
SKIPS = ("none", "bicubic")
LAYOUTS: dict[str, dict[str, Any]] = {
    "super_resolution_light": {"embed_dim": 48, "depths": (5, 5, 5, 5), "num_heads": 4},
    "super_resolution_tiny": {"embed_dim": 24, "depths": (2, 2), "num_heads": 2},
}


def build_super_resolution(name: str, *, scale: int, **options: Any) -> "SuperResolution":
    """Build the network of that name; options change its layout."""
    if name not in LAYOUTS:
        raise unknown_name("super-resolution model", name, LAYOUTS)
    check_options(SuperResolution, options, "super-resolution")
    return SuperResolution(scale=scale, **(LAYOUTS[name] | options))


class SuperResolution(nn.Module):
    """Images [B, 3, H, W] in 0..1 of any size -> [B, 3, scale H, scale W].

    y = base + shuffle(conv(features(x - 1/2))): the last convolution computes the scale^2 pixels of every token.
    The base is 1/2, or (skip="bicubic") the enlarged image. In the latter case the last convolution starts at zero, so that the
    network starts as bicubic interpolation, which a short run needs.
    attention: a method of the library, over the whole image, or "softmax_windows".
    """

    def __init__(
        self,
        *,
        scale: int,
        attention: str = "nalaformer",
        attention_options: Mapping[str, Any] | None = None,
        embed_dim: int = 48,
        depths: Sequence[int] = (5, 5, 5, 5),
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        skip: str = "none",
    ) -> None:
        super().__init__()
        if scale not in SCALES:
            raise ValueError(f"scale must be 2, 3 or 4, got {scale!r}")
        if skip not in SKIPS:
            raise unknown_name("skip", skip, SKIPS)
        self.scale, self.skip = scale, skip
        options = dict(attention_options or {})
        self.features = Features(
            [[attention_config(attention, options, block) for block in range(depth)] for depth in depths],
            dim=embed_dim,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
        )
        self.upsampling = nn.Conv2d(embed_dim, 3 * scale**2, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        if skip == "bicubic":
            nn.init.zeros_(self.upsampling.weight)
            nn.init.zeros_(self.upsampling.bias)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> Tensor:
        if image.dim() != 4 or image.shape[1] != 3 or 0 in image.shape[2:]:
            raise ValueError(
                f"images must be [batch, 3, height, width] with at least one pixel, got {tuple(image.shape)}; "
                "repeat the channel of a gray image"
            )
        features = self.features(image - 0.5)
        # float32, since bfloat16 has steps of half a gray level near white
        with torch.autocast(image.device.type, enabled=False):
            pixels = F.pixel_shuffle(self.upsampling(features.to(self.upsampling.weight.dtype)), self.scale)
        if self.skip == "none":
            return pixels + 0.5
        # antialias selects the cubic of MATLAB and Pillow (a = -1/2); it does not smooth when enlarging
        return pixels + F.interpolate(image, scale_factor=self.scale, mode="bicubic", antialias=True)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of retaining their activations."""
        for group in self.features.groups:
            assert isinstance(group, ResidualGroup)
            group.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of position tables, window biases, and parameters of feature maps (powers, scales, angles)."""
        return parameters_without_decay(self)


class Features(nn.Module):
    """x + conv(norm(groups(x))), x = conv(image): [B, 3, H, W] -> [B, C, H, W], a token for every pixel."""

    def __init__(self, attentions: Sequence[Sequence[AttentionConfig]], *, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, dim, 3, padding=1)
        self.groups = nn.ModuleList(
            ResidualGroup(blocks, dim=dim, num_heads=num_heads, mlp_ratio=mlp_ratio) for blocks in attentions
        )
        self.norm = LayerNorm(dim)
        self.last = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        # a GPU's convolutions are faster with channels last, and tokens have this layout anyway
        shallow = self.first(image.contiguous(memory_format=torch.channels_last))
        grid = (image.shape[2], image.shape[3])
        tokens = as_tokens(shallow).contiguous()
        for group in self.groups:
            tokens = group(tokens, grid)
        return shallow + self.last(as_image(self.norm(tokens), grid))


class ResidualGroup(nn.Module):
    """x + conv(blocks(x)) on tokens [B, N, C] of a grid."""

    def __init__(self, attentions: Sequence[AttentionConfig], *, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.blocks = nn.ModuleList(
            Block(
                attention,
                dim=dim,
                num_heads=num_heads,
                mlp_ratio=mlp_ratio,
                local_positions=0,
                feed_forward_mix=False,
                layer_scale=None,
                drop_path=0.0,
                norm_eps=1e-5,
            )
            for attention in attentions
        )
        self.conv = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        x = tokens
        for block in self.blocks:
            x = checkpoint(block, x, grid, use_reentrant=False) if self.grad_checkpointing and self.training else block(x, grid)
        return tokens + as_tokens(self.conv(as_image(x, grid)))


def attention_config(name: str, options: dict[str, Any], block: int) -> AttentionConfig:
    """Return the attention of a block by its index in the group; windows of every second block are shifted."""
    if name not in ATTENTIONS:
        raise unknown_name("attention", name, ATTENTIONS)
    if name == WINDOWS:
        name, options = "softmax", {"window": WINDOW, "position": "relative"} | options
    config = configure(name, options)
    return replace(config, shifted=True) if config.window and block % 2 else config
