"""Classes drawn over their image."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Colours = list[tuple[int, int, int]]


def label_map(labels: NDArray[np.uint8], colours: Colours) -> "Image":
    """The labels [H, W] as an image whose numbers they are, and whose palette has the colours of the classes."""
    from PIL import Image

    image = Image.fromarray(labels)
    # takes the image from "L" to "P"; the numbers stay
    image.putpalette([part for colour in colours for part in colour])
    return image


def draw_overlay(
    image: "Image", labels: NDArray[np.uint8], *, classes: list[str], colours: Colours, opacity: float, legend: bool
) -> "Image":
    """(1 - opacity) image + opacity colour of each pixel's label; beside it the names of the classes that occur.

    labels: [H, W], of the image's size.
    """
    from PIL import Image

    painted = np.asarray(colours, dtype=np.float32)[labels]
    mixed = (1 - opacity) * np.asarray(image, dtype=np.float32) + opacity * painted
    picture = Image.fromarray(mixed.round().astype(np.uint8))
    if not legend:
        return picture
    present = [label for label in range(len(classes)) if (labels == label).any()]
    names = draw_legend([(classes[label], colours[label]) for label in present], height=picture.height)
    whole = Image.new("RGB", (picture.width + names.width, max(picture.height, names.height)), "white")
    whole.paste(picture, (0, 0))
    whole.paste(names, (picture.width, 0))
    return whole


def draw_legend(entries: list[tuple[str, tuple[int, int, int]]], *, height: int) -> "Image":
    """A column of colours with their names, in letters that suit a picture of that height."""
    from PIL import Image, ImageDraw, ImageFont

    size = max(11, height // 30)
    font, line = ImageFont.load_default(size), round(1.6 * size)
    width = max((round(font.getlength(name)) for name, _ in entries), default=0) + 3 * size
    column = Image.new("RGB", (width, line * len(entries) + size // 2), "white")
    draw = ImageDraw.Draw(column)
    for row, (name, colour) in enumerate(entries):
        top = row * line + size // 2
        draw.rectangle((size // 2, top, size // 2 + size, top + size), fill=colour, outline="black")
        draw.text((2 * size, top + size // 2), name, fill="black", font=font, anchor="lm")
    return column
