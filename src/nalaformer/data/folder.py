"""Images sorted into a folder per class: the ImageNet layout."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

from .images import SUFFIXES, read_image

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """root/split/class/**/*.jpg -> (image [3, H, W], label); labels follow the sorted names of the class folders.

    transform: from an RGB image to a tensor; it is called with the random state that the loader has set for the sample.
    """

    def __init__(self, root: str | Path, split: str, *, transform: "Callable[[Image], Tensor]") -> None:
        folder = Path(root) / split
        if not folder.is_dir():
            raise ValueError(f"a folder of images needs root/{split}/<class>/<image>, got no folder {folder}")
        class_folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        self.classes = tuple(path.name for path in class_folders)
        self.transform = transform
        self.files = [
            (str(path), label)
            for label, class_folder in enumerate(class_folders)
            for path in sorted(class_folder.rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise ValueError(f"{folder} must hold images ({', '.join(SUFFIXES)}) in a folder per class, got none")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return self.transform(read_image(path)), label
