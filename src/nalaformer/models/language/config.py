"""The config of language models in transformers' form, and named sizes."""

from dataclasses import fields
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from ...feature_maps import FEATURE_MAPS, map_option_names
from ...registry import unknown_name

RECURRENT_MIXERS = ("linear", "forgetting", "delta", "gated_delta")
# mixers whose state decays
DECAY_MIXERS = ("forgetting", "gated_delta")
MIXER_NAMES = (*RECURRENT_MIXERS, "softmax")
CONTRASTS = ("none", "learned")

# transformers' kinds of rotary positions, and the fields that each needs beside rope_theta
ROTARY_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

# the names count the parameters of `linear` mixers with tied embeddings of 32,000 tokens
SIZES: dict[str, dict[str, int]] = {
    "nano": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2},
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4},
    "small": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8},
    "340m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1.3b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 32},
}
"""Width, depth and heads by name, for `NaLaConfig.from_size`."""


class NaLaConfig(PreTrainedConfig):
    """The parts of a language model. Each field is documented under it; sizes have names in SIZES."""

    model_type = "nala"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"rope_theta": "rotary_base"}
    ignore_keys_at_rope_validation = {"partial_rotary_factor"}

    vocab_size: int = 32000
    """Number of tokens of the vocabulary."""
    hidden_size: int = 1024
    """Channels of the residual stream."""
    intermediate_size: int = 2816
    """Hidden channels of the SwiGLU network."""
    num_hidden_layers: int = 24
    """Blocks of a mixer and a SwiGLU network."""
    num_attention_heads: int = 16
    """Query heads of every mixer."""
    num_key_value_heads: int | None = None
    """Key heads of `linear`, `forgetting` and `softmax` mixers, shared by groups of query heads; None: one for each query head.
    The delta rules have one for each query head."""
    head_dim: int | None = None
    """Channels of a head; None: hidden_size / num_attention_heads."""
    mixers: str | list[str] = "linear"
    """The mixer of tokens: "linear", "forgetting" (with decay), "delta", "gated_delta" or "softmax", one name for all layers or
    a list with one for each."""
    feature_map: str = "norm_aware"
    """Feature map of every mixer except `softmax`, a name of nalaformer.FEATURE_MAPS."""
    map_options: dict[str, Any] | None = None
    """Options of the feature map."""
    contrast: str = "none"
    """Moves outputs of `linear` and `forgetting` mixers away from the mean of the values that they see, o + z (o - mean v):
    "learned", z = softplus(a + b |q| / sqrt D) with a and b of each head, or "none"."""
    contrast_offset: float = 0.0
    """Initial value of a in a learned contrast; -0.75 is our recommendation."""
    short_convolution: int = 4
    """Kernel size of the causal depth-wise convolution of q, k and v before every mixer except `softmax`; 0: no convolution."""
    linear_rotary: bool = False
    """Rotary positions in `linear` and `forgetting` mixers too (numerator only, as published); `softmax` mixers always have
    them."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies; "rope_theta" in rope_parameters is the same and takes precedence."""
    rope_parameters: dict[str, Any] | None = None
    """Scaling of rotary positions for texts longer than those of training, in transformers' terms: "rope_type" ("default",
    "linear", "dynamic", "yarn" or "llama3") with its fields ("factor", ...), and "partial_rotary_factor", the fraction of the
    channels that rotate. None: "default", all channels; without rotary mixers it stays None."""
    rms_norm_eps: float = 1e-6
    """The eps of every RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of new weights."""
    max_position_embeddings: int = 2048
    """Length that the model is trained for, which evaluation tools read; the model itself has no limit."""
    use_cache: bool = True
    """Return a cache, outside training."""
    logits_in_training: bool = False
    """Return logits beside the loss in training too. By default a training step with labels returns only the loss and never
    holds the logits of all tokens. Evaluation always returns them."""
    tie_word_embeddings: bool = True
    """One matrix for the embedding and the output."""
    pad_token_id: int | None = None
    """The token id of the tokenizer's padding."""
    bos_token_id: int | None = None
    """The token id that begins a text."""
    eos_token_id: int | list[int] | None = None
    """The token id that ends a text, where generation stops."""

    @classmethod
    def from_size(cls, name: str, **changes: Any) -> "NaLaConfig":
        """Return the layout of that name in SIZES, with some fields changed."""
        if name not in SIZES:
            raise unknown_name("size", name, SIZES)
        known = {field.name for field in fields(cls)}
        for key in changes:
            # transformers would store it and use it nowhere
            if key not in known and not hasattr(cls, key):
                raise unknown_name("setting", key, known)
        return cls(**(SIZES[name] | changes))

    def __post_init__(self, **kwargs: Any) -> None:
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        ):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be a positive whole number, got {number!r}")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} and "
                    f"{self.num_attention_heads}; or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {self.num_attention_heads} and "
                f"{self.num_key_value_heads}"
            )
        self.map_options = self.map_options or {}
        self._check_mixers()
        self._check_map()
        self._check_contrast()
        if self.short_convolution < 0:
            raise ValueError(f"short_convolution must be a number of tokens, or 0 for none, got {self.short_convolution}")
        if self.head_dim % 2 and self.has_rotary:
            raise ValueError(f"rotary positions rotate channel pairs and need an even head_dim, got {self.head_dim}")
        older = {name: kwargs.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in kwargs}
        given = kwargs.pop("rope_scaling", None) or self.rope_parameters or {}
        self.rope_parameters = older | given
        self.rope_parameters = self.rotary
        self.check_rotary()
        super().__post_init__(**kwargs)
        if not self.has_rotary:
            # transformers requires an even head_dim of models with rope_parameters
            self.rope_parameters = None

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(key, value)
        known = self.__dict__.get("rope_parameters")
        if key in ("rotary_base", "rope_theta") and known:
            known["rope_theta"] = value
        elif key == "rope_parameters" and known and "rope_theta" in known:
            super().__setattr__("rotary_base", known["rope_theta"])

    @property
    def rotary(self) -> dict[str, Any]:
        """rope_parameters, filled up with defaults."""
        given = self.rope_parameters or {}
        start = {"rope_type": given.get("type", "default"), "rope_theta": self.rotary_base, "partial_rotary_factor": 1.0}
        return start | given

    def check_rotary(self) -> None:
        """Reject rope_parameters that are not supported."""
        if self.rope_parameters is None:
            return
        assert self.head_dim is not None
        kind, part = self.rotary["rope_type"], self.rotary["partial_rotary_factor"]
        if kind not in ROTARY_KINDS:
            raise unknown_name("rope_type", kind, ROTARY_KINDS)
        if kind != "default" and not self.has_rotary:
            raise ValueError(
                f"rope_parameters need a layer with rotary positions, got the type {kind!r} and none; use `softmax` mixers, or "
                "linear_rotary=True"
            )
        for name in ROTARY_KINDS[kind]:
            number = self.rope_parameters.get(name)
            if not isinstance(number, (int, float)) or number <= 0:
                raise ValueError(f"rope_parameters of the type {kind!r} need a positive {name!r}, got {number!r}")
        rotating = int(self.head_dim * part)
        if not 0 < part <= 1 or (self.has_rotary and (rotating % 2 or rotating == 0)):
            raise ValueError(
                f"partial_rotary_factor must be above 0, at most 1, and rotate an even number of channels, got {part} of "
                f"{self.head_dim} channels"
            )

    def _check_mixers(self) -> None:
        if not isinstance(self.mixers, str) and len(self.mixers) != self.num_hidden_layers:
            raise ValueError(
                f"mixers must be one name or one for each of the {self.num_hidden_layers} layers, got {len(self.mixers)} names"
            )
        for name in self.layer_mixers:
            if name not in MIXER_NAMES:
                raise unknown_name("mixer", name, MIXER_NAMES)

    def _check_map(self) -> None:
        assert self.map_options is not None
        for option in self.map_options:
            known = map_option_names(self.feature_map)
            if option not in known:
                raise unknown_name(f"option of the feature map {self.feature_map!r}:", option, known)
        streams = FEATURE_MAPS[self.feature_map].streams
        if streams > 1 and {"delta", "gated_delta"} & set(self.layer_mixers):
            raise ValueError(
                f"the delta rules write one value for each key and need a map with one stream, got {self.feature_map!r} with "
                f"{streams}; use mixers='linear' or 'forgetting', or another feature_map"
            )

    def _check_contrast(self) -> None:
        if self.contrast not in CONTRASTS:
            raise unknown_name("contrast", self.contrast, CONTRASTS)
        if self.contrast_offset and self.contrast == "none":
            raise ValueError(
                f"contrast_offset is where a learned contrast starts, got {self.contrast_offset} with contrast='none'; use "
                "contrast='learned', or leave it out"
            )
        if self.contrast != "none" and not {"linear", "forgetting"} & set(self.layer_mixers):
            raise ValueError(
                f"a contrast is a part of `linear` and `forgetting` mixers, got {self.contrast!r} with mixers={self.mixers!r}; "
                "leave it out"
            )

    @property
    def layer_mixers(self) -> list[str]:
        """The mixer of each layer."""
        return [self.mixers] * self.num_hidden_layers if isinstance(self.mixers, str) else list(self.mixers)

    @property
    def has_rotary(self) -> bool:
        """True if a layer rotates its queries and keys."""
        return "softmax" in self.layer_mixers or self.linear_rotary

    @property
    def layer_types(self) -> list[str]:
        """The mixers in transformers' terms: "full_attention" for `softmax`, "linear_attention" for the others."""
        return ["full_attention" if name == "softmax" else "linear_attention" for name in self.layer_mixers]


AutoConfig.register(NaLaConfig.model_type, NaLaConfig, exist_ok=True)
