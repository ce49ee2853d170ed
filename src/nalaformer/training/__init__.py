"""One loop for all tasks: precision, accumulation, EMA, checkpoints, resume, distributed."""

from .checkpoint import Checkpoint, Checkpoints, DamagedCheckpoint
from .config import TrainingConfig
from .evaluation import evaluate
from .plan import plan_lines
from .trainer import Outcome, Trainer, TrainingStopped

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "DamagedCheckpoint",
    "Outcome",
    "Trainer",
    "TrainingConfig",
    "TrainingStopped",
    "evaluate",
    "plan_lines",
]
