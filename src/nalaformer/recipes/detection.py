"""Finding objects: COCO as published, data of one's own, and a generated set on a CPU."""

from typing import Any

from ..tasks import DetectionConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe, enter, every

# a backbone and heads that a CPU trains from nothing
SMALL_BACKBONE: dict[str, Any] = {
    "embed_dims": [32, 48, 64, 96],
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "mlp_ratios": 2,
    "drop_path_rate": 0.0,
}
BATCH = 16


def shapes(detector: str, detector_options: dict[str, Any], *, steps: int) -> Recipe:
    """The generated set in its own size."""
    return Recipe(
        model="nalaformer_xt_linear",
        attention="nalaformer",
        model_options=SMALL_BACKBONE | detector_options,
        task=DetectionConfig(
            data="overlapping_shapes", eval_samples=100, detector=detector, short_sides=(), eval_short_side=0, longest_side=0
        ),
        training=TrainingConfig(
            steps=steps,
            batch_size=8,
            learning_rate=1e-3,
            weight_decay=0.01,
            warmup=50,
            clip_norm=1.0,
            precision="auto",
            **every(100),
        ),
    )


@RECIPES.register("shapes_retinanet")
def shapes_retinanet() -> Recipe:
    """Boxes around overlapping shapes, from nothing on a CPU.

    Command: nalaformer train shapes_retinanet attention=nalaformer
    Cost: 67 seconds on a CPU core.
    Expected: box mAP 0.364 (0.739 at IoU 0.5) on 100 images, measured once.
        Random weights: 0.0000; constant answers (a grid of boxes of every class): 0.0003.
    """
    return shapes("retinanet", {"channels": 64, "smallest_anchor": 10, "head_norm": True, "head_layers": 1}, steps=600)


@RECIPES.register("shapes_mask_rcnn")
def shapes_mask_rcnn() -> Recipe:
    """Boxes and masks of overlapping shapes, from nothing on a CPU.

    Command: nalaformer train shapes_mask_rcnn attention=nalaformer
    Cost: about four minutes on a CPU core.
    Expected: box mAP 0.607 (0.903 at IoU 0.5), mask mAP 0.494 (0.904) on 100 images, measured once.
        Random weights: box 0.0001, mask 0.0000; constant answers (a grid of boxes of every class): box 0.0003.
    """
    options = {"channels": 64, "smallest_anchor": 10, "head_norm": True, "hidden": 128, "proposals": 150, "regions": 64}
    return shapes("mask_rcnn", options, steps=400)


@RECIPES.register("detection")
def detection() -> Recipe:
    """Objects in images of your own, annotated in COCO's format.

    Command: nalaformer train detection data=/path/to/folder
    Cost: 20 passes over the images; an epoch of 100 images takes minutes on a CPU. Not measured.
    Expected: depends on the data; the first figures come after 100 steps. detector=mask_rcnn learns masks too. A folder
        without a val split has a fifth of its images held out.
    """
    return Recipe(
        model="nalaformer_xt",
        model_options={"channels": 128, "head_norm": True, "head_layers": 1},
        task=DetectionConfig(
            data="my_objects",
            holdout=0.2,
            detector="retinanet",
            short_sides=(384, 448, 512),
            eval_short_side=448,
            longest_side=800,
        ),
        training=TrainingConfig(
            epochs=20,
            batch_size=4,
            learning_rate=3e-4,
            weight_decay=0.05,
            warmup=1,
            clip_norm=1.0,
            precision="auto",
            **every(100),
        ),
    )


# AP as the authors report it for NaLaFormer-T and -S
PUBLISHED = {
    ("retinanet", "1x"): "box AP 46.2 (T), 47.2 (S)",
    ("mask_rcnn", "1x"): "box AP 47.6 (T), 49.5 (S), mask AP 43.0 (T), 44.2 (S)",
    ("mask_rcnn", "3x"): "box AP 46.7 (T), 49.7 (S)",
}


def coco(detector: str, schedule: str) -> Recipe:
    """AdamW, rate and decay 1e-4, 12 or 36 epochs, a tenth of the rate after 2/3 and 11/12 of them.

    The paper gives these. Usual, and ours to choose: batches of 16, sides of 800 (1x) or 480 to 800 (3x) and at most 1333,
    500 steps of warm-up, batch norms at the statistics of the pre-training.
    """
    is_long = schedule == "3x"
    return Recipe(
        model="nalaformer_t",
        model_options={"frozen_statistics": True},
        task=DetectionConfig(
            data="coco",
            detector=detector,
            short_sides=tuple(range(480, 801, 32)) if is_long else (800,),
            eval_short_side=800,
            longest_side=1333,
            empty_images=False,
        ),
        training=TrainingConfig(
            epochs=36 if is_long else 12,
            batch_size=BATCH,
            learning_rate=1e-4,
            weight_decay=1e-4,
            schedule="steps",
            decay_at=(27, 33) if is_long else (8, 11),
            warmup=0.07,
            precision="bfloat16",
            workers=8,
            **every(7329),
        ),
    )


def register(detector: str, schedule: str) -> None:
    """Enter the recipe, with its published figures in its words."""
    name = f"coco_{detector}_{schedule}"
    published = PUBLISHED.get((detector, schedule))
    result = f"{published}: published, not measured here" if published else "not measured, none published"

    title = {"retinanet": "RetinaNet", "mask_rcnn": "Mask R-CNN"}[detector]
    words = f"""NaLaFormer-T with {title} on COCO, schedule {schedule}.

    Command: torchrun --nproc-per-node 8 -m nalaformer train {name} data=/path/to/coco initial_weights=/path/to/weights
    Cost: {"36" if schedule == "3x" else "12"} passes over 117,266 images. Not measured.
    Expected: {result}. Weights trained on ImageNet-1K to start from are part of it; model=nalaformer_s is the larger one.
    """
    enter(name, lambda: coco(detector, schedule), words)


for _detector in ("retinanet", "mask_rcnn"):
    for _schedule in ("1x", "3x"):
        register(_detector, _schedule)
