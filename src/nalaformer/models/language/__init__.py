"""Language models in transformers: a decoder whose layers mix tokens by linear attention, delta rules or exact attention.

The models are imported when asked for: the configuration alone enters transformers' table of names, which must stay light.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .config import MIXER_NAMES, SIZES, NaLaConfig

if TYPE_CHECKING:
    from .cache import NaLaCache, RecurrentLayer
    from .model import (
        NaLaForCausalLM,
        NaLaForQuestionAnswering,
        NaLaForSequenceClassification,
        NaLaForTokenClassification,
        NaLaModel,
    )
    from .static_cache import NaLaStaticCache

__all__ = [
    "MIXER_NAMES",
    "SIZES",
    "NaLaCache",
    "NaLaConfig",
    "NaLaForCausalLM",
    "NaLaForQuestionAnswering",
    "NaLaForSequenceClassification",
    "NaLaForTokenClassification",
    "NaLaModel",
    "NaLaStaticCache",
    "RecurrentLayer",
]

_PLACES = {
    "NaLaCache": "cache",
    "RecurrentLayer": "cache",
    "NaLaForCausalLM": "model",
    "NaLaForQuestionAnswering": "model",
    "NaLaForSequenceClassification": "model",
    "NaLaForTokenClassification": "model",
    "NaLaModel": "model",
    "NaLaStaticCache": "static_cache",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
