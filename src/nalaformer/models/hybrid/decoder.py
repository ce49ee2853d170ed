"""Decoding of converted models that does not wait for the host: a whole step is one CUDA graph."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...attention.hybrid import roll_
from ...ops.graphs import captured
from .attention import converted_attentions
from .cache import HybridCache, SteppingCache

if TYPE_CHECKING:
    from .model import HybridForCausalLM


class SteppingDecoder:
    """A converted model that goes on after a prompt, one token of each sample at a time, in memory of fixed size.

    On a GPU, embedding to logits are captured once and replayed, and so is what happens when chunks leave the window; elsewhere
    the same functions are called. The model must not be changed meanwhile. `generate` does the same by itself, see `Stepping`.

        prompt = model(tokens, use_cache=True)
        decoder = SteppingDecoder(model, prompt.past_key_values)
        token = prompt.logits[:, -1].argmax(-1)
        for _ in range(100):
            token = decoder.step(token).argmax(-1)
    """

    def __init__(
        self, model: "HybridForCausalLM", cache: HybridCache, *, capacity: int | None = None, capture: bool | None = None
    ) -> None:
        """cache: after the prompt, left as it is. capacity: see SteppingState.from_state. capture: on a GPU by default."""
        attentions = [attention.hybrid for attention in converted_attentions(model)]
        self.model, self.cache = model, SteppingCache(cache, attentions, capacity=capacity)
        count = self.cache.states[0].count
        self.tokens = torch.zeros(len(count), 1, dtype=torch.int64, device=count.device)
        self.positions = torch.zeros_like(self.tokens)
        self.logits: Tensor | None = None
        self._replays: tuple[Callable[[], object], ...] | None = None
        self.is_captured = count.device.type == "cuda" if capture is None else capture
        if self.is_captured:
            changed = [tensor for state in self.cache.states for tensor in state.tensors()]
            calls = (self.run_step, self.run_roll)
            self._replays = tuple(captured(call, restore=changed, device=count.device) for call in calls)

    def step(self, tokens: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """The next token of each sample, [B] -> logits [B, vocabulary], in memory that the next step writes over.

        positions: [B, 1] or [1, 1], of the tokens; by default the number of real tokens before each.
        """
        if tokens.numel() != len(self.tokens):
            raise ValueError(
                f"a step takes one token of each of the {len(self.tokens)} samples, got shape {tuple(tokens.shape)}"
            )
        is_full = self.cache.advance()
        self.tokens.copy_(tokens.reshape(-1, 1))
        self.positions.copy_(self.cache.states[0].count[:, None] if positions is None else positions)
        # methods are not kept: in a cycle, states would outlive their last user
        run_step, run_roll = self._replays or (self.run_step, self.run_roll)
        run_step()
        if is_full:
            run_roll()
        assert self.logits is not None
        return self.logits

    @torch.no_grad()
    def run_step(self) -> None:
        """The step of `tokens` itself, uncaptured: `logits` and the states after it."""
        self.cache.expect_step()
        given = {"position_ids": self.positions, "past_key_values": self.cache}
        out = self.model(self.tokens, **given, use_cache=True, logits_to_keep=1)
        if self.logits is None:
            # later steps may be taken outside of inference mode
            with torch.inference_mode(False):
                self.logits = torch.empty_like(out.logits[:, -1], memory_format=torch.contiguous_format)
        self.logits.copy_(out.logits[:, -1])

    def run_roll(self) -> None:
        """What follows a step that fills a chunk, uncaptured."""
        for state in self.cache.states:
            roll_(state)
