"""How a model is linearized."""

from dataclasses import dataclass, field

from ..attention.hybrid import HybridSettings
from ..field_types import check_field_types, check_ranges
from ..registry import unknown_name
from ..training import TrainingConfig

FINETUNE_LOSSES = ("teacher", "next_token")


def transfer_training() -> TrainingConfig:
    """Stage 1 as published: AdamW at 1e-2, two passes, batches of 8."""
    return TrainingConfig(epochs=2, batch_size=8, learning_rate=1e-2, weight_decay=0.0, min_learning_rate=1e-4, clip_norm=1.0)


def finetune_training() -> TrainingConfig:
    """Stage 2 as published: AdamW at 1e-4, two passes, batches of 8."""
    return TrainingConfig(epochs=2, batch_size=8, learning_rate=1e-4, weight_decay=0.0, min_learning_rate=1e-6, clip_norm=1.0)


@dataclass(frozen=True, kw_only=True)
class LinearizeConfig:
    """The attention, the two stages, and what is kept of them."""

    attention: HybridSettings = field(default_factory=lambda: HybridSettings(selection="learned"))
    """The attention that takes the place of softmax. Which tokens are salient is learned in stage 1, the rule that came nearest
    to an oracle in our studies; without the stage choose "key_norm"."""
    transfer: TrainingConfig | None = field(default_factory=transfer_training)
    """Stage 1: maps, gates and scorers learn the outputs of softmax, layer by layer; None: left out."""
    finetune: TrainingConfig | None = field(default_factory=finetune_training)
    """Stage 2: LoRA with the next-token loss; None: left out."""
    finetune_loss: str = "next_token"
    """Stage 2 learns from "teacher", its distribution of each next token, or "next_token", the text alone as published."""
    cache: float | None = None
    """Bytes of the cache at `cache_length` tokens as a part of softmax's, 0.25 for a quarter. The heads that look up what is
    far away keep all tokens, as many of them as fit; the others keep what `attention` says. None: `attention` for all."""
    cache_length: int = 8192
    """Tokens at which `cache` is counted."""
    layers_at_once: int = 0
    """Layers whose attention is transferred together; 1 takes the least memory and the most time; 0: all."""
    lora_rank: int = 8
    """Rank of the matrices that stage 2 learns."""
    lora_alpha: int = 16
    """They are scaled by lora_alpha / lora_rank."""
    merge_adapter: bool = True
    """Add what stage 2 learned to the weights; False: keep it beside them, as peft's adapter."""
    validation_windows: int = 64
    """Most windows, evenly spread over the validation data, on which the model is measured after each stage; 0: all."""
    shard: bool = False
    """Under torchrun: the frozen weights are spread over the processes (FSDP2); what learns is small and stays whole."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.layers_at_once < 0:
            raise ValueError(f"layers_at_once must not be negative, got {self.layers_at_once}; 0 means all")
        if self.validation_windows < 0:
            raise ValueError(f"validation_windows must not be negative, got {self.validation_windows}; 0 means all")
        if self.finetune_loss not in FINETUNE_LOSSES:
            raise unknown_name("finetune_loss", self.finetune_loss, FINETUNE_LOSSES)
        if self.cache is not None and not 0 < self.cache <= 1:
            raise ValueError(f"cache must be above 0 and at most 1 (all that softmax keeps), got {self.cache}")
        check_ranges(self, positive=("lora_rank", "cache_length"))

    @property
    def stages(self) -> list[TrainingConfig]:
        """The stages that are not left out."""
        return [stage for stage in (self.transfer, self.finetune) if stage is not None]
