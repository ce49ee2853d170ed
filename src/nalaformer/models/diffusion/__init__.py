"""Diffusion transformers: the network, which needs torch alone, and what diffusers makes of it."""

from typing import TYPE_CHECKING, Any

from .network import LAYOUTS, DiffusionTransformer, layout_of
from .objectives import OBJECTIVES, Errors, Objective

if TYPE_CHECKING:
    from .model import NaLaDiT
    from .pipeline import NaLaDiTPipeline

# made of parts of diffusers, which takes seconds to import and which training does without
WITH_DIFFUSERS = {"NaLaDiT": "model", "NaLaDiTPipeline": "pipeline"}


def __getattr__(name: str) -> Any:
    if name not in WITH_DIFFUSERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    need_diffusers()
    return getattr(import_module(f".{WITH_DIFFUSERS[name]}", __name__), name)


def need_diffusers() -> None:
    """Say what brings diffusers where it is missing."""
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
