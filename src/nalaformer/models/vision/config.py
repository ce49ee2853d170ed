"""The configuration of backbones, and the published families as such configurations."""

from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from ...attention import METHODS, AttentionConfig, configure
from ...field_types import check_field_types, check_ranges
from ...published_names import FAMILIES
from ...registry import unknown_name

# settings of a softmax stage, which has no feature map
NO_MAP: dict[str, Any] = {
    **{"feature_map": None, "map_options": {}, "contrast": "none", "contrast_offset": 0.0, "key_weight": "none"},
    "mixed_blocks": (1, 1),
}
ATTENTION_PARTS = {part.name for part in fields(AttentionConfig)}


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """The parts of a backbone, in which alone the families differ."""

    family: str
    """The family of parameter names in its published checkpoints, a name of nalaformer.published.FAMILIES."""
    embed_dims: tuple[int, ...]
    """Channels of each stage."""
    depths: tuple[int, ...]
    """Blocks of each stage."""
    num_heads: tuple[int, ...] | int
    """Attention heads, per stage or for all."""
    mlp_ratios: tuple[float, ...] | float = 4.0
    """Hidden channels of the feed-forward network over the channels, per stage or for all."""
    attention: str = "nalaformer"
    """Method of the linear stages, a name of nalaformer.attention.METHODS; "softmax" makes every stage softmax attention."""
    attention_options: dict[str, Any] = field(default_factory=dict)
    """Parts of the attention layers (all stages), the feature map and its options (linear stages), as attention.build takes."""
    attention_stages: str = "llvv"
    """A letter per stage: "l" linear (the method of `attention`), "v" softmax."""
    softmax_shell: str = "softmax"
    """The method whose parts (position, local mix, norm, gate) surround the softmax attention of a softmax stage."""
    softmax_window: int = 0
    """Side of the windows of softmax stages, with a relative bias, every second block shifted (Swin); 0: global attention."""
    key_reduction: tuple[int, ...] | int = 1
    """Ratio by which the image of keys and values is smaller in a linear stage."""
    softmax_key_reduction: tuple[int, ...] | int = 1
    """Ratio by which the image of keys and values is smaller in a softmax stage."""
    stem: str = "convolutions"
    """"convolutions" (four 3x3, two of them with stride 2) or "patches" (one of patch_size, with stride patch_size)."""
    patch_size: int = 4
    """Pixels per token of the first stage; 4 for the convolution stem."""
    stem_norm: bool = True
    """LayerNorm after a patch stem."""
    downsampling: str = "convolution"
    """Between stages: "convolution" (3x3, stride 2, BatchNorm), "patches" (2x2, LayerNorm), "merging" (Swin) or "none"."""
    positions: str = "none"
    """Learned position table added to the tokens: "none", "first" (of the first stage) or "every" stage."""
    local_positions: int = 2
    """Depth-wise 3x3 convolutions of a block: 0, 1 (before attention) or 2 (before the feed-forward network too)."""
    feed_forward_mix: bool = True
    """A depth-wise 3x3 convolution inside the feed-forward network."""
    layer_scale: tuple[float | None, ...] | float | None = None
    """Initial value of the learned scale of each residual branch, per stage or for all; None is no such scale."""
    projection: int | None = 1024
    """Channels of the head before pooling (linear, BatchNorm, SiLU); None is pooling and the classifier alone, and so is 0,
    since timm.create_model passes no None on."""
    final_norm: bool = False
    """LayerNorm after the last stage."""
    output_norms: bool = False
    """LayerNorm of the output features of each stage, not of the input of the next stage: the norms that published files of
    detectors and segmenters have. Logits do not pass them."""
    norm_eps: float = 1e-6
    """Epsilon of the LayerNorms of the blocks and the head."""
    img_size: tuple[int, int] | int = 224
    """Height and width at which position tables are learned; the network takes any size."""
    drop_path_rate: float = 0.0
    """Probability of skipping a residual branch of the last block in training; it grows linearly from 0 at the first."""
    proj_drop_rate: float = 0.0
    """Dropout after attention and inside and after the feed-forward network of every block."""
    attn_drop_rate: float = 0.0
    """Dropout of the weights of softmax stages; linear attention computes no weights that could be dropped."""
    act_layer: str | type[nn.Module] = "gelu"
    """Activation of the feed-forward networks: one of timm's names, or a class."""
    norm_layer: str | type[nn.Module] = "layernorm"
    """Norm of both branches of a block: one of timm's names, or a class that takes (channels, eps=)."""

    def __post_init__(self) -> None:
        check_field_types(self)
        stages = len(self.depths)
        for name in PER_STAGE:
            value = getattr(self, name)
            listed = tuple(value) if isinstance(value, tuple | list) else (value,) * stages
            if len(listed) != stages:
                raise ValueError(f"{name} must have one entry for each of the {stages} stages, got {value!r}")
            # configuration files give lists, and the dataclass is frozen; single values become one tuple
            object.__setattr__(self, name, listed)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown_name(name, getattr(self, name), choices)
        for name, known in (("attention", METHODS), ("softmax_shell", METHODS), ("family", FAMILIES)):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        if len(self.attention_stages) != stages or set(self.attention_stages) - {"l", "v"}:
            raise ValueError(
                f'attention_stages must be "l" (linear) or "v" (softmax) for each of the {stages} stages, '
                f'got {self.attention_stages!r}; for example "{"l" * stages}"'
            )
        if self.local_positions not in (0, 1, 2):
            raise ValueError(f"local_positions must be 0, 1 or 2, got {self.local_positions}")
        if self.stem == "convolutions" and self.patch_size != 4:
            raise ValueError(f'the convolution stem has stride 4, got patch_size={self.patch_size}; use stem="patches"')
        check_ranges(self, below_one=("drop_path_rate", "proj_drop_rate", "attn_drop_rate"), sides=("img_size",))
        # rejects options that no stage takes
        configure(self.attention, self.attention_options)
        if self.attn_drop_rate and all(map(self.is_linear, range(stages))):
            raise ValueError(
                f"attn_drop_rate drops weights of softmax stages, got {self.attn_drop_rate} for a network without any: linear "
                "attention has no weight for each pair; use proj_drop_rate or drop_path_rate"
            )

    def stage_value(self, name: str, stage: int) -> Any:
        """Return the entry for a stage of a field in PER_STAGE."""
        return getattr(self, name)[stage]

    def stride(self, stage: int) -> int:
        """Return the pixels per token of a stage."""
        return self.patch_size * (1 if self.downsampling == "none" else 2**stage)

    @property
    def input_size(self) -> tuple[int, int]:
        """The height and width of img_size."""
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else (self.img_size[0], self.img_size[1])

    def grid(self, stage: int) -> tuple[int, int]:
        """Return height and width in tokens at img_size."""
        height, width = self.input_size
        # each stage pads sizes that do not divide; rounding up at each stage equals rounding up once
        return -(-height // self.stride(stage)), -(-width // self.stride(stage))

    def is_linear(self, stage: int) -> bool:
        feature_map = configure(self.attention, self.attention_options).feature_map
        return self.attention_stages[stage] == "l" and feature_map is not None

    def attention_config(self, stage: int, block: int) -> AttentionConfig:
        """Return the configuration of a block's attention layer."""
        reduction = self.stage_value("key_reduction" if self.is_linear(stage) else "softmax_key_reduction", stage)
        height, width = self.grid(stage)
        parts: dict[str, Any] = {
            "key_reduction": reduction,
            "table_grid": (-(-height // reduction), -(-width // reduction)),
        }
        if self.is_linear(stage):
            return configure(self.attention, parts | self.attention_options)
        if self.softmax_window:
            parts |= {"window": self.softmax_window, "shifted": block % 2 == 1, "position": "relative"}
        parts["weight_dropout"] = self.attn_drop_rate
        parts |= {key: value for key, value in self.attention_options.items() if key in ATTENTION_PARTS}
        return configure(self.softmax_shell, parts | NO_MAP)


PER_STAGE = ("embed_dims", "depths", "num_heads", "mlp_ratios", "key_reduction", "softmax_key_reduction", "layer_scale")
CHOICES = {
    "stem": ("convolutions", "patches"),
    "downsampling": ("convolution", "patches", "merging", "none"),
    "positions": ("none", "first", "every"),
}
