"""Bicubic reduction and enlargement as MATLAB's imresize computes them, which is how this field makes its data."""

from functools import lru_cache

import torch
from torch import Tensor


def reduce(image: Tensor, factor: int) -> Tensor:
    """Return the small image of an 8-bit one: uint8 [..., H, W] -> uint8 [..., ceil(H / factor), ceil(W / factor)].

    It has the kernel of `reduce_floats`, and goes down the columns first. As in MATLAB, the image is rounded to 8 bits (halves
    upwards) and clipped after each direction; the published small images of Set5 are met to the last bit.
    """
    if image.dtype != torch.uint8:
        raise ValueError(f"an image to reduce in 8 bits must be uint8, got {image.dtype}; reduce_floats takes floats")
    for dim in (-2, -1):
        # float64 holds halves exactly; torch rounds them to even numbers
        image = (_along(image.double(), dim, factor, 1) + 0.5).floor().clamp(0, 255).to(torch.uint8)
    return image


def reduce_floats(image: Tensor, factor: int) -> Tensor:
    """Return the small image without rounding: [..., H, W] -> [..., ceil(H / factor), ceil(W / factor)] in the image's floats.

    The kernel is as many times wider as the image becomes smaller, against aliasing.
    """
    return _along(_along(image, -2, factor, 1), -1, factor, 1)


def enlarge(image: Tensor, factor: int) -> Tensor:
    """[..., H, W] -> [..., factor H, factor W] in the image's floats."""
    return _along(_along(image, -2, 1, factor), -1, 1, factor)


def to_eight_bits(image: Tensor) -> Tensor:
    """Floats in 0..1, or outside, as the nearest of 256 levels: uint8."""
    return (image * 255).clamp(0, 255).round().to(torch.uint8)


def cubic(x: Tensor) -> Tensor:
    """Keys' kernel with a = -1/2: 1.5 |x|^3 - 2.5 |x|^2 + 1 up to 1, -0.5 |x|^3 + 2.5 |x|^2 - 4 |x| + 2 up to 2, then 0."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x**2 + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x <= 1, near, torch.where(x <= 2, far, 0.0))


@lru_cache(maxsize=64)
def taps(length: int, down: int, up: int) -> tuple[Tensor, Tensor]:
    """Which pixels of a row make each new one, and their weights in float64: two tensors [new length, taps].

    New pixel i has its centre at u = (i + 1/2) down / up - 1/2; weights cubic((u - j) / down) over the pixels j, divided by
    their sum. Beyond its ends the row goes on mirrored: ..., 1, 0, 0, 1, ...
    """
    new_length = -(-length * up // down)
    centres = (torch.arange(new_length, dtype=torch.float64) + 0.5) * down / up - 0.5
    first = (centres - 2 * down).floor().long()
    places = first[:, None] + torch.arange(4 * down + 2)
    weights = cubic((centres[:, None] - places) / down)
    weights = weights / weights.sum(dim=1, keepdim=True)
    turned = places.remainder(2 * length)
    return torch.where(turned < length, turned, 2 * length - 1 - turned), weights


def _along(image: Tensor, dim: int, down: int, up: int) -> Tensor:
    places, weights = (part.to(image.device) for part in taps(image.shape[dim], down, up))
    weights = weights.to(image.dtype)
    if dim == -2:
        weights = weights[..., None]  # [new length, taps, 1], a factor for every row
    new = image.index_select(dim, places[:, 0]) * weights[:, 0]
    for tap in range(1, places.shape[1]):
        new += image.index_select(dim, places[:, tap]) * weights[:, tap]
    return new
