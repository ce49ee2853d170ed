"""The parts of an attention layer as a configuration, and the published methods as such configurations."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..feature_maps import FEATURE_MAPS, map_option_names
from ..field_types import check_field_types
from ..registry import unknown_name


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The parts of an attention layer, in which alone the methods differ."""

    feature_map: str | None
    """Name of the feature map; None is softmax attention."""
    map_options: dict[str, Any] = field(default_factory=dict)
    """Options of the feature map."""
    contrast: str = "none"
    """Moves outputs away from the mean value, o + z (o - mean v): "none", "mean_score" (z = D^-1/2 phi(q) . mean phi(k), MALA)
    or "learned" (z = softplus(a + b |q| / sqrt D), a and b per head)."""
    contrast_offset: float = 0.0
    """Initial value of a in a learned contrast: at 0, queries of unit variance have z = 1.3, at -3 they have 0.13."""
    key_weight: str = "none"
    """Factor of each key: "none" or "global_query" (a softmax over the keys for the mean of all queries, RALA)."""
    mixed_blocks: tuple[int, int] = (1, 1)
    """Rows and columns of blocks of the grid, each with its own state; a learned matrix mixes the states for the queries of
    each block (MHLA). A single row of tokens is cut into as many blocks. (1, 1): one state."""
    position: str = "none"
    """"none", "rotary" (2-D rotation of the features), "table" (learned, added to the keys, interpolated to any grid) or
    "relative" (learned bias per offset inside a window; softmax only)."""
    rotary_over: str = "head"
    """"head": rotations over the head size, repeated on each half of the features; "features": over the feature size."""
    normalised_rotary: bool = False
    """True: weights >= 0 that sum to one (our form); False: rotation in the numerator only, as published."""
    table_grid: tuple[int, int] = (14, 14)
    """Height and width for which the position table is learned."""
    local_mix: str = "none"
    """Depth-wise convolution of the values: "none", "channels" (a kernel per channel) or "heads" (shared by the heads)."""
    kernel_size: int = 5
    """Side of the local mix's kernel, an odd number."""
    norm: bool = False
    """LayerNorm over the channels after attention and local mix."""
    gate: str = "none"
    """Output gate from the input: "none", "linear" (no activation) or "silu"."""
    qkv_bias: bool = True
    """Bias of the input projection."""
    key_reduction: int = 1
    """Ratio by which the image for keys and values is smaller, as in PVT."""
    value_upsampling: str = "grid"
    """How reduced values reach the local mix: "grid" (2-D) or "flat" (along the flattened tokens, as published)."""
    window: int = 0
    """Side of the windows inside which tokens attend; 0: all tokens see each other."""
    shifted: bool = False
    """Shift windows by half their side, as in every second block of Swin; linear attention then runs once per part of one."""
    causal: bool = False
    """Token i sees tokens 0..i."""
    forgets: bool = False
    """Data-dependent decay: each head of a causal layer multiplies its state at each token by a learned factor, as in Mamba 2;
    linear attention only."""
    block: int = 1
    """Causal layers: token i sees all tokens of its own block of this size and of earlier blocks; 1 is plain causal."""
    weight_dropout: float = 0.0
    """Probability of dropping an attention weight in training; softmax only, since linear attention computes no weights."""

    def __post_init__(self) -> None:
        if self.feature_map is not None:
            FEATURE_MAPS[self.feature_map]
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown_name(f"{name}", getattr(self, name), choices)
        check_field_types(self)
        if min(self.table_grid) < 1:
            raise ValueError(f"table_grid must be (height, width), both positive, got {self.table_grid}")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be positive and odd, so that the image keeps its size, got {self.kernel_size}")
        if self.key_reduction < 1:
            raise ValueError(f"key_reduction must be at least 1, got {self.key_reduction}")
        if self.causal and (self.local_mix != "none" or self.key_reduction > 1):
            raise ValueError('a causal layer must not see later tokens: use local_mix="none" and key_reduction=1')
        if self.feature_map is None and (self.contrast != "none" or self.key_weight != "none"):
            raise ValueError(
                f"contrast and key_weight are parts of linear attention, got {self.contrast!r} and {self.key_weight!r} without "
                'a feature map; use "none" for both, or name a feature_map'
            )
        # configuration files give a list, and the dataclass is frozen
        object.__setattr__(self, "mixed_blocks", tuple(self.mixed_blocks))
        if min(self.mixed_blocks) < 1:
            raise ValueError(f"mixed_blocks must be rows and columns of blocks, both positive, got {self.mixed_blocks}")
        if self.num_states > 1:
            others = {"contrast": "none", "key_weight": "none", "causal": False, "window": 0}
            clash = {name: getattr(self, name) for name, plain in others.items() if getattr(self, name) != plain}
            if self.feature_map is None or clash:
                raise ValueError(
                    f"blocks with states of their own need a feature map, and have no contrast, weights of keys, causal order "
                    f"or windows, got {clash or {'feature_map': None}} with mixed_blocks={self.mixed_blocks}; use "
                    "mixed_blocks=(1, 1), or leave those out"
                )
        if self.contrast_offset and self.contrast != "learned":
            raise ValueError(
                f"contrast_offset is where a learned contrast starts, got {self.contrast_offset} with "
                f'contrast="{self.contrast}"; use contrast="learned", or leave it out'
            )
        if self.block < 1:
            raise ValueError(
                f"block must be the number of tokens that see each other, at least 1, got {self.block}; 1 is plain causal"
            )
        if self.block > 1 and not self.causal:
            raise ValueError(
                f"blocks of tokens are those of a causal layer, got block={self.block} with causal=False; use causal=True, or "
                "block=1"
            )
        if self.forgets and (self.feature_map is None or not self.causal or self.block > 1 or self.contrast == "mean_score"):
            raise ValueError(
                "a layer that forgets needs a feature map, causal=True and block=1, and its contrast is learned or none, got "
                f"feature_map={self.feature_map!r}, causal={self.causal}, block={self.block}, contrast={self.contrast!r}; "
                "use forgets=False, or those"
            )
        if self.causal and self.key_weight == "global_query":
            raise ValueError(
                'key_weight="global_query" looks at all queries, later ones too, and cannot be causal (RALA); '
                'use key_weight="none", or causal=False'
            )
        if self.window < 0:
            raise ValueError(f"window must be the side of a window in tokens, or 0 for none, got {self.window}; Swin has 7")
        if self.feature_map is not None and self.position == "relative":
            raise ValueError(
                f'position="relative" needs the weight of each pair, got the linear {self.feature_map} map; '
                "use feature_map=None, or another position"
            )
        if not 0 <= self.weight_dropout < 1:
            raise ValueError(f"weight_dropout must be at least 0 and below 1, got {self.weight_dropout}")
        if self.feature_map is not None and self.weight_dropout:
            raise ValueError(
                f"weight_dropout needs the weight of each pair, got {self.weight_dropout} for the linear {self.feature_map} "
                "map; use feature_map=None, or dropout after the layer"
            )
        if self.window == 0 and (self.shifted or self.position == "relative"):
            raise ValueError('shifted windows and position="relative" need window=1 or more, got window=0; Swin has window=7')
        if self.window and (self.causal or self.key_reduction > 1):
            raise ValueError("windows hold as many keys as queries and look around: use causal=False and key_reduction=1")

    @property
    def num_states(self) -> int:
        """Number of states of a head, one for each of the mixed blocks."""
        return self.mixed_blocks[0] * self.mixed_blocks[1]


CHOICES = {
    "contrast": ("none", "mean_score", "learned"),
    "key_weight": ("none", "global_query"),
    "position": ("none", "rotary", "table", "relative"),
    "rotary_over": ("head", "features"),
    "local_mix": ("none", "channels", "heads"),
    "gate": ("none", "linear", "silu"),
    "value_upsampling": ("grid", "flat"),
}

METHODS = {
    "softmax": AttentionConfig(feature_map=None),
    "linear": AttentionConfig(feature_map="relu"),
    "flatten": AttentionConfig(feature_map="focused", position="table", local_mix="heads"),
    "polaformer": AttentionConfig(feature_map="polarity", position="table", local_mix="heads", gate="linear"),
    "polaformerpp": AttentionConfig(
        feature_map="polarity_exp", position="rotary", rotary_over="features", local_mix="channels", gate="linear"
    ),
    "nalaformer": AttentionConfig(feature_map="norm_aware", position="rotary", local_mix="channels", norm=True, gate="silu"),
    "rala": AttentionConfig(
        feature_map="elu", key_weight="global_query", position="rotary", local_mix="channels", gate="linear"
    ),
    "mala": AttentionConfig(feature_map="elu", contrast="mean_score", position="rotary", local_mix="channels", gate="linear"),
    # a reconstruction: the published material does not name position, local mix and gate
    "mirrorla": AttentionConfig(
        feature_map="reflection",
        map_options={"variance": True},
        position="rotary",
        local_mix="channels",
        gate="linear",
    ),
}


def configure(name: str, options: dict[str, Any]) -> AttentionConfig:
    """Return the configuration of a method with some parts changed; other options go to the feature map."""
    if not isinstance(name, str) or name not in METHODS:
        raise unknown_name("attention", name, METHODS)
    config = METHODS[name]
    parts = {f.name for f in fields(AttentionConfig)}
    changed = {key: value for key, value in options.items() if key in parts}
    for_map = {key: value for key, value in options.items() if key not in parts}
    name_of_map = changed.get("feature_map", config.feature_map)
    known = parts if name_of_map is None else parts | set(map_option_names(name_of_map))
    for option in for_map:
        if option not in known:
            raise unknown_name(f"option of {name} attention:", option, known)
    # another feature map uses its own default options
    kept = {} if "feature_map" in changed else config.map_options
    given = changed.pop("map_options", {})
    if not isinstance(given, dict):
        raise ValueError(f'map_options must be a dictionary, such as {{"power": 3.0}}, got {given!r}')
    map_options = kept | given | for_map
    return replace(config, **changed, map_options=map_options)
