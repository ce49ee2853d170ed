"""A cache whose tensors stay where they are from the first token on: one compiled step, or one CUDA graph, serves them all."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer

from .cache import LanguageCache, RecurrentLayer
from .config import RECURRENT_MIXERS, NaLaConfig

if TYPE_CHECKING:
    from .tokens import Tokens


class StaticRecurrentLayer(RecurrentLayer):
    """A state that every token changes in its place. How many were seen is a tensor: a compiled step takes it as an input."""

    is_compileable = True
    is_croppable = False
    seen: Tensor  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.tensor(0)

    def reset(self) -> None:
        self.tensors, self.seen = {}, torch.tensor(0)

    def get_seq_length(self) -> int:
        return self.seen if self.tensors else 0  # type: ignore[return-value]

    def mix(self, mixer: Callable[[Tensor, "Tokens", RecurrentLayer], Tensor], x: Tensor, tokens: "Tokens") -> Tensor:
        if not self.tensors:
            self.seen = keep_in_place(self.seen.to(x.device))
        self.leave_inference_mode()
        places = dict(self.tensors)
        out = mixer(x, tokens, self)
        for name, tensor in self.tensors.items():
            if name not in places:
                places[name] = keep_in_place(tensor)
            elif places[name] is not tensor:
                places[name].copy_(tensor)
        self.tensors = places
        return out


class NaLaStaticCache(LanguageCache, StaticCache):
    """The cache of `generate(cache_implementation="static")`: `softmax` mixers have room for `max_cache_len` tokens."""

    layers: list[RecurrentLayer | StaticLayer]  # type: ignore[assignment]

    def __init__(self, config: NaLaConfig, max_cache_len: int) -> None:
        recurrent = [mixer in RECURRENT_MIXERS for mixer in config.mixer_of_layers]
        Cache.__init__(
            self, layers=[StaticRecurrentLayer() if is_recurrent else StaticLayer(max_cache_len) for is_recurrent in recurrent]
        )
        self._room = max_cache_len

    @property
    def max_cache_len(self) -> int:
        """Tokens that there is room for; some versions of transformers ask the layers, of which recurrent ones have no end."""
        return self._room

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            f"a static cache cannot take tokens back, got crop({tokens_to_remove}); use a NaLaCache, the default of generate"
        )

    def activate_past_recording(self) -> None:
        raise ValueError(
            "drafts need a cache that takes tokens back, got a static one; leave out cache_implementation, or use a NaLaCache"
        )


def keep_in_place(tensor: Tensor) -> Tensor:
    """The tensor, marked for torch.compile as one whose address does not change."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor
