"""Enlarging images: the published setting on DIV2K, a run of minutes on generated images, and photographs of one's own."""

from typing import Any

from ..tasks import SuperResolutionConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe, enter, every


def div2k(scale: int) -> Recipe:
    """L1, Adam at 2e-4, 500,000 steps, large patches of 192; the batch and the cosine are ours, the paper names neither."""
    return Recipe(
        model="super_resolution_light",
        attention="nalaformer",
        task=SuperResolutionConfig(data="DIV2K", scale=scale, patch_size=192),
        training=TrainingConfig(
            steps=500_000,
            batch_size=32,
            optimizer="adam",
            learning_rate=2e-4,
            weight_decay=0.0,
            min_learning_rate=1e-6,
            ema=0.999,
            precision="bfloat16",
            workers=8,
            **every(5_000),
        ),
    )


def register_div2k(scale: int) -> None:
    """Enter the recipe of a scale, with what is published for it in its words."""
    name = f"div2k_x{scale}"
    published = "34.81 dB on Set5, 30.71 on Set14" if scale == 3 else "none published for this scale"
    words = f"""Enlarge {scale} times, learned from DIV2K: the paper's light network, attention over the whole image.

    Command: nalaformer train {name} data=/path/to/DIV2K
    Cost: 500,000 steps of 32 patches; days on a GPU. Not measured.
    Expected: {published} (published, not measured here).
    """
    enter(name, lambda: div2k(scale), words)


for _scale in (2, 3, 4):
    register_div2k(_scale)


def on_bicubic(model: str, task: SuperResolutionConfig, **training: Any) -> Recipe:
    """A network that learns what bicubic interpolation leaves, by Adam."""
    settings: dict[str, Any] = {"batch_size": 16, "optimizer": "adam", "weight_decay": 0.0, "precision": "auto"}
    return Recipe(
        model=model,
        attention="nalaformer",
        model_options={"skip": "bicubic"},
        initial_weights="torch",
        task=task,
        training=TrainingConfig(**settings, **training),
    )


@RECIPES.register("super_resolution_small")
def super_resolution_small() -> Recipe:
    """Enlarge generated images twice, with a tiny network, on a CPU.

    Command: nalaformer train super_resolution_small attention=nalaformer
    Cost: two minutes of one CPU core.
    Expected: 37.26 dB and SSIM 0.968 (measured, one seed). Bicubic interpolation, with which the random weights start, has
        33.54 dB and 0.943; a grey image has 17.5 dB. These were measured with small images that were rounded to 8 bits once.
        The settings were chosen with attention=nalaformer, so the recipe does not rank attentions.
    """
    return on_bicubic(
        "super_resolution_tiny",
        SuperResolutionConfig(data="scenes", patch_size=32, eval_crop=128),
        steps=800,
        learning_rate=1.5e-3,
        warmup=20,
        **every(200),
    )


@RECIPES.register("super_resolution")
def super_resolution() -> Recipe:
    """Enlarge photographs, learned from a folder of your own.

    Command: nalaformer train super_resolution data=/path/to/photographs scale=2
    Cost: a few minutes on a GPU.
    Expected: depends on the photographs; the evaluation shows bicubic interpolation beside the network. On six photographs, x2,
        40.9 dB after 1,000 steps where bicubic has 38.6 (one H200, one seed, learned from 24 others; small images were
        rounded to 8 bits once).
    """
    return on_bicubic(
        "super_resolution_light",
        SuperResolutionConfig(data="photographs", patch_size=96, patches_per_image=100, eval_crop=384),
        steps=2_000,
        learning_rate=5e-4,
        warmup=100,
        clip_norm=1.0,
        ema=0.99,
        **every(250),
    )
