"""Networks on images as ONNX programs, with what their user has to know in the metadata of the file."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..tasks import Classification, Detection, Segmentation, SuperResolutionTask
from .run import LoadedRun

# of detectors that evaluate images as they are
USUAL_SIDE = 448


@dataclass(frozen=True, kw_only=True)
class ImageProgram:
    """A network and what is said of it."""

    network: nn.Module
    images: Tensor
    """An example, [2, 3, H, W]: torch takes a batch of one for a constant."""
    outputs: tuple[str, ...]
    any_size: bool
    """True if height and width are free; else they are those of the example."""
    about: dict[str, Any]
    """Entries of the file's metadata: text, or JSON."""


class Decoder(nn.Module):
    """The logits of a segmentation network, which gives them as a tuple."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)[0]


def image_program(run: LoadedRun) -> ImageProgram:
    """What the program of a run is made of; a ValueError where there is none."""
    task, network = run.task, run.model.float().eval()
    if isinstance(task, Classification):
        return of_classifier(run, network)
    if isinstance(task, Segmentation):
        return of_segmenter(run, Decoder(network))
    if isinstance(task, SuperResolutionTask):
        about = {"input": "RGB in 0..1", "output": "RGB in 0..1, scale times as high and wide", "scale": run.facts["scale"]}
        return ImageProgram(
            network=network,
            images=torch.zeros(2, 3, 20, 28),
            outputs=("enlarged",),
            any_size=True,
            about=about | numbers(0.0, 1.0),
        )
    assert isinstance(task, Detection)
    return of_detector(run, network)


def numbers(mean: Any, deviation: Any) -> dict[str, Any]:
    """The normalization of pixels in 0..1: (pixel - mean) / std, for each channel."""
    mean, deviation = ([each] * 3 if isinstance(each, float) else [float(part) for part in each] for each in (mean, deviation))
    return {"mean": mean, "std": deviation}


def of_classifier(run: LoadedRun, network: nn.Module) -> ImageProgram:
    from PIL import Image
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    task = run.task
    image = task.prepare(Image.new("RGB", (64, 64)))
    # generated images are read as they were made
    normal = numbers(0.5, 1.0) if task.is_generated else numbers(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    about = {
        "input": "RGB in 0..1, less mean, over std",
        "output": "logits of the classes",
        "classes": run.facts["classes"],
        "image_size": task.image_size,
        "eval_crop": 1.0 if task.is_generated else task.config.eval_crop,
    }
    return ImageProgram(
        network=network, images=torch.stack([image] * 2), outputs=("logits",), any_size=False, about=about | normal
    )


def of_segmenter(run: LoadedRun, network: nn.Module) -> ImageProgram:
    from ..data.segmentation.crops import DEVIATION, MEAN

    about = {
        "input": "RGB in 0..1, less mean, over std",
        "output": "logits of the classes of each pixel",
        "classes": run.facts["classes"],
        "colours": run.facts["colours"],
        "short_side": run.task.config.short_side,
    }
    about |= numbers(MEAN, DEVIATION)
    return ImageProgram(network=network, images=torch.zeros(2, 3, 64, 96), outputs=("logits",), any_size=True, about=about)


def of_detector(run: LoadedRun, network: Any) -> ImageProgram:
    from ..models.vision.detectors import DenseRetinaNet

    if run.facts["detector"] != "retinanet":
        raise ValueError(
            f"a detector must be a retinanet to become an ONNX program, got {run.facts['detector']}, whose second look "
            "has as many regions as the image has objects; use it by `nalaformer predict --coco FILE`"
        )
    dense, transform = DenseRetinaNet(network), network.network.transform
    # the levels of the pyramid halve it five times
    side = -(-(run.task.config.eval_short_side or USUAL_SIDE) // 32) * 32
    about = {
        "input": "RGB in 0..1, less mean, over std; resize the image to fit and pad it at the right and below with zeros",
        "output": "boxes: left, top, right, bottom in pixels of the input; scores: of each class; drop those of little score, "
        "then suppress what overlaps more than nms_threshold, class by class",
        "classes": run.facts["classes"],
        "nms_threshold": network.network.nms_thresh,
    }
    about |= numbers(transform.image_mean, transform.image_std)
    return ImageProgram(
        network=dense, images=torch.zeros(2, 3, side, side), outputs=("boxes", "scores"), any_size=False, about=about
    )


def writer_of(run: LoadedRun) -> Callable[[Path], None]:
    """What writes the program of a run to a file; whatever can be refused is refused here."""
    # asked for first: torch says less about what is missing
    import onnx  # noqa: F401
    import onnxscript  # noqa: F401

    return partial(write_program, image_program(run), run)


def write_program(program: ImageProgram, run: LoadedRun, path: Path) -> None:
    """Trace the network, for any number of images, and write it with its metadata."""
    free = ("batch", None, "height", "width") if program.any_size else ("batch",)
    shapes = {axis: torch.export.Dim(name) for axis, name in enumerate(free) if name is not None}
    try:
        traced = torch.onnx.export(
            Positional(program.network).eval(),
            (program.images,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=list(program.outputs),
            dynamic_shapes=(shapes,),
        )
    except torch.onnx.OnnxExporterError as error:
        # torch's own words are a page about how to mend torch
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ValueError(
            f"torch cannot write {run.recipe.model} as an ONNX program ({reason}); choose another model, such as one of "
            "`nalaformer models`"
        ) from error
    assert traced is not None
    about = {"model": run.recipe.model, "step": run.step} | program.about
    for name, value in about.items():
        traced.model.metadata_props[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    traced.save(path)


class Positional(nn.Module):
    """The network with one argument, `images`, whatever its own is called."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        return self.network(images)
