"""Tasks: data, loss and metrics, for any model that is passed in."""

from .base import TASKS, Answer, Gather, ImageTask, Loss, Metrics, RecipeTask, SummedMetrics, Task, task_name
from .classification import Classification, ClassificationConfig, TopAccuracy
from .detection import Detection, DetectionConfig
from .generation import Generation, GenerationConfig
from .language import LanguageConfig, LanguageModelling
from .segmentation import Segmentation, SegmentationConfig
from .super_resolution import ImageQuality, SuperResolutionConfig, SuperResolutionTask

__all__ = [
    "TASKS",
    "Answer",
    "Classification",
    "ClassificationConfig",
    "Detection",
    "DetectionConfig",
    "Gather",
    "Generation",
    "GenerationConfig",
    "ImageQuality",
    "ImageTask",
    "LanguageConfig",
    "LanguageModelling",
    "Loss",
    "Metrics",
    "RecipeTask",
    "Segmentation",
    "SegmentationConfig",
    "SummedMetrics",
    "SuperResolutionConfig",
    "SuperResolutionTask",
    "Task",
    "TopAccuracy",
    "task_name",
]
