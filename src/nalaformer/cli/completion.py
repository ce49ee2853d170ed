"""What the shell offers when TAB is pressed: names of recipes, their settings, backbones, samplers and devices."""

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


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys of the recipe that the command names, each with its sign; attentions after `attention=`."""

    def known() -> Iterable[str]:
        from ..attention import METHODS
        from ..recipes import RECIPES, settings_of

        name = str(ctx.params.get("recipe") or "")
        if incomplete.startswith("attention="):
            return [f"attention={each}" for each in METHODS]
        return [f"{setting.key}=" for setting in settings_of(RECIPES[name]())] if name in RECIPES.names() else []

    return [each for each in _known(known) if each.startswith(incomplete)]


devices = completing(lambda: ("auto", "cpu", "cuda"))
splits = completing(lambda: ("val", "test"))
