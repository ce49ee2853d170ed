"""Small signs, each drawn in a square cell."""

import numpy as np
from numpy.typing import NDArray

NAMES = ("disc", "square", "cross", "ring", "diagonals", "bar", "pole", "corner")


def glyph_masks(size: int) -> NDArray[np.float32]:
    """One mask of zeros and ones for each name: [8, size, size]."""
    # smaller discs are squares
    if size < 8:
        raise ValueError(f"a cell must have at least 8 pixels a side for its glyph to be told, got {size}")
    y, x = np.mgrid[0:size, 0:size] - (size - 1) / 2
    radius, stroke = np.hypot(x, y), max(1.1, size / 7)
    masks = (
        radius < 0.42 * size,
        (np.abs(x) < 0.36 * size) & (np.abs(y) < 0.36 * size),
        (np.abs(x) < stroke) | (np.abs(y) < stroke),
        (radius < 0.46 * size) & (radius > 0.25 * size),
        (np.abs(x - y) < 1.4 * stroke) | (np.abs(x + y) < 1.4 * stroke),
        np.abs(y) < 1.4 * stroke,
        np.abs(x) < 1.4 * stroke,
        y > -x,
    )
    return np.stack(masks).astype(np.float32)
