"""The language models: a pre-norm decoder, and its heads for the next token, for classes and for answers."""

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import initialization
from transformers.generation import GenerationMixin, GenerationMode
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.output_capturing import capture_outputs

from ...attention.learned_contrast import LearnedContrast
from ...feature_maps import FeatureMap, feature_map
from ...registry import unknown_name
from ..token_masks import check_input_ids
from .cache import LanguageCache, NaLaCache, RecurrentLayer
from .config import DECAY_MIXERS, NaLaConfig
from .layers import RMSNorm, ShortConvolution, SwiGLU
from .loss import can_do_without_logits, next_token_loss
from .mixers import MIXERS, DecayMixer
from .positions import RotaryPositions
from .static_cache import NaLaStaticCache
from .tokens import Masks, Tokens, describe_tokens, static_masks

logger = logging.get_logger(__name__)
# arguments that transformers' generation, trainer and collators pass to every model, and that losses read
KNOWN_ARGUMENTS = {
    *TransformersKwargs.__annotations__,
    *("return_dict", "cache_position", "shift_labels", "ignore_index", "next_sequence_length", "is_first_iteration"),
}


class NaLaBlock(GradientCheckpointingLayer):
    """A decoder block: x += mixer(norm x); x += feed_forward(norm x)."""

    def __init__(self, config: NaLaConfig, number: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = MIXERS[config.layer_mixers[number]](config)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.number = number

    # transformers looks up the cache by this name when it recomputes blocks
    def forward(self, x: Tensor, tokens: Tokens, past_key_values: LanguageCache | None = None) -> Tensor:
        layer = None if past_key_values is None else past_key_values.layers[self.number]
        y = self.mixer_norm(x)
        mixed = layer.mix(self.mixer, y, tokens) if isinstance(layer, RecurrentLayer) else self.mixer(y, tokens, layer)
        x, normed = self.mlp_norm.add_norm(x, mixed)
        return x + self.mlp(normed)


class NaLaPreTrainedModel(PreTrainedModel):
    """The common base of the models: initialization of weights, and the features that transformers may use."""

    config_class = NaLaConfig
    config: NaLaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _can_record_outputs = {"hidden_states": NaLaBlock}
    _no_split_modules = ["NaLaBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def __init__(self, config: NaLaConfig, *inputs: Any, **kwargs: Any) -> None:
        if set(DECAY_MIXERS) & set(config.layer_mixers):
            self._keep_in_fp32_modules_strict = ["A_log", "dt_bias"]
        super().__init__(config, *inputs, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ShortConvolution):
            module.reset_parameters()
        elif isinstance(module, FeatureMap):
            options = self.config.map_options or {}
            sizes = {"num_heads": module.num_heads, "head_dim": module.head_dim}
            begin_as(module, feature_map(self.config.feature_map, **sizes, **options))
        elif isinstance(module, LearnedContrast):
            begin_as(module, LearnedContrast(num_heads=len(module.offset), offset=self.config.contrast_offset))
        elif isinstance(module, DecayMixer):
            module.reset_decay()
        else:
            super()._init_weights(module)


def begin_as(module: nn.Module, fresh: nn.Module) -> None:
    """Copy the parameters of a new module into this one."""
    for parameter, start in zip(module.parameters(), fresh.parameters(), strict=True):
        initialization.copy_(parameter, start)


class NaLaModel(NaLaPreTrainedModel):
    """Embedding, blocks and a last norm: token ids [B, N] -> hidden states [B, N, C]."""

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        # transformers' tools look it up by this name
        self.rotary_emb = RotaryPositions(config)
        self.layers = nn.ModuleList(NaLaBlock(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Masks | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LanguageCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states. attention_mask: [B, earlier and new tokens], 0 = padding on either side; see describe_tokens.

        Packed sequences, as from DataCollatorWithFlattening: position_ids that restart at 0, or cu_seq_lens_q.
        past_key_values: a NaLaCache or NaLaStaticCache of the earlier tokens, which is changed.
        output_hidden_states: True, or a list of layers as transformers counts them. output_attentions: of `softmax` mixers.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("the tokens must come either as input_ids or as inputs_embeds, got both or none of them")
        if input_ids is not None:
            check_input_ids(input_ids)
        check_known(kwargs)
        reject_numbered_sequences(kwargs, position_ids, cu_seq_lens_q)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        tokens = describe_tokens(
            self.rotary_emb,
            hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seq_lens_q,
            past=0 if cache is None else cache.get_seq_length(),
            capacity=cache.max_cache_len if isinstance(cache, NaLaStaticCache) else None,
            wants_weights=self._wants_weights(kwargs.get("output_attentions")),
        )
        if tokens.cu_seqlens is not None and cache is not None:
            if past_key_values is not None or use_cache:
                raise ValueError(
                    "packed sequences leave no state to continue from, got a cache or use_cache=True; pass neither"
                )
            cache = None
        for block in self.layers:
            hidden = block(hidden, tokens=tokens, past_key_values=cache)
        # None for a recurrent layer, as in other models; releases of transformers differ in the declared type
        weights: Any = None if tokens.weights is None else tuple(tokens.weights)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=cache, attentions=weights)

    def _wants_weights(self, output_attentions: bool | None) -> bool:
        wanted = self.config.output_attentions if output_attentions is None else output_attentions
        if wanted and "softmax" not in self.config.layer_mixers:
            raise ValueError(
                "output_attentions needs a layer with softmax attention, got none: recurrent mixers have no weight for each "
                "pair; nalaformer.attention_weights computes rows of the weights that linear attention amounts to"
            )
        return bool(wanted)

    def _cache(self, given: LanguageCache | None, use_cache: bool | None) -> LanguageCache | None:
        if self.gradient_checkpointing and self.training:
            # a block that runs twice would add its tokens to the cache twice
            if given is not None and given.get_seq_length() > 0:
                raise ValueError("gradient checkpointing cannot continue from a cache, got a filled one; use model.eval()")
            if given is not None or use_cache:
                logger.warning_once("Gradient checkpointing returns no cache; using use_cache=False.")
            return None
        if given is None:
            wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
            return NaLaCache(self.config) if wanted else None
        check_cache(given)
        return given


class NaLaForCausalLM(NaLaPreTrainedModel, GenerationMixin):
    """The decoder with a language head: logits [B, N, vocabulary], and the loss if labels are given."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__(config)
        self.model = NaLaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Masks | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LanguageCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss if labels are given; other arguments as in NaLaModel.

        labels [B, N] are the tokens themselves (shifted here), -100 for none. logits_to_keep: logits of the last so many tokens
        (0: all), or of the tokens with that index. Training with labels returns no logits by default, since they take most
        of the memory; see config.logits_in_training.
        """
        check_known(kwargs)
        reject_numbered_sequences(kwargs, position_ids, cu_seq_lens_q)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seq_lens_q=cu_seq_lens_q,
            **outputs_asked_for(kwargs),
        )
        hidden = outputs.last_hidden_state
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        logits = loss = None
        if labels is not None and self.training and keeps_all and self.trains_without_logits:
            loss = next_token_loss(hidden, self.lm_head.weight, labels, **kwargs)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=cast(Any, loss),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @property
    def trains_without_logits(self) -> bool:
        """True if a training step with labels returns only the loss."""
        return not self.config.logits_in_training and can_do_without_logits(self.lm_head, self.loss_function)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give generation one of our caches; transformers would build one without states."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation must be None, 'dynamic' or 'static' for this model, got {kind!r}; the states of "
                "recurrent mixers have a constant size as they are"
            )
        given = model_kwargs.get("past_key_values")
        if given is not None:
            check_cache(given)
            if generation_mode == GenerationMode.ASSISTED_GENERATION and given.get_seq_length() > 0:
                # transformers would pass the whole text to the model after a cache that holds a part of it
                raise ValueError(
                    f"drafting needs an empty cache, got past_key_values of {int(given.get_seq_length())} tokens with an "
                    "assistant or prompt lookup; omit one of them"
                )
            given._is_user_defined = True
        elif self.model.gradient_checkpointing and self.training:
            logger.warning_once("Gradient checkpointing returns no cache; generating with use_cache=False.")
            generation_config.use_cache = model_kwargs["use_cache"] = False
        elif generation_config.use_cache is not False and kind == "static":
            asked = getattr(generation_config, "max_cache_len", None) or 0
            # use the size of the longest call so far, since another size would compile again
            self._static_length = max(max_cache_length, asked, getattr(self, "_static_length", 0))
            model_kwargs["past_key_values"] = NaLaStaticCache(self.config, self._static_length)
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = NaLaCache(self.config)
            if getattr(generation_config, "is_assistant", False):
                model_kwargs["past_key_values"].activate_past_recording()

    @staticmethod
    def create_masks_for_generate(
        config: NaLaConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: NaLaStaticCache,
        **kwargs: Any,
    ) -> Masks:
        """Return masks of one size for the steps of a static cache; generation calls this outside of what it compiles."""
        past = past_key_values.get_seq_length()
        return static_masks(config, inputs_embeds, attention_mask, past, past_key_values.max_cache_len)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "continuous batching keeps keys and values in pages, and a state has none; use generate with a batch of prompts "
            "padded on the left"
        )

    # all entry points; transformers' own models have the first of them too
    generate_batch = continuous_batching_context_manager = init_continuous_batching


class NaLaForSequenceClassification(NaLaPreTrainedModel):
    """The decoder with a head for a class of each row, from its last real token: logits [B, labels]."""

    def __init__(self, config: NaLaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 0
        self.model = NaLaModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LanguageCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Compute logits. The last real token: by attention_mask, else the last that is not pad_token_id, else the last."""
        check_known(kwargs)
        reject_numbered_sequences(kwargs, position_ids, None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **outputs_asked_for(kwargs),
        )
        hidden = outputs.last_hidden_state
        length = hidden.shape[1]
        last = torch.full((hidden.shape[0],), length - 1, device=hidden.device)
        places = torch.arange(length, device=hidden.device)
        if attention_mask is not None:
            last = (attention_mask[:, -length:].bool() * places).amax(1)
        elif input_ids is not None and self.config.pad_token_id is not None:
            last = ((input_ids != self.config.pad_token_id) * places).amax(1)
        logits = self.score(hidden[torch.arange(hidden.shape[0], device=hidden.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class NaLaForTokenClassification(GenericForTokenClassification, NaLaPreTrainedModel):
    """The decoder with a head for a class of each token, which sees only earlier tokens: logits [B, N, labels]."""


class NaLaForQuestionAnswering(GenericForQuestionAnswering, NaLaPreTrainedModel):
    """The decoder with a head for begin and end of an answer in the text: start_logits and end_logits [B, N]."""


def check_known(arguments: dict[str, Any]) -> None:
    """Reject misspelled arguments; those that transformers' tools pass to any model are allowed."""
    for name in arguments:
        if name not in KNOWN_ARGUMENTS:
            raise unknown_name("argument", name, [*KNOWN_ARGUMENTS, *inspect.signature(NaLaForCausalLM.forward).parameters])


def reject_numbered_sequences(arguments: dict[str, Any], position_ids: Tensor | None, cu_seq_lens_q: Tensor | None) -> None:
    """Reject packed sequences that are only numbered (seq_idx), so that their beginnings are unknown."""
    if arguments.get("seq_idx") is not None and position_ids is None and cu_seq_lens_q is None:
        raise ValueError(
            "packed sequences must come with position_ids that begin again or with cu_seq_lens_q, got seq_idx alone; use "
            "DataCollatorWithFlattening(return_position_ids=True)"
        )


def outputs_asked_for(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments that a head passes to its decoder, and return them; None leaves them to the config."""
    asked = {name: arguments.pop(name, None) for name in ("output_hidden_states", "output_attentions")}
    return {name: value for name, value in asked.items() if value is not None} | {"return_dict": True}


def check_cache(cache: object) -> None:
    if not isinstance(cache, LanguageCache):
        raise ValueError(
            f"past_key_values must be a NaLaCache or NaLaStaticCache, got {type(cache).__name__}, which would lose the "
            "state of the recurrent layers; make one with NaLaCache(model.config)"
        )


AutoModel.register(NaLaConfig, NaLaModel, exist_ok=True)
AutoModelForCausalLM.register(NaLaConfig, NaLaForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(NaLaConfig, NaLaForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(NaLaConfig, NaLaForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(NaLaConfig, NaLaForQuestionAnswering, exist_ok=True)
# transformers' Trainer looks up in this table that labels are the next tokens, for its label smoothing
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[NaLaConfig.model_type] = NaLaForCausalLM.__name__
