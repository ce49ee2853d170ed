"""Images with their masks, checked one by one."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..bad_sample import BadSample
from ..images import SUFFIXES, listed, read_image
from .layouts import MASK_SUFFIXES, find_files
from .masks import read_mask

if TYPE_CHECKING:
    from PIL.Image import Image

Labels = NDArray[np.uint8]
Sample = tuple[Tensor, Tensor]


class MaskedImages(Dataset[Sample]):
    """A split of a folder in one of LAYOUTS -> (image [3, H, W], labels [H', W'] uint8, IGNORED where not counted).

    holdout, seed: as in `find_files`.
    transform: from an RGB image and its labels to the sample; it is called with the random state that the loader has set.
    binary: 0 is background, any other id the object.
    """

    def __init__(
        self,
        root: str | Path,
        split: str,
        *,
        transform: "Callable[[Image, Labels], Sample]",
        holdout: float = 0.0,
        seed: int = 0,
        binary: bool = False,
    ) -> None:
        self.files = find_files(root, split, holdout=holdout, seed=seed, binary=binary)
        self.classes, self.colours = self.files.classes, self.files.colours
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files.pairs)

    def __getitem__(self, index: int) -> Sample:
        return self.transform(*self.read(index))

    def read(self, index: int) -> "tuple[Image, Labels]":
        """Image and labels as the files have them, or BadSample."""
        image_path, mask_path = self.files.pairs[index]
        if image_path is None or mask_path is None:
            path, other = (mask_path, "image") if image_path is None else (image_path, "mask")
            assert path is not None
            endings = ", ".join(SUFFIXES if image_path is None else MASK_SUFFIXES)
            raise BadSample(path, f"there is no {other} of that name ({endings})")
        ids = read_mask(mask_path)
        with listed(image_path):
            image = read_image(image_path, size=(ids.shape[1], ids.shape[0]))
        if ids.shape != (image.height, image.width):
            raise BadSample(
                mask_path, f"the mask is {ids.shape[1]} x {ids.shape[0]}, its image {image_path} {image.width} x {image.height}"
            )
        return image, self.files.labels_of(ids, mask_path)

    @staticmethod
    def collate(samples: list[Sample]) -> tuple[list[Tensor], list[Tensor]]:
        """Images and labels of any sizes."""
        images, labels = zip(*samples, strict=True)
        return list(images), list(labels)


def stack_equal(images: list[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Images of one shape together: (stack, their places in the list) for each shape."""
    places: dict[torch.Size, list[int]] = {}
    for place, image in enumerate(images):
        places.setdefault(image.shape, []).append(place)
    return [(torch.stack([images[place] for place in group]), group) for group in places.values()]
