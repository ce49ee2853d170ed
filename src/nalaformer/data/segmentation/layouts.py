"""Where the data sets keep images, masks and names of classes."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..bad_sample import BadSample
from ..folder import held_out_names
from ..images import SUFFIXES, files_below
from .colours import CITYSCAPES, spread_colours
from .masks import IGNORED, read_mask

# a JPEG file changes ids
MASK_SUFFIXES = (".png", ".bmp", ".tif", ".tiff", ".gif")
ADE20K_CLASSES = 150
CLASS_NAMES = "classes.txt"
ADE20K_NAMES = "objectInfo150.txt"


@dataclass(frozen=True, kw_only=True)
class LabelledFiles:
    """One split of a data set."""

    pairs: tuple[tuple[str | None, str | None], ...]
    """Image and mask by name; where one is missing, None."""
    classes: tuple[str, ...]
    """Names, by label."""
    colours: tuple[tuple[int, int, int], ...]
    """In which they are drawn."""
    labels: NDArray[np.int64]
    """Label of each id of a mask, [256]; IGNORED: not counted, -1: no such id."""
    rule: str
    """Which ids there are, for people."""
    is_binary: bool = False
    """Masks are background (0) and object (all other ids)."""
    is_cut: bool = False
    """True if the split was made by holding out images."""

    def labels_of(self, ids: NDArray[np.int64], path: str) -> NDArray[np.uint8]:
        """Return the labels of a mask's ids, or raise BadSample."""
        if self.is_binary:
            return (ids != 0).astype(np.uint8)
        inside = (ids >= 0) & (ids < len(self.labels))
        labels = self.labels[np.where(inside, ids, 0)]
        wrong = ids[~inside | (labels < 0)]
        if wrong.size:
            raise BadSample(path, f"class id {wrong[0]} is out of range; ids are {self.rule}")
        return labels.astype(np.uint8)


def find_files(root: str | Path, split: str, *, holdout: float = 0.0, seed: int = 0, binary: bool = False) -> LabelledFiles:
    """The files of a split, "train" or "val", in whichever of LAYOUTS the folder has.

    holdout: where it has no val split, this share of its images is "val" and the others are "train"; which ones follows from
    their names and the seed. 0: it needs both splits.
    binary: masks of the plain layout are background (0) and object (all other ids, 255 too).
    """
    root = Path(root)
    if split not in ("train", "val"):
        raise ValueError(f'split must be "train" or "val", got {split!r}')
    for is_there, read, val, _ in LAYOUTS.values():
        if not (root / is_there).is_dir():
            continue
        if binary and read is not folders:
            raise ValueError(f"binary masks lie in masks/train and masks/val, got {root} with {is_there}; set binary=false")
        read = two_classes if binary else read
        if not holdout or (root / val).is_dir():
            return read(root, split)
        # images and masks by themselves are a split without a name
        is_whole = is_there == "masks" and not (root / "images" / "train").is_dir()
        return part_of(read(root, "" if is_whole else "train"), root, split, holdout, seed)
    known = "; ".join(f"{name}: {picture}" for name, (_, _, _, picture) in LAYOUTS.items())
    raise ValueError(f"a folder of images and masks must have one of these layouts ({known}), got {root}")


def part_of(files: LabelledFiles, root: Path, split: str, holdout: float, seed: int) -> LabelledFiles:
    """The files of a split, in their order; at least one pair in each."""
    if len(files.pairs) < 2:
        raise ValueError(
            f"{root} must hold two images or more, one to learn from and one to be held out, got {len(files.pairs)}; add some"
        )
    names = [Path(image or str(mask)).relative_to(root).as_posix() for image, mask in files.pairs]
    held_out = held_out_names(names, holdout, seed)
    pairs = tuple(pair for name, pair in zip(names, files.pairs, strict=True) if (name in held_out) == (split == "val"))
    return replace(files, pairs=pairs, is_cut=True)


def ade20k(root: Path, split: str) -> LabelledFiles:
    """Ids of masks from 1; 0 is unlabelled. Names are those of objectInfo150.txt where it is there."""
    name = {"train": "training", "val": "validation"}[split]
    classes = ade20k_names(root / ADE20K_NAMES)
    labels = table_of({0: IGNORED} | {number + 1: number for number in range(len(classes))})
    return LabelledFiles(
        pairs=pairs_of(root / "images" / name, root / "annotations" / name),
        classes=classes,
        colours=spread_colours(len(classes)),
        labels=labels,
        rule=f"0 (unlabelled) to {len(classes)}",
    )


def ade20k_names(path: Path) -> tuple[str, ...]:
    """The last column of a table with tabs, in the order of its first; of several names of a class the first."""
    if not path.exists():
        return tuple(f"class {number + 1}" for number in range(ADE20K_CLASSES))
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:] if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or row[0].strip() != str(number) or not row[-1].strip():
            raise ValueError(
                f"{path} must have a row for each class, by tabs: Idx from 1 on, ..., Name; got {row!r} in line {number + 1}"
            )
    if not 1 <= len(rows) < IGNORED:
        raise ValueError(f"{path} must name 1 to {IGNORED - 1} classes below its headings, got {len(rows)}")
    return tuple(re.split("[,;]", row[-1])[0].strip() for row in rows)


def cityscapes(root: Path, split: str) -> LabelledFiles:
    """The 19 classes that count, from labelIds; all other ids of Cityscapes are not counted."""
    labels = table_of(dict.fromkeys(range(34), IGNORED) | {each.number: label for label, each in enumerate(CITYSCAPES)})
    return LabelledFiles(
        pairs=pairs_of(
            root / "leftImg8bit" / split, root / "gtFine" / split, image_end="_leftImg8bit", mask_end="_gtFine_labelIds"
        ),
        classes=tuple(each.name for each in CITYSCAPES),
        colours=tuple(each.colour for each in CITYSCAPES),
        labels=labels,
        rule="0 to 33, as labelIds have them",
    )


def folders(root: Path, split: str) -> LabelledFiles:
    """Ids of masks are labels, from 0. Names are the lines of classes.txt; without it, the masks to learn from say how many."""
    path = root / CLASS_NAMES
    if path.exists():
        classes, source = class_names(path), str(path)
    else:
        # without splits every mask is learned from
        learned = split and "train"
        pairs = pairs_of(root / "images" / learned, root / "masks" / learned)
        classes = tuple(f"class {label}" for label in range(1 + largest_id(mask for _, mask in pairs if mask is not None)))
        source = f"the masks in {root / 'masks' / learned}"
    if not 1 <= len(classes) <= IGNORED:
        raise ValueError(f"{source} must name 1 to {IGNORED} classes, got {len(classes)}")
    return LabelledFiles(
        pairs=pairs_of(root / "images" / split, root / "masks" / split),
        classes=classes,
        colours=spread_colours(len(classes)),
        labels=table_of({label: label for label in range(len(classes))}),
        rule=f"0 to {len(classes) - 1} by {source}, and {IGNORED} for what is not counted",
    )


def two_classes(root: Path, split: str) -> LabelledFiles:
    """Background and object, by any id but 0. classes.txt may name them otherwise."""
    path = root / CLASS_NAMES
    classes = class_names(path) if path.exists() else ("background", "object")
    if len(classes) != 2:
        raise ValueError(f"{path} must name two classes for binary masks, got {len(classes)}; remove it, or set binary=false")
    return LabelledFiles(
        pairs=pairs_of(root / "images" / split, root / "masks" / split),
        classes=classes,
        colours=spread_colours(2),
        labels=np.minimum(np.arange(256), 1),
        rule="0, and any other for the object",
        is_binary=True,
    )


def class_names(path: Path) -> tuple[str, ...]:
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def check_counted_classes(files: LabelledFiles) -> None:
    """Raise ValueError if the masks of a split count one class or none: there is nothing to tell apart.

    It reads masks until two classes have been found, which is usually the first.
    """
    ids: set[int] = set()
    counted: set[int] = set()
    folder = None
    for _, path in files.pairs:
        if path is None:
            continue
        try:
            found = read_mask(path)
            counted.update(np.unique(files.labels_of(found, path)).tolist())
        # training names it when it meets it
        except BadSample:
            continue
        folder = Path(path).parent
        ids.update(np.unique(found).tolist())
        if len(counted - {IGNORED}) > 1:
            return
    if folder is None:
        return
    names = ", ".join(files.classes[label] for label in sorted(counted - {IGNORED})) or "none"
    fix = "label two classes or more"
    if IGNORED in ids and not files.is_binary:
        fix = f"{IGNORED} is not counted: if it is the object, set binary=true, or save the object as id 1"
    raise ValueError(
        f"masks must count two classes or more, got {names} alone, of the ids {', '.join(map(str, sorted(ids)[:10]))} in "
        f"{folder}; {fix}"
    )


def largest_id(masks: Iterable[str]) -> int:
    """The largest id of all masks that can be read; training names the others when it meets them."""
    largest = -1
    for path in masks:
        try:
            ids = read_mask(path)
        except BadSample:
            continue
        largest = max(largest, int(ids[ids != IGNORED].max(initial=-1)))
    return largest


# folder that tells a layout from the others, its reader, its images of val, and what it looks like
LAYOUTS: dict[str, tuple[str, Callable[[Path, str], LabelledFiles], str, str]] = {
    "Cityscapes": ("leftImg8bit", cityscapes, "leftImg8bit/val", "leftImg8bit/{train,val} and gtFine/{train,val}"),
    "ADE20K": (
        "annotations",
        ade20k,
        "images/validation",
        "images/{training,validation} and annotations/{training,validation}",
    ),
    "plain": ("masks", folders, "images/val", "images/{train,val} and masks/{train,val}"),
}


def table_of(labels: dict[int, int]) -> NDArray[np.int64]:
    """Label by id; 255 is never counted."""
    table = np.full(256, -1, dtype=np.int64)
    table[list(labels)] = list(labels.values())
    table[IGNORED] = IGNORED
    return table


def pairs_of(
    images: Path, masks: Path, *, image_end: str = "", mask_end: str = ""
) -> tuple[tuple[str | None, str | None], ...]:
    """Files of the two folders that have one name, and those that are alone, in the order of their names."""
    for folder in (images, masks):
        if not folder.is_dir():
            more = "; holdout=0.2 would set a fifth of the images aside" if images.name in ("val", "validation") else ""
            raise ValueError(f"images and masks lie in {images} and {masks}, got no folder {folder}{more}")
    of_images, of_masks = files_by_name(images, image_end, SUFFIXES), files_by_name(masks, mask_end, MASK_SUFFIXES)
    if not of_images:
        raise ValueError(f"{images} must hold images (*{image_end}, {', '.join(SUFFIXES)}), got none")
    return tuple((of_images.get(name), of_masks.get(name)) for name in sorted(of_images | of_masks))


def files_by_name(folder: Path, end: str, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Path by its name below the folder without ending."""
    found: dict[str, str] = {}
    for path in files_below(folder):
        if path.suffix.lower() not in suffixes or not path.stem.endswith(end):
            continue
        name = path.relative_to(folder).with_suffix("").as_posix().removesuffix(end)
        if name in found:
            raise ValueError(f"files of one folder must differ in more than their ending, got {found[name]} and {path}")
        found[name] = str(path)
    return found
