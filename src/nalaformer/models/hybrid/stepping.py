"""The steps of `generate` on a GPU: once a text is long enough, a decoder with CUDA graphs runs them."""

import threading
import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...attention.hybrid import GroupedState
from .blueprint import Blueprint
from .cache import HybridCache, HybridCacheLayer
from .decoder import SteppingDecoder

if TYPE_CHECKING:
    from .model import HybridForCausalLM

# decoders that a model keeps: for a batch size, and for the smaller last batch
KEPT = 2
# in tokens of text
SMALLEST_CAPACITY = 1024


class Stepping:
    """Run the single steps of a converted model by a SteppingDecoder, in `generate` and in calls with a HybridCache.

    The model runs the first steps of a text itself. Then its cache is lent to a decoder, whose graphs are replayed. Graphs stay
    with the model and serve later texts; a cache can be read, reordered, copied or passed to any other call as usual. The model
    itself runs steps that a replay would get wrong (hooks, adapters, autocast, a changed model); `refusal` holds the reason.
    Plain attributes of modules, such as the epsilon of a norm, are not tracked: call `forget()` after changing one. Decoders
    retain their memory until `forget()`, or until the model moves. `model.stepping = None` frees it too and disables
    decoders, `model.stepping = Stepping()` enables them again.
    """

    def __init__(self, *, after: int = 8, capture: bool | None = None) -> None:
        """Configure stepping. after: eager steps before graphs are captured, which costs about as much.

        capture: None for graphs on a GPU and nothing elsewhere; False for the same steps without graphs, on any device.
        """
        if after < 0:
            raise ValueError(f"after must not be negative, got {after}; model.stepping = None turns stepping off")
        self.after, self.capture = after, capture
        self._lock = threading.RLock()
        self._places: list[_Place] = []
        self._blueprint: Blueprint | None = None
        self._failures: dict[Kind, tuple[int, str]] = {}

    @property
    def decoders(self) -> list[SteppingDecoder]:
        """The decoders that are alive, ordered by last use."""
        return [place.decoder for place in self._places]

    @property
    def refusal(self) -> str | None:
        """The reason why the model runs all steps itself, or those of some batches; None: none so far."""
        if self._blueprint is not None and self._blueprint.refusal is not None:
            return self._blueprint.refusal
        # the most recent failure
        return next((told for _, told in reversed(self._failures.values())), None)

    def step(
        self, model: "HybridForCausalLM", tokens: Tensor, positions: Tensor | None, mask: Tensor | None, cache: HybridCache
    ) -> Tensor | None:
        """Return logits [B, 1, vocabulary] after a token of each sample, [B, 1]; None: the model must run the step itself."""
        if not self._may_step(tokens, positions, mask, cache):
            return None
        with self._lock:
            place = self._place(model, cache)
            if place is None:
                return None
            if positions is None:
                # without position_ids the hosts count tokens too
                positions = torch.full_like(tokens[:1], cache.get_seq_length())
            # clone, since the next step overwrites the decoder's memory
            logits = place.step(tokens, positions).clone()
            for layer in cache.layers:
                layer.seen += 1
        return logits[:, None]

    def forget(self) -> None:
        """Give all states back and drop the graphs."""
        with self._lock:
            for place in self._places:
                place.give_back()
            self._places, self._blueprint, self._failures = [], None, {}

    def _may_step(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None, cache: HybridCache) -> bool:
        """True if this is one token of each sample after a prompt, and a graph can be replayed."""
        device, held = tokens.device, cache.layers[0].held
        return (
            (device.type == "cuda" or self.capture is False)
            and not torch.is_grad_enabled()
            and type(tokens) is Tensor
            and tokens.dim() == 2
            and tokens.shape[1] == 1
            and held is not None
            and len(held.lengths) == len(tokens) > 0
            and held.keys.device == device
            and (positions is None or (positions.shape in (tokens.shape, (1, 1)) and positions.device == device))
            and not torch.is_autocast_enabled(device.type)
            and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
            and (mask is None or (mask.dim() == 2 and bool(mask[:, -1].all())))
        )

    def _place(self, model: "HybridForCausalLM", cache: HybridCache) -> "_Place | None":
        """Return the decoder for this cache; None: there is none, or none yet."""
        if self._blueprint is not None and not self._blueprint.holds(model):
            self.forget()
            # start counting again, so that a model that keeps changing is not captured each time
            cache.single_steps = 0
        state = cache.layers[0].held
        assert state is not None
        kind = _kind(state)
        place = next((place for place in self._places if place.has(cache)), None)
        if place is not None:
            if place.kind == kind and place.decoder.cache.has_room():
                return place
            place.give_back()
        is_early = cache.single_steps < self.after
        if is_early and not self._places:
            cache.single_steps += 1
            return None
        if self._blueprint is None:
            self._blueprint = Blueprint(model)
        if self._blueprint.refusal is not None:
            return None
        needed = max(state.lengths) + 1
        fitting = [place for place in self._places if place.fits(kind, needed)]
        free = [place for place in fitting if not place.is_lent()]
        place = None
        # alternating texts would otherwise take one decoder from each other at every step
        if not free and (not fitting or sum(place.is_lent() for place in self._places) < KEPT):
            if is_early:
                cache.single_steps += 1
                return None
            place = self._make(model, cache, kind, needed)
        if place is None:
            if not fitting:
                return None
            place = free[-1] if free else fitting[0]
            place.load(cache)
        place.take(cache, self._lock)
        self._places = [other for other in self._places if other is not place] + [place]
        return place

    def _make(self, model: "HybridForCausalLM", cache: HybridCache, kind: "Kind", needed: int) -> "_Place | None":
        assert self._blueprint is not None
        capacity = None if self._blueprint.is_bounded else capacity_for(needed)
        failed = self._failures.get(kind)
        if kind[0] != model.get_input_embeddings().weight.dtype or (failed is not None and (capacity or 0) >= failed[0]):
            return None
        while len(self._places) >= KEPT:
            # the last one was used last
            place = next((place for place in self._places if not place.is_lent()), self._places[0])
            place.give_back()
            self._places.remove(place)
        # weakly, since the model holds the decoder and would outlive its last user
        held: Any = weakref.proxy(model)
        try:
            # allow writing the tensors outside of inference mode too
            with torch.inference_mode(False), torch.no_grad():
                decoder = SteppingDecoder(held, cache, capacity=capacity, capture=self.capture)
        except Exception as failure:
            # catch any exception, since Triton's have no class of their own
            told = f"steps of {kind[-1]} samples cannot be captured and run eagerly instead: {failure}"
            self._failures[kind] = (capacity or 0, told)
            warnings.warn(told, stacklevel=2)
            return None
        return _Place(decoder, kind, self._blueprint.map_parameters)

    def __getstate__(self) -> dict[str, Any]:
        # graphs belong to the model that they were captured from
        return {"after": self.after, "capture": self.capture}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__init__(**settings)  # type: ignore[misc]


Kind = tuple[torch.dtype, torch.device, int, int]


class _Place:
    """A decoder, and the cache that it decodes for."""

    def __init__(self, decoder: SteppingDecoder, kind: Kind, map_parameters: list[nn.Parameter]) -> None:
        self.decoder, self.kind = decoder, kind
        self._map_parameters, self._map_versions = map_parameters, _versions(map_parameters)
        # weakly, so that an unused cache is not given back
        self._borrowers: list[weakref.ref[HybridCacheLayer]] = []
        device = kind[1]
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def has(self, cache: HybridCache) -> bool:
        """True if the decoder holds the states of all layers."""
        return all(layer.held is state for layer, state in zip(cache.layers, self.decoder.cache.states, strict=True))

    def _lent_layers(self) -> list[HybridCacheLayer]:
        """Return the layers that still exist and have their states here."""
        states = {id(state) for state in self.decoder.cache.states}
        return [layer for borrower in self._borrowers if (layer := borrower()) is not None and id(layer.held) in states]

    def is_lent(self) -> bool:
        return bool(self._lent_layers())

    def fits(self, kind: Kind, needed: int) -> bool:
        capacity = self.decoder.cache.capacity
        return kind == self.kind and (capacity is None or needed <= capacity)

    def load(self, cache: HybridCache) -> None:
        """Load another cache; the previous one gets its states back."""
        self.give_back()
        self.decoder.cache.load_(cache)

    def take(self, cache: HybridCache, lock: AbstractContextManager[object]) -> None:
        """Lend the cache's states to the decoder."""
        self._borrowers = [weakref.ref(layer) for layer in cache.layers]
        for layer, state in zip(cache.layers, self.decoder.cache.states, strict=True):
            layer.lend(state, lock)

    def give_back(self) -> None:
        """Give the states back to the cache, for use on the stream that wrote them and on the current one."""
        lent, self._borrowers = self._lent_layers(), []
        # after the steps that write them, and before any that follow
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for layer in lent:
                layer.take_back()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for tensor in [tensor for layer in lent if layer.held is not None for tensor in layer.held.tensors().values()]:
                tensor.record_stream(current)

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        versions = _versions(self._map_parameters)
        if versions != self._map_versions:
            # these weights are cached in another form, which must be updated
            self.decoder.cache.refresh_()
            self._map_versions = versions
        return self.decoder.step(tokens, positions=positions)


def capacity_for(needed: int) -> int:
    """Return room for a quarter more tokens, in steps of SMALLEST_CAPACITY: texts of similar lengths share a decoder."""
    return -(-(needed + needed // 4) // SMALLEST_CAPACITY) * SMALLEST_CAPACITY


def _kind(state: GroupedState) -> Kind:
    """Return the properties of a state that its decoder must share."""
    device = state.keys.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return state.keys.dtype, device, stream, len(state.lengths)


def _versions(parameters: list[nn.Parameter]) -> list[int]:
    return [parameter._version for parameter in parameters]
