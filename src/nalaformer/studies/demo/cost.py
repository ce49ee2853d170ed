"""Time and memory of each method's network."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ...bench.fresh_process import in_fresh_process
from ...bench.memory import can_measure
from ...bench.timing import median_ms
from ...ops import use_backend
from ...recipes import build_model
from ...tasks import Classification
from .entries import ENTRIES, Entry, demo_recipe

FACTS = {"classes": ["a", "b", "c", "d"]}
# pixels a side: 4,096 tokens
LARGE = 512


@dataclass(frozen=True, kw_only=True)
class Cost:
    """On this machine's CPU."""

    training_images_per_second: float | None
    """Forward and backward at the demo's size."""
    large_images_per_second: float | None
    """Inference with 4,096 tokens, in a process of its own."""
    large_mib: float | None
    """Its peak memory beyond the network itself."""


def cost_of(entry: Entry, *, seconds: float = 0.2) -> Cost:
    """None where the system does not count memory (only Linux does)."""
    if entry not in ENTRIES or not can_measure("cpu"):
        return Cost(training_images_per_second=None, large_images_per_second=None, large_mib=None)
    number = ENTRIES.index(entry)
    with use_backend("reference"):
        training_ms = median_ms(training_step(number), seconds=seconds)
    large_mib, large_ms = in_fresh_process(f"{__name__}:large_image", {"number": number}, seconds=seconds)
    batch = demo_recipe(entry, seed=0).training.batch_size
    return Cost(
        training_images_per_second=1e3 * batch / training_ms, large_images_per_second=1e3 / large_ms, large_mib=large_mib
    )


def training_step(number: int) -> Callable[[], object]:
    """Forward and backward of one batch of the demo."""
    recipe = demo_recipe(ENTRIES[number], seed=0)
    size = Classification(recipe.task).image_size
    model = build_model(recipe, FACTS)
    images = torch.randn(recipe.training.batch_size, 3, size, size)
    labels = torch.zeros(len(images), dtype=torch.long)

    def step() -> object:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        return None

    return step


def large_image(number: int) -> Callable[[], object]:
    """Inference on one image of 4,096 tokens."""
    recipe = demo_recipe(ENTRIES[number], seed=0)
    options = recipe.model_options | {"img_size": LARGE}
    model = build_model(replace(recipe, model_options=options), FACTS).eval()
    image = torch.randn(1, 3, LARGE, LARGE)

    def infer() -> object:
        with torch.no_grad():
            return model(image)

    return infer
