"""Crops of images side by side, to compare by eye what metrics cannot show."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.images import write_image

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[int, int, int, int]
"""Left, top, width and height, in pixels."""
CAPTION, GAP = 18, 6


def draw_crops(rows: Sequence[tuple[Box, Mapping[str, "Image"]]], path: str | Path, *, zoom: int = 3) -> Path:
    """Write a PNG: a row for each box, with the same enlarged crop of each of its images under the image's name."""
    from PIL import Image, ImageDraw

    if not rows or not all(images for _, images in rows):
        raise ValueError("a strip needs rows with at least one image each, got none")
    if zoom < 1:
        raise ValueError(f"zoom must be at least 1, got {zoom}")
    strips = []
    for (left, top, width, height), images in rows:
        for name, image in images.items():
            if left < 0 or top < 0 or left + width > image.width or top + height > image.height:
                raise ValueError(
                    f"a crop must lie inside its image, got {(left, top, width, height)} for {name} of "
                    f"{image.width} x {image.height} pixels"
                )
        strip = Image.new("RGB", ((zoom * width + GAP) * len(images) - GAP, zoom * height + CAPTION), "white")
        pen = ImageDraw.Draw(strip)
        for number, (name, image) in enumerate(images.items()):
            place = number * (zoom * width + GAP)
            crop = image.convert("RGB").crop((left, top, left + width, top + height))
            pen.text((place, 3), name, fill="black")
            strip.paste(crop.resize((zoom * width, zoom * height), Image.Resampling.NEAREST), (place, CAPTION))
        strips.append(strip)
    whole = Image.new("RGB", (max(s.width for s in strips), sum(s.height + GAP for s in strips) - GAP), "white")
    top = 0
    for strip in strips:
        whole.paste(strip, (0, top))
        top += strip.height + GAP
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_image(whole, path, optimize=True)
    return path
