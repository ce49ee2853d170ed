"""Diagnostics: how sharply each method attends, how that depends on the query norm, and attention images side by side."""

from .compare import ComparedMethod, Row, compare_methods, methods
from .crops import draw_crops
from .entropy import attention_entropy, channel_entropy, effective_rank, entropy_drop, norm_sweep, spearman
from .explanations import explain
from .layers import AttentionLayer, attention_layers, record
from .maps import attention_map, enlarge, map_of, rollout
from .pictures import draw_entropy_against_norm
from .records import LayerRecord
from .statistics import HeadStatistics
from .tables import HOW_TO_READ, comparison_table

__all__ = [
    "HOW_TO_READ",
    "AttentionLayer",
    "ComparedMethod",
    "HeadStatistics",
    "LayerRecord",
    "Row",
    "attention_entropy",
    "attention_layers",
    "attention_map",
    "channel_entropy",
    "compare_methods",
    "comparison_table",
    "draw_crops",
    "draw_entropy_against_norm",
    "effective_rank",
    "enlarge",
    "entropy_drop",
    "explain",
    "map_of",
    "methods",
    "norm_sweep",
    "record",
    "rollout",
    "spearman",
]
