"""STILL (arXiv 2602.02180): exact attention for what is near or salient, linear attention for the rest."""

from .distant import distant_attention
from .function import empty_state, hybrid_attention, recurrent_hybrid_attention
from .module import HybridAttention
from .selection import SELECTIONS, Selection
from .settings import HYBRID_METHODS, HybridSettings, hybrid_settings, salient_tokens
from .state import HybridState
from .stepping import hybrid_step_, roll_, stepping_state

__all__ = [
    "HYBRID_METHODS",
    "SELECTIONS",
    "HybridAttention",
    "HybridSettings",
    "HybridState",
    "Selection",
    "distant_attention",
    "empty_state",
    "hybrid_attention",
    "hybrid_settings",
    "hybrid_step_",
    "recurrent_hybrid_attention",
    "roll_",
    "salient_tokens",
    "stepping_state",
]
