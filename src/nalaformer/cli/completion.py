"""What the shell offers when TAB is pressed: names of recipes, their settings, backbones, data, attentions and maps."""

from collections.abc import Callable, Iterable

import typer

Names = Callable[[], Iterable[str]]


def completing(names: Names) -> Callable[[str], list[str]]:
    """A completion among the names, which are asked for when TAB is pressed and not before."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in _known(names) if name.startswith(incomplete)]

    return complete


def _known(names: Names) -> list[str]:
    try:
        return list(names())
    except ImportError:
        # a package is missing: the command will say which, the shell has no room for it
        return []


def recipes() -> Iterable[str]:
    from ..recipes import RECIPES

    return RECIPES.names()


def backbones() -> Iterable[str]:
    from ..models.vision import VARIANTS

    return VARIANTS


def families() -> Iterable[str]:
    from ..published_names import FAMILIES

    return FAMILIES


def samplers() -> Iterable[str]:
    from ..models.diffusion import OBJECTIVES

    return [sampler for name in OBJECTIVES.names() for sampler in OBJECTIVES[name].samplers]


def attentions() -> Iterable[str]:
    """What `attention=` and a scoreboard's methods take: methods, and feature maps by themselves."""
    from ..attention import METHODS
    from ..feature_maps import FEATURE_MAPS

    return dict.fromkeys([*METHODS, *FEATURE_MAPS.names()])


def methods(incomplete: str) -> list[str]:
    """The last of several attentions that are separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _known(attentions) if name.startswith(last)]


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys of the recipe that the command names, each with its sign; attentions after `attention=`."""

    def known() -> Iterable[str]:
        from ..attention import METHODS
        from ..recipes import RECIPES, settings_of

        name = str(ctx.params.get("recipe") or ctx.params.get("task") or "")
        if incomplete.startswith("attention="):
            return [f"attention={each}" for each in METHODS]
        return [f"{setting.key}=" for setting in settings_of(RECIPES[name]())] if name in RECIPES.names() else []

    return [each for each in _known(known) if each.startswith(incomplete)]


devices = completing(lambda: ("auto", "cpu", "cuda"))
splits = completing(lambda: ("val", "test"))
