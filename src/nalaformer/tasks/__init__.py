"""Tasks: data, loss and metrics, for any model that is passed in."""

from .base import TASKS, Loss, Metrics, RecipeTask, Task, task_name
from .classification import Classification, ClassificationConfig, TopAccuracy
from .language import LanguageConfig, LanguageModelling
from .sequences import AnswerAccuracy, Sequences, SequencesConfig, answer_sums, answered

__all__ = [
    "TASKS",
    "AnswerAccuracy",
    "Classification",
    "ClassificationConfig",
    "LanguageConfig",
    "LanguageModelling",
    "Loss",
    "Metrics",
    "RecipeTask",
    "Sequences",
    "SequencesConfig",
    "Task",
    "TopAccuracy",
    "answer_sums",
    "answered",
    "task_name",
]
