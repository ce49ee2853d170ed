"""From a pretrained softmax decoder to one with hybrid attention and a smaller cache: attention transfer, then LoRA."""

from .batches import TokenWindows
from .config import LinearizeConfig
from .report import write_report
from .run import Linearized, linearize
from .saving import save, token_windows
from .validation import Validation, validate

__all__ = [
    "LinearizeConfig",
    "Linearized",
    "TokenWindows",
    "Validation",
    "linearize",
    "save",
    "token_windows",
    "validate",
    "write_report",
]
