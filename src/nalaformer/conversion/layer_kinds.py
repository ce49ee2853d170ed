"""The supported attention layers of other libraries: how to recognize them, why one must stay, and how to replace it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention, AttentionConfig, configure
from ..feature_maps import map_option_names
from ..registry import unknown_name
from .adapters import (
    Adapter,
    DiffusersAttention,
    TimmAttention,
    TimmGridAttention,
    TimmWindowAttention,
    TorchAttention,
    TorchvisionWindowAttention,
    TransformersAttention,
    TransformersGridAttention,
    TransformersNestedAttention,
    TransformersWindowAttention,
)

# options that would need weights which the model does not have
WITHOUT_NEW_PROJECTIONS = {"gate": "none", "norm": False}
# a plain ViT passes no grid to its attention, since a class token lies on none; its input holds the positions
WITHOUT_GRID = {"position": "none", "local_mix": "none"}
TRANSFORMERS_KINDS = (
    "ViTAttention",
    "DeiTAttention",
    "Dinov2Attention",
    "Dinov2WithRegistersAttention",
    "IJepaAttention",
    "ViTMAEAttention",
    "ViTMSNAttention",
)
# plain attention; other processors compute something else
DIFFUSERS_PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")
# these classes serve vision and text encoders
TRANSFORMERS_TWO_ENCODERS = ("CLIPAttention", "SiglipAttention", "Siglip2Attention")
BIASED = "adds a learned bias for each pair of tokens, its positions, which linear attention cannot have"
SCALED = "compares directions with a learned scale for each head, which linear attention has no place for"
ROTARY = "rotates queries and keys by rotary positions that its model gives to it, and ours takes none from outside"
# known layers that cannot be converted, by package and class, with the reason
OBSTACLES = {
    ("timm.models.beit", "Attention"): BIASED,
    ("timm.models.vision_transformer_sam", "Attention"): BIASED,
    ("timm.models.swin_transformer_v2", "WindowAttention"): SCALED,
    ("torchvision.models.swin_transformer", "ShiftedWindowAttentionV2"): SCALED,
    ("transformers.models.beit.modeling_beit", "BeitAttention"): BIASED,
    ("transformers.models.dinov3_vit.modeling_dinov3_vit", "DINOv3ViTAttention"): ROTARY,
}
HEADS = ("num_heads", "num_attention_heads", "heads")


@dataclass(frozen=True)
class LayerKind:
    """A kind of attention layer: the reason why a layer must stay ("" if none), and its replacement."""

    obstacle: Callable[[Any], str]
    convert: Callable[[Any, str, dict[str, Any]], nn.Module]
    record: str = ""
    """The part that holds a converted layer's record: it has a weight in the original layer, whose loading then fails."""

    @staticmethod
    def num_heads(module: nn.Module) -> int:
        return next(getattr(part, name) for part in module.modules() for name in HEADS if hasattr(part, name))


def find_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerKind]]:
    """Yield the attention layers of a model: name, layer and kind."""
    has_rotary = any(type(module).__name__.startswith("RotaryEmbedding") for module in model.modules())
    whole = None
    for name, module in model.named_modules():
        # modules inside of a known layer are parts of it
        if whole is not None and name.startswith(whole):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        layer_kind = find_kind(module, parent)
        if layer_kind is TIMM_EVA and has_rotary:
            layer_kind = unconvertible(ROTARY)
        if layer_kind is not None:
            whole = None if layer_kind is UNKNOWN else f"{name}."
            yield name, module, layer_kind


def find_kind(module: nn.Module, parent: nn.Module) -> LayerKind | None:
    """Return the kind of an attention layer; None for other modules. parent: the module around it."""
    kind, package = type(module).__name__, type(module).__module__
    if isinstance(module, Attention):
        return OURS
    if package.startswith("nalaformer."):
        return None
    if kind == "Attention" and package in ("timm.layers.attention", "timm.models.vision_transformer"):
        return TIMM_VIT
    if kind == "WindowAttention" and package == "timm.models.swin_transformer":
        return TIMM_SWIN
    if kind == "Attention" and package == "timm.models.pvt_v2":
        return TIMM_PVT
    if isinstance(module, nn.MultiheadAttention):
        # torch's layer may get keys of other tokens: convert it only in a model that is known to use self-attention
        is_known = type(parent).__module__ == "torchvision.models.vision_transformer"
        return TORCH_IN_VIT if is_known else UNKNOWN
    if (package, kind) in OBSTACLES:
        return unconvertible(OBSTACLES[package, kind])
    if (package, kind) == ("timm.models.eva", "EvaAttention"):
        return TIMM_EVA
    if (package, kind) == ("torchvision.models.swin_transformer", "ShiftedWindowAttention"):
        return TORCHVISION_SWIN
    if (package, kind) == ("transformers.models.swin.modeling_swin", "SwinAttention") and hasattr(module, "q_proj"):
        return TRANSFORMERS_SWIN
    if kind == "SegformerAttention" and hasattr(module, "q_proj"):
        return TRANSFORMERS_SEGFORMER
    if kind in TRANSFORMERS_TWO_ENCODERS and package.startswith("transformers.models."):
        return TRANSFORMERS_ENCODER
    if kind in TRANSFORMERS_KINDS and package.startswith("transformers.models."):
        return TRANSFORMERS_VIT if hasattr(module, "q_proj") else TRANSFORMERS_NESTED_VIT
    if kind == "Attention" and package == "diffusers.models.attention_processor":
        return DIFFUSERS
    if "attention" not in kind.lower():
        return None
    has_heads = any(isinstance(getattr(module, name, None), int) for name in HEADS)
    projects = any(isinstance(layer, nn.Linear) for layer in module.modules())
    return UNKNOWN if has_heads and projects else None


def unconvertible(reason: str) -> LayerKind:
    return LayerKind(lambda module: reason, lambda module, attention, options: module)


# --- our layer replaces another ------------------------------------------------------------------------------------------


def conversion_config(attention: str, options: dict[str, Any], defaults: dict[str, Any], *, bias: bool) -> AttentionConfig:
    config = configure(attention, defaults | {"qkv_bias": bias} | options)
    if config.feature_map is None:
        raise ValueError(f"{attention!r} is the softmax attention that the model has already; name a linear method")
    if config.causal or config.key_reduction > 1 or config.window:
        raise ValueError("conversion must not change which tokens attend to which: do not set causal, key_reduction or window")
    return config


def conversion_config_without_grid(attention: str, options: dict[str, Any], *, bias: bool) -> AttentionConfig:
    config = conversion_config(attention, options, WITHOUT_NEW_PROJECTIONS | WITHOUT_GRID, bias=bias)
    if config.position != "none" or config.local_mix != "none":
        raise ValueError(
            'a ViT tells its attention no grid (a class token lies on none): leave position and local_mix at "none", got '
            f"{config.position!r} and {config.local_mix!r}; the backbones vit_nala_* have both"
        )
    return config


def conversion_config_with_grid(attention: str, options: dict[str, Any], *, bias: bool) -> AttentionConfig:
    """Use no positions by default: these networks learn positions in their convolutions."""
    return conversion_config(attention, options, WITHOUT_NEW_PROJECTIONS | {"position": "none"}, bias=bias)


def build_layer(config: AttentionConfig, num_heads: int, qkv: tuple[nn.Linear, ...], output: nn.Linear) -> Attention:
    """Build our layer with the weights of theirs, on the same device and in the same dtype."""
    dim, like = output.in_features, output.weight
    with torch.device(like.device):
        layer = Attention(config, dim=dim, num_heads=num_heads).to(like.dtype)
    with torch.no_grad():
        # a gate lies behind q, k and v and keeps its new weights
        layer.qkvg.weight[: 3 * dim] = torch.cat([linear.weight for linear in qkv])
        if layer.qkvg.bias is not None:
            layer.qkvg.bias[: 3 * dim] = torch.cat([linear.bias for linear in qkv])
        layer.projection.weight.copy_(output.weight)
        nn.init.zeros_(layer.projection.bias)
        if output.bias is not None:
            layer.projection.bias.copy_(output.bias)
        start_without_local_mix(layer)
    return layer


def build_layer_on_grid(
    config: AttentionConfig,
    num_heads: int,
    q: nn.Linear,
    kv: tuple[nn.Linear, ...],
    smaller: nn.Conv2d | None,
    norm: nn.LayerNorm | None,
    output: nn.Linear,
) -> Attention:
    """Build our layer for keys of a smaller image, made by a convolution and a norm; None: keys of the tokens themselves."""
    if smaller is None or norm is None:
        return build_layer(config, num_heads, (q, *kv), output)
    config = replace(config, key_reduction=smaller.kernel_size[0])
    with torch.device(output.weight.device):
        layer = Attention(config, dim=output.in_features, num_heads=num_heads).to(output.weight.dtype)
    with torch.no_grad():
        # a gate lies behind q and keeps its new weights
        layer.qg.weight[: len(q.weight)] = q.weight
        layer.kv.weight.copy_(torch.cat([linear.weight for linear in kv]))
        if q.bias is not None:
            layer.qg.bias[: len(q.bias)] = q.bias
            layer.kv.bias.copy_(torch.cat([linear.bias for linear in kv]))
        for ours, theirs in ((layer.reduce, smaller), (layer.reduce_norm, norm), (layer.projection, output)):
            ours.load_state_dict(theirs.state_dict())
        layer.reduce_norm.eps = norm.eps
        start_without_local_mix(layer)
    return layer


def start_without_local_mix(layer: Attention) -> None:
    """Zero the local mix, so that the layer begins as attention alone."""
    if layer.local_mix is not None:
        for parameter in layer.local_mix.parameters():
            parameter.zero_()


@dataclass(frozen=True)
class Parts:
    """The names of a layer's number of heads, its projections (all of q, k, v, or one for each) and its dropout."""

    heads: str
    qkv: tuple[str, ...]
    output: str
    dropout: str = ""

    def obstacle(self, module: Any) -> str:
        """Return why the sizes do not fit our layer, or an empty string."""
        inside, output = (module.get_submodule(name) for name in (self.qkv[0], self.output))
        return projections_obstacle(attrgetter(self.heads)(module), inside.in_features, output)

    def has_bias(self, module: Any) -> bool:
        return module.get_submodule(self.qkv[0]).bias is not None

    def build_layer(self, module: Any, config: AttentionConfig) -> Attention:
        """Build our layer with the weights of the module."""
        qkv = tuple(module.get_submodule(name) for name in self.qkv)
        return build_layer(config, attrgetter(self.heads)(module), qkv, module.get_submodule(self.output))

    def make_kind(self, adapter: type[Adapter], record: str, *, more: Callable[[Any], str] = lambda module: "") -> LayerKind:
        """Return a kind whose attention gets no grid; more: returns another reason why a layer must stay."""

        def convert(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
            config = conversion_config_without_grid(attention, options, bias=self.has_bias(module))
            dropout = module.get_submodule(self.dropout) if self.dropout else None
            return adapter(self.build_layer(module, config), dropout)

        return LayerKind(lambda module: more(module) or self.obstacle(module), convert, record)


def projections_obstacle(heads: int, dim: int, output: nn.Linear) -> str:
    if dim % heads:
        return f"its {dim} channels do not divide into its {heads} heads"
    if output.in_features != dim or output.out_features != dim:
        return f"has {output.in_features} channels inside and {dim} outside, and ours as many inside as outside"
    return ""


# --- the kinds of layers -------------------------------------------------------------------------------------------------


TIMM = Parts("num_heads", ("qkv",), "proj", "proj_drop")
TRANSFORMERS = Parts("num_attention_heads", ("q_proj", "k_proj", "v_proj"), "o_proj")
TRANSFORMERS_TWO = Parts("num_heads", ("q_proj", "k_proj", "v_proj"), "out_proj")
# DINOv2 in older transformers (5.17) has a layer for q, k and v and one for the output, and returns no weights
NESTED_NAMES = ("attention.query", "attention.key", "attention.value")
TRANSFORMERS_NESTED = Parts("attention.num_attention_heads", NESTED_NAMES, "output.dense")
# DiT has no set_attn_processor for the whole model, and a processor cannot hold the projection of a gate, so the module
# itself is replaced
DIFFUSERS_PARTS = Parts("heads", ("to_q", "to_k", "to_v"), "to_out.0", "to_out.1")


def timm_vit_obstacle(module: Any) -> str:
    for part, what in (("q_norm", "queries"), ("k_norm", "keys"), ("norm", "its output")):
        if not isinstance(getattr(module, part, nn.Identity()), nn.Identity):
            return f"normalises {what} with weights that linear attention has no place for"
    if getattr(module, "gate", None) is not None:
        return "has a gate of its own"
    return ""


def conversion_config_in_windows(
    parts: Parts, module: Any, window: tuple[int, int], attention: str, options: dict[str, Any]
) -> AttentionConfig:
    """Configure attention in windows, where position and local mix of the method replace the relative bias."""
    return conversion_config(attention, options, WITHOUT_NEW_PROJECTIONS | {"table_grid": window}, bias=parts.has_bias(module))


def convert_timm_swin(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    window = (module.window_size[0], module.window_size[1])
    config = conversion_config_in_windows(TIMM, module, window, attention, options)
    return TimmWindowAttention(TIMM.build_layer(module, config), module.proj_drop, window)


def convert_transformers_swin(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    window = tuple(module.relative_position_bias.window_size)
    config = conversion_config_in_windows(TRANSFORMERS, module, window, attention, options)
    return TransformersWindowAttention(TRANSFORMERS.build_layer(module, config), None, window)


def convert_torchvision_swin(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    """Convert a layer that splits images into windows itself, as ours does; the local mix sees the whole image."""
    window = (module.window_size[0], module.window_size[1])
    config = conversion_config_in_windows(TIMM, module, window, attention, options)
    config = replace(config, window=window[0], shifted=any(module.shift_size))
    return TorchvisionWindowAttention(TIMM.build_layer(module, config), nn.Dropout(module.dropout))


def torchvision_swin_obstacle(module: Any) -> str:
    if module.window_size[0] != module.window_size[1]:
        return f"has windows of {module.window_size[0]} x {module.window_size[1]}, and ours are square"
    return TIMM.obstacle(module)


def diffusers_obstacle(module: Any) -> str:
    processor = type(module.processor).__name__
    if module.is_cross_attention or module.only_cross_attention:
        return "attends to a text or another input, and linear attention here to the image's own tokens alone"
    if module.added_kv_proj_dim is not None:
        return "attends to image and text together, with projections that linear attention has no place for"
    if processor not in DIFFUSERS_PROCESSORS:
        return f"computes what its {processor} says, which is not plain softmax attention"
    if module.norm_q is not None or module.norm_k is not None:
        return "normalises queries and keys with weights that linear attention has no place for"
    if module.group_norm is not None or module.spatial_norm is not None or module.residual_connection:
        return "normalises its input or adds it to its output, as an autoencoder's attention does"
    if module.is_causal:
        return "is causal"
    if module.rescale_output_factor != 1:
        return f"divides its output by {module.rescale_output_factor:g}"
    if module.to_k.out_features != module.to_q.out_features:
        return "has fewer heads of keys than of queries"
    return ""


def transformers_encoder_obstacle(module: Any) -> str:
    is_causal = type(module.config).__name__ == "CLIPTextConfig"
    return "belongs to a text encoder whose tokens see earlier ones alone" if is_causal else ""


def torch_in_vit_obstacle(module: Any) -> str:
    if not module.batch_first or not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        return "has keys or values of other sizes, or keys that belong to no token"
    return projections_obstacle(module.num_heads, module.embed_dim, module.out_proj)


def convert_torch_in_vit(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    joined = as_linear(module.in_proj_weight, module.in_proj_bias)
    config = conversion_config_without_grid(attention, options, bias=joined.bias is not None)
    return TorchAttention(build_layer(config, module.num_heads, (joined,), module.out_proj))


def as_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Build a layer around these weights, to read them from."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach())
    return linear


def timm_pvt_obstacle(module: Any) -> str:
    if module.pool is not None:
        return "pools its keys to 7 x 7 at every size"
    return projections_obstacle(module.num_heads, module.q.in_features, module.proj)


def convert_timm_pvt(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    config = conversion_config_with_grid(attention, options, bias=module.q.bias is not None)
    layer = build_layer_on_grid(config, module.num_heads, module.q, (module.kv,), module.sr, module.norm, module.proj)
    return TimmGridAttention(layer, module.proj_drop)


def convert_transformers_segformer(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    config = conversion_config_with_grid(attention, options, bias=module.q_proj.bias is not None)
    smaller = getattr(module, "sequence_reduction", None)
    convolution, norm = (None, None) if smaller is None else (smaller.sequence_reduction, smaller.layer_norm)
    kv = (module.k_proj, module.v_proj)
    return TransformersGridAttention(
        build_layer_on_grid(config, module.num_attention_heads, module.q_proj, kv, convolution, norm, module.o_proj)
    )


def timm_eva_obstacle(module: Any) -> str:
    return timm_vit_obstacle(module) or projections_obstacle(module.num_heads, module.proj.out_features, module.proj)


def convert_timm_eva(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    """Convert a layer whose queries and values have a bias and whose keys have none."""
    if module.qkv is None:
        parts = [(linear.weight, linear.bias) for linear in (module.q_proj, module.k_proj, module.v_proj)]
    else:
        weights = module.qkv.weight.chunk(3)
        parts = list(zip(weights, (module.q_bias, module.k_bias, module.v_bias), strict=True))
    has_bias = any(bias is not None for _, bias in parts)
    linears = tuple(
        as_linear(weight, weight.new_zeros(len(weight)) if has_bias and bias is None else bias) for weight, bias in parts
    )
    config = conversion_config_without_grid(attention, options, bias=has_bias)
    return TimmAttention(build_layer(config, module.num_heads, linears, module.proj), module.proj_drop)


def our_obstacle(module: Attention) -> str:
    if module.map is not None:
        return "is linear already"
    return "has a relative bias per pair of tokens" if module.relative_bias is not None else ""


def convert_ours(module: Attention, attention: str, options: dict[str, Any]) -> nn.Module:
    """Convert our own layer: only the feature map is new."""
    method = conversion_config(attention, options, {}, bias=True)
    known = [*map_option_names(method.feature_map or ""), "feature_map", "rotary_over", "contrast", "key_weight"]
    for option in options:
        if option not in known:
            raise unknown_name("option of the feature map (our own layers keep their other parts):", option, known)
    config = replace(
        module.config,
        feature_map=method.feature_map,
        map_options=method.map_options,
        rotary_over=method.rotary_over,
        contrast=method.contrast,
        key_weight=method.key_weight,
        # linear attention computes no weights that could be dropped
        weight_dropout=0.0,
    )
    like = module.projection.weight
    with torch.device(like.device):
        layer = Attention(config, dim=module.dim, num_heads=module.num_heads).to(like.dtype)
    layer.load_state_dict(layer.state_dict() | module.state_dict())
    return layer


OURS = LayerKind(our_obstacle, convert_ours, "converted")
TIMM_VIT = TIMM.make_kind(TimmAttention, "qkv", more=timm_vit_obstacle)
TIMM_SWIN = LayerKind(TIMM.obstacle, convert_timm_swin, "qkv")
TRANSFORMERS_VIT = TRANSFORMERS.make_kind(TransformersAttention, "q_proj")
TRANSFORMERS_NESTED_VIT = TRANSFORMERS_NESTED.make_kind(TransformersNestedAttention, "output.dense")
TRANSFORMERS_ENCODER = TRANSFORMERS_TWO.make_kind(TransformersAttention, "q_proj", more=transformers_encoder_obstacle)
TORCH_IN_VIT = LayerKind(torch_in_vit_obstacle, convert_torch_in_vit, "out_proj")
TIMM_PVT = LayerKind(timm_pvt_obstacle, convert_timm_pvt, "q")
TRANSFORMERS_SEGFORMER = LayerKind(TRANSFORMERS.obstacle, convert_transformers_segformer, "q_proj")
TRANSFORMERS_SWIN = LayerKind(TRANSFORMERS.obstacle, convert_transformers_swin, "q_proj")
TORCHVISION_SWIN = LayerKind(torchvision_swin_obstacle, convert_torchvision_swin, "qkv")
DIFFUSERS = DIFFUSERS_PARTS.make_kind(DiffusersAttention, "to_q", more=diffusers_obstacle)
TIMM_EVA = LayerKind(timm_eva_obstacle, convert_timm_eva, "proj")
UNKNOWN = unconvertible("of a kind that is not known here")
