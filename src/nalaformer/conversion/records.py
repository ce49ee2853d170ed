"""Records of conversion in the state dict, by which a saved model is converted and loaded again."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention, AttentionConfig
from ..weight_files import FRONTS, load_all, read_as_stored, weights_in
from .layer_kinds import LayerKind, find_layers


class ConversionRecord(nn.Module):
    """The config of a converted layer as a vector of characters, under the name of a weight that the original layer has.

    All ways to save weights then save the record, and an unconverted model rejects the weights for their shape.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        # floats, since averaging weights over training steps must not change them
        self.register_buffer("weight", torch.tensor(list(json.dumps(asdict(config)).encode()), dtype=torch.float32))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        if given is None or given.device.type == "meta":
            return
        if given.dim() != 1:
            raise ValueError(
                f"{prefix}weight belongs to the layer before it was converted, got shape {tuple(given.shape)}; load the "
                "weights of the original model first, and then call nalaformer.convert"
            )
        saved = read_record(given, prefix)
        own = json.loads(json.dumps(asdict(self.config)))
        changed = {name: value for name, value in saved.items() if own.get(name) != value}
        if changed:
            raise ValueError(
                f"the weights of {prefix.rstrip('.')} come from a layer that was converted otherwise, with {changed}; make the "
                "model anew without convert, and load them with nalaformer.load_converted"
            )


def attach_record(module: nn.Module, place: str) -> None:
    """Put the record of a converted layer at a place inside of it."""
    layer = module if isinstance(module, Attention) else module.attention
    assert isinstance(layer, Attention)
    *parents, name = place.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    module.add_module(name, ConversionRecord(layer.config).to(layer.projection.weight.device))


def keep_names_when_saved(model: nn.Module) -> None:
    """Keep transformers from saving weights under names of older versions, which never had converted layers."""
    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            setattr(module, "_weight_conversions", [])  # noqa: B010 (not a tensor or module, which types would want)


def load_converted(model: nn.Module, source: Mapping[str, Tensor] | str | PathLike[str]) -> nn.Module:
    """Convert the layers that were converted in the saved model, load the weights, and return the model.

    model: the original, built without `convert`. source: a state dict, a file of torch.save or safetensors, or a folder that
    save_pretrained wrote. The prefixes "module." and "_orig_mod." are removed, and a checkpoint may hold the state dict beside
    other entries. An error leaves the model unchanged.
    """
    state = weights_in(source, "the weights") if isinstance(source, Mapping) else read_weights(Path(source))
    state = match_names(model, state)
    made: dict[str, nn.Module] = {}
    for name, module, layer_kind in find_layers(model):
        key = f"{name}.{layer_kind.record}.weight"
        if layer_kind.record and key in state and state[key].dim() == 1:
            made[name] = converted_by_record(module, layer_kind, read_record(state[key], name))
    if not made:
        raise ValueError(
            "the weights must hold layers that nalaformer.convert made, by the names that this model has, got "
            f"{', '.join(list(state)[:3]) or 'nothing'}, ...; convert the model that you save, not a part of it, and load "
            "weights without such layers as usual"
        )
    layers = {name: model.get_submodule(name) for name in made}
    replaced = tuple(f"{name}." for name in layers)
    values = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and not name.startswith(replaced)
    }
    try:
        for name, module in made.items():
            model.set_submodule(name, module)
        load_all(model, state, "the state dict" if isinstance(source, Mapping) else str(source))
    except BaseException:
        for name, module in layers.items():
            model.set_submodule(name, module)
        model.load_state_dict(values, strict=False)
        raise
    keep_names_when_saved(model)
    return model


def converted_by_record(module: nn.Module, layer_kind: LayerKind, options: dict[str, Any]) -> nn.Module:
    # the original layer determines these
    fixed = ("key_reduction", "window", "shifted")
    options = {name: value for name, value in options.items() if name not in fixed}
    options["table_grid"] = tuple(options["table_grid"])
    is_ours = isinstance(module, Attention)
    # our own layers keep their parts except for the feature map
    parts = ("feature_map", "rotary_over", "contrast", "key_weight")
    kept = {name: options[name] for name in parts if name in options} | options["map_options"] if is_ours else options
    new = layer_kind.convert(module, "linear", kept)
    attach_record(new, layer_kind.record)
    return new.train(module.training)


def read_record(record: Tensor, place: str) -> dict[str, Any]:
    """Return the fields of the AttentionConfig in a record."""
    try:
        found = json.loads(bytes(record.detach().float().round().to(torch.uint8).tolist()))
        if not isinstance(found, dict):
            raise ValueError("it holds no fields")
    except ValueError as error:
        raise ValueError(f"{place} must hold the record of a converted layer, got something else: {error}") from error
    return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, or of the files in a folder that save_pretrained wrote."""
    if not path.is_dir():
        return read_as_stored(path)
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    if not files:
        raise ValueError(f"a folder of weights must hold *.safetensors or *.bin, got {path} without any")
    return {key: value for file in files for key, value in read_as_stored(file).items()}


def match_names(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of distributed training and torch.compile, unless the model has such names itself."""
    own = model.state_dict().keys()
    for front in ("", *FRONTS, "".join(FRONTS)):
        found = {name.removeprefix(front): value for name, value in state.items()}
        if not own.isdisjoint(found):
            return found
    return state
