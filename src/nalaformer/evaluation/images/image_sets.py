"""Sets of images that are compared: samples and a reference, from a folder, a .npz file or generated data."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data import SUFFIXES, BadSample, read_image
from ...data.folder import subfolders
from ...data.generation import GenerationDataConfig, NpzFile, Shapes, as_pixels, open_generation_data, square
from ...data.generation.npz_images import PARTS
from ...data.images import files_below, has_image_name

# names under which programs save samples
IMAGES, LABELS = ("images", "samples", "arr_0"), ("labels", "arr_1")


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """uint8 [N, 3, H, W], and the classes of its images where they are known."""

    images: Tensor
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()
    """The name of each label; empty: labels are numbers."""

    def names(self) -> list[str]:
        """The name of each image's class."""
        if self.labels is None:
            raise ValueError(
                "the classes of the samples must be known here: put them into a folder for each class, or into a .npz file "
                "with the field labels"
            )
        return [self.class_names[label] if self.class_names else str(label) for label in self.labels.tolist()]

    def thinned(self, count: int) -> "ImageSet":
        """At most so many images, spread over all of them: folders lie one class after the other. 0: all."""
        if count < 0:
            raise ValueError(f"the number of images must not be negative, got {count}")
        if not count or count >= len(self.images):
            return self
        chosen = torch.arange(count) * len(self.images) // count
        labels = self.labels if self.labels is None else self.labels[chosen]
        return ImageSet(images=self.images[chosen], labels=labels, class_names=self.class_names)


def read_image_set(source: str | Path, *, split: str = "val", size: int = 0) -> ImageSet:
    """Images of a folder (in a folder for each class, or not), of a .npz file, or "shapes".

    split: where a folder has train/ and val/, or a file train_images and so on. size: cut the square in the middle of each
    image of a folder and resize it so; 0: they must have one size.
    """
    if split not in PARTS:
        raise ValueError(f'split must be "train" or "val", got {split!r}')
    if Shapes.recognises(str(source)):
        return of_shapes(split)
    if Path(source).is_dir():
        return of_folder(Path(source), split, size)
    if Path(source).is_file():
        return of_npz(NpzFile(source), split)
    raise ValueError(f'images must be a folder, a .npz file or "shapes", got {source}, which does not exist')


def of_shapes(split: str) -> ImageSet:
    data = open_generation_data(GenerationDataConfig(data="shapes", train_samples=2_000), split)
    images, labels = zip(*(data[index] for index in range(len(data))), strict=True)
    return ImageSet(images=as_pixels(torch.stack(images)), labels=torch.tensor(labels), class_names=data.class_names)


def of_npz(file: NpzFile, split: str) -> ImageSet:
    prefixes = [prefix for prefix in PARTS[split] if f"{prefix}images" in file.names]
    name = f"{prefixes[0]}images" if prefixes else next((each for each in IMAGES if each in file.names), "images")
    label_names = (f"{prefixes[0]}labels",) if prefixes else LABELS
    pixels = torch.from_numpy(file.images(name))
    grey_or_rgb = pixels.permute(0, 3, 1, 2) if pixels.ndim == 4 else pixels[:, None].expand(-1, 3, -1, -1)
    found = next((each for each in label_names if each in file.names), None)
    if found is None:
        return ImageSet(images=grey_or_rgb)
    labels = torch.from_numpy(file.labels(found, len(pixels)))
    names = file.class_names(int(labels.max()) + 1) if "class_names" in file.names else ()
    return ImageSet(images=grey_or_rgb, labels=labels, class_names=names)


def of_folder(root: Path, split: str, size: int) -> ImageSet:
    root = root / split if (root / split).is_dir() else root
    classes = sorted(path.name for path in subfolders(root))
    places = [root / name for name in classes] or [root]
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for label, place in enumerate(places):
        for path in (path for path in files_below(place) if has_image_name(path) and path.is_file()):
            image = read_image(path)
            pixels = np.array(square(image, size) if size else image)
            if images and pixels.shape != images[0].shape:
                sizes = " and ".join(f"{each.shape[1]} x {each.shape[0]}" for each in (images[0], pixels))
                raise BadSample(path, f"images of a set must have one size, got {sizes}; give a size to cut and resize them")
            images.append(pixels)
            labels.append(label)
    if not images:
        raise ValueError(f"a folder of images must hold at least one ({', '.join(SUFFIXES)}), got none below {root}")
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return ImageSet(images=stacked, labels=torch.tensor(labels) if classes else None, class_names=tuple(classes))
