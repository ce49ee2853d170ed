"""The network of every backbone: stem, stages and head, with timm's interface."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from timm.layers import ClassifierHead
from timm.models import register_notrace_function, register_notrace_module
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...attention import Attention, DepthwiseConv, LayerNorm
from ...attention.position_table import PositionTable
from ...ops import scaled_residual
from ...published_names import backbone_part, is_published_model, translate, warn_about_others
from .block import Block, as_image, as_tokens, parameters_without_decay
from .config import BackboneConfig
from .resampling import resample_to
from .resolution import ChannelNorm, PatchConv, PatchMerging, make_downsampling, make_stem


class Backbone(nn.Module):
    """Classify images of any size, [B, in_chans, H, W] -> logits [B, num_classes]; `config` names the parts.

    A state dict with the authors' names is translated while loading, so that timm's checkpoint_path accepts their files; tables
    of another image size are resampled.
    """

    def __init__(
        self,
        config: BackboneConfig,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        dims = config.embed_dims
        with torch.device(device or torch.get_default_device()):
            self.stem = make_stem(config, in_chans)
            self.stages = nn.Sequential(*(Stage(config, index) for index in range(len(dims))))
            self.norm = ChannelNorm(dims[-1], eps=config.norm_eps) if config.final_norm else nn.Identity()
            self.output_norms = None
            if config.output_norms:
                self.output_norms = nn.ModuleList(ChannelNorm(dim, eps=config.norm_eps) for dim in dims)
            self.projection: nn.Module = nn.Identity()
            if config.projection:
                layers = nn.Conv2d(dims[-1], config.projection, 1), nn.BatchNorm2d(config.projection), nn.SiLU()
                self.projection = nn.Sequential(*layers)
            self.num_features = dims[-1]
            self.head_hidden_size = config.projection or dims[-1]
            self.head = ClassifierHead(self.head_hidden_size, num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.feature_info = [
            {"num_chs": dim, "reduction": config.stride(index), "module": f"stages.{index}"} for index, dim in enumerate(dims)
        ]
        self._initialize()
        self.to(dtype=dtype)
        self.register_load_state_dict_pre_hook(fit_weights)

    def forward(self, image: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(image))

    def forward_features(self, image: Tensor) -> Tensor:
        """Return the features of the last stage, [B, C, H / stride, W / stride], rounded up."""
        return self.norm(self.stages(self._stem(image)))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits [B, num_classes], or with pre_logits the input of the classifier, [B, head_hidden_size]."""
        return self.head(self.projection(features), pre_logits=pre_logits)

    def forward_intermediates(
        self,
        image: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return features after the stages of `indices` (timm's convention), alone or as (final features, list).

        output_fmt: "NCHW", "NHWC" or "NLC" (tokens row by row) for the list; the final features stay NCHW.
        """
        arranged = ARRANGED.get(str(getattr(output_fmt, "value", output_fmt)).upper())
        if arranged is None:
            raise ValueError(f"output_fmt must be one of {', '.join(ARRANGED)}, got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.stages), indices)
        intermediates = []
        x = self._stem(image)
        for index, stage in enumerate(self.stages):
            if stop_early and index > last:
                break
            x = stage(x)
            is_end = index == len(self.stages) - 1
            if index in taken:
                # the norm belongs to the last stage, since earlier ones have other channels
                found = self.norm(x) if norm and is_end else x
                found = found if self.output_norms is None else self.output_norms[index](found)
                intermediates.append(arranged(found))
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def get_intermediate_layers(
        self, image: Tensor, n: int | list[int] | tuple[int, ...] = 1, reshape: bool = False, norm: bool = False
    ) -> tuple[Tensor, ...]:
        """Return tokens [B, N, C] after the last `n` stages, or after those of a list; reshape: as images [B, C, H, W]."""
        indices = n if isinstance(n, int) else list(n)
        form = "NCHW" if reshape else "NLC"
        return tuple(self.forward_intermediates(image, indices, norm=norm, output_fmt=form, intermediates_only=True))

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages that the features of `indices` do not need; return the indices that remain valid."""
        taken, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if self.output_norms is not None:
            self.output_norms = self.output_norms[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.projection = nn.Identity()
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; the new one has the dtype, device and mode of the network."""
        self.num_classes = num_classes
        like = next(self.stem.parameters())
        # a head that was reset to zero classes no longer knows its device
        with torch.device(like.device):
            self.head.reset(num_classes, global_pool)
        self.head.to(like.dtype).train(self.training)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample learned position tables to this image size in place, to train them there.

        The network takes every size without this call, since it interpolates its tables in each pass.
        """
        self.config = replace(self.config, img_size=img_size if isinstance(img_size, int) else (img_size[0], img_size[1]))
        for index, stage in enumerate(self.stages):
            assert isinstance(stage, Stage)
            if stage.positions is not None:
                stage.positions.resample(self.config.grid(index))
            for number, block in enumerate(stage.blocks):
                attention: Any = block.attention
                if attention.table is not None:
                    grid = self.config.attention_config(index, number).table_grid
                    attention.table.resample(grid)
                    # the other parts of the layer may have been converted
                    attention.config = replace(attention.config, table_grid=grid)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of retaining their activations."""
        for stage in self.stages:
            assert isinstance(stage, Stage)
            stage.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group parameters by depth, for layer-wise learning rates."""
        fine = [(r"^stages\.(\d+)\.(?:downsampling|positions)", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        last = (r"^(?:norm|output_norms|projection)", (99999,))
        return {"stem": r"^stem", "blocks": [(r"^stages\.(\d+)", None), last] if coarse else [*fine, last]}

    def no_weight_decay(self) -> set[str]:
        """Return the names of position tables, window biases, and parameters of feature maps (powers, scales, angles)."""
        return parameters_without_decay(self)

    def _stem(self, image: Tensor) -> Tensor:
        return self.stem(checked_image(image, self.in_chans))

    def _initialize(self) -> None:
        for module in self.modules():
            # the published patch layouts leave convolutions at torch's initialization
            own = (nn.Linear, nn.Conv2d) if self.config.stem == "convolutions" else (nn.Linear,)
            if isinstance(module, own):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class Stage(nn.Module):
    """Downsampling (except in the first stage), an optional position table, and blocks: [B, C, H, W] -> [B, C', H', W']."""

    def __init__(self, config: BackboneConfig, index: int) -> None:
        super().__init__()
        dim = config.embed_dims[index]
        self.grad_checkpointing = False
        self.downsampling: nn.Module = nn.Identity()
        if index > 0:
            self.downsampling = make_downsampling(config.downsampling, config.embed_dims[index - 1], dim)
        has_table = config.positions == "every" or (config.positions == "first" and index == 0)
        self.positions = PositionTable(channels=dim, grid=config.grid(index)) if has_table else None
        self.blocks = nn.ModuleList(
            Block(
                config.attention_config(index, block),
                dim=dim,
                num_heads=config.stage_value("num_heads", index),
                mlp_ratio=config.stage_value("mlp_ratios", index),
                local_positions=config.local_positions,
                feed_forward_mix=config.feed_forward_mix,
                layer_scale=config.stage_value("layer_scale", index),
                drop_path=_drop_path(config, index, block),
                drop=config.proj_drop_rate,
                activation=config.act_layer,
                norm=config.norm_layer,
                norm_eps=config.norm_eps,
            )
            for block in range(config.depths[index])
        )

    def forward(self, image: Tensor) -> Tensor:
        image = self.downsampling(image)
        grid = (image.shape[2], image.shape[3])
        # one copy here saves strided reads in every layer of the stage
        tokens = as_tokens(image).contiguous()
        if self.positions is not None:
            tokens = tokens + self.positions(grid).to(tokens.dtype)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                tokens = checkpoint(block, tokens, grid, use_reentrant=False)
            else:
                tokens = block(tokens, grid)
        return as_image(tokens, grid)


# fx cannot trace a check of shapes, so it takes the function as one step
@register_notrace_function
def checked_image(image: Tensor, in_chans: int) -> Tensor:
    """Check the image and return it in the stem's fastest memory format."""
    if image.dim() != 4 or image.shape[1] != in_chans or 0 in image.shape[2:]:
        raise ValueError(
            f"images must be [batch, {in_chans}, height, width] with at least one pixel, got {tuple(image.shape)}; "
            "other channels: create the model with in_chans="
        )
    # convolutions are several times faster with the channels side by side, on a GPU batch norms too
    return image.contiguous(memory_format=torch.channels_last)


# modules that branch on shapes or call kernels are one step of a traced graph
for _part in (Attention, DepthwiseConv, LayerNorm, PatchConv, PatchMerging, PositionTable):
    register_notrace_module(_part)
register_notrace_function(scaled_residual)

ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "NCHW": lambda image: image,
    "NHWC": lambda image: image.permute(0, 2, 3, 1),
    "NLC": as_tokens,
}


def _drop_path(config: BackboneConfig, stage: int, block: int) -> float:
    last = sum(config.depths) - 1
    return config.drop_path_rate * (sum(config.depths[:stage]) + block) / max(last, 1)


def fit_weights(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Translate weights in place to the network's names and resample tables to its image size."""
    translate_published_names(model, state_dict, prefix)
    lines = resample_to(model, state_dict, prefix)
    if lines:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        warnings.warn(f"the weights are of another image size; resampled: {lines[0]}{more}", stacklevel=2)


def translate_published_names(model: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace the authors' names by ours, and remove prefixes of training programs."""
    # only for a whole model: inside another module the names have a prefix that no published file has
    if prefix:
        return
    inside, others = backbone_part(state_dict)
    if is_published_model(inside):
        inside = translate(inside, model.config.family)  # type: ignore[union-attr, arg-type]
    warn_about_others(others)
    state_dict.clear()
    state_dict.update(inside)
