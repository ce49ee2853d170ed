"""Objects in images, annotated as COCO does: a JSON file beside a folder of images."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...json_text import parse_json
from ..bad_sample import BadSample
from ..folder import held_out_names
from ..images import read_image
from .masks import is_number, read_mask, resized_side, short

if TYPE_CHECKING:
    from PIL.Image import Image

# COCO's year, and the name that exporters give the val split; "" is a folder without splits, which CVAT calls "default"
SPLIT_NAMES = {"train": ("train", "train2017"), "val": ("val", "val2017", "valid"), "test": ("test", "test2017")}
SPLIT_NAMES |= {"": ("default", "")}

# of a box, in pixels: float32 rounds less away, and detectors stop at a box of no width
SMALLEST_SIDE = 0.001


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The objects of one image, in pixels of that image."""

    boxes: NDArray[np.float32]
    """[N, 4]: left, top, right, bottom."""
    labels: NDArray[np.int64]
    """[N], from 0, in the order of the categories' ids."""
    crowds: NDArray[np.bool_]
    """[N]: a region of many objects, which are not told apart."""
    areas: NDArray[np.float32]
    """[N]: pixels, as annotated; 0: not annotated."""
    segmentations: list[Any]
    """As annotated; None where there is none."""


class CocoFolder:
    """Images and objects of one split.

    root/annotations/instances_<split>.json with the images in root/<split>, root/images/<split> or root/images; or
    root/<split>/_annotations.coco.json beside its images. <split> may be written train2017, val2017 or valid.
    holdout: where root has no val split, this share of the images of its train split is "val" and the others are "train"; or of
    those of root/annotations/instances_default.json or root/_annotations.coco.json. Which ones follows from their file names
    and the seed. 0: root needs both splits.

    A file that is broken as a whole is a ValueError here; an image or annotation that is wrong is BadSample when it is read.
    """

    def __init__(self, root: str | Path, split: str, *, holdout: float = 0.0, seed: int = 0) -> None:
        root = Path(root)
        self.is_cut = holdout > 0 and root.is_dir() and annotations_of(root, "val") is None
        self.file, self.images = (uncut_annotations if self.is_cut else find_annotations)(root, split)
        content = read_annotations(self.file)
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.classes = tuple(str(category["name"]) for category in categories)
        self.labels = {category["id"]: label for label, category in enumerate(categories)}
        if len(self.labels) != len(categories):
            raise ValueError(f"{self.file}: categories must have different ids, got {[c['id'] for c in categories]}")
        annotations: dict[int, list[dict[str, Any]]] = {entry["id"]: [] for entry in content["images"]}
        if len(annotations) != len(content["images"]):
            raise ValueError(f"{self.file}: images must have different ids, got some twice")
        repeated = first_repeated(annotation.get("id") for annotation in content["annotations"])
        if repeated is not None:
            raise ValueError(f"{self.file}: annotations must have different ids, got {repeated} twice; number them anew")
        for annotation in content["annotations"]:
            if annotation["image_id"] not in annotations:
                raise ValueError(
                    f"{self.file}: image_id of annotation {annotation.get('id')} must be the id of one of its images, got "
                    f"{annotation['image_id']!r}"
                )
            annotations[annotation["image_id"]].append(annotation)
        entries = part_of(content["images"], split, holdout, seed, self.file) if self.is_cut else content["images"]
        rows = [(entry, annotations[entry["id"]]) for entry in entries]
        # nothing to learn from: no object, or crowds alone
        self.is_empty = np.array([all(annotation.get("iscrowd") == 1 for annotation in row[1]) for row in rows])
        if self.is_empty.all():
            part = f" among the {len(rows)} images of {split}" if self.is_cut else ""
            raise ValueError(f"{self.file}: annotations must hold at least one object that is no crowd, got none{part}")
        self.rows = PackedRows(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def path(self, index: int) -> Path:
        return self.images / self.rows[index][0]["file_name"]

    def read_image(self, index: int) -> "Image":
        """The image, of the size that its entry states."""
        path, entry = self.path(index), self.rows[index][0]
        stated = entry["width"], entry["height"]
        try:
            image = read_image(path, size=stated)
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise BadSample(path, f"{error.strerror}; it is the file_name of an image in {self.file}") from error
        if stated != image.size:
            raise BadSample(path, f"width and height in {self.file} must be those of the image, {image.size}, got {stated}")
        return image

    def read_objects(self, index: int) -> Objects:
        """The objects of an image, each field looked at; masks are decoded by `read_masks`."""
        entry, annotations = self.rows[index]
        boxes = [self._box(entry, annotation) for annotation in annotations]
        areas = [annotation.get("area", 0) for annotation in annotations]
        crowds = [annotation.get("iscrowd", 0) for annotation in annotations]
        for annotation, area, crowd in zip(annotations, areas, crowds, strict=True):
            if not is_number(area) or area < 0:
                raise self._bad(entry, annotation, f"area must be a number of pixels, got {short(area)}")
            # some programs write null, or true and false
            if crowd not in (0, 1, None):
                raise self._bad(entry, annotation, f"iscrowd must be 0 or 1, got {short(crowd)}")
        return Objects(
            boxes=np.array(boxes, dtype=np.float32).reshape(-1, 4),
            labels=np.array([self._label(entry, annotation) for annotation in annotations], dtype=np.int64),
            crowds=np.array(crowds, dtype=bool),
            areas=np.array(areas, dtype=np.float32),
            segmentations=[annotation.get("segmentation") for annotation in annotations],
        )

    def read_masks(self, index: int, chosen: NDArray[np.bool_], *, scale: tuple[float, float]) -> NDArray[np.bool_]:
        """[N, H', W'] of the chosen objects of an image, in the image resized by (x, y)."""
        entry, annotations = self.rows[index]
        height, width = entry["height"], entry["width"]
        masks = []
        for annotation, is_chosen in zip(annotations, chosen, strict=True):
            if not is_chosen:
                continue
            try:
                masks.append(read_mask(annotation.get("segmentation"), height, width, scale=scale))
            except ValueError as error:
                raise self._bad(entry, annotation, f"segmentation: {error}") from error
        empty = np.zeros((0, resized_side(height, scale[1]), resized_side(width, scale[0])), dtype=bool)
        return np.stack(masks) if masks else empty

    def _box(self, entry: dict[str, Any], annotation: dict[str, Any]) -> list[float]:
        box, width, height = annotation.get("bbox"), entry["width"], entry["height"]
        if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
            raise self._bad(entry, annotation, f"bbox must be [x, y, width, height], got {short(box)}")
        left, top, right, bottom = box[0], box[1], box[0] + box[2], box[1] + box[3]
        if box[2] <= 0 or box[3] <= 0:
            raise self._bad(entry, annotation, f"bbox must have a positive width and height, got {box}")
        # annotators round outwards by a pixel
        if left < -1 or top < -1 or right > width + 1 or bottom > height + 1:
            raise self._bad(entry, annotation, f"bbox must lie inside the image of {width} x {height}, got {box}")
        inside = [max(left, 0), max(top, 0), min(right, width), min(bottom, height)]
        if min(inside[2] - inside[0], inside[3] - inside[1]) < SMALLEST_SIDE:
            rule = f"bbox must have a width and height of at least {SMALLEST_SIDE} inside the image of {width} x {height}"
            raise self._bad(entry, annotation, f"{rule}, got {box}")
        return inside

    def _label(self, entry: dict[str, Any], annotation: dict[str, Any]) -> int:
        category = annotation.get("category_id")
        if not isinstance(category, int) or category not in self.labels:
            ids = ", ".join(map(str, list(self.labels)[:10]))
            raise self._bad(entry, annotation, f"category_id must be the id of a category ({ids}), got {short(category)}")
        return self.labels[category]

    def _bad(self, entry: dict[str, Any], annotation: dict[str, Any], reason: str) -> BadSample:
        return BadSample(self.images / entry["file_name"], f"annotation {annotation.get('id')} in {self.file}: {reason}")


def first_repeated(ids: Iterable[object]) -> int | str | None:
    """Return the first id that occurs twice; annotations without an id have none."""
    seen: set[int | str] = set()
    for each in ids:
        if isinstance(each, int | str):
            if each in seen:
                return each
            seen.add(each)
    return None


class PackedRows:
    """What JSON holds, a piece for each image, in one tensor: reading processes share it, where they would copy dictionaries.

    The annotations of COCO are gigabytes as dictionaries.
    """

    def __init__(self, rows: list[Any]) -> None:
        pieces = [json.dumps(row).encode() for row in rows]
        self.ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)
        self.text = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        start = int(self.ends[index - 1]) if index else 0
        return json.loads(self.text[start : int(self.ends[index])].numpy().tobytes())


def find_annotations(root: Path, split: str) -> tuple[Path, Path]:
    """The annotation file of a split, and the folder that its file names start from."""
    if not root.is_dir():
        raise ValueError(f"data must be a folder in COCO's layout, or the name of generated data, got {root}")
    found = annotations_of(root, split)
    if found is None:
        more = "; holdout=0.2 would set a fifth of the images aside" if split == "val" else ""
        raise ValueError(
            f"{root} must hold annotations/instances_{split}.json (or _{SPLIT_NAMES[split][1]}) and its images in {split}/, "
            f"or {split}/_annotations.coco.json beside its images; got neither{more}"
        )
    return found


def annotations_of(root: Path, split: str) -> tuple[Path, Path] | None:
    for name in SPLIT_NAMES[split]:
        file = root / "annotations" / f"instances_{name}.json"
        if file.is_file():
            folders = (root / name, root / "images" / name, root / "images", root)
            return file, next(folder for folder in folders if folder.is_dir())
        beside = root / name / "_annotations.coco.json"
        if beside.is_file():
            return beside, beside.parent
    return None


def uncut_annotations(root: Path, split: str) -> tuple[Path, Path]:
    """The file whose images lose a share to the val split: that of train, or that of a folder without splits."""
    found = annotations_of(root, "train") or annotations_of(root, "")
    return found or find_annotations(root, "train")


def part_of(entries: list[dict[str, Any]], split: str, holdout: float, seed: int, file: Path) -> list[dict[str, Any]]:
    """The images of a split, in their order; at least one in each."""
    if len(entries) < 2:
        raise ValueError(f"{file} must list two images or more, one to learn from and one to be held out, got {len(entries)}")
    held_out = held_out_names([entry["file_name"] for entry in entries], holdout, seed)
    return [entry for entry in entries if (entry["file_name"] in held_out) == (split == "val")]


def read_annotations(
    file: Path, parts: tuple[str, ...] = ("images", "annotations", "categories")
) -> dict[str, list[dict[str, Any]]]:
    """What these parts of the file hold, as far as every image needs it."""
    try:
        content = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} must be COCO's JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must be an object with {', '.join(parts)}, got {short(content)}")
    fields: dict[str, dict[str, type]] = {
        "images": {"id": int, "file_name": str, "width": int, "height": int},
        "annotations": {"image_id": int},
        "categories": {"id": int, "name": str},
    }
    for name in parts:
        rows = content.get(name)
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"{file}: {name} must be a list with at least one entry, got {short(rows)}")
        for row in rows:
            for part, kind in fields[name].items():
                if not isinstance(row, dict) or not isinstance(row.get(part), kind):
                    raise ValueError(f"{file}: {part} of each of its {name} must be {WORDS[kind]}, got {short(row)}")
    for entry in content["images"]:
        if Path(entry["file_name"]).is_absolute() or ".." in Path(entry["file_name"]).parts:
            raise ValueError(f"{file}: file_name must lie in the folder of the images, got {entry['file_name']!r}")
        if entry["width"] < 1 or entry["height"] < 1:
            raise ValueError(f"{file}: width and height of an image must be positive, got {short(entry)}")
    return content


WORDS = {int: "a whole number", str: "text"}
