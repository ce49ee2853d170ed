"""Vision backbones: one four-stage network in several layouts, registered with timm, which is required."""

try:
    import timm  # noqa: F401  (asked for here, so that the error can say what brings it)
except ModuleNotFoundError as error:
    if error.name != "timm":
        raise
    raise ModuleNotFoundError("nalaformer.models.vision needs timm: pip install 'nalaformer[vision]'", name="timm") from error

from . import registration  # noqa: F401  (enters the names into timm)
from .backbone import Backbone
from .cards import ModelCard, card, cards, cards_table, notes_of
from .config import BackboneConfig
from .multiply_adds import count_multiply_adds
from .super_resolution import SuperResolution, build_super_resolution
from .variants import LAYOUTS, VARIANTS, Variant, build

__all__ = [
    "LAYOUTS",
    "VARIANTS",
    "Backbone",
    "BackboneConfig",
    "ModelCard",
    "SuperResolution",
    "Variant",
    "build",
    "build_super_resolution",
    "card",
    "cards",
    "cards_table",
    "count_multiply_adds",
    "notes_of",
]
