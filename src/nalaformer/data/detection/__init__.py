"""Objects in images: COCO's format, and a generated set in it."""

from .coco import CocoFolder, Objects
from .masks import decode_runs, encode_runs, read_mask
from .overlapping_shapes import OverlappingShapes
from .results import CocoIds, coco_results, ids_of, numbered
from .samples import DetectionSamples, EvalSamples, TrainingSamples, as_tensor, fitting_scale, resized

__all__ = [
    "CocoFolder",
    "CocoIds",
    "DetectionSamples",
    "EvalSamples",
    "Objects",
    "OverlappingShapes",
    "TrainingSamples",
    "as_tensor",
    "coco_results",
    "decode_runs",
    "encode_runs",
    "fitting_scale",
    "ids_of",
    "numbered",
    "read_mask",
    "resized",
]
