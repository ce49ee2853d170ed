"""Objects drawn into the image in which they were found."""

import colorsys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Colour = tuple[int, int, int]


def colour_of(label: int) -> Colour:
    """Neighbouring labels get hues far apart."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.85, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_objects(image: "Image", found: list[dict[str, Any]], classes: list[str]) -> "Image":
    """Masks, boxes, names and scores, the surest on top; each class has its colour."""
    from PIL import Image, ImageDraw

    # small images are drawn larger: names must be readable
    scale = max(1, -(-400 // max(image.size)))
    width, height = image.width * scale, image.height * scale
    pixels = np.array(image.resize((width, height), Image.Resampling.NEAREST), dtype=np.float32)
    surest_last = sorted(found, key=lambda each: each["score"])
    for each in surest_last:
        if "mask" in each:
            mask = each["mask"].repeat(scale, 0).repeat(scale, 1)
            pixels[mask] = 0.5 * pixels[mask] + 0.5 * np.array(colour_of(classes.index(each["class"])))
    picture = Image.fromarray(pixels.astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for each in surest_last:
        colour = colour_of(classes.index(each["class"]))
        left, top, right, bottom = (round(scale * side) for side in each["box"])
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=max(2, max(picture.size) // 300))
        write_name(draw, f"{each['class']} {each['score']:.2f}", (left, top), picture.size, colour)
    return picture


def write_name(draw: Any, text: str, corner: tuple[int, int], size: tuple[int, int], colour: Colour) -> None:
    """Above the corner, or wherever the image has room for it."""
    from PIL import ImageFont

    font = ImageFont.load_default(size=max(12, max(size) // 50))
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    x = max(0, min(corner[0], size[0] - int(right)))
    y = max(0, corner[1] - int(bottom) - 2)
    draw.rectangle((x + left - 1, y + top - 1, x + right + 1, y + bottom + 1), fill=colour)
    draw.text((x, y), text, fill="black", font=font)
