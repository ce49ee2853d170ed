"""Language models in transformers: a decoder whose layers mix tokens by linear attention, delta rules or softmax attention.

Importing this package registers them, so that AutoConfig and AutoModelForCausalLM load their folders.
"""

from .cache import NaLaCache, RecurrentLayer
from .config import MIXER_NAMES, SIZES, NaLaConfig
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
