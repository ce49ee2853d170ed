"""Recipes that need no download and run on a CPU."""

from dataclasses import replace

from ..tasks import ClassificationConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe, every

# one token per cell: a plain stack of two blocks, so that attention alone can compare cells
SMALL_VIT = {
    "embed_dims": [64],
    "depths": [2],
    "num_heads": [4],
    "mlp_ratios": 2,
    "attention_stages": "l",
    "key_reduction": 1,
    "softmax_key_reduction": 1,
    "layer_scale": [None],
    "patch_size": 8,
    "global_pool": "max",
}


def small_vit(image_size: int) -> dict[str, object]:
    """Options of a two-block ViT without convolutions; position is a table added to the tokens."""
    return SMALL_VIT | {"img_size": image_size, "attention_options": {"local_mix": "none", "position": "none"}}


@RECIPES.register("cue_grid")
def cue_grid() -> Recipe:
    """Name the glyph whose colour the marked cell shows: pointing, which needs sharp attention.

    Command: nalaformer train cue_grid attention=nalaformer
    Cost: a minute or two on a CPU core.
    Expected: from chance, 0.25, to 0.8: the moment at which a run learns differs from seed to seed and from machine to machine.
        Two seeds on one CPU, 500 eval images: attention=softmax 0.83, 0.68; linear 0.30, 0.28; nalaformer 0.45, 0.80.
    """
    return Recipe(
        model="vit_nala_tiny_patch16",
        attention="nalaformer",
        model_options=small_vit(64),
        initial_weights="torch",
        task=ClassificationConfig(data="cue_grid", data_options={"cells": 8}, eval_samples=1_000),
        training=TrainingConfig(
            steps=650,
            batch_size=32,
            learning_rate=2e-3,
            weight_decay=0.01,
            beta2=0.98,
            warmup=65,
            clip_norm=1.0,
            **every(100),
        ),
    )


@RECIPES.register("count_grid")
def count_grid() -> Recipe:
    """Count the glyphs like the marked one: the control to cue_grid, which needs flat attention.

    Command: nalaformer train count_grid attention=nalaformer
    Cost: about a minute on two CPU cores.
    Expected: not measured; chance is 0.125.
    """
    task = ClassificationConfig(data="count_grid", eval_samples=1_000)
    return replace(cue_grid(), model_options=small_vit(48), task=task)


@RECIPES.register("marked_pair")
def marked_pair() -> Recipe:
    """Say whether two marked objects among others share shape and colour.

    Command: nalaformer train marked_pair attention=nalaformer
    Cost: a few minutes on two CPU cores.
    Expected: not measured; chance is 0.25.
    """
    base = cue_grid()
    training = replace(base.training, steps=2_000, batch_size=64, learning_rate=1e-3, warmup=200, **every(500))
    return replace(base, task=ClassificationConfig(data="marked_pair", eval_samples=1_000), training=training)
