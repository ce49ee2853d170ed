"""The authors' released checkpoints, by their own parameter names.

`translate` turns a state dict with published names into ours. It works on whole models as well as on single layers: a
name is looked at from its last dot-separated parts, whatever stands before.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from .registry import unknown_name

Weights = dict[str, Tensor]


def translate(state_dict: Mapping[str, Tensor], family: str) -> Weights:
    """Published names -> ours, for "nalaformer", "polaformer", "polaformerpp" or "flatten"."""
    if family not in FAMILIES:
        raise unknown_name("family of published weights", family, FAMILIES)
    return FAMILIES[family](dict(state_dict))


def _nalaformer(published: Weights) -> Weights:
    return _renamed(published, {"ln": "norm", "lepe": "local_mix.conv", "out_proj": "projection", "qkvg": "qkvg"})


def _polaformerpp(published: Weights) -> Weights:
    ours = _renamed(published, {"lepe": "local_mix.conv", "proj": "projection", "qkvg": "qkvg"})
    for prefix in _prefixes(published, "s1"):
        ours[f"{prefix}map.same"] = ours.pop(f"{prefix}s1")[0, :, 0]
        ours[f"{prefix}map.opposite"] = ours.pop(f"{prefix}s2")[0, :, 0]
    return ours


def _flatten(published: Weights) -> Weights:
    """Also PolaFormer's: it adds a gate and a power per channel to the same layer."""
    ours = _renamed(published, {"dwc": "local_mix.conv", "proj": "projection"})
    for prefix in _prefixes(published, "dwc.weight"):
        ours[f"{prefix}table.table"] = ours.pop(f"{prefix}positional_encoding")
        scale = ours.pop(f"{prefix}scale")[0, 0]
        head_dim = published[f"{prefix}dwc.weight"].shape[0]
        ours[f"{prefix}map.scale"] = scale.unflatten(0, (-1, head_dim))
        if f"{prefix}power" in ours:
            ours[f"{prefix}map.power"] = ours.pop(f"{prefix}power")[0, :, 0]
        _join_projections(ours, prefix)
    return ours


def _join_projections(weights: Weights, prefix: str) -> None:
    """Published: q (or q and gate) and kv apart. Ours: all of them in one, except where keys come from a reduced image."""
    reduced = f"{prefix}sr.weight" in weights
    for part in ("weight", "bias"):
        names = [f"{prefix}{name}.{part}" for name in ("q", "qg", "qkv", "qkvg", "kv", "sr", "norm")]
        q, qg, qkv, qkvg, kv, sr, norm = (weights.pop(name, None) for name in names)
        query = q if q is not None else qg
        if reduced:
            found = {"qg": query, "kv": kv, "reduce": sr, "reduce_norm": norm}
        elif kv is not None and query is not None:
            channels = kv.shape[0] // 2
            found = {"qkvg": torch.cat((query[:channels], kv, query[channels:]))}
        else:
            found = {"qkvg": qkvg if qkvg is not None else qkv}
        weights.update({f"{prefix}{name}.{part}": value for name, value in found.items() if value is not None})


def _renamed(weights: Weights, modules: dict[str, str]) -> Weights:
    """Rename the module that holds a parameter: "blocks.0.ln.weight" -> "blocks.0.norm.weight"."""
    result = {}
    for name, value in weights.items():
        *path, parameter = name.split(".")
        if path and path[-1] in modules:
            path[-1] = modules[path[-1]]
        result[".".join((*path, parameter))] = value
    return result


def _prefixes(names: Iterable[str], ending: str) -> list[str]:
    """What stands before `ending` in the names that end so; "" for a layer by itself."""
    return [name.removesuffix(ending) for name in names if name == ending or name.endswith(f".{ending}")]


FAMILIES: dict[str, Callable[[Weights], Weights]] = {
    "nalaformer": _nalaformer,
    "polaformer": _flatten,
    "polaformerpp": _polaformerpp,
    "flatten": _flatten,
}
