"""Images in two resolutions: reduction, folders, patches, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from nalaformer.data import BadSample, CorruptImage
from nalaformer.data.super_resolution import (
    EvalImages,
    ImagePairs,
    Patches,
    enlarge,
    find_pairs,
    folders,
    reduce,
    reduce_floats,
    to_eight_bits,
    write_scenes,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def cubic(x):
    x = abs(x)
    if x <= 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def resized_row(row, new_length, step, width):
    """The formula, pixel by pixel in Python's floats; the row goes on mirrored beyond its ends."""
    mirrored = [*row, *reversed(row)]
    out = []
    for i in range(new_length):
        centre = (i + 0.5) * step - 0.5
        near = range(int(centre - 3 * width) - 2, int(centre + 3 * width) + 3)
        weights = [cubic((centre - j) / width) for j in near]
        out.append(sum(w * mirrored[j % len(mirrored)] for w, j in zip(weights, near, strict=True)) / sum(weights))
    return out


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("length", [3, 8, 13, 24])
def test_rows_are_resized_by_the_formula(factor, length):
    row = np.random.default_rng(length).uniform(size=length).tolist()
    image = torch.tensor([row], dtype=torch.float64)
    # a single row has a mirror image of itself above and below
    smaller = resized_row(row, -(-length // factor), factor, factor)
    larger = resized_row(row, length * factor, 1 / factor, 1)
    assert torch.allclose(reduce_floats(image, factor)[0], torch.tensor(smaller, dtype=torch.float64), atol=1e-12, rtol=0)
    assert torch.allclose(enlarge(image, factor)[1], torch.tensor(larger, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_away_from_the_borders_torch_resizes_alike(factor):
    image = torch.rand(1, 3, 12 * factor, 10 * factor, dtype=torch.float64)
    inside = (..., slice(2, -2), slice(2, -2))
    smaller = F.interpolate(image, size=(12, 10), mode="bicubic", antialias=True)
    assert torch.allclose(reduce_floats(image, factor)[inside], smaller[inside], atol=1e-12, rtol=0)
    larger = F.interpolate(smaller, scale_factor=factor, mode="bicubic", antialias=True)
    inside = (..., slice(2 * factor, -2 * factor), slice(2 * factor, -2 * factor))
    assert torch.allclose(enlarge(smaller, factor)[inside], larger[inside], atol=1e-12, rtol=0)
    # there its rows end, and ours go on mirrored
    assert not torch.allclose(reduce_floats(image, factor), F.interpolate(image, size=(12, 10), mode="bicubic", antialias=True))


def test_rows_and_columns_are_treated_alike():
    image = torch.rand(9, 14, dtype=torch.float64)
    assert torch.allclose(reduce_floats(image, 3).mT, reduce_floats(image.mT.contiguous(), 3), atol=1e-12, rtol=0)
    assert torch.allclose(enlarge(image, 2).mT, enlarge(image.mT.contiguous(), 2), atol=1e-12, rtol=0)


def rounded(values):
    return np.clip(np.floor(np.array(values) + 0.5), 0, 255)


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_small_images_are_rounded_after_each_direction(factor):
    """As MATLAB makes them, and with it this field."""
    image = np.random.default_rng(factor).integers(0, 256, (13, 9)) // 200 * 200
    height, width = (-(-side // factor) for side in image.shape)
    high = np.stack([rounded(resized_row(column.tolist(), height, factor, factor)) for column in image.T], axis=1)
    small = np.stack([rounded(resized_row(row.tolist(), width, factor, factor)) for row in high])
    pixels = torch.from_numpy(image.astype(np.uint8)).expand(2, 3, 13, 9)
    found = reduce(pixels, factor)
    assert found.dtype == torch.uint8
    assert torch.equal(found, torch.from_numpy(small.astype(np.uint8)).expand(2, 3, height, width))
    assert not torch.equal(found, to_eight_bits(reduce_floats(pixels.double() / 255, factor)))


def test_halves_are_rounded_upwards_and_what_is_below_zero_is_black():
    """Weights of the neighbours of a new pixel, halved: (111, 29, -9, -3) / 256, mirrored at the border."""
    column = torch.tensor([0, 128, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)[:, None]
    # 128 (111 - 9) / 256 = 51, 128 * 29 / 256 = 14.5, 128 * -3 / 256 = -1.5
    assert reduce(column, 2).tolist() == [[51], [15], [0], [0]]
    with pytest.raises(ValueError, match=r"must be uint8, got torch\.float32; reduce_floats takes floats"):
        reduce(column.float(), 2)


def test_eight_bits_are_the_nearest_level():
    assert to_eight_bits(torch.tensor([-0.1, 0.0, 0.49 / 255, 0.51 / 255, 1.0, 1.2])).tolist() == [0, 0, 0, 1, 255, 255]


# ---- folders


def save(path, width=24, height=20, mode="RGB", seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"L": (), "RGB": (3,), "CMYK": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8)
    Image.fromarray(pixels, mode=mode if mode == "CMYK" else None).save(path)
    return path


def names(root, split, scale=2):
    return [(files.high.name, files.low and files.low.name) for files in find_pairs(root, split, scale=scale)]


def test_a_plain_folder_gives_one_image_of_ten_to_evaluation(tmp_path):
    for number in range(12):
        save(tmp_path / f"{number:02d}.png")
    assert names(tmp_path, "val") == [("00.png", None), ("10.png", None)]
    assert [name for name, _ in names(tmp_path, "train")] == [f"{number:02d}.png" for number in range(12) if number % 10]


def test_splits_may_be_folders_of_large_images(tmp_path):
    save(tmp_path / "train" / "a.png")
    save(tmp_path / "val" / "b.jpg")
    assert (names(tmp_path, "train"), names(tmp_path, "val")) == ([("a.png", None)], [("b.jpg", None)])


@pytest.mark.parametrize("low", ["LR/a.png", "LR/ax2.png", "LR/X2/a.png", "LR_bicubic/X2/ax2.bmp"])
def test_small_images_are_found_by_name(low, tmp_path):
    save(tmp_path / "train" / "HR" / "a.png")
    save(tmp_path / "train" / low, 12, 10)
    assert names(tmp_path, "train") == [("a.png", low.rsplit("/", 1)[1])]


def test_div2k_is_read_as_it_is_distributed(tmp_path):
    for name in ("train", "valid"):
        save(tmp_path / f"DIV2K_{name}_HR" / "0001.png")
        save(tmp_path / f"DIV2K_{name}_LR_bicubic" / "X2" / "0001x2.png", 12, 10)
    assert names(tmp_path, "train") == names(tmp_path, "val") == [("0001.png", "0001x2.png")]


def test_a_set_without_splits_is_for_evaluation_alone(tmp_path):
    save(tmp_path / "HR" / "baby.png")
    save(tmp_path / "HR" / "bird.png")
    save(tmp_path / "LR_bicubic" / "X2" / "babyx2.png", 12, 10)
    assert names(tmp_path, "val") == [("baby.png", "babyx2.png"), ("bird.png", "bird.png")]
    with pytest.raises(ValueError, match=r"for x3 must lie in .*X3, got only X2 there"):
        find_pairs(tmp_path, "val", scale=3)
    with pytest.raises(ValueError, match=r"must lie in .*train/HR, got .*HR, all for evaluation"):
        find_pairs(tmp_path, "train", scale=2)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "at least one"),
        (["a.png"], "an image each, got 1"),
        (["train/a.png"], "val images must lie in .*val, got no such folder"),
        (["train/a.png", "val/LR/a.png"], "large ones in .*HR, got only .*LR"),
    ],
)
def test_a_folder_without_its_parts_is_refused(files, message, tmp_path):
    for name in files:
        save(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        find_pairs(tmp_path, "val", scale=2)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere, which is none"):
        find_pairs(tmp_path / "nowhere", "val", scale=2)


# ---- pairs


def pairs_of(root, *, scale=2, kept_mib=10):
    return ImagePairs(find_pairs(root, "train", scale=scale), scale=scale, kept_mib=kept_mib)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_a_large_image_alone_is_cut_and_reduced(scale, tmp_path):
    path = save(tmp_path / "train" / "a.png", 26, 23)
    low, high = pairs_of(tmp_path, scale=scale)[0]
    pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
    assert torch.equal(high, pixels[:, : 23 // scale * scale, : 26 // scale * scale])
    assert torch.equal(low, reduce(high, scale))


def test_a_small_image_is_read_and_not_made(tmp_path):
    save(tmp_path / "train" / "HR" / "a.png", 24, 21)
    path = save(tmp_path / "train" / "LR" / "a.png", 12, 10, seed=1)
    low, high = pairs_of(tmp_path)[0]
    assert torch.equal(low, torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1))
    assert high.shape == (3, 20, 24)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_printers_colours_are_read(mode, tmp_path):
    save(tmp_path / "train" / "a.tif", mode=mode)
    low, high = pairs_of(tmp_path)[0]
    assert (low.shape, high.shape) == ((3, 10, 12), (3, 20, 24))


def test_sixteen_bits_are_read_by_their_upper_eight(tmp_path):
    (tmp_path / "train").mkdir()
    pixels = np.random.default_rng(0).integers(0, 2**16, (20, 24), dtype=np.uint16)
    Image.fromarray(pixels).save(tmp_path / "train" / "a.png")
    assert np.array_equal(pairs_of(tmp_path)[0][1][0].numpy(), pixels >> 8)


def test_a_truncated_image_is_named(tmp_path):
    path = save(tmp_path / "train" / "a.png")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CorruptImage, match=r"a\.png"):
        pairs_of(tmp_path)[0]


def test_a_small_image_of_another_size_names_both_files(tmp_path):
    save(tmp_path / "train" / "HR" / "a.png", 24, 20)
    save(tmp_path / "train" / "LR" / "a.png", 12, 11)
    with pytest.raises(BadSample, match=r"LR/a\.png .* size must be that of .*HR/a\.png divided by 2, 12 x 10, got 12 x 11"):
        pairs_of(tmp_path)[0]


def test_a_missing_small_image_is_named_with_its_folder(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / "train" / "HR" / f"{name}.png")
    save(tmp_path / "train" / "LR" / "a.png", 12, 10)
    with pytest.raises(BadSample, match=r"HR/b\.png .* small image is missing; .*LR must hold b or bx2"):
        pairs_of(tmp_path)[1]


def test_an_image_smaller_than_the_scale_is_refused(tmp_path):
    save(tmp_path / "train" / "a.png", 24, 2)
    with pytest.raises(BadSample, match=r"at least the scale, 3, got 24 x 2"):
        pairs_of(tmp_path, scale=3)[0]


@pytest.mark.parametrize(("kept_mib", "reads"), [(10, 2), (0, 6)])
def test_images_are_decoded_once_while_they_fit(kept_mib, reads, tmp_path, monkeypatch):
    for name in ("a", "b"):
        save(tmp_path / "train" / f"{name}.png")
    count = []
    monkeypatch.setattr(folders, "opened_image", lambda path, opened=folders.opened_image: count.append(path) or opened(path))
    pairs = pairs_of(tmp_path, kept_mib=kept_mib)
    for _ in range(3):
        for index in range(2):
            pairs[index]
    assert len(count) == reads


# ---- patches


def corners(folder, **options):
    """Large images whose pixels name their place: red the row, green the column."""
    (folder / "train" / "HR").mkdir(parents=True)
    (folder / "train" / "LR").mkdir()
    for name, side in (("HR", 24), ("LR", 12)):
        rows, columns = np.mgrid[:side, :side].astype(np.uint8)
        Image.fromarray(np.stack((rows, columns, 0 * rows), axis=2)).save(folder / "train" / name / "a.png")
    return Patches(pairs_of(folder), **options)


def test_a_patch_shows_the_same_place_in_both_sizes_turned_alike(tmp_path):
    patches = corners(tmp_path, size=9, per_image=40)
    assert len(patches) == 40
    orientations, places = set(), set()
    for index in range(len(patches)):
        np.random.seed(index)
        low, high = (image[:2].long() for image in patches[index])
        assert (low.shape, high.shape) == ((2, 4, 4), (2, 8, 8))
        # every small pixel lies where the four large ones lie
        cells = high.unfold(1, 2, 2).unfold(2, 2, 2).amin((3, 4))
        assert torch.equal(cells, 2 * low)
        places.add(tuple(low.amin((1, 2)).tolist()))
        orientations.add(tuple((low[:, 0, 1] - low[:, 0, 0]).tolist() + (low[:, 1, 0] - low[:, 0, 0]).tolist()))
    assert len(orientations) == 8
    assert len(places) > 10


def test_a_patch_follows_the_random_state(tmp_path):
    patches = corners(tmp_path, size=8, per_image=2)
    found = []
    for seed in (0, 0, 1):
        np.random.seed(seed)
        found.append(patches[0][1])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_an_image_smaller_than_the_patch_is_named(tmp_path):
    with pytest.raises(BadSample, match=r"a\.png .* a patch of 40 x 40 pixels, got 24 x 24; use a smaller patch_size"):
        corners(tmp_path, size=40, per_image=1)[0]


def test_evaluation_sees_the_whole_image_or_its_middle(tmp_path):
    pairs = corners(tmp_path, size=8, per_image=1).pairs
    low, high = EvalImages(pairs)[0]
    assert (low.shape, high.shape) == ((3, 12, 12), (3, 24, 24))
    low, high = EvalImages(pairs, crop=9)[0]
    assert (low[:2, 0, 0].tolist(), high[:2, 0, 0].tolist()) == ([4, 4], [8, 8])
    assert (low.shape, high.shape) == ((3, 4, 4), (3, 8, 8))


def test_an_image_too_small_to_be_judged_is_named(tmp_path):
    pairs = corners(tmp_path, size=8, per_image=1).pairs
    with pytest.raises(BadSample, match=r"a\.png .* at least 25 pixels, got 24 x 24"):
        EvalImages(pairs, smallest=25)[0]


# ---- generated images


def test_scenes_are_written_once_and_follow_from_their_seed(tmp_path):
    options = {"train": 2, "val": 1, "size": 32}
    folder = write_scenes(tmp_path / "a", **options)
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}
    assert len(stamps) == 3
    assert write_scenes(tmp_path / "a", **options) == folder
    assert stamps == {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}
    same, other = (write_scenes(tmp_path / "b", **options, seed=seed) for seed in (0, 1))
    pixels = [np.array(Image.open(root / "train" / "0001.png")) for root in (folder, same, other)]
    assert np.array_equal(pixels[0], pixels[1])
    assert not np.array_equal(pixels[0], pixels[2])


def test_no_scene_is_in_both_splits(tmp_path):
    folder = write_scenes(tmp_path, train=2, val=2, size=24)
    assert len({path.read_bytes() for path in folder.rglob("*.png")}) == 4


def test_a_stopped_writer_leaves_no_folder(tmp_path, monkeypatch):
    def stop(self, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        write_scenes(tmp_path, train=1, val=1, size=24)
    assert list(tmp_path.iterdir()) == []
