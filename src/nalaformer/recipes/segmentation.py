"""Semantic segmentation: ADE20K and Cityscapes as published, generated scenes, and data of one's own."""

from ..tasks import SegmentationConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe

# a backbone for images of 96 pixels, which a CPU trains in minutes
SMALL = {
    "embed_dims": [32, 64, 96, 128],
    "depths": [1, 1, 2, 1],
    "num_heads": [1, 2, 3, 4],
    "mlp_ratios": 2.0,
    "drop_path_rate": 0.0,
    "decoder_channels": 64,
}


@RECIPES.register("scenes")
def scenes() -> Recipe:
    """Name every pixel of generated landscapes, whose colours say nothing: written to the disk as ADE20K, read from there.

    Command: nalaformer train scenes attention=nalaformer
    Cost: not measured.
    Expected: not measured.
    """
    return Recipe(
        model="semantic_fpn:nalaformer_xt_linear",
        attention="nalaformer",
        model_options=SMALL,
        initial_weights="torch",
        task=SegmentationConfig(data="scenes", short_side=96, crop=96, smallest_scale=0.75, largest_scale=1.5),
        training=TrainingConfig(
            steps=1_000,
            batch_size=8,
            learning_rate=2e-3,
            weight_decay=0.01,
            warmup=100,
            clip_norm=1.0,
            eval_every=250,
            save_every=250,
        ),
    )
