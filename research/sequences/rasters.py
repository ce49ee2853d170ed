"""Grey images as bytes: widened, and made smaller as Pillow does it."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

FULL = 255
# pixels of the smaller image that the filter reaches to either side
LANCZOS = 3


def dilate(images: Bytes, radius: int) -> Bytes:
    """The brightest pixel of a disc around each: [B, S, S]."""
    side = images.shape[1]
    padded = np.pad(images, ((0, 0), (radius, radius), (radius, radius)))
    found = images.copy()
    for row, column in np.argwhere(disc(radius)):
        np.maximum(found, padded[:, row : row + side, column : column + side], out=found)
    return found


def disc(radius: int) -> NDArray[np.bool_]:
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    inside: NDArray[np.bool_] = x**2 + y**2 <= radius**2
    return inside


def resize(images: Bytes, side: int) -> Bytes:
    """Square images [B, S, S] made smaller by Lanczos' filter, rounded and kept in range after each of its two passes."""
    weights = lanczos_weights(images.shape[1], side)
    rows = round_to_bytes(np.einsum("ij,bkj->bki", weights, images))
    return round_to_bytes(np.einsum("ij,bjk->bik", weights, rows))


def round_to_bytes(x: NDArray[np.float64]) -> Bytes:
    return np.clip(np.floor(x + 0.5), 0, FULL).astype(np.uint8)


@cache
def lanczos_weights(large: int, small: int) -> NDArray[np.float32]:
    """[small, large]; those of pixels beyond the edge are given to the others."""
    scale = large / small
    apart = (np.arange(large) + 0.5 - (np.arange(small)[:, None] + 0.5) * scale) / scale
    weights = np.where(np.abs(apart) < LANCZOS, np.sinc(apart) * np.sinc(apart / LANCZOS), 0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
