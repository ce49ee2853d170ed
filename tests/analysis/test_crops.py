"""Crops of images side by side."""

import numpy as np
import pytest
from PIL import Image

from nalaformer.analysis.crops import CAPTION, GAP, draw_crops


def image_of(level, size=(12, 9)):
    return Image.new("RGB", size, (level, 0, 0))


def test_every_image_shows_the_same_place_in_its_column(tmp_path):
    one, two = image_of(10), image_of(20)
    two.putpixel((3, 2), (255, 0, 0))
    path = draw_crops([((3, 2, 4, 3), {"one": one, "two": two}), ((0, 0, 2, 2), {"one": one})], tmp_path / "a.png", zoom=2)
    pixels = np.array(Image.open(path))[..., 0]
    assert pixels.shape == (CAPTION + 6 + GAP + CAPTION + 4, 8 + GAP + 8)
    assert (pixels[CAPTION : CAPTION + 6, :8] == 10).all()
    second = pixels[CAPTION : CAPTION + 6, 8 + GAP :]
    assert (second[:2, :2] == 255).all()
    assert (second[2:] == 20).all()
    assert (pixels[-4:, :4] == 10).all()


@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, 0, 13, 4), (0, 6, 4, 4)])
def test_a_crop_outside_its_image_is_refused(box, tmp_path):
    with pytest.raises(ValueError, match=r"must lie inside its image, got .* for one of 12 x 9 pixels"):
        draw_crops([(box, {"one": image_of(1)})], tmp_path / "a.png")


@pytest.mark.parametrize("rows", [[], [((0, 0, 1, 1), {})]])
def test_a_strip_of_nothing_is_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="at least one image"):
        draw_crops(rows, tmp_path / "a.png")
