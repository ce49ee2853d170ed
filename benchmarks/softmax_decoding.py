"""Softmax attention after a context of one length: a cache layer, and a model that takes one step again and again."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from nalaformer.ops.graphs import captured
from nalaformer.timing import median_ms

HEADS, ROWS = "nala_grouped_heads", "nala_grouped_rows"
WAYS = {HEADS: "SDPA with enable_gqa", ROWS: "SDPA with the heads of a group as rows"}
"""How heads that share keys can attend in one step, by the name under which transformers knows it. transformers' own way copies
the keys for every head wherever it has made a mask, which no fair comparison does."""


class FixedLayer(DynamicLayer):
    """Keys and values [B, H, N, D] in memory of fixed size, whose last place each new token takes again.

    The cost of a token after N - 1 others, without a copy of all of them: what a benchmark needs, and no generation.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2] - 1


class FixedDecoder:
    """A softmax model after the tokens of FixedLayers; on a GPU a step is a CUDA graph. Every step takes the same place."""

    def __init__(self, model: Any, layers: list[FixedLayer], *, capture: bool) -> None:
        self.model, self.layers, self.cache = model, layers, Cache(layers=list(layers))
        keys = layers[0].keys
        assert keys is not None
        self.tokens = torch.zeros(len(keys), 1, dtype=torch.int64, device=keys.device)
        # made here: a step may make nothing on the host
        self.positions = torch.full_like(self.tokens, keys.shape[2] - 1)
        self.logits: Tensor | None = None
        self._step: Callable[[], object] = captured(self.run_step) if capture else self.run_step

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in (layer.keys, layer.values) if tensor is not None)

    def step(self, tokens: Tensor) -> Tensor:
        """[B] -> logits [B, vocabulary], in memory that the next step writes over."""
        self.tokens.copy_(tokens.view(-1, 1))
        self._step()
        assert self.logits is not None
        return self.logits

    @torch.no_grad()
    def run_step(self) -> None:
        """The step itself, uncaptured."""
        out = self.model(self.tokens, position_ids=self.positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        if self.logits is None:
            self.logits = torch.empty_like(out.logits[:, -1], memory_format=torch.contiguous_format)
        self.logits.copy_(out.logits[:, -1])


def attend_in_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """One step's softmax attention: [B, H, 1, D] on [B, K, N, D] -> [B, 1, H, D]."""
    assert query.shape[2] == 1
    assert attention_mask is None
    out = F.scaled_dot_product_attention(query, key, value, scale=arguments.get("scaling"), enable_gqa=True)
    return out.transpose(1, 2), None


def attend_in_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attend with the H / K queries of each of the K heads as rows."""
    assert query.shape[2] == 1
    assert attention_mask is None
    rows = query[:, :, 0].unflatten(1, (key.shape[1], -1))
    out = F.scaled_dot_product_attention(rows, key, value, scale=arguments.get("scaling"))
    return out.flatten(1, 2)[:, None], None


def no_mask(*_: object, **__: object) -> None:
    """A step sees all that is there."""


ATTENTIONS = {HEADS: attend_in_heads, ROWS: attend_in_rows}
for name, attend in ATTENTIONS.items():
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, no_mask)


@torch.no_grad()
def fastest_way(query: Tensor, key: Tensor, value: Tensor) -> tuple[str, str]:
    """The name of the faster one of WAYS for [B, H, 1, D] on [B, K, N, D], and what was found; captured, so on a GPU."""

    def call(name: str) -> Callable[[], Tensor]:
        return lambda: ATTENTIONS[name](nn.Identity(), query, key, value, None)[0]

    times = {name: median_ms(call(name), device="cuda", seconds=0.02) for name in WAYS}
    best = min(times, key=lambda name: times[name])
    return best, ", ".join(f"{WAYS[name]} {1e3 * time:.0f} us a layer" for name, time in times.items())
