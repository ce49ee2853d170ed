"""Images of a .npz file as sequences, such as Fashion-MNIST: a token for each pixel, or a vector for each patch or row."""

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nalaformer.data.generation.npz_images import Labels, NpzFile, Pixels

from .base import SEQUENCES, Arrays, SequenceData, SequenceFacts


class ImageFile(SequenceData):
    """Fields train_images, uint8 [n, height, width], train_labels, test_images and test_labels.

    The last tenth of the train images is the val split; how many samples there are is what the file holds, at most `samples`.
    """

    stream_name = "image_file"

    def __init__(self, *, split: str, samples: int, seed: int = 0, file: str = "") -> None:
        super().__init__(split=split, samples=samples, seed=seed)
        if not file or not Path(file).is_file():
            raise ValueError(
                f"file must be a .npz file with train_images, train_labels, test_images and test_labels, got {file!r}; pass "
                'data_options=\'{"file": "/path/to/images.npz"}\''
            )
        self.file = file
        self.samples = min(samples, len(self.content[1]))
        self.chance = 1 / self.classes

    @cached_property
    def arrays(self) -> dict[str, tuple[Pixels, Labels]]:
        """Images [n, height, width] and labels of the two parts of the file."""
        file, found = NpzFile(self.file), {}
        for part in ("train", "test"):
            images = file.images(f"{part}_images")
            if images.ndim != 3:
                raise ValueError(f"images must be grey, [n, height, width], got {list(images.shape)} in {self.file}")
            found[part] = images, file.labels(f"{part}_labels", len(images))
        return found

    @cached_property
    def content(self) -> tuple[Pixels, Labels]:
        """Images and labels of the split."""
        images, labels = self.arrays["test" if self.split == "test" else "train"]
        kept = len(labels) - max(1, len(labels) // 10)
        place = {"train": slice(0, kept), "val": slice(kept, None), "test": slice(None)}[self.split]
        return images[place], labels[place]

    @property
    def classes(self) -> int:
        return 1 + max(int(labels.max()) for _, labels in self.arrays.values())


@SEQUENCES.register("pixels")
class ImagePixels(ImageFile):
    """A token for each pixel, row by row: 256 tokens of grey."""

    @property
    def facts(self) -> SequenceFacts:
        height, width = self.content[0].shape[1:]
        return SequenceFacts(answers="sequence", outputs=self.classes, length=height * width, vocabulary=256)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        images, labels = self.content
        return {"inputs": images[indices].reshape(len(indices), -1), "targets": labels[indices]}


@SEQUENCES.register("patches")
class ImagePatches(ImageFile):
    """A vector for each square of `patch` pixels, row by row, grey from -1 to 1: what a plain vision transformer sees."""

    def __init__(self, *, split: str, samples: int, seed: int = 0, file: str = "", patch: int = 4) -> None:
        super().__init__(split=split, samples=samples, seed=seed, file=file)
        height, width = self.content[0].shape[1:]
        if patch < 1 or height % patch or width % patch:
            raise ValueError(f"patch must divide the sides of the images, {height} x {width}, got {patch}")
        self.patch = patch

    @property
    def facts(self) -> SequenceFacts:
        height, width = self.content[0].shape[1:]
        length = height * width // self.patch**2
        return SequenceFacts(answers="sequence", outputs=self.classes, length=length, channels=self.patch**2)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        images, labels = self.content
        grey = as_grey(images[indices])
        count, height, width = grey.shape
        cells = grey.reshape(count, height // self.patch, self.patch, width // self.patch, self.patch)
        return {"inputs": cells.swapaxes(2, 3).reshape(count, -1, self.patch**2), "targets": labels[indices]}


@SEQUENCES.register("image_rows")
class ImageRows(ImageFile):
    """A vector for each row of pixels, grey from -1 to 1: the image as it is, for models of images."""

    @property
    def facts(self) -> SequenceFacts:
        height, width = self.content[0].shape[1:]
        return SequenceFacts(answers="sequence", outputs=self.classes, length=height, channels=width)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        images, labels = self.content
        return {"inputs": as_grey(images[indices]), "targets": labels[indices]}


def as_grey(images: Pixels) -> NDArray[np.float32]:
    """From -1 to 1."""
    return images.astype(np.float32) / 127.5 - 1
