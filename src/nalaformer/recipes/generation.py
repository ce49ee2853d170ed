"""Making images: generated shapes on a CPU and on a GPU, the published setting, and a folder of one's own."""

from typing import Any

from ..tasks import GenerationConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe, every


def flow(model: str, task: GenerationConfig, *, model_options: dict[str, Any] | None = None, **training: Any) -> Recipe:
    """A flow from noise to images, learned by AdamW without decay; the weights are averaged."""
    settings: dict[str, Any] = {"weight_decay": 0.0, "beta2": 0.99, "clip_norm": 1.0}
    return Recipe(
        model=model,
        attention="nalaformer",
        model_options=model_options or {},
        task=task,
        training=TrainingConfig(**(settings | training)),
    )


@RECIPES.register("shapes_dit_tiny")
def shapes_dit_tiny() -> Recipe:
    """Make images of shapes, with a tiny diffusion transformer, on a CPU.

    Command: nalaformer train shapes_dit_tiny attention=nalaformer
    Cost: about 25 minutes of one CPU core.
    Expected: of 200 samples 0.09 are valid and show what was asked for, explained 0.964 (measured, one seed); none was after
        2,000 steps. shapes_dit, on a GPU, is made for valid samples.
    """
    return flow(
        "dit_s2",
        GenerationConfig(data="shapes", objective="flow", levels="middle", eval_samples=64, judged=64, judged_steps=20),
        model_options={"depth": 3, "dim": 64, "num_heads": 2, "mlp_ratio": 2.0},
        steps=6_000,
        batch_size=16,
        learning_rate=2e-3,
        warmup=50,
        ema=0.99,
        **every(500),
    )


@RECIPES.register("shapes_dit")
def shapes_dit() -> Recipe:
    """Make images of shapes, with a small diffusion transformer, in minutes on a GPU.

    Command: nalaformer train shapes_dit attention=nalaformer
    Cost: 5,000 steps of 256 images of 256 tokens: 6.5 minutes for three runs side by side on one H200.
    Expected: of 1,000 samples 0.844 are valid and show what was asked for (measured, one seed); attention=softmax 0.579,
        attention=linear 0.376 at the same budget.
    """
    return flow(
        "dit_s2",
        GenerationConfig(data="shapes", objective="flow", levels="middle", train_samples=1_000_000, judged=1_000),
        model_options={"depth": 6, "dim": 192, "num_heads": 3},
        steps=5_000,
        batch_size=256,
        learning_rate=1e-3,
        warmup=200,
        ema=0.999,
        precision="auto",
        workers=12,
        **every(1_000),
    )


@RECIPES.register("imagenet_dit_s2")
def imagenet_dit_s2() -> Recipe:
    """Make images of ImageNet's 1,000 classes at 256 pixels: DiT-S/2 with norm-aware attention, on encoded latents.

    Command: nalaformer data encode IMAGENET --autoencoder AUTOENCODER --out latents
        nalaformer train imagenet_dit_s2 data=latents
    Cost: 400,000 steps of 256 latents, 4 x 32 x 32; days on one GPU. Not measured.
    Expected: FID 53.08 without guidance (published, not measured here); softmax 68.40, plain linear attention 89.72.
    """
    return Recipe(
        model="dit_s2",
        attention="nalaformer",
        task=GenerationConfig(data="imagenet", objective="ddpm"),
        training=TrainingConfig(
            steps=400_000,
            batch_size=256,
            # DiT's: a constant rate, and the default moments
            learning_rate=1e-4,
            min_learning_rate=1e-4,
            weight_decay=0.0,
            ema=0.9999,
            precision="bfloat16",
            workers=8,
            **every(10_000),
        ),
    )


@RECIPES.register("own_images_dit_tiny")
def own_images_dit_tiny() -> Recipe:
    """Make small images like those of a folder of your own, a folder for each class, in minutes on a CPU.

    Command: nalaformer train own_images_dit_tiny data=/path/to/images
    Cost: 2,000 steps of 32 images of 32 pixels: nine minutes of one CPU core, evaluations included.
    Expected: depends on the images. Of ten classes of Fashion-MNIST, 285 images of each to learn from, explained 0.890 of 150
        held out, 0.443 after 250 steps (measured, one seed). With --guidance 2, clothes can be told apart, and shoes and bags
        are coarse.
    """
    return flow(
        "dit_s4",
        GenerationConfig(data="images", objective="flow", levels="middle", image_size=32, flip=True, holdout=0.05),
        model_options={"depth": 4, "dim": 128, "num_heads": 4, "mlp_ratio": 2.0},
        steps=2_000,
        batch_size=0,
        learning_rate=1e-3,
        warmup=100,
        ema=0.995,
        precision="auto",
        **every(250),
    )


@RECIPES.register("own_images_dit")
def own_images_dit() -> Recipe:
    """Make images like those of a folder of your own, a folder for each class, in pixels.

    Command: nalaformer train own_images_dit data=/path/to/images image_size=64
    Cost: 50,000 steps of 128 images; hours on a GPU. Not measured.
    Expected: depends on the images; not measured.
    """
    return flow(
        "dit_s4",
        GenerationConfig(data="images", objective="flow", image_size=64, flip=True, holdout=0.05),
        steps=50_000,
        batch_size=128,
        learning_rate=3e-4,
        warmup=1_000,
        ema=0.9995,
        precision="auto",
        workers=8,
        **every(2_500),
    )
