"""Sequences to learn from: the Long Range Arena, recall, pointing and hidden facts, generated exactly."""

from .answer_metrics import METRICS, Metric, flatten_answers
from .base import IGNORE, SEQUENCES, SPLITS, SequenceData, SequenceFacts, as_tensor, known_options, make_sequences
from .copying import Copying, Induction
from .cue_cells import CueCells
from .documents import DocumentWindows
from .filler import ENTROPY, Filler
from .image_file import ImagePatches, ImagePixels
from .listops import ListOps, ListOpsWithoutBrackets
from .mqar import AssociativeRecall
from .needles import FAMILIES, HiddenFacts, Needles, RecallLanguage, Variables
from .pathfinder import Pathfinder, PathX
from .pointing import Counting, Pointing
from .released import GreyImage, Retrieval, Text
from .stored import Stored, plan_write, stored_name, write
from .teacher import SoftmaxTeacher

__all__ = [
    "ENTROPY",
    "FAMILIES",
    "IGNORE",
    "METRICS",
    "SEQUENCES",
    "SPLITS",
    "AssociativeRecall",
    "Copying",
    "Counting",
    "CueCells",
    "DocumentWindows",
    "Filler",
    "GreyImage",
    "HiddenFacts",
    "ImagePatches",
    "ImagePixels",
    "Induction",
    "ListOps",
    "ListOpsWithoutBrackets",
    "Metric",
    "Needles",
    "PathX",
    "Pathfinder",
    "Pointing",
    "RecallLanguage",
    "Retrieval",
    "SequenceData",
    "SequenceFacts",
    "SoftmaxTeacher",
    "Stored",
    "Text",
    "Variables",
    "as_tensor",
    "flatten_answers",
    "known_options",
    "make_sequences",
    "plan_write",
    "stored_name",
    "write",
]
