"""Found objects as COCO's results: one list of every image's objects, with the ids of an annotation file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .coco import read_annotations


@dataclass(frozen=True, kw_only=True)
class CocoIds:
    """The ids of images and of classes: those of an annotation file, or from 1 on."""

    images: dict[Path, int]
    categories: dict[str, int]


def numbered(images: Sequence[Path], classes: Sequence[str]) -> CocoIds:
    """Count both from 1, in the order given."""
    return CocoIds(
        images={path: number for number, path in enumerate(images, 1)},
        categories={name: number for number, name in enumerate(classes, 1)},
    )


def ids_of(file: Path, images: Sequence[Path], classes: Sequence[str]) -> CocoIds:
    """Take the ids that an annotation file gives to these images, by their file names, and to these classes."""
    content = read_annotations(file, ("images", "categories"))
    categories = {entry["name"]: entry["id"] for entry in content["categories"]}
    unknown = [name for name in classes if name not in categories]
    if unknown:
        raise ValueError(f"{file} must have the categories of the run, got none named {unknown[0]!r}; name another file")
    by_name = {Path(entry["file_name"]).parts: entry["id"] for entry in content["images"]}
    found: dict[Path, int] = {}
    for path in images:
        # a file name may start at any folder above the image
        ends = (path.absolute().parts[-length:] for length in range(1, len(path.absolute().parts)))
        number = next((by_name[end] for end in ends if end in by_name), None)
        if number is None:
            raise ValueError(f"{file} must list every image that is asked about, got none with the file name of {path}")
        found[path] = number
    return CocoIds(images=found, categories={name: categories[name] for name in classes})


def coco_results(path: Path, objects: Sequence[dict[str, Any]], ids: CocoIds) -> list[dict[str, Any]]:
    """Return a result for each object of an image; the masks are runs of pixels, packed into text.

    objects: class, score, box (left, top, right, bottom) and, where there are masks, mask [H, W].
    """
    results = []
    for each in objects:
        left, top, right, bottom = each["box"]
        result = {
            "image_id": ids.images[path],
            "category_id": ids.categories[each["class"]],
            "bbox": [left, top, right - left, bottom - top],
            "score": each["score"],
        }
        if "mask" in each:
            result["segmentation"] = packed_runs(each["mask"])
        results.append(result | {"file_name": path.name})
    return results


def packed_runs(mask: Any) -> dict[str, Any]:
    from faster_coco_eval.core import mask as codec

    runs = codec.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode()}
