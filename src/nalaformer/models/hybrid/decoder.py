"""Decoding of converted models in CUDA graphs, one per step, so that launch latency does not matter."""

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
    """The state of one attention at fixed addresses; the decoder counts its steps."""

    def __init__(self, hybrid: HeadGroups, state: GroupedState, seen: int) -> None:
        super().__init__()
        self.hybrid, self.state, self.seen = hybrid, state, seen
        self.query_matrix = hybrid.query_matrix()

    def attend(self, hybrid: HeadGroups, *tokens: Tensor, key_mask: None, scale: float | None) -> Tensor:
        """Decode one token of each sample; see HeadGroups.step_."""
        return hybrid.step_(*tokens, state=self.state, scale=scale, query_matrix=self.query_matrix)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state.select_(indices)


class SteppingCache(Cache):
    """The states of a decoder. The model rejects this cache; `to_cache` converts it."""

    layers: list[SteppingLayer]  # type: ignore[assignment]

    def __init__(self, cache: HybridCache, attentions: Sequence[HeadGroups], *, capacity: int | None = None) -> None:
        """Copy the states of `cache`. attentions: the model's, in the order of layers; capacity: see SteppingDecoder."""
        self.capacity = None if all(hybrid.is_bounded for hybrid in attentions) else capacity
        layers: list[Any] = []
        for layer, hybrid in zip(cache.layers, attentions, strict=True):
            with layer.access():
                if layer.held is None:
                    raise ValueError("stepping continues from a prompt, got an empty cache; pass one that the model has filled")
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
        """Copy another cache of as many samples into the same memory."""
        for own, layer in zip(self.layers, cache.layers, strict=True):
            with layer.access():
                assert layer.held is not None
                own.state.load_(layer.held)
            own.seen = layer.seen
        self.refresh_()

    def refresh_(self) -> None:
        """Copy the current parameters of the feature maps."""
        for layer in self.layers:
            for kept, matrix in zip(layer.query_matrix, layer.hybrid.query_matrix(), strict=True):
                if kept is not None and matrix is not None:
                    kept.copy_(matrix)

    def advance(self) -> bool:
        """Count a step of all layers; return True if their roll must follow."""
        first, *others = self.states
        is_full = first.advance()
        # all layers have seen the same tokens; counting in each of them would take longer than the device may wait
        for state in others:
            state.lengths = first.lengths
        for layer in self.layers:
            layer.seen += 1
        return is_full

    def to_cache(self, config: Any) -> HybridCache:
        """Return a copy for calls of the model, with padding and beams. config: the model's."""
        cache = HybridCache(config)
        for layer, own in zip(cache.layers, self.layers, strict=True):
            layer.put(own.state.clone(), own.seen)
        return cache


class SteppingDecoder:
    """A converted model that decodes after a prompt, one token of each sample at a time, in memory of fixed size.

    On a GPU, the step from embedding to logits and the roll of the window are each captured once and replayed; elsewhere the
    same functions run eagerly. The model must not be changed meanwhile. `generate` uses this by itself, see `Stepping`.

        prompt = model(tokens, use_cache=True)
        decoder = SteppingDecoder(model, prompt.past_key_values)
        token = prompt.logits[:, -1].argmax(-1)
        for _ in range(100):
            token = decoder.step(token).argmax(-1)
    """

    def __init__(
        self, model: "HybridForCausalLM", cache: HybridCache, *, capacity: int | None = None, capture: bool | None = None
    ) -> None:
        """Create a decoder. cache: after the prompt, not changed. capture: True on a GPU by default.

        capacity: tokens of the longest text that there is room for; not needed if every head's memory is bounded.
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
        """Decode the next token of each sample, [B] -> logits [B, vocabulary], in memory that the next step overwrites.

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
        # bound methods are not stored: in a cycle, states would outlive their last user
        run_step, run_roll = self._replays or (self.run_step, self.run_roll)
        run_step()
        if self.cache.advance():
            run_roll()
        assert self.logits is not None
        return self.logits

    @torch.no_grad()
    def run_step(self) -> None:
        """Run the step of `tokens` eagerly: set `logits` and update the states."""
        given = {"position_ids": self.positions, "past_key_values": self.cache}
        # call the host, since the model itself would look for a decoder
        out = self.model.host(input_ids=self.tokens, **given, use_cache=True, logits_to_keep=1)
        if self.logits is None:
            # later steps may run outside of inference mode
            with torch.inference_mode(False):
                self.logits = torch.empty_like(out.logits[:, -1], memory_format=torch.contiguous_format)
        self.logits.copy_(out.logits[:, -1])

    def run_roll(self) -> None:
        """Move the windows eagerly after a step that fills a chunk."""
        for layer in self.cache.layers:
            layer.hybrid.roll_(layer.state)
