"""Images sorted into a folder per class: the ImageNet layout, or class folders alone."""

import hashlib
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

from .bad_sample import BadSample
from .images import SUFFIXES, files_below, has_image_name, is_hidden, listed, opened_image, read_image

if TYPE_CHECKING:
    from PIL.Image import Image

SPLITS = ("train", "val")
# what others call their splits: as classes they would be learned in earnest
OTHER_SPLITS = ("valid", "validation", "dev", "eval", "test", "training")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """root/split/class/**/*.jpg -> (image [3, H, W], label); labels follow the sorted names of the class folders.

    transform: from an RGB image to a tensor; it is called with the random state that the loader has set for the sample.
    holdout: where root has no val/ but class folders (or train/ alone), this share of each class's images is "val" and the
    others are "train". Which ones follows from their names and the seed, on every machine alike. 0: root needs train/ and val/.
    """

    def __init__(
        self, root: str | Path, split: str, *, transform: "Callable[[Image], Tensor]", holdout: float = 0.0, seed: int = 0
    ) -> None:
        folder = Path(root) / split
        self.is_cut = holdout > 0 and not has_splits(Path(root))
        if self.is_cut:
            folder = uncut_folder(Path(root))
        elif not folder.is_dir():
            raise ValueError(
                f"a folder of images needs root/{split}/<class>/<image>, got no folder {folder}; holdout=0.2 would set a fifth "
                "of the images aside"
            )
        self.folder = folder
        class_folders = sorted(subfolders(folder))
        self.classes = tuple(path.name for path in class_folders)
        self.transform = transform
        self.files: list[tuple[str, int]] = []
        # files that look like data and are not read: beside the class folders, or with another ending
        self.ignored = [str(path) for path in sorted(folder.iterdir()) if path.is_file() and not is_hidden(path.name)]
        for label, class_folder in enumerate(class_folders):
            found = files_below(class_folder)
            images = [path for path in found if has_image_name(path)]
            self.ignored += [str(path) for path in found if not has_image_name(path) and path.is_file()]
            if self.is_cut:
                images = part_of(images, split, class_folder, holdout, seed)
            self.files += [(str(path), label) for path in images]
        if not self.files:
            raise ValueError(f"{folder} must hold images ({', '.join(SUFFIXES)}) in a folder per class, got none")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        with listed(path):
            image = read_image(path)
        return self.transform(image), label

    def check_classes(self) -> None:
        """Raise ValueError if a class has no image that can be read: it would be neither learned nor missed in the figures."""
        wanted = dict(enumerate(self.classes))
        for path, label in self.files:
            if label in wanted and is_readable(path):
                del wanted[label]
        if wanted:
            label, name = next(iter(wanted.items()))
            count = sum(each == label for _, each in self.files)
            more = f", nor has any of {len(wanted) - 1} other classes" if len(wanted) > 1 else ""
            raise ValueError(
                f"each class needs an image that can be read in each split, got none among {count} of {name} in {self.folder}"
                f"{more}; add images, or remove the folder of that class from each split"
            )


def is_readable(path: str) -> bool:
    try:
        with listed(path):
            read_image(path)
    except BadSample:
        return False
    return True


def subfolders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name)]


def has_splits(root: Path) -> bool:
    return all((root / split).is_dir() for split in SPLITS)


def uncut_folder(root: Path) -> Path:
    """The folder whose classes lose a share to the val split: root, or root/train if there is nothing else."""
    names = {path.name for path in subfolders(root)}
    others = sorted(name for name in names if name.lower() in OTHER_SPLITS)
    if others and "train" in {name.lower() for name in names}:
        raise ValueError(
            f"{root} must hold train/ and val/, or a folder per class, got train/ beside {others[0]}/; rename {others[0]}/ to "
            "val/, or leave train/ alone there"
        )
    folder = root / "train" if names == {"train"} else root
    if len(subfolders(folder)) < 2:
        found = ", ".join(sorted(path.name for path in subfolders(folder))) or "none"
        raise ValueError(f"{folder} must hold a folder of images for each of two classes or more, got {found}")
    return folder


def part_of(images: list[Path], split: str, class_folder: Path, holdout: float, seed: int) -> list[Path]:
    """One class's images of a split, in their order; at least one in each."""
    if len(images) < 2:
        raise ValueError(
            f"a class needs two images or more, one to learn from and one to be held out, got {len(images)} in {class_folder} "
            f"({', '.join(SUFFIXES)}); add some, or move the folder away"
        )
    names = {path: path.relative_to(class_folder.parent).as_posix() for path in images}
    held_out = held_out_names(list(names.values()), holdout, seed)
    return [path for path in images if (names[path] in held_out) == (split == "val")]


def held_out_names(names: list[str], holdout: float, seed: int) -> set[str]:
    """Return a share of two names or more, at least one and not all; which ones follows from the names and the seed."""
    count = min(max(1, round(holdout * len(names))), len(names) - 1)
    return set(sorted(names, key=lambda name: rank_of(name, seed))[:count])


def rank_of(name: str, seed: int) -> str:
    """A number without pattern that follows from the name alone, so that few images change sides when some are added."""
    # macOS stores accents apart from their letters
    name = unicodedata.normalize("NFC", name)
    return hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogateescape")).hexdigest()


def usual_side(files: list[str], *, most: int = 100) -> int:
    """The median of the images' shorter sides, of up to `most` images spread over the list; 0 if none of them can be read."""
    sides = []
    for path in files[:: -(-len(files) // most)]:
        try:
            with listed(path), opened_image(path) as image:
                sides.append(min(image.size))
        # what is no image is for the reader to refuse, with its name
        except BadSample:
            continue
    return sorted(sides)[len(sides) // 2] if sides else 0
