"""Masks as COCO writes them: polygons, or runs of pixels, counted in a list or packed into text."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
LARGEST = float(np.finfo(np.float32).max)


def read_mask(segmentation: Any, height: int, width: int, *, scale: tuple[float, float] = (1.0, 1.0)) -> Mask:
    """The mask [H', W'] of a segmentation in an image of height x width; ValueError says what is wrong with it.

    scale: (x, y), by which the image is resized; the mask has the size of the resized image, rounded. Polygons are scaled
    before they become pixels.
    """
    target = resized_side(height, scale[1]), resized_side(width, scale[0])
    if isinstance(segmentation, list):
        return fill_polygons(segmentation, (height, width), target)
    if isinstance(segmentation, dict):
        mask = decode_runs(segmentation, height, width)
        return mask if mask.shape == target else nearest(mask, target)
    raise ValueError(f"must be a list of polygons or an object with size and counts, got {short(segmentation)}")


def resized_side(side: int, scale: float) -> int:
    return max(1, round(side * scale))


def fill_polygons(polygons: list[Any], size: tuple[int, int], target: tuple[int, int]) -> Mask:
    """All of them together; each is [x, y, x, y, ...] in an image of `size`, filled in one of `target` (height, width)."""
    from faster_coco_eval.core import mask as codec

    (height, width), (rows, columns) = size, target
    if not polygons:
        raise ValueError("must hold at least one polygon, got an empty list")
    filled = []
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2 or not all(map(is_number, polygon)):
            raise ValueError(f"a polygon must be at least 3 points, x and y in turn, got {short(polygon)}")
        points = np.array(polygon, dtype=np.float64).reshape(-1, 2)
        # the compiled filling trusts what it gets; annotators round outwards by a pixel
        if points.min() < -1 or points[:, 0].max() > width + 1 or points[:, 1].max() > height + 1:
            raise ValueError(f"a polygon must lie inside the image of {width} x {height}, got {short(polygon)}")
        points = (points * (columns / width, rows / height)).clip(0, (columns, rows))
        filled.append(points.ravel().tolist())
    # a list of four numbers would be taken for a box
    return np.asarray(codec.decode(codec.merge(codec.frPyObjects(filled, rows, columns))), dtype=bool)


def decode_runs(runs: dict[str, Any], height: int, width: int) -> Mask:
    """Runs of zeros and ones in turn, column by column, zeros first."""
    size, counts = runs.get("size"), runs.get("counts")
    if not isinstance(size, list) or list(size) != [height, width]:
        raise ValueError(f"size must be that of the image, [{height}, {width}] (height, width), got {short(size)}")
    if isinstance(counts, str):
        counts = unpack_counts(counts)
    if not isinstance(counts, list) or not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"counts must be a list of numbers of pixels, or text, got {short(counts)}")
    if sum(counts) != height * width:
        raise ValueError(f"counts must add up to the {height * width} pixels of the image, got {sum(counts)}")
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape(width, height).T


def unpack_counts(text: str) -> list[int]:
    """COCO's packed counts: 5 bits a character, and a sixth if more follow; later counts are stored less the last but one."""
    counts: list[int] = []
    value, shift = 0, 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise ValueError(f"counts must be packed into characters from '0' to 'o', got {character!r}")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            if shift > 60:
                raise ValueError("counts must be numbers of pixels, got one of more than 60 bits")
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value, shift = 0, 0
    if shift:
        raise ValueError("counts must end with a whole number, got text that is cut off")
    return counts


def encode_runs(mask: Mask) -> dict[str, Any]:
    """The mask [H, W] as runs in a list."""
    flat = np.concatenate(([False], mask.T.ravel(), [False]))
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff(np.concatenate(([0], changes, [mask.size]))).tolist()
    # a mask whose last pixel is set ends there
    return {"size": [int(side) for side in mask.shape], "counts": counts[:-1] if counts and counts[-1] == 0 else counts}


def nearest(mask: Mask, target: tuple[int, int]) -> Mask:
    """The mask in another size (height, width); each pixel takes the value at its centre."""
    rows, columns = (((np.arange(new) + 0.5) * old / new).astype(int) for new, old in zip(target, mask.shape, strict=True))
    return mask[rows][:, columns]


def is_number(value: object) -> bool:
    """True if the value is a finite number in float32; JSON has integers of hundreds of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def short(value: object) -> str:
    """A shortened form for error messages: a polygon may have thousands of points."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
