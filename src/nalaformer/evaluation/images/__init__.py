"""How good generated images are: distances to real ones by features of a network, and an exact reader of shapes."""

from .distances import frechet_distance, kernel_distance, precision_and_recall
from .extractors import Extractor, classifier_extractor, inception_extractor
from .figures import FIGURES, image_figures, shape_figures
from .image_sets import ImageSet, read_image_set

__all__ = [
    "FIGURES",
    "Extractor",
    "ImageSet",
    "classifier_extractor",
    "frechet_distance",
    "image_figures",
    "inception_extractor",
    "kernel_distance",
    "precision_and_recall",
    "read_image_set",
    "shape_figures",
]
