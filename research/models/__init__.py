"""Small models in which attention is the only thing that differs: classifiers, a recall model, a backbone, one attention."""

from .attention import attention_names, sequence_attention, state_size
from .classifier import SequenceClassifier
from .one_attention import OneAttention
from .parts import SEQUENCE_MODELS
from .recall import RecallModel
from .small_backbone import SmallBackbone

__all__ = [
    "SEQUENCE_MODELS",
    "OneAttention",
    "RecallModel",
    "SequenceClassifier",
    "SmallBackbone",
    "attention_names",
    "sequence_attention",
    "state_size",
]
