"""A pretrained decoder with hybrid attention, for transformers: its cache grows by a sixteenth, or not at all."""

from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...attention.hybrid import HeadGroups, HybridSettings
from ..token_masks import begins_again, check_input_ids, check_mask
from .attention import INTERFACE, ConvertedAttention, converted_attentions
from .cache import HybridCache
from .config import HybridConfig
from .stepping import Stepping
from .support import check_config, decoder_layers, head_sizes


class HybridForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder of the Llama family, `host`, whose attention modules are converted.

    from_pretrained and save_pretrained work as for any model; `convert` wraps a pretrained model in memory.
    """

    stepping: Stepping | None
    """Runs the steps of `generate` on a GPU; None: the model runs them all itself."""

    config_class = HybridConfig
    base_model_prefix = "host"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values"]

    def __init__(self, config: HybridConfig, host: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        check_config(config.text_config)
        if host is None:
            host = AutoModelForCausalLM.from_config(config.text_config)
        self.host, self.stepping = host, Stepping()
        self._no_split_modules = getattr(host, "_no_split_modules", None)
        convert_attention_(host, config.settings, config.budget)
        host.set_attn_implementation(INTERFACE)
        self.generation_config = host.generation_config
        self.post_init()

    @classmethod
    def convert(
        cls, model: PreTrainedModel, settings: HybridSettings, *, budget: list[list[str]] | None = None
    ) -> "HybridForCausalLM":
        """Return the model with hybrid attention: its weights are shared, not copied, and maps and gates are new.

        budget: for each layer and key head a name in BUDGETS; None: "salient" for all.
        """
        check_config(model.config)
        own_config_(model)
        hybrid = cls(HybridConfig(text_config=model.config, hybrid=asdict(settings), budget=budget), host=model)
        for attention in converted_attentions(hybrid):
            # new parameters stay in float32, since bfloat16 is too coarse to train them
            attention.hybrid.to(dtype=torch.promote_types(model.dtype, torch.float32))
        return hybrid

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Call the host's forward; the cache is a HybridCache."""
        if input_ids is not None:
            check_input_ids(input_ids)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = HybridCache(self.config)
        if past_key_values is not None and not isinstance(past_key_values, HybridCache):
            raise ValueError(
                f"past_key_values must be a HybridCache, got {type(past_key_values).__name__}; pass HybridCache(model.config)"
            )
        reject_packing(position_ids, attention_mask, kwargs)
        asks_for_weights = kwargs.get("output_attentions")
        if asks_for_weights if asks_for_weights is not None else getattr(self.host.config, "output_attentions", False):
            raise ValueError(
                "hybrid attention computes no weights, got output_attentions=True; omit it, or look at the layers with "
                "nalaformer.analysis.record"
            )
        if attention_mask is not None and attention_mask.dim() == 2:
            tokens = input_ids if input_ids is not None else inputs_embeds
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            if tokens is not None:
                check_mask(attention_mask, len(tokens), past + tokens.shape[1])
                if position_ids is None:
                    # the host would count padding too
                    position_ids = positions(attention_mask)[:, past:]
        if (
            self.stepping is not None
            # first, since the following conditions cannot be traced
            and not torch.compiler.is_compiling()
            and past_key_values is not None
            and input_ids is not None
            and use_cache
            and not self.training
            and inputs_embeds is None
            and labels is None
            and isinstance(logits_to_keep, int)
            and logits_to_keep >= 0
            and self._wants_logits_alone(kwargs)
        ):
            logits: Any = self.stepping.step(self, input_ids, position_ids, attention_mask, past_key_values)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        return self.host(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def _wants_logits_alone(self, options: dict[str, Any]) -> bool:
        """True if neither the arguments nor the config request other outputs."""
        defaults = {name: getattr(self.host.config, name, None) for name in ("output_attentions", "output_hidden_states")}
        asked = defaults | {"return_dict": self.host.config.return_dict} | options
        if asked.pop("return_dict") is False:
            return False
        return all(value is None or value is False for value in asked.values())

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.use_cache is False or model_kwargs.get("past_key_values") is not None:
            return
        if generation_config.cache_implementation not in (None, "dynamic"):
            asked = generation_config.cache_implementation
            raise ValueError(f"a converted model has a cache of its own, got cache_implementation={asked!r}; omit it")
        model_kwargs["past_key_values"] = HybridCache(self.config)

    def _apply(self, fn: Any, recurse: bool = True) -> "HybridForCausalLM":
        """Also drop the decoders, whose memory would stay on the old device."""
        # it does not exist yet while a model is built
        if (stepping := getattr(self, "stepping", None)) is not None:
            stepping.forget()
        return super()._apply(fn, recurse)

    def get_input_embeddings(self) -> nn.Module:
        return self.host.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.host.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.host.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.host.set_output_embeddings(new_embeddings)


def reject_packing(position_ids: Tensor | None, attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    """Reject packed sequences; transformers only detects them without cache and mask, and passes their bounds on unread."""
    bounds, numbers = options.get("cu_seq_lens_q"), options.get("seq_idx")
    is_packed = bounds is not None and len(bounds) > 2
    if numbers is not None and not torch.compiler.is_compiling() and not numbers.is_meta:
        is_packed = is_packed or bool((numbers != numbers[..., :1]).any())
    # a traced program cannot read values
    if not is_packed and position_ids is not None and position_ids.dim() == 2 and not torch.compiler.is_compiling():
        length = position_ids.shape[1]
        if length > 1 and not position_ids.is_meta:
            visible = torch.ones_like(position_ids, dtype=torch.bool)
            if attention_mask is not None and attention_mask.dim() == 2:
                visible = attention_mask[:, -length:].bool()
            is_packed = begins_again(visible, position_ids == 0, position_ids)
    if is_packed:
        raise ValueError(
            "hybrid attention runs from the first token of a row to its last, got packed sequences (position_ids that begin "
            "again, cu_seq_lens_q or seq_idx); pass one sequence in each row, with attention_mask for padding"
        )


def positions(visible: Tensor) -> Tensor:
    """Return the number of real tokens before each of its row, [B, N]."""
    return (visible.long().cumsum(1) - 1).clamp(min=0)


def own_config_(model: PreTrainedModel) -> None:
    """Give the model a copy of its config, which names our attention; models made from one config share it."""
    shared, own = model.config, deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own  # type: ignore[assignment]


def convert_attention_(model: nn.Module, settings: HybridSettings, budget: list[list[str]] | None = None) -> None:
    """Wrap every attention module in place; the weights stay, under `self_attn.original`."""
    config, layers = model.config, decoder_layers(model)
    if budget is not None and len(budget) != len(layers):
        raise ValueError(f"a budget has a row for each of the model's {len(layers)} layers, got {len(budget)}")
    for number, layer in enumerate(layers):
        original = layer.self_attn
        assert isinstance(original, nn.Module)
        hybrid = HeadGroups(settings, None if budget is None else budget[number], **head_sizes(config, original))
        like = next(original.parameters())
        hybrid = hybrid.to(device=like.device, dtype=like.dtype)
        # the feature maps compute in float32 whatever the model's dtype is
        for part in hybrid.parts:
            part.map.to(dtype=torch.promote_types(like.dtype, torch.float32))
        for module in hybrid.modules():
            # transformers would initialize the weights of linear layers again
            module._is_hf_initialized = True  # type: ignore[assignment]
        layer.self_attn = ConvertedAttention(original, hybrid, layer=number)


def restore_attention_(model: nn.Module) -> None:
    """Remove the wrappers again."""
    for layer in decoder_layers(model):
        if isinstance(layer.self_attn, ConvertedAttention):
            layer.self_attn = layer.self_attn.original


AutoModelForCausalLM.register(HybridConfig, HybridForCausalLM, exist_ok=True)
# transformers' Trainer looks up in this table that labels are the next tokens, for its label smoothing
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[HybridConfig.model_type] = HybridForCausalLM.__name__
