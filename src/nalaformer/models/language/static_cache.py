"""A cache with tensors at fixed addresses, so that one compiled step, or one CUDA graph, serves all tokens."""

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
    """A state that every token changes in place. The number of tokens is a tensor, an input of a compiled step."""

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
        recurrent = [mixer in RECURRENT_MIXERS for mixer in config.layer_mixers]
        Cache.__init__(
            self, layers=[StaticRecurrentLayer() if is_recurrent else StaticLayer(max_cache_len) for is_recurrent in recurrent]
        )
        self._room = max_cache_len

    @property
    def max_cache_len(self) -> int:
        """The capacity in tokens; some versions of transformers ask the layers, of which recurrent ones have no limit."""
        return self._room

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            f"a static cache cannot remove tokens, got crop({tokens_to_remove}); use a NaLaCache, the default of generate"
        )

    def activate_past_recording(self) -> None:
        raise ValueError(
            "drafting needs a cache that can remove tokens, got a static one; omit cache_implementation, or use a NaLaCache"
        )


def keep_in_place(tensor: Tensor) -> Tensor:
    """Mark the tensor for torch.compile as one with a fixed address, and return it."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
    return tensor
