"""Hybrid attention inside a pretrained attention module.

The module still projects, normalizes and rotates as its authors wrote it, and then calls our attention with queries, keys and
values. One wrapper thus supports all families without repeating their code. Two interfaces of transformers allow this: it
looks up the attention function and the mask function by name, and a module passes unknown arguments on to the former.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from ...attention.hybrid import HeadGroups
from ...ops import compute_dtype
from .cache import HybridCache

INTERFACE = "nala_hybrid"
# variants that our attention does not support, by the argument in which modules pass them
FOREIGN = {"softcap": "capped logits", "s_aux": "sinks", "sliding_window": "a sliding window of its own"}


@dataclass
class Transfer:
    """The losses of a layer's student against its teacher in one pass."""

    squared_error: Tensor
    """The mean squared error over head outputs, with gradient."""
    teacher_square: Tensor
    """The mean square of the teacher's outputs, by which the error is divided."""
    scorer_loss: Tensor | None
    """The loss of the scorer; None without a learned selection."""


class ConvertedAttention(nn.Module):
    """A pretrained attention module that attends by hybrid attention.

    mode "hybrid": as converted; "softmax": the original without a cache; "transfer": the original, with the hybrid compared to
    it (`transferred`).
    """

    def __init__(self, original: nn.Module, hybrid: HeadGroups, *, layer: int) -> None:
        super().__init__()
        self.original, self.hybrid, self.layer = original, hybrid, layer
        self.mode = "hybrid"
        self.transferred: Transfer | None = None
        self.observer: Callable[[ConvertedAttention, Tensor, Tensor, float], None] | None = None
        """Called with queries, keys and scale of each pass in the mode "softmax"."""

    def forward(self, hidden_states: Tensor, *args: Any, past_key_values: HybridCache | None = None, **kwargs: Any) -> Any:
        """Call the original module; the cache is ours."""
        call = AttentionPass(self, hidden_states, past_key_values)
        out = self.original(hidden_states, *args, past_key_values=None, hybrid_call=call, **kwargs)
        if not call.has_attended:
            raise ValueError(
                f"{type(self.original).__name__} attends by itself and not by transformers' attention functions, so it would "
                "stay as it is; it cannot be converted"
            )
        return out


@dataclass
class AttentionPass:
    """One pass through one attention: the inputs of our attention function beyond queries, keys and values."""

    attention: ConvertedAttention
    tokens: Tensor
    cache: HybridCache | None
    has_attended: bool = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
        """Attend by the current mode: q [B, N, H, D]; k, v [B, N, K, D] -> [B, N, H, D]."""
        owner = self.attention
        if self.has_attended:
            raise ValueError(
                f"{type(owner.original).__name__} attends more than once in a pass, and a layer caches one sequence of keys "
                "and values; it cannot be converted"
            )
        self.has_attended = True
        if owner.mode == "hybrid":
            return self._attend_hybrid(q, k, v, key_mask, scale)
        if self.cache is not None:
            raise ValueError(f"the mode {owner.mode!r} computes whole sequences, got a cache; pass use_cache=False")
        if owner.observer is not None:
            owner.observer(owner, q, k, scale)
        teacher = softmax_attention(q, k, v, key_mask, scale)
        if owner.mode == "transfer":
            self._transfer(q.detach(), k.detach(), v.detach(), key_mask, scale, teacher.detach())
        return teacher

    def _attend_hybrid(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
        hybrid = self.attention.hybrid
        if self.cache is None:
            return hybrid(q, k, v, self.tokens, key_mask=key_mask, scale=scale)[0]
        return self.cache.layers[self.attention.layer].attend(hybrid, q, k, v, self.tokens, key_mask=key_mask, scale=scale)

    def _transfer(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, teacher: Tensor) -> None:
        hybrid, tokens = self.attention.hybrid, self.tokens.detach()
        out, _ = hybrid(q, k, v, tokens, key_mask=key_mask, scale=scale)
        wide = compute_dtype(out)
        error = (out.to(wide) - teacher.to(wide)).square().mean()
        scorer_loss = hybrid.scorer_loss(q, k, tokens, scale=scale)
        self.attention.transferred = Transfer(error, teacher.to(wide).square().mean(), scorer_loss)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """Compute causal softmax attention, [B, N, H, D]."""
    mask = None
    if key_mask is not None:
        mask = key_mask[:, None, None, :] & torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
        # a row of padding sees itself, so that it is finite; its values are never read
        mask = mask | torch.eye(q.shape[1], dtype=torch.bool, device=q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' function named INTERFACE: layout [B, H, N, D] in, [B, N, H, D] out."""
    call = arguments.get("hybrid_call")
    if call is None:
        raise ValueError(f"{type(module).__name__} was not converted; use nalaformer.linearize, not attn_implementation alone")
    for name, what in FOREIGN.items():
        if arguments.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} attends with {what} ({name}={arguments[name]!r}), which cannot be converted"
            )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be [batch, tokens], got {tuple(attention_mask.shape)}; masks of pairs are unsupported"
        )
    scale = arguments.get("scaling") or query.shape[-1] ** -0.5
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return call.attend(q, k, v, attention_mask, scale), None


def build_key_mask(
    q_length: int, *, attention_mask: Tensor | None = None, mask_function: Any = None, **_: Any
) -> Tensor | None:
    """Return the mask for transformers' name INTERFACE: which of the new tokens are real, [B, N] bool; None: all of them."""
    if mask_function is not None and mask_function is not causal_mask_function:
        raise ValueError(
            "hybrid attention runs from the first token of a sample to its last, got packed sequences or a mask of pairs; "
            "pass one sequence in each row, with attention_mask for padding and no position_ids that start anew"
        )
    if attention_mask is None:
        return None
    new = attention_mask[:, -q_length:].bool()
    return None if bool(new.all()) else new


AttentionInterface.register(INTERFACE, attend)
AttentionMaskInterface.register(INTERFACE, build_key_mask)


def converted_attentions(model: nn.Module) -> list[ConvertedAttention]:
    """Return the converted attentions of a model, in the order of its layers."""
    found = [module for module in model.modules() if isinstance(module, ConvertedAttention)]
    return sorted(found, key=lambda module: module.layer)


@contextmanager
def attention_mode(model: nn.Module, mode: str, layers: range | None = None) -> Iterator[list[ConvertedAttention]]:
    """Set the attention mode of the model inside the block; `layers` are those that "transfer" compares."""
    if mode not in ("hybrid", "softmax", "transfer"):
        raise ValueError(f'mode must be "hybrid", "softmax" or "transfer", got {mode!r}')
    found = converted_attentions(model)
    before = [module.mode for module in found]
    for module in found:
        module.mode = "softmax" if mode == "transfer" and layers is not None and module.layer not in layers else mode
    try:
        yield found
    finally:
        for module, old in zip(found, before, strict=True):
            module.mode, module.transferred = old, None
