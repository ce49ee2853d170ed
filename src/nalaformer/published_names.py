"""Translation of the authors' parameter names into ours.

`translate` accepts whole models and single layers. It first translates the frame of a model (stem, stages, head), if there
is one, then each attention layer, which it finds by the last dot-separated parts of its names, with any prefix.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from .registry import unknown_name

Weights = dict[str, Tensor]


def translate(state_dict: Mapping[str, Tensor], family: str) -> Weights:
    """Translate published names into ours, for "nalaformer", "polaformer", "polaformerpp", "flatten", "rala" or "mala"."""
    if family not in FAMILIES:
        raise unknown_name("family of published weights", family, FAMILIES)
    weights = dict(state_dict)
    is_model = is_published_model(weights)
    try:
        if is_model:
            weights = _frame(weights)
        ours = FAMILIES[family](weights)
    # torch raises these for a tensor that lacks dimensions or has other sizes
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"weights of the family {family} must have the shapes that its authors' code gives them, got others: {error}"
        ) from error
    except KeyError as error:
        raise ValueError(
            f"weights of the family {family} must hold {error}, got none of that name; name {fitting_families(weights)}"
        ) from error
    known = OUR_MODEL if is_model else OUR_LAYER
    unknown = [name for name in ours if not known.search(name)]
    if unknown:
        some = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        raise ValueError(
            f"every name must be one of a published {family} {'model' if is_model else 'layer'}, got {len(unknown)} others: "
            f"{some}; leave them out, or name {fitting_families(weights)}"
        )
    return ours


def fitting_families(weights: Weights) -> str:
    """Name the families whose rules translate every name of a framed model or a layer."""
    found = []
    for family, rename in FAMILIES.items():
        try:
            if all(OUR_LAYER.search(name) for name in rename(dict(weights))):
                found.append(family)
        except (LookupError, RuntimeError):
            continue
    return f"the family that they are of: {' or '.join(found)}" if found else "the family that they are of"


# these patterns match our own names
_LINEAR = r"(weight|bias)"
_NORM = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_ATTENTION = (
    rf"((qkvg|qg|kv|reduce|reduce_norm|norm|projection|local_mix\.conv)\.{_LINEAR}|table\.table|relative_bias\.bias|"
    r"map\.(scale|power|same|opposite))"
)
_BLOCK = rf"((local[12]|norm[12]|feed_forward\.(fc1|fc2|local))\.{_LINEAR}|scale[12]\.gamma|attention\.{_ATTENTION})"
_STAGE = rf"(downsampling\.(reduction\.{_LINEAR}|norm\.{_NORM})|positions\.table|blocks\.\d+\.{_BLOCK})"
OUR_MODEL = re.compile(
    rf"^(stem\.\d+\.{_NORM}|stages\.\d+\.{_STAGE}|norm\.{_LINEAR}|output_norms\.\d\.{_LINEAR}|projection\.\d\.{_NORM}|head\.fc\.{_LINEAR})$"
)
# this matches single layers with any prefix, and models that have our names already
OUR_LAYER = re.compile(rf"(^|\.){_ATTENTION}$|{OUR_MODEL.pattern}")


def is_published_model(names: Iterable[str]) -> bool:
    """True if these are the names of a whole published model: it has a patch embedding, ours has a stem."""
    return any(name.startswith("patch_embed") for name in names)


# the prefix of a backbone's first names, the authors' or ours: `backbone.` of a detector, `module.` of distributed training,
# `ema.` of the averaged copy
BEFORE_BACKBONE = re.compile(r"((?:(?:module|_orig_mod|model|model_ema|ema|backbone)\.)*)(?:patch_embed|stem\.)")


def backbone_part(weights: Mapping[str, Tensor]) -> tuple[Weights, dict[str, int]]:
    """Return the backbone in a file of a detector, segmenter or training program, and the number of tensors in each other part.

    The names of the backbone have a prefix there, such as `backbone.`, which is removed; of several copies the averaged one is
    taken. Weights of a backbone alone, and all others, are returned unchanged.
    """
    fronts = dict.fromkeys(found[1] for name in weights if (found := BEFORE_BACKBONE.match(name)))
    front = next((front for front in fronts if "ema." in front), next(iter(fronts), ""))
    inside = {name.removeprefix(front): value for name, value in weights.items() if name.startswith(front)}
    return inside, dict(Counter(name.split(".")[0] for name in weights if not name.startswith(front)))


def warn_about_others(others: Mapping[str, int]) -> None:
    """Warn about the tensors of a file that are not part of the backbone."""
    if others:
        listed = ", ".join(f"{name} ({count} tensors)" for name, count in others.items())
        warnings.warn(f"only the backbone of the file is used; left out: {listed}", stacklevel=3)


def _frame(published: Weights) -> Weights:
    """Translate stem, stages and head; attention layers keep their names inside the blocks."""
    ours = {}
    for name, value in published.items():
        # rotary angles, window masks and window offsets are computed, not stored
        if re.search(r"\.(RoPE(_linear)?\.|attn_mask$|relative_position_index$)", name):
            continue
        # the published PVT has a last norm that its forward pass skips
        if name.startswith("norm.") and "pos_embed1" in published:
            continue
        for pattern, replacement in FRAME:
            name, found = re.subn(pattern, replacement, name)
            if found:
                break
        for pattern, replacement in INSIDE_BLOCKS:
            name = re.sub(pattern, replacement, name)
        ours[name] = value
    return _reshape_entries(ours)


# the first rule that matches applies
FRAME: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # the four-stage network
    (r"^patch_embed\.proj\.(\d+)\.", r"stem.\1."),
    (r"^layers\.(\d+)\.downsample\.", lambda m: f"stages.{int(m[1]) + 1}.downsampling."),
    (r"^layers\.(\d+)\.", r"stages.\1."),
    (r"^proj\.", "projection.0."),
    (r"^extra_norms\.(\d)\.(?:norm\.)?", r"output_norms.\1."),
    # Swin has the stages of the above and a stem of its own
    (r"^patch_embed\.proj\.", "stem.0."),
    (r"^patch_embed\.norm\.", "stem.1."),
    # PVT
    (r"^patch_embed1\.proj\.", "stem.0."),
    (r"^patch_embed1\.norm\.", "stem.1."),
    (r"^patch_embed(\d)\.proj\.", lambda m: f"stages.{int(m[1]) - 1}.downsampling.reduction."),
    (r"^patch_embed(\d)\.norm\.", lambda m: f"stages.{int(m[1]) - 1}.downsampling.norm."),
    (r"^pos_embed(\d)$", lambda m: f"stages.{int(m[1]) - 1}.positions.table"),
    (r"^block(\d)\.(\d+)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks.{m[2]}."),
    (r"^head\.", "head.fc."),
)
INSIDE_BLOCKS = (
    (r"(\.blocks\.\d+)\.cpe([12])\.", r"\1.local\2."),
    (r"(\.blocks\.\d+)\.pos\.", r"\1.local1."),
    (r"(\.blocks\.\d+\.norm[12])\.norm\.", r"\1."),
    (r"(\.blocks\.\d+)\.attn\.", r"\1.attention."),
    (r"(\.blocks\.\d+)\.(?:ffn|mlp)\.", r"\1.feed_forward."),
    (r"(\.feed_forward)\.dwconv\.", r"\1.local."),
    (r"(\.attention)\.relative_position_bias_table$", r"\1.relative_bias.bias"),
    (r"(\.blocks\.\d+)\.gamma_([12])$", r"\1.scale\2.gamma"),
)


def _reshape_entries(weights: Weights) -> Weights:
    """Change entries with another shape or place: scales [1, C, 1, 1], 1x1 convolutions versus linear layers, the last norm."""
    ours = {}
    projects = "projection.0.weight" in weights
    for name, value in weights.items():
        if name.endswith(".gamma"):
            value = value.flatten()
        elif name == "head.fc.weight":
            value = value.flatten(1)
        elif name == "projection.0.weight" and value.dim() == 2:
            value = value[:, :, None, None]
        elif name.startswith("norm.") and projects:
            # BatchNorm behind the projection; elsewhere the LayerNorm of the last stage
            name = f"projection.1.{name.removeprefix('norm.')}"
        ours[name] = value
    return ours


def _nalaformer(published: Weights) -> Weights:
    return _rename_modules(published, {"ln": "norm", "lepe": "local_mix.conv", "out_proj": "projection"})


def _polaformerpp(published: Weights) -> Weights:
    # the gate is called g in a linear layer and o in a softmax layer
    ours = _rename_modules(published, {"lepe": "local_mix.conv", "proj": "projection", "qkvo": "qkvg"})
    for prefix in _prefixes(published, "s1"):
        ours[f"{prefix}map.same"] = ours.pop(f"{prefix}s1")[0, :, 0]
        ours[f"{prefix}map.opposite"] = ours.pop(f"{prefix}s2")[0, :, 0]
    return ours


def _rala(published: Weights) -> Weights:
    """Translate RALA and MALA. Their linear layers are 1x1 convolutions."""
    ours = _rename_modules(published, {"lepe": "local_mix.conv", "proj": "projection", "qkvo": "qkvg"})
    is_linear = re.compile(r"(^|\.)(qkvg|projection|feed_forward\.fc[12])\.weight$")
    return {name: value.flatten(1) if is_linear.search(name) else value for name, value in ours.items()}


def _flatten(published: Weights) -> Weights:
    """Translate FLatten and PolaFormer, which adds a gate and a power per channel. Softmax layers lack the conv branch."""
    ours = _rename_modules(published, {"dwc": "local_mix.conv", "proj": "projection"})
    for prefix in _prefixes(published, "dwc.weight"):
        ours[f"{prefix}table.table"] = ours.pop(f"{prefix}positional_encoding")
        scale = ours.pop(f"{prefix}scale")[0, 0]
        head_dim = published[f"{prefix}dwc.weight"].shape[0]
        ours[f"{prefix}map.scale"] = scale.unflatten(0, (-1, head_dim))
        if f"{prefix}power" in ours:
            ours[f"{prefix}map.power"] = ours.pop(f"{prefix}power")[0, :, 0]
    for prefix in _prefixes(published, "proj.weight"):
        _join_projections(ours, prefix)
    return ours


def _join_projections(weights: Weights, prefix: str) -> None:
    """Join q (or q and gate) and kv into one projection, except where keys come from a reduced image."""
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


def _rename_modules(weights: Weights, modules: dict[str, str]) -> Weights:
    """Rename the module that holds a parameter: "blocks.0.ln.weight" -> "blocks.0.norm.weight"."""
    result = {}
    for name, value in weights.items():
        *path, parameter = name.split(".")
        if path and path[-1] in modules:
            path[-1] = modules[path[-1]]
        result[".".join((*path, parameter))] = value
    return result


def _prefixes(names: Iterable[str], ending: str) -> list[str]:
    """Return the prefixes of the names that end in `ending`; "" for a layer alone."""
    return [name.removesuffix(ending) for name in names if name == ending or name.endswith(f".{ending}")]


def is_published_dit(names: Iterable[str]) -> bool:
    """True if these are the names of a published diffusion transformer."""
    return "x_embedder.proj.weight" in set(names)


def translate_dit(published: Mapping[str, Tensor]) -> Weights:
    """Translate DiT's names into those of our softmax diffusion transformer; its position table is computed, not stored."""
    ours, unknown = {}, []
    for name, value in published.items():
        if name == "pos_embed":
            continue
        new = name
        for pattern, replacement in DIT:
            new, found = re.subn(pattern, replacement, name)
            if found:
                break
        else:
            unknown.append(name)
        ours[new] = value
    if unknown:
        raise ValueError(f"every name must be one of a published DiT, got {len(unknown)} others: {', '.join(unknown[:3])}")
    return ours


# each name matches one rule
DIT = (
    (r"^x_embedder\.proj\.", "patches."),
    (r"^t_embedder\.mlp\.([02])\.", r"time.\1."),
    (r"^y_embedder\.embedding_table\.", "classes."),
    (r"^(blocks\.\d+)\.attn\.qkv\.", r"\1.attention.qkvg."),
    (r"^(blocks\.\d+)\.attn\.proj\.", r"\1.attention.projection."),
    (r"^(blocks\.\d+)\.mlp\.(fc[12])\.", r"\1.\2."),
    (r"^(blocks\.\d+)\.adaLN_modulation\.1\.", r"\1.modulation.linear."),
    (r"^final_layer\.adaLN_modulation\.1\.", "last_modulation.linear."),
    (r"^final_layer\.linear\.", "pixels."),
)


FAMILIES: dict[str, Callable[[Weights], Weights]] = {
    "nalaformer": _nalaformer,
    "polaformer": _flatten,
    "polaformerpp": _polaformerpp,
    "flatten": _flatten,
    "rala": _rala,
    "mala": _rala,
}
