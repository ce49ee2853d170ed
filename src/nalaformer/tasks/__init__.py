"""Tasks: data, loss and metrics, for any model that is passed in."""

from .base import Loss, Metrics, Task
from .classification import Classification, ClassificationConfig, TopAccuracy

__all__ = ["Classification", "ClassificationConfig", "Loss", "Metrics", "Task", "TopAccuracy"]
