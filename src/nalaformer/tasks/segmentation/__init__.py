"""Naming what every pixel of an image shows."""

from .config import SegmentationAnswers, SegmentationConfig
from .metrics import ConfusionMatrix
from .overlay import draw_overlay, label_map
from .task import Segmentation
from .windows import label_pixels, logits_in_windows

__all__ = [
    "ConfusionMatrix",
    "Segmentation",
    "SegmentationAnswers",
    "SegmentationConfig",
    "draw_overlay",
    "label_map",
    "label_pixels",
    "logits_in_windows",
]
