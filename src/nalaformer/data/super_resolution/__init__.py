"""Images in two resolutions: readers of folders, MATLAB's reduction, and generated photographs."""

from .folders import EvalImages, ImagePairs, Patches, find_pairs
from .resize import enlarge, reduce, reduce_floats, to_eight_bits
from .scenes import SCENES, write_scenes

__all__ = [
    "SCENES",
    "EvalImages",
    "ImagePairs",
    "Patches",
    "enlarge",
    "find_pairs",
    "reduce",
    "reduce_floats",
    "to_eight_bits",
    "write_scenes",
]
