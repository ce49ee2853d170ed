"""Images with a class for every pixel: the layouts of ADE20K and Cityscapes, a plain one, and generated scenes."""

from .crops import EvalResize, TrainingCrop, as_input
from .layouts import LAYOUTS, LabelledFiles, check_counted_classes, find_files
from .masked_images import MaskedImages, stack_equal
from .masks import IGNORED, read_mask
from .scenes import SCENE_CLASSES, write_scenes

__all__ = [
    "IGNORED",
    "LAYOUTS",
    "SCENE_CLASSES",
    "EvalResize",
    "LabelledFiles",
    "MaskedImages",
    "TrainingCrop",
    "as_input",
    "check_counted_classes",
    "find_files",
    "read_mask",
    "stack_equal",
    "write_scenes",
]
