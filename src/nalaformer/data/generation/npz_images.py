"""Images and labels in one .npz file, such as Fashion-MNIST."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...atomic_files import atomic_folder
from ..bad_sample import BadSample
from .base import GENERATION_DATA, GenerationData, GenerationDataConfig, as_values

# a few kilobytes of zip can unpack to gigabytes
MOST_BYTES = 16 * 2**30
# labels are numbers of classes, each with a name and weights of its own
MOST_CLASSES = 100_000
# fields of the splits, the first that are there
PARTS = {"train": ("train_",), "val": ("val_", "test_")}
Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Splits = dict[str, tuple[Pixels, Labels]]


class BrokenArrays(BadSample):
    """A .npz file without the arrays that are needed; the message names the field."""

    rule = "is no .npz file of images that can be used"


class NpzFile:
    """The arrays of a .npz file, none of them trusted; nothing is unpickled."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
                self.names = {entry.filename.removesuffix(".npy") for entry in archive.infolist()}
        except zipfile.BadZipFile as error:
            raise BrokenArrays(path, str(error)) from error
        if size > MOST_BYTES:
            raise BrokenArrays(path, f"it unpacks to {size:,} bytes, at most {MOST_BYTES:,} are read")

    def array(self, name: str) -> NDArray[np.generic]:
        if name not in self.names:
            raise BrokenArrays(self.path, f"its field {name} is missing, it has {', '.join(sorted(self.names)) or 'none'}")
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                return np.asarray(arrays[name])
        # the decoders of zip and of numpy raise what they like on hostile bytes
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, SyntaxError, MemoryError) as error:
            raise BrokenArrays(self.path, f"its field {name} cannot be read: {error or type(error).__name__}") from error

    def images(self, name: str) -> Pixels:
        """uint8 [N, H, W] or [N, H, W, 3]."""
        found = self.array(name)
        is_grey_or_rgb = found.ndim == 3 or (found.ndim == 4 and found.shape[3] == 3)
        if found.dtype != np.uint8 or not is_grey_or_rgb or 0 in found.shape:
            wanted = "uint8 [N, H, W] or [N, H, W, 3]"
            raise BrokenArrays(self.path, f"its field {name} must be {wanted}, got {found.dtype} {list(found.shape)}")
        return found.astype(np.uint8, copy=False)

    def labels(self, name: str, count: int) -> Labels:
        """Numbers from 0, one for each of `count` images."""
        found = self.array(name)
        if not np.issubdtype(found.dtype, np.integer) or found.shape != (count,):
            got = f"{found.dtype} {list(found.shape)}"
            raise BrokenArrays(self.path, f"its field {name} must be integers [{count}], one for each image, got {got}")
        if found.min() < 0 or found.max() >= MOST_CLASSES:
            got = found.min() if found.min() < 0 else found.max()
            raise BrokenArrays(self.path, f"its field {name} must hold labels from 0 to {MOST_CLASSES - 1:,}, got {got}")
        return found.astype(np.int64)

    def class_names(self, count: int) -> tuple[str, ...]:
        """The field class_names where there is one, else the numbers."""
        if "class_names" not in self.names:
            return tuple(str(number) for number in range(count))
        found = self.array("class_names")
        if found.dtype.kind != "U" or found.ndim != 1 or len(found) < count:
            got = f"{found.dtype} {list(found.shape)}"
            raise BrokenArrays(self.path, f"its field class_names must be text [{count}], one for each label, got {got}")
        names = tuple(str(name) for name in found)
        # they become names of folders
        bad = [name for name in names if not name or name.startswith(".") or set(name) & set("/\\")]
        if bad or len(set(names)) < len(names):
            reason = f"its field class_names must hold names of folders, all different, got {bad[:1] or list(names)}"
            raise BrokenArrays(self.path, reason)
        return names


def read_splits(path: str | Path, *, holdout: float, seed: int) -> tuple[Splits, tuple[str, ...]]:
    """Images and labels of "train" and "val", and the names of the classes.

    Fields: train_images and train_labels with val_images or test_images and their labels; or images and labels, of which
    `holdout` of each class is "val".
    """
    file = NpzFile(path)
    if "images" in file.names and "train_images" not in file.names:
        if not holdout:
            raise BrokenArrays(path, "it has no field train_images; holdout=0.1 would set a tenth of its images aside")
        images = file.images("images")
        labels = file.labels("labels", len(images))
        is_held_out = held_out(labels, holdout, seed)
        splits = {"train": (images[~is_held_out], labels[~is_held_out]), "val": (images[is_held_out], labels[is_held_out])}
    else:
        splits = {}
        for split, prefixes in PARTS.items():
            prefix = next((each for each in prefixes if f"{each}images" in file.names), prefixes[0])
            images = file.images(f"{prefix}images")
            splits[split] = images, file.labels(f"{prefix}labels", len(images))
        if splits["train"][0].shape[1:] != splits["val"][0].shape[1:]:
            sizes = " and ".join(str(list(images.shape[1:])) for images, _ in splits.values())
            raise BrokenArrays(path, f"the images of its splits must have one size, got {sizes}")
    return splits, file.class_names(1 + max(int(labels.max()) for _, labels in splits.values()))


def held_out(labels: Labels, share: float, seed: int) -> NDArray[np.bool_]:
    """Which images are set aside: this share of each class, one at least of each."""
    chosen = np.zeros(len(labels), dtype=np.bool_)
    random = np.random.default_rng(seed)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        if len(places) < 2:
            raise ValueError(f"a class needs two images, one to learn from and one to be held out, got one of class {label}")
        count = min(max(1, round(share * len(places))), len(places) - 1)
        chosen[random.permutation(places)[:count]] = True
    return chosen


@GENERATION_DATA.register("npz")
class NpzImages(GenerationData):
    """The images of a .npz file, in memory, in their own size; grey ones have one channel."""

    def __init__(self, config: GenerationDataConfig, split: str) -> None:
        super().__init__(config, split)
        splits, self.class_names = read_splits(config.data, holdout=config.holdout, seed=config.data_seed)
        self.images, self.labels = splits[split]
        self.height, self.width = self.images.shape[1:3]
        self.channels = 3 if self.images.ndim == 4 else 1

    @classmethod
    def recognises(cls, data: str) -> bool:
        return data.lower().endswith(".npz") and Path(data).is_file()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return as_values(self.mirrored(self.images[index])), int(self.labels[index])


def unpack_images(path: str | Path, out: str | Path, *, holdout: float = 0.0, seed: int = 0) -> dict[str, int]:
    """Write the images of a .npz file as PNG into out/train/<class>/ and out/val/<class>/, from which classifiers learn.

    Returns the number of images of each split. The folder is whole or not there.
    """
    from PIL import Image

    splits, class_names = read_splits(path, holdout=holdout, seed=seed)
    # numbers of equal length, so that the order of the names is the order of the labels
    digits = len(str(len(class_names) - 1))
    folders = [name if not name.isdigit() else name.zfill(digits) for name in class_names]
    # to wait for 70,000 files one by one takes minutes
    with atomic_folder(out, wait_for_disk=False) as aside:
        for split, (images, labels) in splits.items():
            for name in folders:
                (aside / split / name).mkdir(parents=True)
            for index, (pixels, label) in enumerate(zip(images, labels, strict=True)):
                Image.fromarray(pixels).save(aside / split / folders[label] / f"{index:06d}.png")
    return {split: len(labels) for split, (_, labels) in splits.items()}
