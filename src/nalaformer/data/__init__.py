"""Images to learn from: folders in the ImageNet layout, and generated tasks that need attention."""

from .augment import Augmentation, eval_transform, training_transform
from .bad_sample import BadSample
from .folder import ImageFolder, usual_side
from .generated import GENERATED, Generated
from .glyph_grids import CountGrid, CueGrid
from .images import SUFFIXES, CorruptImage, find_images, notes_of_ignored, read_image
from .loading import Batch, Batches, Samples, batches_from, batches_in_order, map_tensors, seed_everything, steps_per_epoch
from .relation import MarkedPair

__all__ = [
    "GENERATED",
    "SUFFIXES",
    "Augmentation",
    "BadSample",
    "Batch",
    "Batches",
    "CorruptImage",
    "CountGrid",
    "CueGrid",
    "Generated",
    "ImageFolder",
    "MarkedPair",
    "Samples",
    "batches_from",
    "batches_in_order",
    "eval_transform",
    "find_images",
    "map_tensors",
    "notes_of_ignored",
    "read_image",
    "seed_everything",
    "steps_per_epoch",
    "training_transform",
    "usual_side",
]
