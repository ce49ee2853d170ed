"""Speed and memory of the ops and of whole models, side by side with their peers in one run."""

from nalaformer.machine import describe_machine, extras
from nalaformer.timing import median_ms

from . import mala_and_rala as mala_and_rala  # enters them
from .backbone_peers import run_backbone_peers
from .cases import Case, cases_for
from .generation import run_generation
from .implementations import IMPLEMENTATIONS, Implementation
from .language import run_language
from .language_training import run_training
from .measurement import CallMeasurement, Measurement, Result
from .models import MODEL_VARIANTS, ModelMeasurement, run_models
from .ops import OpMeasurement
from .peers import skipped_peers
from .runner import measure
from .super_resolution import run_super_resolution

__all__ = [
    "IMPLEMENTATIONS",
    "MODEL_VARIANTS",
    "CallMeasurement",
    "Case",
    "Implementation",
    "Measurement",
    "ModelMeasurement",
    "OpMeasurement",
    "Result",
    "cases_for",
    "describe_machine",
    "extras",
    "measure",
    "median_ms",
    "run_backbone_peers",
    "run_generation",
    "run_language",
    "run_models",
    "run_super_resolution",
    "run_training",
    "skipped_peers",
]  # fmt: skip
