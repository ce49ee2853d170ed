"""Checks whether a model can be converted, with the reason if not."""

from typing import Any

from torch import nn

from .config import HybridConfig


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder, each with its attention under `self_attn`; raise ValueError if there are none."""
    inner = getattr(model, "model", None)
    layers = getattr(inner, "layers", None)
    name = type(model).__name__
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(f"{name} has no `model.layers` as decoders of the Llama family have; it cannot be converted")
    for number, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None)
        if not isinstance(attention, nn.Module):
            raise ValueError(f"layer {number} of {name} has no `self_attn`; mixtures with recurrent layers cannot be converted")
        if hasattr(layer, "encoder_attn") or hasattr(layer, "cross_attn"):
            raise ValueError(f"layer {number} of {name} attends to an encoder; cross-attention cannot be converted")
        if hasattr(attention, "kv_a_proj_with_mqa") or hasattr(attention, "kv_b_proj"):
            raise ValueError(f"layer {number} of {name} keeps compressed keys (MLA), which cannot be converted")
        if getattr(attention, "sinks", None) is not None:
            raise ValueError(f"layer {number} of {name} has attention sinks, which cannot be converted")
    return list(layers)


def check_config(config: Any) -> None:
    """Reject attention that hybrid attention cannot replace."""
    name = config.model_type
    if isinstance(config, HybridConfig):
        raise ValueError(f"this model is converted already ({name}); give the pretrained one that it was made from")
    for field in ("num_attention_heads", "num_key_value_heads", "hidden_size", "num_hidden_layers"):
        number = getattr(config, field, None)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{field} of {name} must be a positive whole number, got {number!r}; fix its config.json")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder and a decoder; only decoders can be converted")
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in types):
        odd = sorted(set(types) - {"full_attention"})
        raise ValueError(f"{name} has layers of other kinds ({', '.join(odd)}); only full attention can be converted")
    # Qwen2 has a window in its config and does not use it
    if window is not None and getattr(config, "use_sliding_window", True) and not types:
        raise ValueError(
            f"{name} attends within a sliding window of {window} tokens; set sliding_window to null in its config.json if it "
            "is longer than any text you will use"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ValueError(f"{name} caps its attention logits at {config.attn_logit_softcapping}, which cannot be converted")


def head_sizes(config: Any, attention: nn.Module) -> dict[str, int]:
    """Return the arguments of HybridAttention for an attention module."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(attention, "head_dim", None) or config.hidden_size // heads
    return {"dim": config.hidden_size, "num_heads": heads, "num_key_heads": key_heads, "head_dim": head_dim}
