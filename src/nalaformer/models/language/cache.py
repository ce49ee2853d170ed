"""The cache of generation: a state of constant size for each recurrent layer, keys and values for each softmax layer."""

import json
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from ...json_text import parse_json
from ..state_layer import StateLayer
from .config import RECURRENT_MIXERS, NaLaConfig

if TYPE_CHECKING:
    from .tokens import Tokens


# tokens that a recording layer can remove; assistants draft about twenty
RECORDED_TOKENS = 64


class Recorded(NamedTuple):
    """Tokens of one call: the state before them, and a function that adds the first of them again."""

    tensors: dict[str, Tensor]
    seen: int
    length: int
    add: Callable[["RecurrentLayer", int], Tensor]
    """Takes the layer, since copies of a cache share this function."""


class RecurrentLayer(StateLayer):
    """The state of one recurrent mixer: named tensors, batch first, whose sizes do not depend on the number of tokens.

    While it records (generation with drafts), it retains copies of the state before the last tokens, to which `crop` returns.
    """

    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.record_past = False
        self.recorded: list[Recorded] = []

    def reset(self) -> None:
        self.tensors, self.seen, self.recorded = {}, 0, []

    def batch_select_indices(self, indices: Tensor) -> None:
        self.tensors = {name: tensor[indices.to(tensor.device)] for name, tensor in self.tensors.items()}
        self.recorded = []

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.tensors = {name: tensor.repeat_interleave(repeats, dim=0) for name, tensor in self.tensors.items()}
        self.recorded = []

    def activate_past_recording(self) -> None:
        """Let `crop` remove the last tokens from now on, at most RECORDED_TOKENS."""
        self.record_past = True

    def mix(self, mixer: Callable[[Tensor, "Tokens", "RecurrentLayer"], Tensor], x: Tensor, tokens: "Tokens") -> Tensor:
        """Return mixer(x, tokens, self), recorded if recording is active. x [B, N, C]."""
        self.leave_inference_mode()
        if not self.record_past:
            if self.recorded:
                # these tokens are not recorded, so no earlier ones can be removed any more
                self.recorded = []
            return mixer(x, tokens, self)
        length = x.shape[1]
        before = max(length - RECORDED_TOKENS, 0)
        out = [] if before == 0 else [mixer(x[:, :before], tokens.slice_tokens(0, before), self)]
        x, tokens = x[:, before:], tokens.slice_tokens(before, length)
        inputs = x.detach()
        copies = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.recorded.append(
            Recorded(
                *(copies, self.seen, length - before),
                lambda layer, count: mixer(inputs[:, :count], tokens.slice_tokens(0, count), layer),
            )
        )
        while sum(each.length for each in self.recorded[1:]) >= RECORDED_TOKENS:
            self.recorded.pop(0)
        return torch.cat([*out, mixer(x, tokens, self)], dim=1)

    def leave_inference_mode(self) -> None:
        """Copy tensors made in inference mode for use outside, where steps cannot change them in place."""
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self.tensors = {name: y.clone() if y.is_inference() else y for name, y in self.tensors.items()}

    def check_crop(self, tokens_to_remove: int) -> None:
        """Reject a removal of tokens that are not recorded."""
        if not self.record_past:
            super().crop(tokens_to_remove)
        known = sum(each.length for each in self.recorded)
        if not 0 <= -tokens_to_remove <= known:
            raise ValueError(
                f"crop takes back the last tokens by a negative number, down to -{known} here, got {tokens_to_remove}; copy "
                "the cache (copy.deepcopy) before the tokens that you may want to take back"
            )

    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:  # type: ignore[override]
        self.check_crop(tokens_to_remove)
        left = -tokens_to_remove
        while left > 0:
            last = self.recorded.pop()
            self.tensors, self.seen = {name: tensor.clone() for name, tensor in last.tensors.items()}, last.seen
            if last.length > left:
                last.add(self, last.length - left)
                self.recorded.append(last._replace(length=last.length - left))
            left -= last.length


class LanguageCache(Cache):
    """The common base of the caches of a language model."""

    layers: list[RecurrentLayer | DynamicLayer | StaticLayer]  # type: ignore[assignment]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        found = {}
        for number, layer in enumerate(self.layers):
            pair = {} if layer.keys is None or layer.values is None else {"keys": layer.keys, "values": layer.values}
            for name, tensor in (layer.tensors if isinstance(layer, RecurrentLayer) else pair).items():
                found[f"layers.{number}.{name}"] = tensor
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


class NaLaCache(LanguageCache, DynamicCache):
    """The cache of a language model: constant in size except for `softmax` mixers, which retain every key and value."""

    layers: list[RecurrentLayer | DynamicLayer]  # type: ignore[assignment]

    def __init__(self, config: NaLaConfig) -> None:
        recurrent = [mixer in RECURRENT_MIXERS for mixer in config.layer_mixers]
        Cache.__init__(self, layers=[RecurrentLayer() if is_recurrent else DynamicLayer() for is_recurrent in recurrent])
        # compiled programs build caches too and cannot trace json, so the rest is done when a file is written or read
        self._made_for = (list(config.layer_mixers), config.feature_map, dict(config.map_options or {}), config.contrast)

    @property
    def kind(self) -> dict[str, Any]:
        """The model's fields that give its states their meaning, as files store them."""
        mixers, feature_map, map_options, contrast = self._made_for
        found = {"mixers": mixers, "feature_map": feature_map, "map_options": json.loads(json.dumps(map_options))}
        # files of models without a contrast have no entry for it
        return found if contrast == "none" else found | {"contrast": contrast}

    def crop(self, tokens_to_remove: int) -> None:
        # check all layers before any changes
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        for number, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer):
                layer.reset()
            else:
                # transformers 5.17 zeroes the keys of a dynamic layer and retains their number
                self.layers[number] = type(layer)()

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file; `load` resumes from it."""
        from safetensors.torch import save_file

        seen = [layer.get_seq_length() for layer in self.layers]
        about = {"seen": json.dumps(seen), "kind": json.dumps(self.kind)}
        save_file({name: x.contiguous() for name, x in self.tensors().items()}, path, about)

    @classmethod
    def load(cls, path: str | PathLike[str], config: NaLaConfig, *, device: str | torch.device = "cpu") -> "NaLaCache":
        """Read a file of `save`, for a model of that config."""
        from safetensors import SafetensorError, safe_open

        cache = cls(config)
        found: list[dict[str, Tensor]] = [{} for _ in cache.layers]
        try:
            opened = safe_open(path, framework="pt", device=str(device))
        except SafetensorError as error:
            raise ValueError(f"a cache must be a whole file that NaLaCache.save wrote, got {path}: {error}") from error
        with opened as file:
            about = file.metadata() or {}
            if "seen" not in about or "kind" not in about:
                raise ValueError(f"a cache must be a file that NaLaCache.save wrote, got another kind of file in {path}")
            seen, kind = parse_json(about["seen"]), parse_json(about["kind"])
            if len(seen) != len(found):
                raise ValueError(f"the cache must come from a model of {len(found)} layers, got one of {len(seen)} in {path}")
            if kind != cache.kind:
                raise ValueError(
                    f"the cache must come from a model with the same mixers and feature map, got one of {kind} in {path}; "
                    f"this model has {cache.kind}"
                )
            for key in file.keys():  # noqa: SIM118 (a file, not a dict)
                _, number, name = key.split(".")
                found[int(number)][name] = file.get_tensor(key)
        for number, (layer, tensors) in enumerate(zip(cache.layers, found, strict=True)):
            if isinstance(layer, RecurrentLayer):
                layer.tensors, layer.seen = tensors, seen[number]
            elif tensors:
                layer.update(tensors["keys"], tensors["values"])
        return cache
