"""How attention sits in each kind of model: how it is recognised, what stands in the way, how ours takes its place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..attention import Attention, AttentionConfig, configure
from ..feature_maps import map_options_of
from ..registry import unknown_name
from .adapters import DiffusersAttention, TimmAttention, TimmWindowAttention, TransformersAttention, TransformersNestedAttention

# parts that would need weights which the model does not have
WITHOUT_NEW_PROJECTIONS = {"gate": "none", "norm": False}
# a class token lies on no grid, so attention of a plain ViT is told none: its positions are in its input
WITHOUT_GRID = {"position": "none", "local_mix": "none"}
TRANSFORMERS_KINDS = (
    "ViTAttention",
    "DeiTAttention",
    "Dinov2Attention",
    "IJepaAttention",
    "ViTMAEAttention",
    "ViTMSNAttention",
)
# plain attention; any other processor computes something else
DIFFUSERS_PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")
HEADS = ("num_heads", "num_attention_heads", "heads")


@dataclass(frozen=True)
class Host:
    """A kind of attention layer: why one may have to stay (empty: it need not), and its replacement."""

    obstacle: Callable[[Any], str]
    convert: Callable[[Any, str, dict[str, Any]], nn.Module]
    record: str = ""
    """Where a converted layer keeps what it became: a part that has a weight in the original, which then refuses to load it."""

    @staticmethod
    def num_heads(module: nn.Module) -> int:
        return next(getattr(part, name) for part in module.modules() for name in HEADS if hasattr(part, name))


def host_of(module: nn.Module) -> Host | None:
    """The kind of an attention layer; None for a module that is none."""
    kind, package = type(module).__name__, type(module).__module__
    if isinstance(module, Attention):
        return OURS
    if package.startswith("nalaformer."):
        return None
    if kind == "Attention" and package in ("timm.layers.attention", "timm.models.vision_transformer"):
        return TIMM_VIT
    if kind == "WindowAttention" and package == "timm.models.swin_transformer":
        return TIMM_SWIN
    if kind in TRANSFORMERS_KINDS and package.startswith("transformers.models."):
        return TRANSFORMERS_VIT if hasattr(module, "q_proj") else TRANSFORMERS_NESTED_VIT
    if kind == "Attention" and package == "diffusers.models.attention_processor":
        return DIFFUSERS
    if "attention" not in kind.lower():
        return None
    has_heads = any(isinstance(getattr(module, name, None), int) for name in HEADS)
    projects = any(isinstance(layer, nn.Linear) for layer in module.modules())
    return UNKNOWN if has_heads and projects else None


# --- our layer in the place of another -----------------------------------------------------------------------------------


def settled(attention: str, options: dict[str, Any], defaults: dict[str, Any], *, bias: bool) -> AttentionConfig:
    config = configure(attention, defaults | {"qkv_bias": bias} | options)
    if config.feature_map is None:
        raise ValueError(f"{attention!r} is the softmax attention that the model has already; name a linear method")
    if config.causal or config.key_reduction > 1 or config.window:
        raise ValueError("conversion keeps which tokens attend to which: leave causal, key_reduction and window as they are")
    return config


def settled_without_grid(attention: str, options: dict[str, Any], *, bias: bool) -> AttentionConfig:
    config = settled(attention, options, WITHOUT_NEW_PROJECTIONS | WITHOUT_GRID, bias=bias)
    if config.position != "none" or config.local_mix != "none":
        raise ValueError(
            'a ViT tells its attention no grid (a class token lies on none): leave position and local_mix at "none", got '
            f"{config.position!r} and {config.local_mix!r}; the backbones vit_nala_* have both"
        )
    return config


def filled(config: AttentionConfig, num_heads: int, qkv: tuple[nn.Linear, ...], output: nn.Linear) -> Attention:
    """Our layer with the weights of theirs, on the same device and in the same type."""
    dim, like = output.in_features, output.weight
    with torch.device(like.device):
        layer = Attention(config, dim=dim, num_heads=num_heads).to(like.dtype)
    with torch.no_grad():
        # a gate, where asked for, lies behind q, k and v and stays new
        layer.qkvg.weight[: 3 * dim] = torch.cat([linear.weight for linear in qkv])
        if layer.qkvg.bias is not None:
            layer.qkvg.bias[: 3 * dim] = torch.cat([linear.bias for linear in qkv])
        layer.projection.weight.copy_(output.weight)
        nn.init.zeros_(layer.projection.bias)
        if output.bias is not None:
            layer.projection.bias.copy_(output.bias)
        if layer.local_mix is not None:
            # it begins as attention alone
            for parameter in layer.local_mix.parameters():
                parameter.zero_()
    return layer


def projections_obstacle(heads: int, dim: int, output: nn.Linear) -> str:
    if dim % heads:
        return f"its {dim} channels do not divide into its {heads} heads"
    if output.in_features != dim or output.out_features != dim:
        return f"has {output.in_features} channels inside and {dim} outside, and ours as many inside as outside"
    return ""


# --- the kinds -----------------------------------------------------------------------------------------------------------


def timm_vit_obstacle(module: Any) -> str:
    for part, what in (("q_norm", "queries"), ("k_norm", "keys"), ("norm", "its output")):
        if not isinstance(getattr(module, part, nn.Identity()), nn.Identity):
            return f"normalises {what} with weights that linear attention has no place for"
    if getattr(module, "gate", None) is not None:
        return "has a gate of its own"
    return projections_obstacle(module.num_heads, module.qkv.in_features, module.proj)


def convert_timm_vit(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    config = settled_without_grid(attention, options, bias=module.qkv.bias is not None)
    return TimmAttention(filled(config, module.num_heads, (module.qkv,), module.proj), module.proj_drop)


def timm_swin_obstacle(module: Any) -> str:
    return projections_obstacle(module.num_heads, module.qkv.in_features, module.proj)


def convert_timm_swin(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    """A window is a grid: position and local mix are those of the method, in the place of the relative bias."""
    window = (module.window_size[0], module.window_size[1])
    defaults = WITHOUT_NEW_PROJECTIONS | {"table_grid": window}
    config = settled(attention, options, defaults, bias=module.qkv.bias is not None)
    return TimmWindowAttention(filled(config, module.num_heads, (module.qkv,), module.proj), module.proj_drop, window)


def transformers_vit_obstacle(module: Any) -> str:
    return projections_obstacle(module.num_attention_heads, module.q_proj.in_features, module.o_proj)


def convert_transformers_vit(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    parts = (module.q_proj, module.k_proj, module.v_proj)
    config = settled_without_grid(attention, options, bias=module.q_proj.bias is not None)
    return TransformersAttention(filled(config, module.num_attention_heads, parts, module.o_proj))


def transformers_nested_vit_obstacle(module: Any) -> str:
    inner = module.attention
    return projections_obstacle(inner.num_attention_heads, inner.query.in_features, module.output.dense)


def convert_transformers_nested_vit(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    """DINOv2 in older transformers (5.17): a layer for q, k and v and one for the output, and no weights returned."""
    inner = module.attention
    config = settled_without_grid(attention, options, bias=inner.query.bias is not None)
    layer = filled(config, inner.num_attention_heads, (inner.query, inner.key, inner.value), module.output.dense)
    return TransformersNestedAttention(layer)


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
    return projections_obstacle(module.heads, module.to_q.in_features, module.to_out[0])


def convert_diffusers(module: Any, attention: str, options: dict[str, Any]) -> nn.Module:
    """DiT has no set_attn_processor for the whole model, and a processor has no place for projections of a gate: the
    module itself is replaced."""
    config = settled_without_grid(attention, options, bias=module.to_q.bias is not None)
    layer = filled(config, module.heads, (module.to_q, module.to_k, module.to_v), module.to_out[0])
    return DiffusersAttention(layer, module.to_out[1])


def our_obstacle(module: Attention) -> str:
    if module.map is not None:
        return "is linear already"
    return "has a relative bias per pair of tokens" if module.relative_bias is not None else ""


def convert_ours(module: Attention, attention: str, options: dict[str, Any]) -> nn.Module:
    """Every part stays; only the feature map is new."""
    method = settled(attention, options, {}, bias=True)
    known = [*map_options_of(method.feature_map or ""), "feature_map", "rotary_over"]
    for option in options:
        if option not in known:
            raise unknown_name("option of the feature map (our own layers keep their other parts):", option, known)
    config = replace(
        module.config,
        feature_map=method.feature_map,
        map_options=method.map_options,
        rotary_over=method.rotary_over,
    )
    like = module.projection.weight
    with torch.device(like.device):
        layer = Attention(config, dim=module.dim, num_heads=module.num_heads).to(like.dtype)
    layer.load_state_dict(layer.state_dict() | module.state_dict())
    return layer


OURS = Host(our_obstacle, convert_ours)
TIMM_VIT = Host(timm_vit_obstacle, convert_timm_vit)
TIMM_SWIN = Host(timm_swin_obstacle, convert_timm_swin)
TRANSFORMERS_VIT = Host(transformers_vit_obstacle, convert_transformers_vit)
TRANSFORMERS_NESTED_VIT = Host(transformers_nested_vit_obstacle, convert_transformers_nested_vit)
DIFFUSERS = Host(diffusers_obstacle, convert_diffusers)
OURS = Host(our_obstacle, convert_ours, "converted")
TIMM_VIT = Host(timm_vit_obstacle, convert_timm_vit, "qkv")
TIMM_SWIN = Host(timm_swin_obstacle, convert_timm_swin, "qkv")
TRANSFORMERS_VIT = Host(transformers_vit_obstacle, convert_transformers_vit, "q_proj")
TRANSFORMERS_NESTED_VIT = Host(transformers_nested_vit_obstacle, convert_transformers_nested_vit, "output.dense")
UNKNOWN = Host(lambda module: "of a kind that is not known here", lambda module, attention, options: module)
