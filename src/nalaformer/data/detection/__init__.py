"""Objects in images: COCO's format, and a generated set in it."""

from .coco import CocoFolder, Objects
from .masks import decode_runs, encode_runs, read_mask
from .overlapping_shapes import OverlappingShapes
from .samples import DetectionSamples, EvalSamples, TrainingSamples, as_tensor, fitting_scale, resized

__all__ = [
    "CocoFolder",
    "DetectionSamples",
    "EvalSamples",
    "Objects",
    "OverlappingShapes",
    "TrainingSamples",
    "as_tensor",
    "decode_runs",
    "encode_runs",
    "fitting_scale",
    "read_mask",
    "resized",
]
