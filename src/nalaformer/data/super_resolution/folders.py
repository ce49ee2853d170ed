"""Folders of photographs: large ones alone, or with the small ones that belong to them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..bad_sample import BadSample
from ..images import SUFFIXES, find_images, listed, opened_image, read_stored
from .resize import reduce

SPLITS = {"train": "train", "val": "valid"}
"""The splits, and what DIV2K calls them."""
EVERY = 10
"""A folder without splits gives one image of so many, the first among them, to evaluation."""


class Files(NamedTuple):
    """A photograph, and the small one that belongs to it; None: it is made by reduction."""

    high: Path
    low: Path | None


Pair = tuple[Tensor, Tensor]
"""Small and large image: uint8 [3, h, w] and [3, scale h, scale w]."""


def find_pairs(root: str | Path, split: str, *, scale: int) -> list[Files]:
    """The files of a split, sorted; `root` has one of these layouts, the first that fits.

    root/DIV2K_train_HR, DIV2K_valid_HR and DIV2K_train_LR_bicubic/X2, ...: DIV2K as it is distributed;
    root/train/HR, root/val/HR and, if there are small images, root/train/LR or root/train/LR/X2, ... (or LR_bicubic);
    root/train and root/val: large images alone;
    root/HR and, if there are small images, root/LR or LR_bicubic: all for evaluation, as Set5 and its like;
    root: large images alone, one of ten for evaluation.
    A small image is named like its large one, or with "x2" behind.
    """
    if split not in SPLITS:
        raise ValueError(f'split must be "train" or "val", got {split!r}')
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"data must be a folder of images, got {root}, which is none")
    if any((root / f"DIV2K_{name}_HR").is_dir() for name in SPLITS.values()):
        high = existing(root / f"DIV2K_{SPLITS[split]}_HR", split)
        low = root / f"DIV2K_{SPLITS[split]}_LR_bicubic"
    elif any((root / name).is_dir() for name in SPLITS):
        folder = existing(root / split, split)
        high, low = folder / "HR", small_images(folder)
        if not high.is_dir() and low.is_dir():
            raise ValueError(f"small images need their large ones in {high}, got only {low}")
        high = high if high.is_dir() else folder
    elif (root / "HR").is_dir():
        if split == "train":
            raise ValueError(f"images to learn from must lie in {root / 'train' / 'HR'}, got {root / 'HR'}, all for evaluation")
        high, low = root / "HR", small_images(root)
    else:
        return one_of_ten(root, split)
    others = sorted(path.name for path in low.glob("X[234]") if path.is_dir())
    if others and f"X{scale}" not in others:
        raise ValueError(f"small images for x{scale} must lie in {low / f'X{scale}'}, got only {', '.join(others)} there")
    low = low / f"X{scale}" if others else low
    small = {path.relative_to(low).with_suffix(""): path for path in find_images([low])} if low.is_dir() else None
    return [Files(path, None if small is None else partner(path, high, low, small, scale)) for path in find_images([high])]


def small_images(folder: Path) -> Path:
    return folder / "LR" if (folder / "LR").is_dir() else folder / "LR_bicubic"


def existing(folder: Path, split: str) -> Path:
    if not folder.is_dir():
        raise ValueError(f"the {split} images must lie in {folder}, got no such folder")
    return folder


def one_of_ten(root: Path, split: str) -> list[Files]:
    found = find_images([root])
    if len(found) < 2:
        raise ValueError(f"training and evaluation need an image each, got {len(found)} in {root}")
    return [Files(path, None) for number, path in enumerate(found) if (number % EVERY == 0) == (split == "val")]


def partner(path: Path, high: Path, low: Path, small: dict[Path, Path], scale: int) -> Path:
    """The small image of a large one; where there is none, the name that it should have."""
    name = path.relative_to(high).with_suffix("")
    candidates = (name, name.with_name(f"{name.name}x{scale}"))
    return next((small[each] for each in candidates if each in small), low / name.with_suffix(path.suffix))


class ImagePairs:
    """Pairs of a split by number, decoded once and kept while they fit into `kept_mib`.

    A large image is cut to a multiple of the scale. Without a small one it is reduced as MATLAB does it.
    """

    def __init__(self, files: list[Files], *, scale: int, kept_mib: int = 2048) -> None:
        self.files, self.scale = files, scale
        self.room = kept_mib * 2**20
        self.kept: dict[int, Pair] = {}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Pair:
        if index in self.kept:
            return self.kept[index]
        pair = self.read(self.files[index])
        size = sum(image.nbytes for image in pair)
        if size <= self.room:
            self.room -= size
            self.kept[index] = pair
        return pair

    def read(self, files: Files) -> Pair:
        scale, high = self.scale, as_tensor(files.high)
        height, width = (side // scale for side in high.shape[1:])
        if not height or not width:
            raise BadSample(files.high, f"its sides must be at least the scale, {scale}, got {size_of(high)}")
        if files.low is None:
            high = high[:, : height * scale, : width * scale].contiguous()
            return reduce(high, scale), high
        if not files.low.is_file():
            expected = f"{files.high.stem} or {files.high.stem}x{scale} ({', '.join(SUFFIXES)})"
            raise BadSample(files.high, f"its small image is missing; {files.low.parent} must hold {expected}")
        low = as_tensor(files.low)
        if low.shape[1:] != (height, width):
            raise BadSample(
                files.low,
                f"its size must be that of {files.high} divided by {scale}, {width} x {height}, got {size_of(low)}",
            )
        return low, high[:, : height * scale, : width * scale].contiguous()


def as_tensor(path: Path) -> Tensor:
    """uint8 [3, H, W], as it is stored: the program that made the small image may not have kept the notes of the large one."""
    with listed(path), opened_image(path) as image:
        return torch.from_numpy(np.array(read_stored(image))).permute(2, 0, 1).contiguous()


def size_of(image: Tensor) -> str:
    return f"{image.shape[2]} x {image.shape[1]}"


class Patches(Dataset[Pair]):
    """Random patches, `per_image` of each image: (low [3, p / scale, p / scale], high [3, p, p]), turned and flipped.

    size: p, of the large patch; rounded down to a multiple of the scale.
    """

    def __init__(self, pairs: ImagePairs, *, size: int, per_image: int) -> None:
        if size < pairs.scale:
            raise ValueError(f"patches must have at least the scale, {pairs.scale}, as their side, got {size}")
        self.pairs, self.small, self.per_image = pairs, size // pairs.scale, per_image

    def __len__(self) -> int:
        return len(self.pairs) * self.per_image

    def __getitem__(self, index: int) -> Pair:
        index %= len(self.pairs)
        low, high = self.pairs[index]
        rows, columns = low.shape[1] - self.small + 1, low.shape[2] - self.small + 1
        scale = self.pairs.scale
        if rows < 1 or columns < 1:
            side = self.small * scale
            raise BadSample(
                self.pairs.files[index].high,
                f"it must hold a patch of {side} x {side} pixels, got {size_of(high)}; use a smaller patch_size",
            )
        # the loader has seeded them for this sample
        top, left, turns, flip = (int(np.random.randint(count)) for count in (rows, columns, 4, 2))
        corner = (slice(None), slice(top, top + self.small), slice(left, left + self.small))
        large = (slice(None), *(slice(scale * each.start, scale * each.stop) for each in corner[1:]))
        return symmetric(low[corner], turns, bool(flip)), symmetric(high[large], turns, bool(flip))


def symmetric(image: Tensor, turns: int, flip: bool) -> Tensor:
    """One of the eight symmetries of the square."""
    image = image.rot90(turns, dims=(1, 2))
    return (image.flip(2) if flip else image).contiguous()


class EvalImages(Dataset[Pair]):
    """Whole images, or their middle.

    crop: side of the middle, of the large image; 0: the whole. smallest: no side of a large one is below.
    """

    def __init__(self, pairs: ImagePairs, *, crop: int = 0, smallest: int = 1) -> None:
        self.pairs, self.crop, self.smallest = pairs, crop, smallest

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        low, high = self.pairs[index]
        scale = self.pairs.scale
        if self.crop:
            side = max(1, self.crop // scale)
            top, left = (max(0, (length - side) // 2) for length in low.shape[1:])
            low = low[:, top : top + side, left : left + side]
            high = high[:, scale * top : scale * (top + side), scale * left : scale * (left + side)]
        if min(high.shape[1:]) < self.smallest:
            path = self.pairs.files[index].high
            raise BadSample(path, f"its sides must be at least {self.smallest} pixels, got {size_of(high)}")
        return low, high

    @staticmethod
    def collate(samples: list[Pair]) -> list[Pair]:
        """Images have sizes of their own."""
        return samples
