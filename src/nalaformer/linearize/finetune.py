"""Stage 2: low-rank matrices beside the projections and the gate learn the next token."""

import warnings
from typing import Any

import torch
from torch import nn

from ..data import Samples
from ..models.hybrid.model import HybridForCausalLM
from ..tasks.base import Loss, SummedMetrics
from .batches import count_predicted, divergences, inputs_and_targets, next_token_losses
from .config import LinearizeConfig
from .validation import teacher_logits

# projections of attention by the names that families give them, and the gate
TARGETS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "o_proj", "out_proj", "dense", ".gate")


def with_adapter(model: HybridForCausalLM, config: LinearizeConfig) -> Any:
    """The model under peft's LoRA; maps and scorers stay as stage 1 left them."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("stage 2 needs peft: pip install 'nalaformer[language]'", name="peft") from error

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.endswith(TARGETS)]
    names = [name for name in names if ".self_attn." in name]
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=names)
    with warnings.catch_warnings():
        # peft asks by a name that transformers has replaced
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        return get_peft_model(model, lora)


class NextToken:
    """Cross-entropy of the next token; with `from_teacher` against the teacher's distribution instead of the text's token.

    What the teacher says of every token keeps it from learning the text by heart and forgetting the rest.
    """

    def __init__(self, train_data: Samples, eval_data: Samples, *, from_teacher: bool = False) -> None:
        self.train_data, self.eval_data, self.from_teacher = train_data, eval_data, from_teacher

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, targets = inputs_and_targets(batch)
        expected = None
        if self.from_teacher:
            inner: Any = model.module if hasattr(model, "module") else model
            with torch.no_grad():
                expected = teacher_logits(inner.model, None, tokens)
        logits = model(input_ids=tokens, use_cache=False).logits
        losses = next_token_losses(logits, targets) if expected is None else divergences(logits, expected, targets)
        count = count_predicted(targets)
        return Loss(total=losses.sum() / count.clamp(min=1), weight=count.item())

    def metrics(self) -> "NextTokenAccuracy":
        return NextTokenAccuracy()


class NextTokenAccuracy(SummedMetrics):
    """How often the likeliest token is the right one, and the mean loss."""

    def __init__(self) -> None:
        # tokens, right ones, sum of losses
        self.sums = torch.zeros(3, dtype=torch.float64)

    def update(self, model: nn.Module, batch: Any) -> None:
        tokens, targets = inputs_and_targets(batch)
        logits = model(input_ids=tokens, use_cache=False).logits
        right = (logits.argmax(-1) == targets).sum()
        figures = (count_predicted(targets), right, next_token_losses(logits, targets).sum())
        self.sums += torch.stack([figure.double().cpu() for figure in figures])

    def result(self) -> dict[str, float]:
        tokens, right, losses = self.sums.tolist()
        if not tokens:
            raise ValueError("accuracy needs at least one predicted token, got none")
        return {"accuracy": right / tokens, "loss": losses / tokens, "tokens": tokens}
