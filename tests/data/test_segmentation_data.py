"""Images with masks: the layouts of real data sets, what is wrong with single files, and crops."""

import pickle
import struct
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from nalaformer.data import BadSample, batches_in_order
from nalaformer.data.generated_folders import written_once
from nalaformer.data.loading import random_state_of
from nalaformer.data.segmentation import (
    IGNORED,
    SCENE_CLASSES,
    EvalResize,
    MaskedImages,
    TrainingCrop,
    find_files,
    read_mask,
    write_scenes,
)

IDS = np.arange(12, dtype=np.uint8).reshape(3, 4) % 3


def save(path, array, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path)
    return path


def picture(height=3, width=4):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


def plain(root, *, ids=IDS, names=("a", "b"), classes="wall\nroof\ndoor\n"):
    """A folder in the plain layout."""
    for split in ("train", "val"):
        for name in names:
            save(root / "images" / split / f"{name}.png", picture(*ids.shape))
            save(root / "masks" / split / f"{name}.png", ids)
    if classes:
        (root / "classes.txt").write_text(classes)
    return root


def opened(root, split="train"):
    return MaskedImages(root, split, transform=EvalResize())


# ---- layouts


def test_ade20k_counts_from_one_and_ignores_zero(tmp_path):
    for split in ("training", "validation"):
        save(tmp_path / "images" / split / "ADE_1.jpg", picture())
        save(tmp_path / "annotations" / split / "ADE_1.png", np.array([[0, 1, 150, 7]] * 3, dtype=np.uint8))
    data = opened(tmp_path, "val")
    assert len(data.classes) == len(set(data.colours)) == 150
    assert data[0][1][0].tolist() == [IGNORED, 0, 149, 6]


@pytest.mark.parametrize("place", ["train", "."])
def test_a_folder_without_val_holds_out_a_share_by_the_names_of_its_files(tmp_path, place):
    for index in range(10):
        save(tmp_path / "images" / place / f"{index}.png", picture(*IDS.shape))
        save(tmp_path / "masks" / place / f"{index}.png", IDS)

    def pairs(split, seed=0):
        data = MaskedImages(tmp_path, split, transform=EvalResize(), holdout=0.2, seed=seed)
        assert len(data.classes) == IDS[IDS != IGNORED].max() + 1
        assert data[0][1].shape == IDS.shape
        return set(data.files.pairs)

    train, val = pairs("train"), pairs("val")
    assert (len(train), len(val), len(train | val)) == (8, 2, 10)
    assert val == pairs("val") != pairs("val", seed=1)
    with pytest.raises(ValueError, match=r"holdout=0\.2 would set a fifth" if place == "train" else "got no folder"):
        opened(tmp_path, "val")


def test_a_val_split_of_its_own_is_taken_whole(tmp_path):
    data = MaskedImages(plain(tmp_path), "val", transform=EvalResize(), holdout=0.5)
    assert (len(data), data.files.is_cut) == (2, False)


def test_ade20k_takes_names_and_number_of_classes_from_its_table(tmp_path):
    write_scenes(tmp_path, train=1, val=1)
    assert opened(tmp_path).classes == SCENE_CLASSES
    (tmp_path / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tName\n1\t.1\t1\t1\twall, plaster\n2\t.1\t1\t1\tdoor;gate\n"
    )
    assert opened(tmp_path).classes == ("wall", "door")


@pytest.mark.parametrize("text", ["Idx\tName\n", "Idx\tName\n2\twall\n", "Idx\tName\n1\t\n", "Idx\tName\n1\n"])
def test_a_broken_table_of_names_is_refused_by_its_name(tmp_path, text):
    write_scenes(tmp_path, train=1, val=1)
    (tmp_path / "objectInfo150.txt").write_text(text)
    with pytest.raises(ValueError, match=r"objectInfo150\.txt must"):
        opened(tmp_path)


def test_cityscapes_ids_become_the_nineteen_classes_that_count(tmp_path):
    ids = np.array([[7, 8, 33, 0, 34 - 3, 29]], dtype=np.uint8)
    for split in ("train", "val"):
        save(tmp_path / "leftImg8bit" / split / "bonn" / "bonn_000001_leftImg8bit.png", picture(1, 6))
        save(tmp_path / "gtFine" / split / "bonn" / "bonn_000001_gtFine_labelIds.png", ids)
        # files of other kinds lie beside it
        save(tmp_path / "gtFine" / split / "bonn" / "bonn_000001_gtFine_color.png", picture(1, 6))
        save(tmp_path / "gtFine" / split / "bonn" / "bonn_000001_gtFine_instanceIds.png", ids)
    data = opened(tmp_path)
    assert len(data) == 1
    assert data[0][1].tolist() == [[0, 1, 18, IGNORED, 16, IGNORED]]
    assert (data.classes[0], data.classes[18], data.colours[13]) == ("road", "bicycle", (0, 0, 142))


def test_the_plain_layout_finds_its_classes_in_the_masks_to_learn_from(tmp_path):
    ids = IDS.copy()
    ids[0, 0] = IGNORED
    plain(tmp_path, ids=ids, classes="")
    (tmp_path / "masks" / "train" / "a.png").write_bytes(b"no image")
    data = opened(tmp_path)
    assert data.classes == ("class 0", "class 1", "class 2")
    assert data[1][1].tolist() == ids.tolist()


def test_a_palette_holds_ids_and_not_colours(tmp_path):
    plain(tmp_path)
    mask = Image.fromarray(IDS).convert("P")
    mask.putdata(IDS.ravel().tolist())
    mask.putpalette([9, 9, 9, 8, 8, 8, 7, 7, 7])
    mask.save(tmp_path / "masks" / "train" / "a.png")
    assert read_mask(tmp_path / "masks" / "train" / "a.png").tolist() == IDS.tolist()


@pytest.mark.parametrize("suffix", ["gif", "png", "bmp", "tif"])
def test_a_mask_of_one_bit_has_the_ids_0_and_1(tmp_path, suffix):
    Image.fromarray(IDS == 1).save(tmp_path / f"a.{suffix}")
    assert read_mask(tmp_path / f"a.{suffix}").tolist() == (IDS == 1).tolist()


def png_of_greys(bits, row):
    """A PNG file of one row of grey pixels, of bits that Pillow reads and does not write."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", 8 * len(row) // bits, 1, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [2, 4])
def test_ids_that_readers_of_images_would_change_are_refused(tmp_path, bits):
    path = tmp_path / "mask.png"
    # Pillow makes 85 of a 1 of 2 bits, and of a 3 what is not counted
    path.write_bytes(png_of_greys(bits, b"\x1b\x1b"))
    with pytest.raises(BadSample, match=f"class ids must have 8 or 16 bits, got greys of {bits}.*save ids with 8"):
        read_mask(path)
    path.write_bytes(png_of_greys(8, b"\1\2"))
    assert read_mask(path).tolist() == [[1, 2]]


def test_a_folder_without_a_layout_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"Cityscapes: leftImg8bit.*ADE20K: images.*plain: images"):
        find_files(tmp_path, "train")
    with pytest.raises(ValueError, match="split must be"):
        find_files(tmp_path, "test")


def test_an_empty_or_missing_split_is_named(tmp_path):
    plain(tmp_path, names=())
    (tmp_path / "masks" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"got no folder .*images.train"):
        opened(tmp_path)
    (tmp_path / "images" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"images.train must hold images .*got none"):
        opened(tmp_path)


def test_two_images_of_one_name_are_refused(tmp_path):
    save(plain(tmp_path) / "images" / "train" / "a.jpg", picture())
    with pytest.raises(ValueError, match=r"a\.jpg and .*a\.png"):
        opened(tmp_path)


# ---- bad files


def harm_mask(change):
    def harm(root):
        change(root / "masks" / "train" / "a.png")

    return harm


def moved(path):
    """What the link in its place led to is gone."""
    path.unlink()
    path.symlink_to("nowhere.png")


BAD = {
    "no mask": (lambda root: (root / "masks" / "train" / "a.png").unlink(), r"images.train.a\.png .*there is no mask"),
    "a mask as JPEG": (
        harm_mask(lambda path: path.rename(path.with_suffix(".jpg"))),
        r"images.train.a\.png .*there is no mask of that name \(\.png",
    ),
    "no image": (lambda root: (root / "images" / "train" / "a.png").unlink(), r"masks.train.a\.png .*there is no image"),
    "other size": (harm_mask(lambda path: save(path, IDS[:2])), r"masks.train.a\.png .*the mask is 4 x 2, its image .* 4 x 3"),
    "id too large": (
        harm_mask(lambda path: save(path, IDS + 1)),
        r"masks.train.a\.png .*class id 3 is out of range; ids are 0 to 2",
    ),
    "id of 16 bits": (harm_mask(lambda path: save(path, IDS.astype(np.uint16) + 300)), r"class id 300 is out of range"),
    "colours": (harm_mask(lambda path: save(path, picture())), r"masks.train.a\.png .*one channel.*got colours \(RGB\)"),
    "colours and alpha": (harm_mask(lambda path: save(path, picture(), "RGBA")), r"got colours \(RGBA\)"),
    "cut mask": (harm_mask(lambda path: path.write_bytes(path.read_bytes()[:50])), r"masks.train.a\.png is no image"),
    "cut image": (
        lambda root: (root / "images" / "train" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n"),
        r"images.train.a\.png is no image",
    ),
    "mask that was moved": (
        harm_mask(moved),
        r"masks.train.a\.png cannot be used: No such file",
    ),
    "image that was moved": (
        lambda root: moved(root / "images" / "train" / "a.png"),
        r"images.train.a\.png cannot be used: No such file",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_sample_that_cannot_be_used_is_named_with_its_reason_and_left_out(tmp_path, kind):
    harm, message = BAD[kind]
    harm(plain(tmp_path))
    data = opened(tmp_path)
    with pytest.raises(BadSample, match=message):
        data[0]
    (batch,) = batches_in_order(data, batch_size=2)
    assert len(batch.content[0]) == 1
    assert len(batch.rejected) == 1


@pytest.mark.parametrize("mode", ["L", "CMYK", "LA", "1", "P"])
def test_an_image_of_any_kind_of_colours_is_read_as_rgb(tmp_path, mode):
    suffix = "jpg" if mode == "CMYK" else "png"
    plain(tmp_path)
    (tmp_path / "images" / "train" / "a.png").unlink()
    save(tmp_path / "images" / "train" / f"a.{suffix}", picture(), mode)
    image, labels = opened(tmp_path)[0]
    assert image.shape == (3, 3, 4)
    assert labels.tolist() == IDS.tolist()


def test_a_photograph_is_turned_as_its_mask_is(tmp_path):
    image = plain(tmp_path) / "images" / "train" / "a.png"
    notes = Image.Exif()
    notes[0x0112] = 6
    shown = picture()
    for stored in (np.rot90(shown), shown):
        Image.fromarray(stored.copy()).save(image, exif=notes)
        assert np.array_equal(np.asarray(opened(tmp_path).read(0)[0]), shown)


def test_an_image_of_16_bits_has_the_brightness_of_its_upper_8(tmp_path):
    grey = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    save(plain(tmp_path) / "images" / "train" / "a.png", grey)
    expected = save(tmp_path / "images" / "train" / "b.png", (grey >> 8).astype(np.uint8))
    assert expected.exists()
    data = opened(tmp_path)
    assert torch.equal(data[0][0], data[1][0])


# ---- crops

SCENE = Image.fromarray(picture(40, 60))
LABELS = (np.arange(2400).reshape(40, 60) % 60 // 20).astype(np.uint8)


def crop_of(seed=0, **options):
    with random_state_of(seed):
        return TrainingCrop(**({"crop": 32} | options))(SCENE, LABELS)


def test_image_and_labels_are_cut_scaled_and_flipped_together():
    """An image that shows its labels still shows them afterwards."""
    shown = Image.fromarray(np.repeat(LABELS[..., None] * 80, 3, axis=2).astype(np.uint8))
    for seed in range(20):
        with random_state_of(seed):
            image, labels = TrainingCrop(crop=32)(shown, LABELS)
        grey = (image[0] * 0.229 + 0.485) * 255 / 80
        is_inside = labels != IGNORED
        # but for the pixels that lie between two of them
        assert ((grey - labels).abs() < 0.02)[is_inside].float().mean() > 0.8
        assert (image[:, ~is_inside] == 0).all()


def test_a_scene_smaller_than_the_crop_is_filled_up_with_what_is_not_counted():
    image, labels = crop_of(smallest_scale=0.5, largest_scale=0.5)
    assert image.shape == (3, 32, 32)
    assert (labels[:20, :30] != IGNORED).all()
    assert (labels == IGNORED).sum() == 32 * 32 - 20 * 30
    assert (image[:, 20:] == 0).all()


def test_the_same_random_state_gives_the_same_crop():
    first, second, other = crop_of(3, color_jitter=0.5), crop_of(3, color_jitter=0.5), crop_of(4, color_jitter=0.5)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])


def test_crops_reach_other_processes():
    crop = TrainingCrop(crop=8, flip=0.25)
    assert pickle.loads(pickle.dumps(crop)) == crop  # noqa: S301


# ---- generated scenes


def test_scenes_are_read_by_the_reader_of_ade20k_and_follow_from_their_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_scenes(tmp_path / name, train=2, val=2, seed=seed)
    a, b, c = (opened(tmp_path / name, "val") for name in "abc")
    for index in range(2):
        assert torch.equal(a[index][0], b[index][0])
        assert torch.equal(a[index][1], b[index][1])
    assert a[0][1].shape != c[0][1].shape or not torch.equal(a[0][1], c[0][1])
    # splits do not share scenes
    assert not np.array_equal(*(np.asarray(opened(tmp_path / "a", split).read(0)[0])[:192, :224] for split in ("train", "val")))


def test_every_class_and_the_unlabelled_occur_in_scenes(tmp_path):
    write_scenes(tmp_path, train=1, val=12)
    data = opened(tmp_path, "val")
    found = {label for index in range(len(data)) for label in data[index][1].unique().tolist()}
    assert found == {*range(7), IGNORED}


def test_a_folder_is_written_by_the_first_who_asks_and_again_after_a_failure(tmp_path):
    calls = []

    def write(folder, fail):
        calls.append(fail)
        (folder / "x").write_text("x")
        if fail:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        written_once(tmp_path / "data" / "d", partial(write, fail=True))
    assert not (tmp_path / "data" / "d").exists()
    for _ in range(2):
        assert (written_once(tmp_path / "data" / "d", partial(write, fail=False)) / "x").exists()
    assert calls == [True, False]
