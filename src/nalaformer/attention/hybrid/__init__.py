"""STILL (arXiv 2602.02180): softmax attention to near and salient tokens, linear attention to the rest."""

from .distant import distant_attention
from .function import empty_state, hybrid_attention, recurrent_hybrid_attention
from .head_groups import BUDGETS, GroupedState, HeadGroups, settings_for
from .module import HybridAttention
from .selection import SELECTIONS, Selection
from .settings import HYBRID_METHODS, HybridSettings, hybrid_settings, salient_tokens
from .state import HybridState
from .stepping import hybrid_step_, roll_, stepping_state

__all__ = [
    "BUDGETS",
    "HYBRID_METHODS",
    "SELECTIONS",
    "GroupedState",
    "HeadGroups",
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
    "settings_for",
    "stepping_state",
]
