"""Where a command puts its pictures."""

import errno
import os

import pytest
from PIL import Image

from nalaformer.cli.pictures import PictureWriter

PICTURE = Image.new("RGB", (4, 4), "red")


def make(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2)).save(path)
    return path


def test_inputs_of_one_name_keep_a_picture_each(tmp_path):
    inputs = [make(tmp_path / "a" / "x.jpg"), make(tmp_path / "b" / "x.jpg")]
    writer = PictureWriter(tmp_path / "out", inputs=inputs)
    assert [writer.write(path, PICTURE).name for path in inputs] == ["x.png", "x_2.png"]
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_folder_that_holds_the_inputs_keeps_them(tmp_path):
    source = make(tmp_path / "x.png")
    before = source.read_bytes()
    PictureWriter(tmp_path, inputs=[source]).write(source, PICTURE)
    assert source.read_bytes() == before


def test_a_file_name_is_for_one_image(tmp_path):
    inputs = [make(tmp_path / "x.png"), make(tmp_path / "y.png")]
    with pytest.raises(ValueError, match=r"out\.png for 2; name a folder"):
        PictureWriter(tmp_path / "out.png", inputs=inputs)
    assert PictureWriter(tmp_path / "out.png", inputs=inputs[:1]).write(inputs[0], PICTURE) == tmp_path / "out.png"


def test_a_full_disk_leaves_the_earlier_picture_and_names_the_file(tmp_path, monkeypatch):
    source, target = make(tmp_path / "x.png"), tmp_path / "out.png"
    writer = PictureWriter(target, inputs=[source])
    writer.write(source, PICTURE)
    before = target.read_bytes()

    def half(image, file, **_):
        os.close(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(OSError, match=r"out\.png could not be written, the disk is full"):
        writer.write(source, PICTURE)
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.png", "x.png"]


def test_the_image_that_is_read_is_not_overwritten(tmp_path):
    source = make(tmp_path / "x.png")
    with pytest.raises(ValueError, match="must not be an image that is read"):
        PictureWriter(source, inputs=[source])
