"""Finding objects: COCO as published, one's own data, and a generated set on a CPU."""

from typing import Any

from ..tasks import DetectionConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe

# a backbone and heads that a CPU trains from nothing
SMALL_BACKBONE: dict[str, Any] = {
    "embed_dims": [32, 48, 64, 96],
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "mlp_ratios": 2,
    "drop_path_rate": 0.0,
}
SMALL_DETECTOR: dict[str, Any] = {"channels": 64, "smallest_anchor": 10, "head_norm": True}


@RECIPES.register("shapes_retinanet")
def shapes_retinanet() -> Recipe:
    """Boxes around overlapping shapes, from nothing on a CPU.

    Command: nalaformer train shapes_retinanet attention=nalaformer
    Cost: not measured.
    Expected: not measured.
    """
    return Recipe(
        model="nalaformer_xt_linear",
        attention="nalaformer",
        model_options=SMALL_BACKBONE | SMALL_DETECTOR,
        task=DetectionConfig(
            data="overlapping_shapes", detector="retinanet", short_sides=(), eval_short_side=0, longest_side=0
        ),
        training=TrainingConfig(
            steps=600,
            batch_size=8,
            learning_rate=1e-3,
            weight_decay=0.01,
            warmup=50,
            clip_norm=1.0,
            eval_every=200,
            save_every=200,
        ),
    )
