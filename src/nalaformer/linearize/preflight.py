"""What is known to fail before any work is done: settings, packages, architecture, sizes and room."""

import os
from pathlib import Path
from typing import Any

import torch

from ..data import Samples, steps_per_epoch
from ..models.hybrid.support import check_config, decoder_layers
from ..training import TrainingConfig
from .config import LinearizeConfig
from .fingerprint import longest


def check_settings(config: LinearizeConfig) -> None:
    """Refuse stages that do not fit together, or whose packages are missing."""
    attention = config.attention
    chooses = attention.exact and attention.salient_per_chunk > 0
    if config.transfer is None and attention.selection == "learned" and chooses:
        raise ValueError(
            "selection 'learned' is learned in the transfer of attention, which is left out; "
            "give it steps, or use another selection, such as 'key_norm'"
        )
    if config.finetune is not None:
        try:
            import peft  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("stage 2 needs peft: pip install 'nalaformer[language]'", name="peft") from error


def check_windows(config: LinearizeConfig, train_data: Samples, eval_data: Samples) -> None:
    """Refuse data that does not fill a batch of every stage, or leaves nothing to validate on."""
    for stage in config.stages:
        steps_per_epoch(train_data, stage.batch_size)
        parts = int(os.environ.get("WORLD_SIZE", "1")) * stage.accumulate
        if stage.batch_size % parts:
            raise ValueError(
                f"batch_size must divide into ranks x accumulate equal parts, got {stage.batch_size} for {parts} parts"
            )
    if not len(eval_data):
        raise ValueError("validation needs at least one window of tokens, got none")
    for data in (train_data, eval_data):
        check_length(config, longest(data))


def check_length(config: LinearizeConfig, length: int) -> None:
    """Refuse windows that lie in the exact window: there the student is its teacher, and every metric is perfect."""
    attention = config.attention
    if attention.exact and not attention.keeps_all and length <= 2 * attention.chunk_size:
        raise ValueError(
            f"windows must be longer than the two chunks that a query attends to exactly, 2 x chunk_size = "
            f"{2 * attention.chunk_size} tokens, got {length}; nothing could be learned or measured in them: use longer ones "
            "(--length), several chunks at least, or a smaller chunk_size"
        )


def check_architecture(config: Any) -> int:
    """Refuse what cannot be converted, by the model's config alone; the number of its parameters. Takes no memory."""
    from transformers import AutoModelForCausalLM

    check_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    decoder_layers(model)
    return int(model.num_parameters())


def model_bytes(folder: Path) -> int:
    """Size of the weights in a model's folder."""
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))


def stage_line(name: str, stage: TrainingConfig | None, train_data: Samples | None) -> str:
    """A stage in words; how many steps an epoch has is known once there are tokens."""
    if stage is None:
        return f"{name}: left out"
    if train_data is not None:
        duration = f"{stage.total_steps(steps_per_epoch(train_data, stage.batch_size)):,} steps"
    else:
        duration = f"{stage.steps:,} steps" if stage.steps else f"{stage.epochs:g} epochs"
    return f"{name}: {duration} of {stage.batch_size}, {stage.precision}, a checkpoint every {stage.save_minutes:g} minutes"
