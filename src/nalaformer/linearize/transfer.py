"""Stage 1, attention transfer: each layer's hybrid attention learns the outputs of the softmax attention in its place.

The teacher is the model itself. Its softmax outputs go on to the next layer, so every layer learns from what it would have
seen, and no layer waits for another; nothing of size tokens x tokens is kept.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..data import Samples
from ..models.hybrid.attention import attention_mode, converted_attentions
from ..tasks.base import Loss, SummedMetrics
from .batches import inputs_and_targets
from .trainable import Trainable, freeze

LOSS_SCALE = 1000.0


class TransferModel(Trainable):
    """Errors of the students in some layers; maps, gates and scorers of those layers learn, nothing else."""

    def __init__(self, model: nn.Module, layers: range) -> None:
        super().__init__(model)
        self.layers = layers
        freeze(model)
        for attention in converted_attentions(model):
            for part in attention.hybrid.parts if attention.layer in layers else ():
                part.requires_grad_(True)
                # a map that nothing looks at has no gradient
                part.map.requires_grad_(part.settings.linear)

    def train(self, mode: bool = True) -> "TransferModel":
        # a teacher does not drop out
        super().train(False)
        return self

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each layer: mean squared error, mean square of the teacher, loss of the scorer; [layers] each."""
        with attention_mode(self.model, "transfer", self.layers) as attentions:
            # logits are not asked for: one is enough
            self.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
            found = [attention.transferred for attention in attentions if attention.layer in self.layers]
        transfers = [transfer for transfer in found if transfer is not None]
        assert len(transfers) == len(self.layers)
        errors = torch.stack([transfer.squared_error for transfer in transfers])
        squares = torch.stack([transfer.teacher_square for transfer in transfers])
        scorers = [errors.new_zeros(()) if t.scorer_loss is None else t.scorer_loss for t in transfers]
        return errors, squares, torch.stack(scorers)


class AttentionTransfer:
    """1000 x the mean over layers of the squared error of head outputs."""

    def __init__(self, train_data: Samples, eval_data: Samples, layers: range) -> None:
        self.train_data, self.eval_data, self.layers = train_data, eval_data, layers

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, _ = inputs_and_targets(batch)
        errors, squares, scorers = model(tokens)
        relative = (errors / squares.clamp(min=1e-12)).detach().mean()
        return Loss(
            total=LOSS_SCALE * errors.mean() + scorers.mean(),
            weight=tokens.numel(),
            parts={"relative_error": relative, "scorer": scorers.detach().mean()},
        )

    def metrics(self) -> "TransferErrors":
        return TransferErrors(self.layers)


class TransferErrors(SummedMetrics):
    """The squared error of each layer's outputs, as a part of their square."""

    def __init__(self, layers: range) -> None:
        self.layers = layers
        self.sums = torch.zeros(1 + 2 * len(layers), dtype=torch.float64)

    def update(self, model: nn.Module, batch: Any) -> None:
        tokens, _ = inputs_and_targets(batch)
        errors, squares, _ = model(tokens)
        one = errors.new_ones(1)
        self.sums += tokens.numel() * torch.cat((one, errors, squares)).double().cpu()

    def result(self) -> dict[str, float]:
        if not self.sums[0]:
            raise ValueError("transfer errors need at least one window of tokens, got none")
        errors, squares = self.sums[1:].chunk(2)
        relative = (errors / squares.clamp(min=1e-300)).tolist()
        by_layer = {f"layer_{layer}": error for layer, error in zip(self.layers, relative, strict=True)}
        return {"explained": 1 - sum(relative) / len(relative), **by_layer}
