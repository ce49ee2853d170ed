"""How a run is trained, whatever it learns."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..field_types import check_field_types, check_ranges
from ..registry import unknown_name

SCHEDULES = ("cosine", "linear", "steps")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# of a batch that follows from the data
LARGEST_CHOSEN_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Duration, optimiser, precision, and what is kept. Up to rounding, results do not depend on ranks or accumulation."""

    epochs: float = 0.0
    """Passes over the training data; give this or steps."""
    steps: int = 0
    """Optimiser steps; give this or epochs."""
    batch_size: int = 64
    """Samples per optimiser step, over all ranks and accumulation parts; 0: 32, or less where there are fewer than 128."""
    accumulate: int = 1
    """Parts into which each rank cuts its share of a batch, to save memory."""
    optimizer: str = "adamw"
    """timm's name of the optimiser."""
    learning_rate: float = 1e-3
    """At its highest."""
    weight_decay: float = 0.05
    """Not on biases, norms and what the model's no_weight_decay names."""
    beta2: float = 0.999
    """How slowly Adam's second moment changes."""
    epsilon: float = 1e-8
    """Adam adds this to the root of the second moment."""
    schedule: str = "cosine"
    """How the rate falls: "cosine"; "linear": straight up in the warm-up and straight down to the end (one cycle); or
    "steps": to a tenth at each time of decay_at."""
    decay_at: tuple[float, ...] = ()
    """Epochs (or steps, where the duration is in steps) at which the schedule "steps" lowers the rate."""
    warmup: float = 0.0
    """Epochs (or steps, where the duration is in steps) of linear warm-up, part of the duration."""
    warmup_learning_rate: float = 1e-6
    """Where the warm-up starts; learning_rate where that is lower."""
    min_learning_rate: float = 1e-5
    """Where the schedules "cosine" and "linear" end; learning_rate where that is lower."""
    cooldown: float = 0.0
    """Epochs (or steps) at the lowest rate, added to the duration."""
    clip_norm: float = 0.0
    """Largest norm of the gradient of all parameters together; 0: no limit."""
    clip_value: float = 0.0
    """Largest absolute value of each entry of the gradient; 0: no limit."""
    ema: float = 0.0
    """Decay of the moving average of the weights, which is then what is evaluated; 0: none."""
    repeats: int = 1
    """Repeated augmentation: how often each image comes in an epoch, augmented anew."""
    precision: str = "float32"
    """"float32", or forward and loss in "bfloat16" or "float16" (with loss scaling); "fp32", "bf16" and "fp16" for short;
    "auto": bfloat16 on a GPU that computes in it, else float32."""
    compile: bool = False
    """torch.compile the model."""
    checkpoint_activations: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": a GPU where there is one."""
    seed: int = 0
    """Decides the first weights, the order of the data, augmentation and dropout."""
    workers: int = 0
    """Processes that read data, on each rank, at most as many as there are cores; 0: the training process itself."""
    eval_every: int = 0
    """Steps between evaluations; 0: at the end only. There is always one at the end."""
    eval_epochs: float = 0.0
    """Epochs between evaluations, beside those of eval_every; 0: none."""
    save_every: int = 0
    """Steps between checkpoints; 0: at the end, when stopped, at the best evaluation, and by time."""
    save_minutes: float = 5.0
    """Minutes after which a checkpoint is written, however few steps that was; 0: not by time."""
    keep: int = 2
    """Newest checkpoints that are kept, besides the best."""
    tensorboard: bool = False
    """Write the log for TensorBoard too; needs nalaformer[tensorboard]."""
    bad_steps: int = 10
    """Steps with a loss or gradient that is not finite, in a row, after which the run stops; each is skipped and counted."""
    on_corrupt: str = "skip"
    """An image that cannot be read: "skip" (the next one takes its place; counted, named in the log) or "stop"."""
    most_corrupt: int = 100
    """Images that may be skipped before the run stops all the same."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_ranges(
            self,
            positive=("accumulate", "repeats", "keep", "bad_steps", "epsilon"),
            not_negative=(
                "epochs",
                "steps",
                "batch_size",
                "learning_rate",
                "weight_decay",
                "warmup_learning_rate",
                "min_learning_rate",
                "seed",
                "warmup",
                "cooldown",
                "clip_norm",
                "clip_value",
                "workers",
                "eval_every",
                "eval_epochs",
                "save_every",
                "save_minutes",
                "most_corrupt",
            ),
            below_one=("ema", "beta2"),
        )
        # a negative number is told of by its name
        if (self.epochs > 0) == (self.steps > 0):
            raise ValueError(
                f"the duration is given by epochs or by steps, got epochs={self.epochs} and steps={self.steps}; give one"
            )
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", self.schedule, SCHEDULES)
        # as a checkpoint's settings hold it
        object.__setattr__(self, "decay_at", tuple(self.decay_at))
        if self.schedule == "steps" and (not self.decay_at or list(self.decay_at) != sorted(self.decay_at)):
            raise ValueError(f'schedule="steps" needs decay_at, times in order, got {self.decay_at}; for example decay_at=8,11')
        if self.precision not in (*PRECISIONS, "auto"):
            raise unknown_name("precision", self.precision, (*PRECISIONS, "auto"))
        if self.on_corrupt not in ("skip", "stop"):
            raise ValueError(f'on_corrupt must be "skip" or "stop", got {self.on_corrupt!r}')

    def total_steps(self, steps_per_epoch: int) -> int:
        """Duration and cool-down in optimiser steps."""
        return self.in_steps(self.epochs or self.steps, steps_per_epoch) + self.in_steps(self.cooldown, steps_per_epoch)

    def in_steps(self, duration: float, steps_per_epoch: int) -> int:
        """A duration in the config's unit as a number of steps."""
        return round(duration * steps_per_epoch) if self.epochs else round(duration)

    def with_changes(self, changes: Mapping[str, Any]) -> "TrainingConfig":
        """The same with some fields changed; a duration in the other unit takes the place of the old one.

        Then, unless they are given too, the warm-up keeps its share of the duration and there is no cool-down: sixty steps
        are sixty steps.
        """
        if changes.get("steps") == 0 and "epochs" not in changes:
            usual = f"{self.epochs:g} epochs" if self.epochs else f"{self.steps:,} steps"
            raise ValueError(f"a training takes at least one step, got steps=0; leave it out for {usual}")
        for unit, other in (("steps", "epochs"), ("epochs", "steps")):
            duration, old = changes.get(unit, 0), getattr(self, other)
            if duration > 0 and old > 0 and not changes.get(other):
                return replace(self, **({other: 0, "warmup": self.warmup * duration / old, "cooldown": 0.0} | dict(changes)))
        return replace(self, **changes)

    def fitted_to(self, samples: int) -> "TrainingConfig":
        """The same with a batch size for so many samples, where it was left open: four batches and more, powers of two."""
        if self.batch_size:
            return self
        # two at least: the statistics of one sample are none
        return replace(self, batch_size=2 ** max(1, min(LARGEST_CHOSEN_BATCH, samples // 4).bit_length() - 1))
