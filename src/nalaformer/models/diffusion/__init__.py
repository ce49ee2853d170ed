"""Diffusion transformers: the network, which needs only torch, and its diffusers model and pipeline."""

from typing import TYPE_CHECKING, Any

from .network import LAYOUTS, DiffusionTransformer, layout_of
from .objectives import OBJECTIVES, Errors, Objective

if TYPE_CHECKING:
    from .model import NaLaDiT
    from .pipeline import NaLaDiTPipeline

# these import diffusers, which takes seconds and which training does not need
WITH_DIFFUSERS = {"NaLaDiT": "model", "NaLaDiTPipeline": "pipeline"}


def __getattr__(name: str) -> Any:
    if name not in WITH_DIFFUSERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    need_diffusers()
    return getattr(import_module(f".{WITH_DIFFUSERS[name]}", __name__), name)


def need_diffusers() -> None:
    """Raise ModuleNotFoundError with the install command if diffusers is missing."""
    try:
        import diffusers  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise
        raise ModuleNotFoundError(
            "images are sampled with diffusers: pip install 'nalaformer[diffusion]'", name="diffusers"
        ) from error


__all__ = [
    "LAYOUTS",
    "OBJECTIVES",
    "DiffusionTransformer",
    "Errors",
    "NaLaDiT",
    "NaLaDiTPipeline",
    "Objective",
    "layout_of",
    "need_diffusers",
]
