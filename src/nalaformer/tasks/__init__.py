"""Tasks: data, loss and metrics, for any model that is passed in."""

from .base import TASKS, Loss, Metrics, RecipeTask, Task, task_name
from .classification import Classification, ClassificationConfig, TopAccuracy
from .language import LanguageConfig, LanguageModelling

__all__ = [
    "TASKS",
    "Classification",
    "ClassificationConfig",
    "LanguageConfig",
    "LanguageModelling",
    "Loss",
    "Metrics",
    "RecipeTask",
    "Task",
    "TopAccuracy",
    "task_name",
]
