"""What generation remembers: a state of constant size for each recurrent layer, keys and values for each exact one."""

import json
from os import PathLike

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ...json_text import parse_json
from ..state_layer import StateLayer
from .config import RECURRENT_MIXERS, NaLaConfig


class RecurrentLayer(StateLayer):
    """The state of one recurrent mixer: named tensors, batch first, whose sizes do not depend on how many tokens were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.tensors, self.seen = {}, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        self.tensors = {name: tensor[indices.to(tensor.device)] for name, tensor in self.tensors.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.tensors = {name: tensor.repeat_interleave(repeats, dim=0) for name, tensor in self.tensors.items()}


class NaLaCache(Cache):
    """The cache of a language model: constant in size but for `softmax` mixers, which keep every key and value."""

    layers: list[RecurrentLayer | DynamicLayer]  # type: ignore[assignment]

    def __init__(self, config: NaLaConfig) -> None:
        recurrent = [mixer in RECURRENT_MIXERS for mixer in config.mixer_of_layers]
        super().__init__(layers=[RecurrentLayer() if is_recurrent else DynamicLayer() for is_recurrent in recurrent])
        # what of the model its states mean something to
        self.kind = {
            "mixers": list(config.mixer_of_layers),
            "feature_map": config.feature_map,
            "map_options": json.loads(json.dumps(config.map_options or {})),
        }

    def crop(self, *args: object) -> None:
        # before any layer has changed
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.crop(*args)
        super().crop(*args)  # type: ignore[arg-type]

    def reset(self) -> None:
        # transformers 5.17 zeroes the keys of a dynamic layer and keeps their number
        self.layers = [type(layer)() for layer in self.layers]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is remembered, by name."""
        found = {}
        for number, layer in enumerate(self.layers):
            pair = {} if layer.keys is None or layer.values is None else {"keys": layer.keys, "values": layer.values}
            for name, tensor in (layer.tensors if isinstance(layer, RecurrentLayer) else pair).items():
                found[f"layers.{number}.{name}"] = tensor
        return found

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file; `load` goes on from it."""
        from safetensors.torch import save_file

        seen = [layer.get_seq_length() for layer in self.layers]
        about = {"seen": json.dumps(seen), "kind": json.dumps(self.kind)}
        save_file({name: x.contiguous() for name, x in self.tensors().items()}, path, about)

    @classmethod
    def load(cls, path: str | PathLike[str], config: NaLaConfig, *, device: str | torch.device = "cpu") -> "NaLaCache":
        """Read what `save` wrote, for a model of that config."""
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
