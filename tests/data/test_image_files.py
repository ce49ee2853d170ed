"""Images from files and folders, none of them trusted."""

import itertools
import os
import random
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageFile

from nalaformer.data import (
    Augmentation,
    CorruptImage,
    CueGrid,
    ImageFolder,
    batches_in_order,
    find_images,
    images,
    notes_of_ignored,
    read_image,
    training_transform,
    usual_side,
)
from nalaformer.data.augment import posterize
from nalaformer.data.segmentation import read_mask
from nalaformer.data.super_resolution.folders import as_tensor as as_pair
from nalaformer.tasks import Classification, ClassificationConfig


@pytest.fixture
def folder(tmp_path):
    """Two classes of small images in the ImageNet layout."""
    for split, name, number in itertools.product(("train", "val"), ("cat", "dog"), range(5)):
        path = tmp_path / split / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return tmp_path


def as_tensor(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float()


def test_a_folder_gives_images_with_the_label_of_their_class(folder):
    data = ImageFolder(folder, "train", transform=as_tensor)
    assert data.classes == ("cat", "dog")
    assert [data[i][1] for i in range(len(data))] == [0] * 5 + [1] * 5
    assert data[0][0].shape == (3, 12, 10)


def test_generated_images_written_to_a_folder_come_back_the_same(tmp_path):
    data = CueGrid(split="val", samples=12)
    data.write(tmp_path)
    again = ImageFolder(tmp_path, "val", transform=as_tensor)
    assert again.classes == tuple(sorted({data.classes[data[i][1]] for i in range(12)} | set(data.classes)))
    by_name = {path.rsplit("/", 1)[-1]: index for index, (path, _) in enumerate(again.files)}
    for index in range(12):
        image, label = data[index]
        read, read_label = again[by_name[f"{index:06d}.png"]]
        assert again.classes[read_label] == data.classes[label]
        assert torch.allclose(read, (image + 0.5) * 255, atol=0.51)


@pytest.mark.parametrize("missing", ["train", "classes"])
def test_a_folder_that_has_no_images_says_what_it_should_have(tmp_path, missing):
    if missing == "classes":
        (tmp_path / "train" / "empty").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"class"):
        ImageFolder(tmp_path, "train", transform=as_tensor)


def corrupt(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "not an image":
        path.write_bytes(b"hello")
    elif how == "empty":
        path.write_bytes(b"")


@pytest.fixture(params=["jpg", "png"])
def picture(request, tmp_path):
    path = tmp_path / f"picture.{request.param}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return path


@pytest.mark.parametrize("how", ["truncated", "not an image", "empty"])
@pytest.mark.parametrize("lenient", [False, True])
def test_a_broken_file_is_refused_even_where_others_made_pillow_lenient(picture, how, lenient, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    assert read_image(picture).size == (64, 64)
    corrupt(picture, how)
    with pytest.raises(CorruptImage, match=picture.name):
        read_image(picture)
    assert lenient == ImageFile.LOAD_TRUNCATED_IMAGES


# how a viewer shows pixels [H, W] that a camera noted a number beside, by EXIF's table of the first row and column
SHOWN = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.T,
    6: lambda a: a.T[:, ::-1],
    7: lambda a: a[::-1, ::-1].T,
    8: lambda a: a.T[::-1],
}


def save_as_held(path, pixels, number):
    notes = Image.Exif()
    notes[0x0112] = number
    options = {".webp": {"lossless": True}, ".tiff": {"compression": "tiff_lzw"}}.get(path.suffix, {})
    Image.fromarray(pixels).save(path, exif=notes, **options)
    return path


@pytest.mark.parametrize("kind", ["png", "webp", "tiff"])
@pytest.mark.parametrize("number", SHOWN)
def test_a_photograph_is_upright_however_the_camera_was_held(tmp_path, number, kind):
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    path = save_as_held(tmp_path / f"a.{kind}", grey, number)
    assert np.array_equal(np.asarray(read_image(path))[..., 0], SHOWN[number](grey))


def test_a_photograph_is_annotated_as_it_is_shown_or_as_it_is_stored(tmp_path):
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    path = save_as_held(tmp_path / "a.png", grey, 6)
    for size, expected in (((4, 3), grey), ((3, 4), SHOWN[6](grey)), ((9, 9), SHOWN[6](grey))):
        assert np.array_equal(np.asarray(read_image(path, size=size))[..., 0], expected), size
    # both have the size: what people see is what they annotate
    path = save_as_held(tmp_path / "b.png", grey, 3)
    assert np.array_equal(np.asarray(read_image(path, size=(4, 3)))[..., 0], SHOWN[3](grey))


@pytest.mark.parametrize("notes", [b"nothing", b"II*\0\x08\0", b"II*\0\x08\0\0\0\xff\xff\x12\x01"])
@pytest.mark.filterwarnings("ignore:.*Corrupt EXIF data")
def test_broken_notes_beside_a_photograph_change_nothing(tmp_path, notes):
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    Image.fromarray(grey).save(tmp_path / "a.png", exif=b"Exif\0\0" + notes)
    assert np.array_equal(np.asarray(read_image(tmp_path / "a.png"))[..., 0], grey)


GREYS = np.arange(256, dtype=np.uint16).reshape(16, 16)


def png_of_16_bits(pixels, kind):
    """A PNG file by the letter of its format, for the kinds that Pillow reads and does not write; pixels: [H, W, channels]."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("written", ["png", "tiff", "big-endian tiff", "ppm", "grey and alpha", "colour", "colour and alpha"])
def test_an_image_of_16_bits_is_that_of_8_bits(written, tmp_path):
    pixels = GREYS * 257
    kinds = {"grey and alpha": (4, 2), "colour": (2, 3), "colour and alpha": (6, 4)}
    path = tmp_path / f"picture.{'png' if written in kinds else written.removeprefix('big-endian ')}"
    if written in kinds:
        kind, channels = kinds[written]
        path.write_bytes(png_of_16_bits(np.stack([pixels] * channels, axis=-1), kind))
    elif written == "big-endian tiff":
        Image.frombytes("I;16B", (16, 16), pixels.astype(">u2").tobytes()).save(path)
    else:
        Image.fromarray(pixels).save(path)
    assert np.array_equal(np.asarray(read_image(path)), np.stack([GREYS] * 3, axis=-1))
    # as training and evaluation read it
    (tmp_path / "train" / "cat").mkdir(parents=True)
    path.rename(tmp_path / "train" / "cat" / path.name)
    image, _ = ImageFolder(tmp_path, "train", transform=as_tensor)[0]
    assert torch.equal(image, torch.from_numpy(GREYS.astype(np.float32)).expand(3, -1, -1))


def test_a_damaged_image_of_16_bits_is_refused_too(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (64, 64), dtype=np.uint16)).save(path)
    corrupt(path, "truncated")
    with pytest.raises(CorruptImage, match=path.name):
        read_image(path)


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "integers"), (np.float32, "floats")])
def test_pixels_without_an_agreed_white_are_refused(dtype, kind, tmp_path):
    path = tmp_path / "picture.tiff"
    Image.fromarray(GREYS.astype(dtype)).save(path)
    with pytest.raises(CorruptImage, match=f"must be of 8 or 16 bits, got {kind} of 32.*save it with 8 or 16"):
        read_image(path)


def test_an_image_too_large_is_refused_before_it_is_decoded(picture, monkeypatch):
    monkeypatch.setattr(images, "MOST_PIXELS", 64 * 64 - 1)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(CorruptImage, match="64 x 64 pixels"):
        read_image(picture)


def test_the_strongest_posterization_is_black_and_no_error():
    augmentation = Augmentation(auto_augment="rand-m10-n12-inc1")
    transform = training_transform(16, augmentation)
    image = Image.fromarray(np.full((20, 20, 3), 200, np.uint8))
    for seed in range(40):
        random.seed(seed)
        np.random.seed(seed)
        assert transform(image).shape == (3, 16, 16)
    assert posterize(image, 0).getextrema() == ((0, 0),) * 3
    assert posterize(image, 1).getextrema() == ((128, 128),) * 3


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_picture_starts_a_program(folder, monkeypatch):
    """Pillow hands PostScript to Ghostscript, whatever the name of the file says."""
    program, ran = folder / "bin" / "gs", folder / "ran"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $@ > '{ran}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    picture = folder / "train" / "cat" / "0.png"
    picture.write_bytes(POSTSCRIPT)
    for read in (read_image, read_mask, as_pair):
        with pytest.raises(CorruptImage, match=r"it must be one of JPEG, PNG, .*, got another format or no image"):
            read(picture)
        assert not ran.exists()
    assert usual_side([str(picture)]) == 0
    # the file would start it
    with pytest.raises(OSError, match="cannot identify image file"):
        Image.open(picture).load()
    assert ran.exists()


def test_images_are_opened_in_one_place():
    """Others would take every format that Pillow knows."""
    found = [path.name for path in Path(images.__file__).parents[1].rglob("*.py") if "Image.open(" in path.read_text()]
    assert found == ["images.py"]


@pytest.mark.parametrize("written", ["JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_images_of_the_formats_in_use_are_read(tmp_path, written):
    Image.new("RGB", (4, 3), (9, 9, 9)).save(tmp_path / "a.png", format=written)
    assert read_image(tmp_path / "a.png").size == (4, 3)


def test_files_that_are_not_read_are_counted_and_named(folder):
    first = folder / "train" / "cat" / "0.png"
    for name in ("cat/a.heic", "cat/none", "a.png", "cat/b.jfif", "cat/.DS_Store", "cat/._a.jpg", "__MACOSX/cat/._1.jpg"):
        (folder / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(first, folder / "train" / name)
    data = ImageFolder(folder, "train", transform=as_tensor)
    assert data.classes == ("cat", "dog")
    assert len(data) == 5 + 1 + 5
    (line,) = notes_of_ignored(data.ignored)
    names = ", ".join(str(folder / "train" / name) for name in ("a.png", "cat/a.heic", "cat/none"))
    assert line.startswith(f"files that are not read as images: 3 ({names}); images end in .jpg, ")
    # so are those of two classes without splits
    (folder / "train").rename(folder / "both")
    assert ImageFolder(folder / "both", "val", transform=as_tensor, holdout=0.5).classes == ("cat", "dog")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_of_which_no_image_can_be_read_is_refused(folder, split):
    config = ClassificationConfig(data=str(folder), image_size=16)
    for number in range(4):
        (folder / split / "dog" / f"{number}.png").write_bytes(b"no image")
    # the last can be read
    assert len(getattr(Classification(config), f"{split if split == 'train' else 'eval'}_data")) == 10
    corrupt(folder / split / "dog" / "4.png", "truncated")
    with pytest.raises(ValueError, match=rf"in each split, got none among 5 of dog in .*{split}; add images, or remove"):
        Classification(config).notes()


def test_a_missing_file_is_not_called_corrupt(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "none.png")


def test_a_link_of_a_folder_whose_image_was_moved_is_left_out_and_named(folder):
    """So is a folder that is called like an image."""
    for number, make in ((1, lambda path: path.symlink_to("nowhere.png")), (3, lambda path: path.mkdir())):
        path = folder / "val" / "dog" / f"{number}.png"
        path.unlink()
        make(path)
    (batch,) = batches_in_order(ImageFolder(folder, "val", transform=as_tensor), batch_size=10)
    assert len(batch.content[1]) == 8
    link, inner = batch.rejected
    assert link == f"{folder / 'val' / 'dog' / '1.png'} cannot be used: No such file or directory"
    assert "3.png cannot be used: Is a directory" in inner


def test_images_whose_names_are_no_text_are_held_out_or_named(folder):
    """Older archives have names in other codes: Python keeps their bytes as surrogates."""
    for number, name in enumerate((b"caf\xe9.png", b"na\xefve.png")):
        path = folder / "train" / "dog" / os.fsdecode(name)
        (folder / "train" / "dog" / f"{number}.png").rename(path)
    path.write_bytes(path.read_bytes()[:200])
    for split in ("train", "val"):
        shutil.rmtree(folder / "val", ignore_errors=True)
        data = ImageFolder(folder, split, transform=as_tensor, holdout=0.5)
        assert len(data) in (4, 6)
        for batch in batches_in_order(data, batch_size=10):
            assert all(r"na\udcefve.png is no image" in line.encode().decode() for line in batch.rejected)


def test_images_are_found_below_folders_and_by_themselves(folder):
    assert len(find_images([folder / "val"])) == 10
    one = folder / "val" / "cat" / "0.png"
    assert find_images([one]) == [one]
    with pytest.raises(ValueError, match="must exist"):
        find_images([folder / "none.png"])
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="at least one"):
        find_images([folder / "empty"])
