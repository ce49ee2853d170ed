"""Semantic segmentation: ADE20K and Cityscapes as published, generated scenes, and data of one's own."""

from typing import Any

from ..tasks import SegmentationConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe, enter, every

# a backbone for images of 96 pixels, which a CPU trains in minutes
SMALL = {
    "embed_dims": [32, 64, 96, 128],
    "depths": [1, 1, 2, 1],
    "num_heads": [1, 2, 3, 4],
    "mlp_ratios": 2.0,
    "drop_path_rate": 0.0,
    "decoder_channels": 64,
}
# a run of minutes
SHORT: dict[str, Any] = {
    "steps": 1_000,
    "batch_size": 8,
    "weight_decay": 0.01,
    "warmup": 100,
    "clip_norm": 1.0,
    "precision": "auto",
}


@RECIPES.register("scenes")
def scenes() -> Recipe:
    """Name every pixel of generated landscapes, whose colours say nothing: written to the disk as ADE20K, read from there.

    Command: nalaformer train scenes attention=nalaformer
    Cost: about 220 s of one CPU core.
    Expected: mIoU 0.695 with seed 0 on one CPU. One class everywhere has at most 0.062, random weights have 0.008 to 0.059, and
        the most frequent class of each place, without a look at the image, 0.224.
    """
    return Recipe(
        model="semantic_fpn:nalaformer_xt_linear",
        attention="nalaformer",
        model_options=SMALL,
        initial_weights="torch",
        task=SegmentationConfig(data="scenes", short_side=96, crop=96, smallest_scale=0.75, largest_scale=1.5),
        training=TrainingConfig(**SHORT, learning_rate=2e-3, **every(250)),
    )


def published(data: str, model: str, *, steps: int, batch_size: int, warmup: int, window: int = 0) -> Recipe:
    """AdamW at 1e-4 with decay 1e-3, as the paper trains; crops of 512 at scales 0.5 to 2.

    The paper names neither batch nor warm-up: they are those that these decoders are usually trained with.
    """
    return Recipe(
        model=model,
        task=SegmentationConfig(data=data, short_side=512 if data == "ade20k" else 0, crop=512, window=window),
        training=TrainingConfig(
            steps=steps,
            batch_size=batch_size,
            learning_rate=1e-4,
            weight_decay=1e-3,
            schedule="linear",
            warmup=warmup,
            min_learning_rate=0.0,
            precision="bfloat16",
            workers=8,
            eval_every=8_000,
            save_every=2_000,
        ),
    )


ADE20K_MIOU = {"semantic_fpn": {"t": 45.4, "s": 48.0}, "upernet": {"t": 46.9, "s": 48.5}}
ADE20K_SETTINGS = {
    "semantic_fpn": {"steps": 40_000, "batch_size": 32, "warmup": 0},
    "upernet": {"steps": 160_000, "batch_size": 16, "warmup": 1_500},
}
TITLES = {"semantic_fpn": "Semantic FPN", "upernet": "UPerNet"}


def register_ade20k(decoder: str, size: str) -> None:
    """Enter the recipe of a decoder and a size, with its published mIoU in its words."""
    name, settings = f"ade20k_{decoder}_nalaformer_{size}", ADE20K_SETTINGS[decoder]
    words = f"""{TITLES[decoder]} on nalaformer_{size}, ADE20K, {settings["steps"]:,} steps.

    Command: torchrun --nproc-per-node 8 -m nalaformer train {name} data=/path/to/ADEChallengeData2016
    Cost: {settings["steps"] * settings["batch_size"]:,} crops of 512 pixels. Not measured.
    Expected: {ADE20K_MIOU[decoder][size]} mIoU (published, from weights trained on ImageNet; not measured here).
    """
    enter(name, lambda: published("ade20k", f"{decoder}:nalaformer_{size}", **settings), words)


for _decoder in ADE20K_MIOU:
    for _size in ("t", "s"):
        register_ade20k(_decoder, _size)


@RECIPES.register("cityscapes_upernet_nalaformer_t")
def cityscapes() -> Recipe:
    """UPerNet on nalaformer_t, Cityscapes at 1024 x 2048, windows of 512 in evaluation; window=0 takes the whole image.

    Command: torchrun --nproc-per-node 8 -m nalaformer train cityscapes_upernet_nalaformer_t data=/path/to/cityscapes
    Cost: 1,280,000 crops of 512 pixels. Not measured.
    Expected: not measured; 83.5 mIoU is published for NaLaFormer, with weights trained on ImageNet and in a setting of its own.
    """
    return published("cityscapes", "upernet:nalaformer_t", steps=160_000, batch_size=8, warmup=1_500, window=512)


@RECIPES.register("segmentation")
def own_data() -> Recipe:
    """Name every pixel of images of your own: a folder with images/ and masks/, each with train/ and val/ if there are splits.

    Command: nalaformer train segmentation data=/path/to/folder
    Cost: 1,000 steps of 8 crops of 128 pixels, each about 0.6 s of one CPU core; a first mIoU after 100.
    Expected: depends on the data. A folder without val/ has a fifth of its images held out.
        On a GPU, larger images are within reach: short_side=512 crop=512.
    """
    return Recipe(
        model="semantic_fpn:nalaformer_xt_linear",
        model_options={"decoder_channels": 128},
        task=SegmentationConfig(data="your_folder", holdout=0.2, short_side=160, crop=128, color_jitter=0.2),
        training=TrainingConfig(**SHORT, learning_rate=5e-4, **every(100)),
    )
