"""Diagnostics: how sharply each method attends, what the query norm has to do with it, and images side by side."""

from .compare import Method, Row, compare_methods, methods
from .crops import draw_crops
from .entropy import attention_entropy, channel_entropy, effective_rank, entropy_drop, norm_sweep, spearman
from .pictures import draw_entropy_against_norm
from .tables import HOW_TO_READ, comparison_table

__all__ = [
    "HOW_TO_READ",
    "Method",
    "Row",
    "attention_entropy",
    "channel_entropy",
    "compare_methods",
    "comparison_table",
    "draw_crops",
    "draw_entropy_against_norm",
    "effective_rank",
    "entropy_drop",
    "methods",
    "norm_sweep",
    "spearman",
]
