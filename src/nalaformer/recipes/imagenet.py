"""ImageNet-1K as NaLaFormer's released code trains it. Accuracies are the authors': published, not measured here."""

from ..data import Augmentation
from ..models.vision import VARIANTS
from ..tasks import ClassificationConfig
from ..training import TrainingConfig
from .recipe import Recipe, enter, every

BATCH = 1024


def imagenet(model: str) -> Recipe:
    """300 epochs of AdamW with strong augmentation; lr = 5e-4 batch / 512, EMA decay = 0.99996^(batch / 512)."""
    return Recipe(
        model=model,
        task=ClassificationConfig(
            data="imagenet",
            image_size=224,
            augmentation=Augmentation(auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.4, random_erasing=0.25),
            mixup=0.8,
            cutmix=1.0,
            smoothing=0.1,
        ),
        training=TrainingConfig(
            epochs=300,
            batch_size=BATCH,
            learning_rate=5e-4 * BATCH / 512,
            weight_decay=0.05,
            warmup=5,
            warmup_learning_rate=1e-6,
            min_learning_rate=1e-5,
            cooldown=10,
            ema=0.99996 ** (BATCH / 512),
            repeats=3,
            precision="bfloat16",
            workers=8,
            **every(1251),
        ),
    )


def register(name: str, model: str) -> None:
    """Enter the recipe of a model, with its published accuracy in its words."""
    published = VARIANTS[model].published_top1
    result = f"{published} top-1 (published, not measured here)" if published else "not measured, none published for this size"
    words = f"""{model} on ImageNet-1K at 224, the authors' released recipe.

    Command: torchrun --nproc-per-node 8 -m nalaformer train {name} data=/path/to/imagenet
    Cost: 310 passes over 1.28 million images; days on 8 GPUs. Not measured.
    Expected: {result}.
    """
    enter(name, lambda: imagenet(model), words)


for _model in (
    *(f"nalaformer_{size}" for size in ("xt", "t", "s", "b", "l", "xt_paper", "t_paper")),
    *(f"polaformer_pvt_{size}" for size in ("t", "s")),
    "flatten_pvt_t",
):
    register(f"imagenet_{_model}", _model)
