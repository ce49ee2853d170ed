"""The config of a converted model: that of the original model and its attention."""

from dataclasses import asdict
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from ...attention.hybrid import HybridSettings


class HybridConfig(PreTrainedConfig):
    """A decoder of the Llama family (`text_config`, the name under which transformers looks for it) with hybrid attention."""

    model_type = "nala_hybrid"
    keys_to_ignore_at_inference = ["past_key_values"]
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    """The configuration of the model that was converted."""
    hybrid: dict[str, Any] | None = None
    """Fields of nalaformer.attention.hybrid.HybridSettings."""
    budget: list[list[str]] | None = None
    """The budget of each layer and key head, a name in nalaformer.attention.hybrid.BUDGETS; None: "salient" for all."""
    use_cache: bool = True
    """Return a cache, outside training."""
    tie_word_embeddings: bool = False
    """Copied from text_config, which decides."""

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = AutoConfig.for_model(**self.text_config)
        elif self.text_config is None:
            self.text_config = AutoConfig.for_model("llama")
        self.hybrid = asdict(HybridSettings(**(self.hybrid or {})))
        assert isinstance(self.text_config, PreTrainedConfig)
        self.tie_word_embeddings = bool(self.text_config.tie_word_embeddings)
        super().__post_init__(**kwargs)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name, None) is None:
                setattr(self, name, getattr(self.text_config, name, None))

    @property
    def settings(self) -> HybridSettings:
        return HybridSettings(**(self.hybrid or {}))


AutoConfig.register(HybridConfig.model_type, HybridConfig, exist_ok=True)
