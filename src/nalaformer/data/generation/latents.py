"""Latents of images that were encoded once, on disk: a folder of plain arrays with a note about them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...json_text import parse_json
from ..bad_sample import BadSample
from ..mapped_files import mapped
from .base import GENERATION_DATA, GenerationData, GenerationDataConfig

ABOUT = "about.json"
FORMAT = "nalaformer latents 1"


@GENERATION_DATA.register("latents")
class Latents(GenerationData):
    """A folder that `encode_images` wrote: latents [C, h, w], scaled as the autoencoder says.

    Training draws mean + deviation * noise, anew each time; evaluation takes the mean.
    """

    def __init__(self, config: GenerationDataConfig, split: str) -> None:
        super().__init__(config, split)
        root = Path(config.data)
        about = read_note(root / ABOUT)
        try:
            if about["format"] != FORMAT:
                raise ValueError(f"its format must be {FORMAT}, got {about['format']}")
            # which autoencoder made them: samples are decoded by that one alone
            self.autoencoder = str(about["autoencoder"])
            self.class_names = tuple(str(name) for name in about["class_names"])
            self.channels, self.height, self.width = (int(side) for side in about["shape"])
            shards = int(about["shards"][split])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"it is not as `nalaformer data encode` writes it: {type(error).__name__} {error}"
            raise BadSample(root / ABOUT, reason) from error
        self.paths: list[Path] = []
        self.shards, labels = [], [np.empty(0, dtype=np.int64)]
        # one by one: a number that is not true ends at the first file that is missing
        for number in range(shards):
            path = shard_path(root, split, number)
            self.paths.append(path)
            self.shards.append(read_moments(path, (2, self.channels, self.height, self.width)))
            labels.append(read_labels(path.with_suffix(".json"), len(self.shards[-1]), len(self.class_names)))
        self.labels = np.concatenate(labels)
        self.ends = np.cumsum([len(each) for each in labels[1:]])
        if not len(self.labels):
            raise BadSample(root / ABOUT, f"its split {split} must hold an image at least, got none; encode the images again")

    @classmethod
    def recognises(cls, data: str) -> bool:
        return (Path(data) / ABOUT).is_file()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = int(np.searchsorted(self.ends, index, side="right"))
        place = index - (int(self.ends[shard - 1]) if shard else 0)
        mean, deviation = torch.from_numpy(np.array(self.shards[shard][place], dtype=np.float32))
        if not bool(mean.isfinite().all() and deviation.isfinite().all()):
            raise BadSample(self.paths[shard], f"its latent {place} must be finite")
        if self.split == "train":
            # the loader has seeded them for this sample
            mean = mean + deviation * torch.randn(mean.shape)
        return mean, int(self.labels[index])


def shard_path(root: Path, split: str, number: int) -> Path:
    """Mean and deviation, float16 [images, 2, C, h, w]; the labels lie beside it in a .json file."""
    return root / f"{split}_{number:05d}.npy"


def read_note(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise BadSample(path, f"it cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadSample(path, f"it must be an object, got {type(found).__name__}")
    return found


def read_moments(path: Path, shape: tuple[int, ...]) -> NDArray[np.float16]:
    try:
        found = mapped(path)
    except (ValueError, OSError) as error:
        raise BadSample(path, str(error)) from error
    if found.dtype != np.float16 or found.shape[1:] != shape:
        raise BadSample(
            path, f"it must be float16 [images, {', '.join(map(str, shape))}], got {found.dtype} {list(found.shape)}"
        )
    return found


def read_labels(path: Path, count: int, classes: int) -> NDArray[np.int64]:
    labels = read_note(path).get("labels")
    if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < classes for label in labels):
        raise BadSample(path, f"its field labels must be a list of numbers from 0 to {classes - 1}")
    if len(labels) != count:
        raise BadSample(path, f"its field labels must have one for each of {count} latents, got {len(labels)}")
    return np.array(labels, dtype=np.int64)
