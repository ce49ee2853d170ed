"""Decoding of converted models that does not wait for the host: a whole step is one CUDA graph."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...attention.hybrid import GroupedState, HeadGroups
from ...ops.graphs import captured
from ..state_layer import StateLayer
from .attention import converted_attentions
from .cache import HybridCache

if TYPE_CHECKING:
    from .model import HybridForCausalLM


class SteppingLayer(StateLayer):
    """The state of one attention in memory that stays where it is; the decoder counts its steps."""

    def __init__(self, hybrid: HeadGroups, state: GroupedState, seen: int) -> None:
        super().__init__()
        self.hybrid, self.state, self.seen = hybrid, state, seen
        self.query_matrix = hybrid.query_matrix()

    def attend(self, hybrid: HeadGroups, *tokens: Tensor, key_mask: None, scale: float | None) -> Tensor:
        """One token of each sample; see HeadGroups.step_."""
        return hybrid.step_(*tokens, state=self.state, scale=scale, query_matrix=self.query_matrix)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state.select_(indices)


class SteppingCache(Cache):
    """What a decoder remembers. Calls of the model refuse it; `to_cache` makes one for them."""

    layers: list[SteppingLayer]  # type: ignore[assignment]

    def __init__(self, cache: HybridCache, attentions: Sequence[HeadGroups], *, capacity: int | None = None) -> None:
        """Starts from a copy of `cache`. attentions: the model's, in the order of layers; capacity: see SteppingDecoder."""
        self.capacity = None if all(hybrid.is_bounded for hybrid in attentions) else capacity
        layers: list[Any] = []
        for layer, hybrid in zip(cache.layers, attentions, strict=True):
            with layer.access():
                if layer.held is None:
                    raise ValueError("stepping goes on from a prompt, got an empty cache; pass one that the model has filled")
                state = hybrid.stepping_state(layer.held, self.capacity)
            layers.append(SteppingLayer(hybrid, state, layer.seen))
        super().__init__(layers=layers)

    @property
    def states(self) -> list[GroupedState]:
        return [layer.state for layer in self.layers]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def has_room(self) -> bool:
        """True if there is room for one more token of each sample."""
        return self.capacity is None or max(self.layers[0].state.lengths) < self.capacity

    def load_(self, cache: HybridCache) -> None:
        """Go on from what another cache remembers of as many samples, in the same memory."""
        for own, layer in zip(self.layers, cache.layers, strict=True):
            with layer.access():
                assert layer.held is not None
                own.state.load_(layer.held)
            own.seen = layer.seen
        self.refresh_()

    def refresh_(self) -> None:
        """Take over what the parameters of the feature maps are now."""
        for layer in self.layers:
            for kept, matrix in zip(layer.query_matrix, layer.hybrid.query_matrix(), strict=True):
                if kept is not None and matrix is not None:
                    kept.copy_(matrix)

    def advance(self) -> bool:
        """Count a step of all layers; True: their roll must follow."""
        first, *others = self.states
        is_full = first.advance()
        # all layers have seen the same tokens: asking each of them would take the host longer than the device may wait
        for state in others:
            state.lengths = first.lengths
        for layer in self.layers:
            layer.seen += 1
        return is_full

    def to_cache(self, config: Any) -> HybridCache:
        """A copy that takes prompts, padding and beams again. config: the model's."""
        cache = HybridCache(config)
        for layer, own in zip(cache.layers, self.layers, strict=True):
            layer.put(own.state.clone(), own.seen)
        return cache


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
        """cache: after the prompt, left as it is. capture: on a GPU by default.

        capacity: tokens of the longest text that there is room for; not needed where every head's memory is bounded.
        """
        attentions = [attention.hybrid for attention in converted_attentions(model)]
        self.model, self.cache = model, SteppingCache(cache, attentions, capacity=capacity)
        count = self.cache.states[0].count
        self.tokens = torch.zeros(len(count), 1, dtype=torch.int64, device=count.device)
        self.positions = torch.zeros_like(self.tokens)
        self.logits: Tensor | None = None
        self._replays: tuple[Callable[[], object], ...] | None = None
        self.is_captured = count.device.type == "cuda" if capture is None else capture
        if self.is_captured:
            changed = [tensor for state in self.cache.states for tensor in state.tensors().values()]
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
        first = self.cache.states[0]
        if not self.cache.has_room():
            raise ValueError(
                f"the decoder has room for texts of {self.cache.capacity} tokens, got one of {max(first.lengths) + 1}; make it "
                "with a larger capacity"
            )
        self.tokens.copy_(tokens.reshape(-1, 1))
        self.positions.copy_(first.count[:, None] if positions is None else positions)
        # methods are not kept: in a cycle, states would outlive their last user
        run_step, run_roll = self._replays or (self.run_step, self.run_roll)
        run_step()
        if self.cache.advance():
            run_roll()
        assert self.logits is not None
        return self.logits

    @torch.no_grad()
    def run_step(self) -> None:
        """The step of `tokens` itself, uncaptured: `logits` and the states after it."""
        given = {"position_ids": self.positions, "past_key_values": self.cache}
        # the host: the model itself would ask whether a decoder takes this step
        out = self.model.host(input_ids=self.tokens, **given, use_cache=True, logits_to_keep=1)
        if self.logits is None:
            # later steps may be taken outside of inference mode
            with torch.inference_mode(False):
                self.logits = torch.empty_like(out.logits[:, -1], memory_format=torch.contiguous_format)
        self.logits.copy_(out.logits[:, -1])

    def run_roll(self) -> None:
        """What follows a step that fills a chunk, uncaptured."""
        for layer in self.cache.layers:
            layer.hybrid.roll_(layer.state)
