"""The model that the attention page shows, loaded from the user's text, with its image transform."""

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...attention import METHODS
from ...conversion import convert
from ...data import eval_transform, seed_everything
from ...recipes import load_run
from ...recipes.initial_weights import backbone_of, load_weights
from ...registry import unknown_name
from ...tasks import task_name

if TYPE_CHECKING:
    from PIL.Image import Image

# side of the images for backbones of detectors and segmenters
SIDE = 224
# side of the images for super-resolution
PIXEL_SIDE = 64
GRAMMAR = (
    "give the folder of a run, the NAME of a backbone or of timm's models, NAME@FILE for weights, NAME:ATTENTION to convert "
    "its softmax attention; what stands first is done first"
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model for the attention page."""

    name: str
    """The name as the user wrote it."""
    model: nn.Module
    prepare: "Callable[[Image], Tensor]"
    """Transforms an image to the model's input, [3, height, width]."""
    mean: tuple[float, ...]
    """Subtracted from each channel by `prepare`."""
    spread: tuple[float, ...]
    """`prepare` divides each channel by this."""
    notes: list[str] = field(default_factory=list)
    """Remarks, such as the origin of the weights."""
    is_random: bool = False
    """True if the model is untrained."""
    names_classes: bool = False
    """True if its output is a score for each class."""
    answer: "Callable[[Image], str] | None" = None
    """Returns the model's answer for an image, if it is a classifier."""

    def to_image(self, pixels: Tensor) -> "Image":
        """Return the input [3, height, width] as an image again, cropped as the model saw it."""
        from PIL import Image

        mean, spread = (torch.tensor(each, device=pixels.device)[:, None, None] for each in (self.mean, self.spread))
        bright = (pixels * spread + mean).clamp(0, 1) * 255
        return Image.fromarray(bright.round().to(torch.uint8).permute(1, 2, 0).cpu().numpy())


def as_text(name: str) -> str:
    """Return a name with bytes that are no text escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def load_subject(text: str, *, device: torch.device | str = "cpu") -> Subject:
    """Load the model that the text names: a run's folder, or NAME with @FILE and :ATTENTION after it, in either order."""
    subject = load_run_model(Path(text)) if Path(text).is_dir() else load_named_model(text)
    subject.model.eval().to(device)
    return subject


def load_run_model(folder: Path) -> Subject:
    """Load a trained model, or the backbone of a detector, segmenter and the like."""
    run = load_run(folder)
    task: Any = run.task
    name, notes = as_text(str(folder)), [f"trained: {run.recipe.model}, {run.step_name}"]
    if not hasattr(task, "answer"):
        raise ValueError(
            "a run to look into must have learned to answer images (classification, detection, segmentation, super-resolution)"
            f", got {folder}, a run of {task_name(run.recipe.task)}; name one of those"
        )
    if "scale" in run.facts:
        notes.append(f"on images of {PIXEL_SIDE} pixels: each pixel is a token")
        return Subject(
            name=name, model=run.model, prepare=resize_for_super_resolution, mean=(0.0,) * 3, spread=(1.0,) * 3, notes=notes
        )
    if not hasattr(task, "prepare"):
        notes.append(f"its backbone, on images of {SIDE} pixels")
        network = backbone_of(task, run.model)
        return Subject(name=name, model=network, prepare=eval_transform(SIDE), notes=notes, **image_net_numbers())
    # generated images are not normalized by ImageNet's statistics
    numbers = {"mean": (0.5,) * 3, "spread": (1.0,) * 3} if task.is_generated else image_net_numbers()

    def answer(image: "Image") -> str:
        return ", ".join(task.answer(run.model, image, run.facts, task.AnswerOptions()).cells[:2])

    return Subject(name=name, model=run.model, prepare=task.prepare, notes=notes, answer=answer, names_classes=True, **numbers)


def resize_for_super_resolution(image: "Image") -> Tensor:
    """Return the image as super-resolution reads it: [3, 64, 64], from 0 to 1."""
    from torchvision.transforms.functional import pil_to_tensor

    return pil_to_tensor(image.resize((PIXEL_SIDE, PIXEL_SIDE))) / 255


def load_named_model(text: str) -> Subject:
    """Create a timm model by its name, with weights of a file and conversion as the text says."""
    import timm
    from timm.data import create_transform, resolve_model_data_config

    from ...models import vision  # noqa: F401  (enters our names)

    name, actions = parse(text)
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"a model must be known by its name, got {name!r}; {hint}{GRAMMAR}")
    seed_everything(0)
    model = timm.create_model(name)
    notes, is_random = [], True
    for kind, value in actions:
        if kind == "weights":
            notes.append(load_weights(model, None, value))
            is_random = False
        else:
            convert(model, value)
            notes.append(f"softmax attention replaced by {value}")
            if not is_random:
                notes.append("its projections are those of the file, its feature maps are untrained")
    if is_random:
        notes.insert(0, "it has learned nothing, so what you see is its start and not a trained model; NAME@FILE loads weights")
    settings = resolve_model_data_config(model)
    return Subject(
        name=text,
        model=model,
        prepare=create_transform(**settings, is_training=False),
        mean=settings["mean"],
        spread=settings["std"],
        notes=notes,
        is_random=is_random,
        names_classes=getattr(model, "num_classes", 0) > 0,
    )


def parse(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Parse name and actions in order: NAME@FILE:ATTENTION -> [("weights", FILE), ("attention", ATTENTION)]."""
    start, at, file = text.partition("@")
    name, colon, attention = start.partition(":")
    actions = [("attention", attention)] if colon else []
    if at:
        # a colon may belong to the file's name
        before, colon, last = file.rpartition(":")
        is_converted = bool(colon) and last in METHODS
        file = before if is_converted else file
        if not Path(file).is_file():
            raise ValueError(f"weights must be a file, got {file!r} in {text!r}; {GRAMMAR}")
        actions.append(("weights", file))
        if is_converted:
            actions.append(("attention", last))
    for kind, value in actions:
        if kind == "attention" and value not in METHODS:
            raise unknown_name("attention", value, METHODS)
    return name, actions


def image_net_numbers() -> dict[str, Any]:
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    return {"mean": IMAGENET_DEFAULT_MEAN, "spread": IMAGENET_DEFAULT_STD}
