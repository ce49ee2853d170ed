"""From the folder of a run to images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..data.generation import load_autoencoder
from ..models.diffusion import layout_of
from ..tasks import Generation
from ..training.ranks import find_device
from .run import LoadedRun, load_run

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..models.diffusion import NaLaDiTPipeline


def load_pipeline(folder: str | Path, *, autoencoder: str | Path | None = None, device: str = "auto") -> "NaLaDiTPipeline":
    """The pipeline of a run's best checkpoint, its moving average where there is one; or one that was saved in the folder.

    autoencoder: folder of the AutoencoderKL that encoded the data of a run on latents.
    """
    from ..models.diffusion import NaLaDiTPipeline

    place = find_device(device)
    if (Path(folder) / "model_index.json").is_file():
        inside = Path(folder) / "vae"
        # diffusers would fill what its weights lack with random numbers
        parts = {"vae": load_autoencoder(inside).model} if inside.is_dir() else {}
        return NaLaDiTPipeline.from_pretrained(folder, local_files_only=True, **parts).to(place)
    run = load_run(folder)
    if not isinstance(run.task, Generation):
        raise ValueError(f"images are made by a run that has learned to, such as shapes_dit_tiny, got {folder}")
    decoder = None
    if autoencoder is not None:
        loaded = load_autoencoder(autoencoder)
        encoder = run.facts.get("autoencoder")
        if encoder and encoder != loaded.fingerprint:
            raise ValueError(
                f"the autoencoder must be the one that encoded the run's data, got another in {autoencoder}; name that one"
            )
        decoder = loaded.model
    return NaLaDiTPipeline(model_of(run), decoder).to(place)


def model_of(run: LoadedRun) -> Any:
    """The run's network as diffusers knows models."""
    from ..models.diffusion import NaLaDiT

    recipe, facts = run.recipe, run.facts
    attention = {"attention": recipe.attention} if recipe.attention else {}
    known = {name: facts[name] for name in ("channels", "num_classes", "objective", "height", "width", "class_names")}
    model = NaLaDiT(**(layout_of(recipe.model) | recipe.model_options | attention | known))
    model.load_state_dict(run.model.state_dict())
    return model


def grid_of(images: Tensor, *, columns: int, gap: int = 2) -> "Image":
    """uint8 [N, 3, H, W] -> one picture, row by row, on white."""
    from PIL import Image

    count, _, height, width = images.shape
    rows = -(-count // columns)
    canvas = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 255, dtype=np.uint8)
    for number, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        row, column = divmod(number, columns)
        top, left = gap + row * (height + gap), gap + column * (width + gap)
        canvas[top : top + height, left : left + width] = image
    return Image.fromarray(canvas)
