"""Generated images, folders of images, and batches that follow from seed and step."""

import hashlib
import itertools
import random
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from nalaformer.data import (
    GENERATED,
    Augmentation,
    CorruptImage,
    CountGrid,
    CueGrid,
    ImageFolder,
    MarkedPair,
    batches_from,
    batches_in_order,
    find_images,
    images,
    read_image,
    training_transform,
)
from nalaformer.data.augment import posterize

# sha256 over pixels and labels of the first eight samples: data that changes silently changes every figure learned on it
CHECKSUMS = {
    "cue_grid": "f1fd6efd10162663",
    "count_grid": "c5c8fea63840321a",
    "marked_pair": "3fb0e2eaf7c00cb3",
}


@pytest.mark.parametrize("name", GENERATED.names())
def test_the_first_samples_never_change(name):
    digest = hashlib.sha256()
    for image, label in itertools.islice(GENERATED[name](split="train", samples=8, seed=0), 8):
        digest.update((255 * (image + 0.5)).round().to(torch.uint8).numpy().tobytes() + bytes([label]))
    assert digest.hexdigest()[:16] == CHECKSUMS[name]


@pytest.mark.parametrize("name", GENERATED.names())
def test_a_sample_depends_on_seed_split_and_index_alone(name):
    data = GENERATED[name](split="train", samples=10)
    torch.manual_seed(1)
    np.random.seed(1)
    image, label = data[7]
    again, same_label = GENERATED[name](split="train", samples=99)[7]
    assert torch.equal(image, again)
    assert label == same_label
    assert not torch.equal(image, GENERATED[name](split="val", samples=10)[7][0])
    assert not torch.equal(image, GENERATED[name](split="train", samples=10, seed=1)[7][0])
    assert not torch.equal(image, data[6][0])


@pytest.mark.parametrize("name", GENERATED.names())
def test_every_class_comes_about_equally_often(name):
    data = GENERATED[name](split="val", samples=800)
    counts = np.bincount([data[i][1] for i in range(800)], minlength=len(data.classes))
    expected = 800 / len(data.classes)
    # four standard deviations of a binomial count
    assert np.abs(counts - expected).max() < 4 * expected**0.5
    assert len(counts) == len(data.classes)


@pytest.mark.parametrize("name", GENERATED.names())
def test_images_have_the_size_and_range_they_say(name):
    data = GENERATED[name](split="train", samples=4)
    image, _ = data[0]
    assert image.shape == (3, data.image_size, data.image_size)
    assert image.dtype == torch.float32
    assert image.min() >= -0.5
    assert image.max() <= 0.5


def colour_histograms(data, bins=4):
    """Counts of colours over the whole image, [samples, bins^3], and labels."""
    features, labels = [], []
    for image, label in itertools.islice(data, len(data)):
        level = ((image + 0.5) * (bins - 1e-3)).long()
        code = (level[0] * bins + level[1]) * bins + level[2]
        features.append(torch.bincount(code.flatten(), minlength=bins**3).float())
        labels.append(label)
    x = torch.stack(features).sqrt()
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-3), torch.tensor(labels)


def logistic_accuracy(x, y, classes):
    """Accuracy of a logistic regression on the half it has not seen."""
    half = len(x) // 2
    weight = torch.zeros(x.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=40)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(x[:half] @ weight, y[:half]) + 1e-2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return (x[half:] @ weight).argmax(1).eq(y[half:]).float().mean().item()


@pytest.mark.parametrize("name", GENERATED.names())
def test_colours_alone_do_not_tell_the_class(name, one_thread):
    data = GENERATED[name](split="val", samples=1200)
    chance = 1 / len(data.classes)
    accuracy = logistic_accuracy(*colour_histograms(data), len(data.classes))
    # four standard errors of 600 guesses
    assert accuracy < chance + 4 * (chance * (1 - chance) / 600) ** 0.5


def test_the_shortcut_check_finds_a_shortcut(one_thread):
    class Tinted(CueGrid):
        def draw(self, random):
            pixels, label = super().draw(random)
            pixels[0, :4] = label / 4
            return pixels, label

    data = Tinted(split="val", samples=600)
    assert logistic_accuracy(*colour_histograms(data), 4) > 0.6


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_cued_colour_belongs_to_the_answer_alone(split):
    data = CueGrid(split=split, samples=20, separation=20)
    for index in range(20):
        image, label = data[index]
        cells = (image + 0.5).unflatten(1, (6, 8)).unflatten(3, (6, 8)).permute(1, 3, 0, 2, 4).reshape(36, 3, 8, 8)
        is_cue = (cells[:, :, 0] == 1).all(dim=(1, 2))
        assert is_cue.sum() == 1
        cue = cells[is_cue][0, :, 4, 4]
        colours = cells[~is_cue].flatten(2).amax(2)
        filled = colours.amax(1) > 0
        angle = torch.nn.functional.cosine_similarity(colours[filled] - 0.5, (cue - 0.5)[None]).clamp(-1, 1).acos().rad2deg()
        assert (angle < 1).sum() == 1
        assert (angle < 19.9).sum() == 1
        answer = cells[~is_cue][filled][angle.argmin()]
        shape = (answer.amax(0) > 0).float()
        assert torch.equal(shape, torch.from_numpy(data.masks[label]))


def test_every_glyph_of_a_cue_grid_comes_equally_often():
    data = CueGrid(split="val", samples=5)
    masks = torch.from_numpy(data.masks)
    for index in range(5):
        cells = (data[index][0] + 0.5).unflatten(1, (6, 8)).unflatten(3, (6, 8)).permute(1, 3, 0, 2, 4).reshape(36, 3, 8, 8)
        shapes = (cells.amax(1) > 0).float()
        assert [(shapes == mask).all(dim=(1, 2)).sum().item() for mask in masks] == [8] * 4


def test_the_count_is_the_number_of_glyphs_like_the_marked_one():
    data = CountGrid(split="val", samples=20)
    for index in range(20):
        image, label = data[index]
        cells = (image + 0.5).unflatten(1, (6, 8)).unflatten(3, (6, 8)).permute(1, 3, 0, 2, 4).reshape(36, 3, 8, 8)
        is_cue = (cells[:, :, 0] == 1).all(dim=(1, 2))
        inside = cells[is_cue][0, 0, 1:-1, 1:-1]
        shapes = (cells[~is_cue].amax(1) > 0).float()[:, 1:-1, 1:-1]
        assert (shapes == inside).all(dim=(1, 2)).sum().item() == label + 1


def test_marked_pairs_relate_as_their_label_says():
    data = MarkedPair(split="val", samples=40)
    for index in range(40):
        image, label = data[index]
        pixels = (image + 0.5).numpy()
        white = (pixels == 1).all(0)
        # upper left corners of the frames: white with 13 white to the right and below, and none before
        corners = [
            (y, x)
            for y, x in np.argwhere(white)
            if white[y, x : x + 13].sum() == 13 and white[y : y + 13, x].sum() == 13 and white[y + 12, x : x + 13].sum() == 13
        ]
        assert len(corners) == 2
        shapes, colours = [], []
        for y, x in corners:
            inside = pixels[:, y + 2 : y + 11, x + 2 : x + 11]
            shapes.append(inside.max(0) > 0)
            colours.append(inside.max(axis=(1, 2)))
        assert np.array_equal(*shapes) == bool(label & 2)
        assert np.allclose(*colours) == bool(label & 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CueGrid(split="test", samples=1), "train"),
        (lambda: CueGrid(split="train", samples=0), "samples must be positive"),
        (lambda: CueGrid(split="train", samples=1, glyphs=9), "glyphs must be between"),
        (lambda: CueGrid(split="train", samples=1, cells=1), "room for every glyph"),
        (lambda: CueGrid(split="train", samples=1, cell_size=3), "at least 6 pixels"),
        (lambda: CueGrid(split="train", samples=1, separation=90), "separation"),
        (lambda: CountGrid(split="train", samples=1, most=99), "most must be"),
        (lambda: MarkedPair(split="train", samples=1, image_size=32), "larger image_size"),
    ],
)
def test_impossible_images_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- files


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


def test_a_missing_file_is_not_called_corrupt(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "none.png")


def test_images_are_found_below_folders_and_by_themselves(folder):
    assert len(find_images([folder / "val"])) == 10
    one = folder / "val" / "cat" / "0.png"
    assert find_images([one]) == [one]
    with pytest.raises(ValueError, match="must exist"):
        find_images([folder / "none.png"])
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="at least one"):
        find_images([folder / "empty"])


# ---- batches


class Numbers:
    """Sample i is i, and a random number, which stands for augmentation; listed ones are corrupt."""

    def __init__(self, count, corrupt=()):
        self.count, self.corrupt = count, corrupt

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.corrupt:
            raise CorruptImage(f"{index}.png", "made so")
        return index, torch.rand(()).item() + random.random() + np.random.rand()


def read(step, last_step, data=None, **options):
    batches = batches_from(step, data or Numbers(23), seed=3, batch_size=6, last_step=last_step, **options)
    return [(batch.content[0].tolist(), batch.content[1].tolist()) for batch in batches]


class Words(Numbers):
    """Samples that cannot be stacked."""

    def __getitem__(self, index):
        return "x" * index

    @staticmethod
    def collate(samples):
        return "|".join(samples)


def test_data_with_a_collate_of_its_own_is_put_together_by_it():
    (batch,) = batches_in_order(Words(3), batch_size=3)
    assert batch.content == "|x|xx"


@pytest.mark.parametrize("step", [1, 3, 5])
def test_batches_from_a_later_step_are_those_of_the_whole_run(step):
    whole = read(0, 8)
    torch.rand(5)
    assert read(step, 8) == whole[step:]


def test_the_order_of_an_epoch_and_its_augmentation_never_change():
    """A run that is resumed with a later version must see what it would have seen."""
    whole = read(0, 4)
    # 23 samples are three batches of six; the fourth begins another epoch
    assert [indices for indices, _ in whole] == [
        [9, 17, 12, 18, 0, 15],
        [3, 20, 8, 13, 6, 1],
        [10, 2, 11, 22, 16, 14],
        [13, 10, 11, 2, 20, 14],
    ]
    assert whole[0][1] == pytest.approx([2.271461, 1.294116, 1.531405, 1.686954, 0.996887, 1.839811], abs=1e-5)


def test_an_epoch_has_no_sample_twice_and_the_next_another_order():
    whole = [index for indices, _ in read(0, 6) for index in indices]
    assert len(set(whole[:18])) == 18
    assert whole[:18] != whole[18:36]


def test_augmentation_differs_from_epoch_to_epoch():
    drawn = [number for _, numbers in read(0, 9) for number in numbers]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (1, 3), (3, 2)])
def test_ranks_and_parts_together_see_what_one_process_sees(ranks, accumulate):
    whole = read(0, 4)
    shares = [read(0, 4, rank=rank, ranks=ranks, accumulate=accumulate) for rank in range(ranks)]
    for step in range(4):
        parts = [share[step * accumulate + part] for share in shares for part in range(accumulate)]
        assert sorted(i for indices, _ in parts for i in indices) == sorted(whole[step][0])
        assert sorted(n for _, numbers in parts for n in numbers) == sorted(whole[step][1])


def test_repeated_augmentation_shows_each_image_again_in_another_form():
    (indices, numbers), *_ = read(0, 1, repeats=3)
    assert sorted(indices) == sorted([indices[0]] * 3 + [indices[3]] * 3)
    assert len(set(numbers)) == 6


def test_workers_make_the_same_batches(one_thread):
    assert read(2, 4, workers=2) == read(2, 4)


def test_reading_leaves_the_random_state_alone():
    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()

    numbers = []
    for reads in (False, True):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        if reads:
            read(0, 2)
        numbers.append(draw())
    assert numbers[0] == numbers[1]


def test_a_corrupt_image_gives_way_to_the_next_and_is_named():
    batches = list(batches_from(0, Numbers(6, corrupt=(2,)), seed=0, batch_size=6, last_step=1))
    assert sorted(batches[0].content[0].tolist()) == [0, 1, 3, 3, 4, 5]
    assert len(batches[0].rejected) == 1
    assert "2.png" in batches[0].rejected[0]


def test_evaluation_leaves_a_corrupt_image_out():
    batches = list(batches_in_order(Numbers(5, corrupt=(0, 1)), batch_size=2))
    assert batches[0].content is None
    assert [index for batch in batches[1:] for index in batch.content[0].tolist()] == [2, 3, 4]
    assert sum(len(batch.rejected) for batch in batches) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_evaluation_sees_every_sample_once_over_all_ranks(ranks):
    seen = [
        index
        for rank in range(ranks)
        for batch in batches_in_order(Numbers(5), batch_size=2, rank=rank, ranks=ranks)
        for index in batch.content[0].tolist()
    ]
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_data_in_which_nothing_can_be_read_ends_with_an_error():
    with pytest.raises(ValueError, match="in a row cannot be used"):
        list(batches_from(0, Numbers(6, corrupt=range(6)), seed=0, batch_size=2, last_step=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"accumulate": 4}, "equal parts"), ({"repeats": 0}, "repeats"), ({"data": Numbers(5)}, "whole batch")],
)
def test_batches_that_do_not_divide_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        read(0, 1, **options)


SLOW_READER = """
import os, sys, time
from nalaformer.data import batches_from


class Places:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return os.getpid()


if __name__ == "__main__":
    for batch in batches_from(0, Places(), seed=0, batch_size=2, last_step=50, workers=1):
        print(int(batch.content[0]), flush=True)
        time.sleep(60)
"""


def test_workers_leave_when_their_reader_is_killed(tmp_path):
    script = tmp_path / "reader.py"
    script.write_text(SLOW_READER)
    reader = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(reader.stdout.readline())
    reader.kill()
    reader.wait()
    # the pipe is held by the workers too: it ends with the last of them
    deadline = time.monotonic() + 60
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not is_running(worker)
    reader.stdout.close()


def is_running(process: int) -> bool:
    try:
        # a process that has ended but was not waited for is a zombie
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
