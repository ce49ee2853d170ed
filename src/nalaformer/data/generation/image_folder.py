"""Images of a folder per class, cut to squares of one size."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..folder import ImageFolder, has_splits, subfolders
from ..images import notes_of_ignored
from .base import GENERATION_DATA, SPLITS, GenerationData, GenerationDataConfig, as_values
from .latents import Latents

if TYPE_CHECKING:
    from PIL.Image import Image


@GENERATION_DATA.register("folder")
class FolderImages(GenerationData):
    """root/train/<class>/ and root/val/<class>/, or root/<class>/ and a holdout, as `ImageFolder` reads them."""

    channels = 3

    def __init__(self, config: GenerationDataConfig, split: str) -> None:
        super().__init__(config, split)
        self.height = self.width = config.image_size
        self.folder = ImageFolder(config.data, split, transform=self.prepare, holdout=config.holdout, seed=config.data_seed)
        self.class_names = self.folder.classes
        if has_splits(Path(config.data)):
            train, val = ({path.name for path in subfolders(Path(config.data) / each)} for each in SPLITS)
            if train != val:
                odd = ", ".join(sorted(train ^ val)[:5])
                raise ValueError(f"train and val must have the same class folders, got only in one of them: {odd}")
        self.folder.check_classes()

    @classmethod
    def recognises(cls, data: str) -> bool:
        return Path(data).is_dir() and not Latents.recognises(data)

    def notes(self) -> list[str]:
        return notes_of_ignored(self.folder.ignored)

    def prepare(self, image: "Image") -> Tensor:
        return as_values(self.mirrored(np.asarray(square(image, self.config.image_size))))

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.folder[index]


def square(image: "Image", size: int) -> "Image":
    """The square in the middle of an image, [size, size]; Pillow averages over what it makes smaller."""
    from PIL import Image as PillowImage

    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.resize((size, size), PillowImage.Resampling.BICUBIC, box=(left, top, left + side, top + side))
