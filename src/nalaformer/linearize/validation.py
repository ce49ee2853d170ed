"""How much of a model is left after its conversion: loss, perplexity, and the distance to its teacher."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data import Samples, batches_in_order
from ..models.hybrid.attention import attention_mode
from .batches import IGNORED, count_predicted, divergences, inputs_and_targets, next_token_losses


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Means over predicted tokens."""

    loss: float
    teacher_loss: float
    divergence: float
    """KL(teacher || student) of the next token's distribution, in nats."""
    agreement: float
    """How often both think the same token likeliest."""
    accuracy: float
    teacher_accuracy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def teacher_perplexity(self) -> float:
        return math.exp(min(self.teacher_loss, 700.0))

    def figures(self) -> dict[str, float]:
        """All of them by name."""
        return vars(self) | {"perplexity": self.perplexity, "teacher_perplexity": self.teacher_perplexity}


@torch.no_grad()
def validate(
    model: nn.Module,
    data: Samples,
    *,
    batch_size: int = 8,
    teacher: nn.Module | None = None,
    advance: Callable[[int], None] = lambda windows: None,
) -> Validation:
    """The converted model beside its teacher on every window; teacher: by default the model itself attending by softmax.

    Under a LoRA adapter the teacher is the model without it. advance: told how many more windows are done.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(7, dtype=torch.float64)
    try:
        for batch in batches_in_order(data, batch_size=batch_size):
            tokens, targets = (x.to(device) for x in inputs_and_targets(batch.content))
            student = model(input_ids=tokens, use_cache=False).logits
            expected = teacher_logits(model, teacher, tokens)
            is_predicted = targets != IGNORED
            divergence = divergences(student, expected, targets)
            figures = (
                count_predicted(targets),
                next_token_losses(student, targets).sum(),
                next_token_losses(expected, targets).sum(),
                divergence[is_predicted].sum(),
                (student.argmax(-1) == expected.argmax(-1))[is_predicted].sum(),
                (student.argmax(-1) == targets).sum(),
                (expected.argmax(-1) == targets).sum(),
            )
            sums += torch.stack([figure.double().cpu() for figure in figures])
            advance(len(tokens))
    finally:
        model.train(was_training)
    count, *totals = sums.tolist()
    if not count:
        raise ValueError("validation needs at least one predicted token, got none")
    loss, teacher_loss, divergence_, agreement, accuracy, teacher_accuracy = (total / count for total in totals)
    return Validation(
        loss=loss,
        teacher_loss=teacher_loss,
        divergence=divergence_,
        agreement=agreement,
        accuracy=accuracy,
        teacher_accuracy=teacher_accuracy,
        tokens=int(count),
    )


def teacher_logits(model: Any, teacher: nn.Module | None, tokens: torch.Tensor) -> torch.Tensor:
    if teacher is not None:
        return teacher(input_ids=tokens, use_cache=False).logits.float()
    with attention_mode(model, "softmax"):
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                return model(input_ids=tokens, use_cache=False).logits.float()
        return model(input_ids=tokens, use_cache=False).logits.float()
