"""A diffusers pipeline that generates images by label from a trained network."""

from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput
from torch import Tensor

from ...json_text import parse_json
from ...registry import unknown_name
from .model import NaLaDiT
from .samplers import denoise, to_rgb

INDEX = "model_index.json"
# the library and class of each part, as save_pretrained writes them into the index; a missing part has none
PARTS: dict[str, tuple[str, str]] = {"transformer": ("nalaformer", "NaLaDiT"), "vae": ("diffusers", "AutoencoderKL")}


class NaLaDiTPipeline(DiffusionPipeline):
    """A NaLaDiT and, if it generates latents, the autoencoder that decodes them into images.

    save_pretrained(folder) writes both; NaLaDiTPipeline.from_pretrained(folder) reads them, runs no code of the folder and
    downloads nothing. diffusers' own DiffusionPipeline.from_pretrained looks for classes in diffusers alone and does not find
    this one.
    """

    _optional_components = ["vae"]
    model_cpu_offload_seq = "transformer->vae"

    def __init__(self, transformer: NaLaDiT, vae: AutoencoderKL | None = None) -> None:
        super().__init__()
        check_channels(vae, transformer.channels)
        self.register_modules(transformer=transformer.eval(), vae=vae)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> "NaLaDiTPipeline":
        """Load the pipeline that save_pretrained wrote to a local folder; options as in diffusers."""
        check_pipeline_folder(Path(folder))
        return super().from_pretrained(folder, **{"local_files_only": True, **options})

    def __call__(self, labels: Sequence[int | str] | Tensor, **options: Any) -> ImagePipelineOutput:
        """Sample images for Pillow, as diffusers' pipelines do: pipeline(["circle"]).images[0].save(...)."""
        from PIL import Image

        pixels = self.sample(labels, **options).permute(0, 2, 3, 1).numpy()
        return ImagePipelineOutput(images=[Image.fromarray(each) for each in pixels])

    def sample(
        self,
        labels: Sequence[int | str] | Tensor,
        *,
        guidance: float = 1.0,
        steps: int = 50,
        sampler: str = "",
        seed: int = 0,
        height: int = 0,
        width: int = 0,
        advance: Callable[[float], object] = lambda images: None,
    ) -> Tensor:
        """Sample an image for each label, by number or name: uint8 RGB [N, 3, H, W] on the CPU.

        Image i depends on (seed, i) alone. height, width: 0 for the trained size; a latent model counts latents. The other
        options are those of `samplers.denoise`.
        """
        config = self.transformer.config
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}; take 0 or more")
        numbers = self.class_numbers(labels)
        images = denoise(
            self.transformer,
            torch.tensor(numbers, dtype=torch.long),
            objective=config.objective,
            height=height or config.height,
            width=width or config.width,
            clip=self.vae is None,
            steps=steps,
            guidance=guidance,
            sampler=sampler,
            seeds=[(seed, index) for index in range(len(numbers))],
            advance=advance,
        )
        if self.vae is not None:
            images = decode(self.vae, images.to(self.vae.dtype)).float()
        return to_rgb(images).cpu()

    def class_numbers(self, labels: Sequence[int | str] | Tensor) -> list[int]:
        """Return the numbers of classes that are given by number or name."""
        if isinstance(labels, str | Integral) or (isinstance(labels, Tensor) and labels.dim() != 1):
            raise ValueError(f"labels must be a list with one for each image, got {labels!r}; write [{labels!r}] for one image")
        return [self.number_of(label) for label in (labels.tolist() if isinstance(labels, Tensor) else labels)]

    def number_of(self, label: int | str) -> int:
        """Return the number of a class, given by number or name."""
        names = self.transformer.config.class_names or []
        if label in names:
            return names.index(label)
        if isinstance(label, Integral) or (isinstance(label, str) and label.isdecimal()):
            return int(label)
        raise unknown_name("label", label, names or [f"0 .. {self.transformer.num_classes - 1}"])


@torch.no_grad()
def decode(autoencoder: AutoencoderKL, latents: Tensor) -> Tensor:
    """Decode scaled latents [N, C, h, w] to images [N, 3, H, W], about in -1..1, one by one, since pixels need more memory."""
    config = autoencoder.config
    shift = config.shift_factor or 0.0
    return torch.cat([autoencoder.decode(each[None] / config.scaling_factor + shift).sample for each in latents])


def check_channels(autoencoder: AutoencoderKL | None, channels: int) -> None:
    """Reject an autoencoder with other channels than the network's latents; without one the network must generate pixels."""
    if autoencoder is None:
        if channels not in (1, 3):
            raise ValueError(
                f"a network of {channels} channels makes latents and needs the autoencoder that encoded them, got none; pass "
                "its AutoencoderKL, on the command line with --autoencoder FOLDER"
            )
        return
    if not isinstance(autoencoder, AutoencoderKL):
        raise ValueError(
            f"the autoencoder must be an AutoencoderKL of diffusers, got {type(autoencoder).__name__}; others have latents of "
            "another kind"
        )
    if autoencoder.config.latent_channels != channels:
        raise ValueError(
            f"the autoencoder must have the channels of the network's latents, {channels}, got "
            f"{autoencoder.config.latent_channels}; name the one that encoded the data"
        )


def check_pipeline_folder(folder: Path) -> None:
    """Reject a folder from which some releases of diffusers would run code: modules in the index, or .py files."""
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(
            f"a pipeline must be a local folder that save_pretrained wrote, got {folder} without {INDEX}; fetch it first"
        )
    try:
        entries = parse_json(index.read_bytes())
    except ValueError as error:
        raise ValueError(f"{index} must be the JSON that save_pretrained wrote: {error}; save the pipeline again") from error
    if not isinstance(entries, dict) or not all(is_our_entry(name, value) for name, value in entries.items()):
        raise ValueError(
            f"{index} must name the parts of a NaLaDiTPipeline alone, a NaLaDiT and perhaps an AutoencoderKL; save the "
            "pipeline again with save_pretrained"
        )
    for place in (folder, *(folder / part for part in PARTS)):
        for file in sorted(place.glob("*")):
            if file.suffix.lower() == ".py":
                raise ValueError(f"a pipeline's folder must hold no code, got {file}; move it away")


def is_our_entry(name: str, value: object) -> bool:
    """True if save_pretrained writes such an entry into the index of our pipeline."""
    if name not in PARTS:
        return value == NaLaDiTPipeline.__name__ if name == "_class_name" else name.startswith("_") and isinstance(value, str)
    library, kind = PARTS[name]
    if value == [None, None]:
        return name in NaLaDiTPipeline._optional_components
    if not isinstance(value, list) or len(value) != 2:
        return False
    return str(value[0]).split(".")[0] == library and value[1] == kind
