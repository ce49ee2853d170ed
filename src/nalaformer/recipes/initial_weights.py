"""Weights to start from, loaded by name into the backbone of any task's model; a report accounts for every one."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..models.vision.resampling import resample_to
from ..published import read
from ..published_names import backbone_part, is_published_dit, is_published_model, translate, translate_dit

# names that a report spells out
MOST_NAMES = 3


def load_weights(model: nn.Module, task: Any, source: str | Path, weights: Mapping[str, Tensor] | None = None) -> str:
    """Load a file's weights into the model's backbone (`task.backbone`, or the model where the task has none); what happened.

    weights: those of the source, where they have been read already. A tensor that is of another shape here, such as the
    classifier of other classes, stays as it is. A source of which nothing but a classifier fits is refused.
    """
    backbone = backbone_of(task, model)
    given = dict(weights if weights is not None else read(source))
    family = getattr(getattr(backbone, "config", None), "family", None)
    # timm's ViTs have a patch_embed too; of ours only published files have
    published, others = backbone_part(given) if family is not None else (given, {})
    if family is not None and is_published_model(published):
        given = translate(published, family)
    else:
        # names of another file are all accounted for below
        others = {}
        given = translate_dit(given) if is_published_dit(given) else given
    wanted = backbone.state_dict()
    prefix = common_prefix(given, wanted)
    inside = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    outside = {name: value for name, value in given.items() if not name.startswith(prefix)}
    # another part of the file may have a name of the backbone's, such as norm.weight beside backbone.norm.weight
    hidden = [name for name in outside if name in inside]
    given = outside | inside
    places = {flat(name): name for name in given}
    found = {name: given[places[flat(name)]] for name in wanted if flat(name) in places}
    resampled = resample_to(backbone, found)
    fitting = {name: value for name, value in found.items() if value.shape == wanted[name].shape}
    classifier = classifier_of(backbone)
    if not any(name not in classifier for name in fitting):
        raise ValueError(
            f"initial_weights must fit the model at least in part, got {source}, of which nothing does: it has "
            f"{some(given)}, and the model {some(wanted)}; name the model that the weights are of"
        )
    backbone.load_state_dict(fitting, strict=False)
    used = {places[flat(name)] for name in found}
    parts = (
        ("of another image size and resampled", resampled),
        ("of another shape and left out", [name for name in found if name not in fitting]),
        ("not in the file", [name for name in wanted if name not in found]),
        ("in the file and not used", [name for name in given if name not in used] + hidden),
    )
    told = "".join(f"; {len(names)} {what}: {some(names)}" for what, names in parts if names)
    if others:
        told += f"; {sum(others.values())} of other parts of the file and left out: {some(others)}"
    return f"{len(fitting)} of {len(wanted)} tensors start from {source}{told}"


def backbone_of(task: Any, model: nn.Module) -> nn.Module:
    """The part of the model that weights are for, without timm's wrapper for features."""
    from ..models.vision.features import network_of

    return network_of(task.backbone(model) if hasattr(task, "backbone") else model)


def classifier_of(backbone: nn.Module) -> set[str]:
    """Names of the last layer's parameters, of a model that says which one that is."""
    if not hasattr(backbone, "get_classifier"):
        return set()
    layer = backbone.get_classifier()  # type: ignore[operator]
    own = {id(parameter) for parameter in layer.parameters()} if isinstance(layer, nn.Module) else set()
    return {name for name, parameter in backbone.named_parameters() if id(parameter) in own}


def common_prefix(given: Iterable[str], wanted: Iterable[str]) -> str:
    """What stands before our names in most of the others: "backbone." in the file of a detector."""
    ours = {flat(name) for name in wanted}
    prefixes: Counter[str] = Counter()
    for name in given:
        parts = name.split(".")
        for start in range(len(parts)):
            if flat(".".join(parts[start:])) in ours:
                prefixes["".join(f"{part}." for part in parts[:start])] += 1
    return prefixes.most_common(1)[0][0] if prefixes else ""


def flat(name: str) -> str:
    """timm's features_only writes stages_0 for stages.0."""
    return name.replace(".", "_")


def some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:MOST_NAMES]) + (", ..." if len(listed) > MOST_NAMES else "")
