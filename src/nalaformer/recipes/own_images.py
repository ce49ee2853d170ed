"""A folder of one's own images: from nothing or from weights, on one CPU or one GPU."""

from ..data import Augmentation
from ..tasks import ClassificationConfig
from ..training import TrainingConfig
from .recipe import RECIPES, Recipe


@RECIPES.register("images")
def images() -> Recipe:
    """Name what your own images show: a folder of images for each class is all that it needs.

    Command: nalaformer train images data=/path/to/images
        from weights: nalaformer train images data=/path/to/images initial_weights=FILE_OR_RUN learning_rate=2e-4 epochs=5
    Cost: 20 passes over the images. Ten passes over 2,400 of 28 pixels took 166 seconds of one CPU core.
    Expected: of ten classes of Fashion-MNIST, 240 images of each to learn from, epochs=10: top-1 0.817 of 600 held out,
        0.540 after the first pass (measured, one seed); chance is 0.1. Twenty passes: not measured.
    """
    return Recipe(
        model="nalaformer_xt",
        task=ClassificationConfig(
            data="images", holdout=0.2, image_size=0, eval_crop=1.0, augmentation=Augmentation(smallest_crop=0.7)
        ),
        training=TrainingConfig(
            epochs=20,
            batch_size=0,
            learning_rate=1e-3,
            warmup=1,
            clip_norm=1.0,
            precision="auto",
            eval_epochs=1,
        ),
    )
