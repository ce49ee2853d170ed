"""Every option of image data and of classification does what its documentation says."""

import inspect
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from helpers.option_effects import Effects
from nalaformer.data import GENERATED, Augmentation, ImageFolder, eval_transform, find_images, training_transform
from nalaformer.data.loading import random_state_of
from nalaformer.data.text import find_text
from nalaformer.tasks import Classification, ClassificationConfig

AUGMENTATION = Effects(field.name for field in fields(Augmentation))
CLASSIFICATION = Effects(field.name for field in fields(ClassificationConfig))
GENERATORS = Effects(
    f"{name}.{option}"
    for name in GENERATED.names()
    for option in inspect.signature(GENERATED[name]).parameters
    if option not in ("split", "samples", "seed")
)


def test_no_option_is_without_a_test_of_its_effect():
    assert [*AUGMENTATION.missing(), *CLASSIFICATION.missing(), *GENERATORS.missing()] == []


# ---- augmentation

# red rises to the right and green downwards, so that a part of the image says where it was cut
RAMP = Image.fromarray(
    np.stack(
        np.broadcast_arrays(np.arange(128)[None, :] * 2, np.arange(128)[:, None] * 2, np.full((1, 1), 100)), axis=-1
    ).astype(np.uint8)
)
PLAIN = {"smallest_crop": 1.0, "flip": 0.0}
MEAN, STD = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]


def augmented(count=60, size=32, **options):
    """The ramp as training sees it, in values 0..1: [count, 3, size, size]."""
    transform = training_transform(size, Augmentation(**(PLAIN | options)))
    found = []
    for seed in range(count):
        with random_state_of(seed):
            found.append(transform(RAMP) * STD + MEAN)
    return torch.stack(found)


def about(count, share):
    """Four standard deviations of a binomial count."""
    return pytest.approx(count * share, abs=4 * (count * share * (1 - share)) ** 0.5)


@AUGMENTATION.of("flip")
def test_images_are_flipped_as_often_as_asked():
    def flips(flip):
        images = augmented(flip=flip)
        return int((images[:, 0, 16, 0] > images[:, 0, 16, -1]).sum())

    assert flips(0.0) == 0
    assert flips(1.0) == 60
    assert flips(0.3) == about(60, 0.3)


def areas(**options):
    """Which part of the image's area each crop keeps."""
    images = augmented(**options)
    return (images[:, 0].amax((1, 2)) - images[:, 0].amin((1, 2))) * (images[:, 1].amax((1, 2)) - images[:, 1].amin((1, 2)))


@AUGMENTATION.of("smallest_crop")
def test_a_crop_keeps_at_least_its_part_of_the_area():
    assert areas(smallest_crop=1.0).min() > 0.9
    half = areas(smallest_crop=0.5)
    assert half.min() > 0.44
    assert half.max() - half.min() > 0.3
    assert areas(smallest_crop=0.08).min() < 0.2


@AUGMENTATION.of("random_erasing")
def test_a_rectangle_becomes_noise_as_often_as_asked():
    plain = augmented(count=1)[0]

    def erased(part):
        return int(((augmented(random_erasing=part) - plain).abs().amax((1, 2, 3)) > 0.3).sum())

    assert erased(0.0) == 0
    assert erased(1.0) == 60
    assert erased(0.25) == about(60, 0.25)


@AUGMENTATION.of("color_jitter")
def test_brightness_varies_as_strongly_as_asked():
    # blue is the same everywhere: 100 of 255
    blue = {strength: augmented(color_jitter=strength)[:, 2].mean((1, 2)) / (100 / 255) for strength in (0.0, 0.2, 0.8)}
    assert blue[0.0].std() < 1e-3
    assert 0.05 < blue[0.2].std() < 0.2
    assert blue[0.8].std() > 2 * blue[0.2].std()


@AUGMENTATION.of("auto_augment")
def test_automatic_augmentation_changes_images_and_replaces_jitter():
    plain = augmented(count=1)[0]
    changed = (augmented(auto_augment="rand-m9-mstd0.5-inc1") - plain).abs().amax((1, 2, 3)) > 0.05
    # two operations, each of them done or left out by a throw
    assert changed.float().mean() > 0.4
    assert (augmented() - plain).abs().max() < 1e-5
    one, other = (augmented(count=5, auto_augment="rand-m0-n1", color_jitter=strength) for strength in (0.0, 0.9))
    assert torch.equal(one, other)


# ---- files


@pytest.fixture
def unordered(monkeypatch):
    """A disk that lists its files in no useful order."""

    def turned_around(listed):
        return lambda *arguments: sorted(listed(*arguments), reverse=True)

    for name in ("iterdir", "glob", "rglob"):
        monkeypatch.setattr(Path, name, turned_around(getattr(Path, name)))


@pytest.fixture
def folder(tmp_path):
    """The ramp twice in each class, dark in one and bright in the other."""
    for split, name, number in ((s, c, n) for s in ("train", "val") for c in ("dark", "light") for n in "123"):
        path = tmp_path / "data" / split / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.asarray(RAMP) // (1 if name == "light" else 2) - np.uint8(int(number))
        Image.fromarray(pixels).save(path)
    return tmp_path / "data"


def test_files_come_in_the_order_of_their_names_whatever_the_disk_says(folder, unordered):
    expected = [
        (str(folder / "val" / name / f"{number}.png"), label)
        for label, name in enumerate(("dark", "light"))
        for number in "123"
    ]
    data = ImageFolder(folder, "val", transform=eval_transform(32))
    assert data.classes == ("dark", "light")
    assert data.files == expected
    assert find_images([folder / "val"]) == [Path(path) for path, _ in expected]
    for name in ("b.txt", "a.jsonl", "c.txt"):
        (folder / name).write_text("x")
    assert find_text([folder]) == [folder / name for name in ("a.jsonl", "b.txt", "c.txt")]


def test_hidden_folders_are_no_classes(folder):
    (folder / "val" / ".thumbnails").mkdir()
    (folder / "val" / ".thumbnails" / "1.png").write_bytes((folder / "val" / "dark" / "1.png").read_bytes())
    assert ImageFolder(folder, "val", transform=eval_transform(32)).classes == ("dark", "light")


# ---- classification


def task_of(**settings):
    return Classification(ClassificationConfig(**({"data": "cue_grid", "train_samples": 8, "eval_samples": 8} | settings)))


@CLASSIFICATION.of("data")
def test_data_is_a_folder_or_the_name_of_generated_data(folder):
    assert task_of(data=str(folder)).classes == ("dark", "light")
    for name in GENERATED.names():
        task = task_of(data=name)
        assert (type(task.train_data), type(task.eval_data)) == (GENERATED[name], GENERATED[name])
    assert (task.train_data.split, task.eval_data.split) == ("train", "val")
    assert "/train/" in task_of(data=str(folder)).train_data.files[0][0]
    assert "/val/" in task_of(data=str(folder)).eval_data.files[0][0]


@CLASSIFICATION.of("data_options")
def test_options_reach_both_splits_and_the_size():
    task = task_of(data_options={"cells": 4, "cell_size": 9})
    assert task.train_data[0][0].shape == task.eval_data[0][0].shape == (3, 36, 36)
    assert task.image_size == 36
    assert task.prepare(RAMP).shape == (3, 36, 36)


@CLASSIFICATION.of("data_seed")
def test_a_seed_gives_other_images_in_both_splits():
    zero, one = task_of(), task_of(data_seed=1)
    assert not torch.equal(zero.train_data[0][0], one.train_data[0][0])
    assert not torch.equal(zero.eval_data[0][0], one.eval_data[0][0])


@CLASSIFICATION.of("train_samples", "eval_samples")
def test_so_many_images_are_generated():
    task = task_of(train_samples=5, eval_samples=3)
    assert (len(task.train_data), len(task.eval_data)) == (5, 3)


@CLASSIFICATION.of("image_size")
def test_images_of_a_folder_have_the_size(folder):
    task = task_of(data=str(folder), image_size=24)
    assert task.train_data[0][0].shape == task.eval_data[0][0].shape == task.prepare(RAMP).shape == (3, 24, 24)
    assert task.image_size == 24


@pytest.mark.parametrize(("sides", "size"), [((28, 28), 32), ((5, 9), 32), ((60, 80), 64), ((65, 200), 80), ((900, 700), 128)])
def test_a_size_that_is_left_open_is_the_usual_side(folder, sides, size):
    for number, path in enumerate(sorted((folder / "train").rglob("*.png"))):
        # the shorter side counts, and one odd image in six does not
        Image.new("RGB", sides if number else (400, 400)).save(path)
    (folder / "train" / "dark" / "1.png").write_bytes(b"no image")
    task = task_of(data=str(folder), image_size=0)
    assert task.image_size == task.config.image_size == size
    assert task.prepare(RAMP).shape == (3, size, size)
    assert task_of(image_size=0).image_size == task_of().image_size


def held_out(folder, **settings):
    task = task_of(**({"data": str(folder), "holdout": 0.25, "image_size": 32} | settings))
    splits = [
        {Path(path).relative_to(folder).as_posix() for path, _ in data.files} for data in (task.train_data, task.eval_data)
    ]
    assert not splits[0] & splits[1]
    return splits


@CLASSIFICATION.of("holdout")
def test_a_share_of_each_class_is_held_out_and_follows_from_the_names(tmp_path, unordered):
    def add(root, name, numbers):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in numbers:
            Image.new("RGB", (8, 8)).save(root / name / f"{number}.png")

    for root in (tmp_path / "a", tmp_path / "b" / "c"):
        add(root, "cat", range(8))
        add(root, "dog", range(2))
    train, val = held_out(tmp_path / "a")
    assert (len(train), len(val)) == (6 + 1, 2 + 1)
    # the choice itself is part of the promise: on every machine the same
    assert val == {"cat/0.png", "cat/1.png", "dog/1.png"}
    assert held_out(tmp_path / "b" / "c") == [train, val]
    assert len(held_out(tmp_path / "a", holdout=0.5)[1]) == 4 + 1
    # train/ alone is cut in the same way
    (tmp_path / "b" / "c").rename(tmp_path / "b" / "train")
    assert held_out(tmp_path / "b")[1] == {f"train/{name}" for name in val}


def test_folders_with_val_are_not_cut(folder):
    assert [len(split) for split in held_out(folder)] == [6, 6]
    assert "6 of val/" in task_of(data=str(folder), holdout=0.2, image_size=32).notes()[0]
    assert task_of().notes() == []


def test_another_seed_holds_out_other_images(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(20):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    zero, one = (held_out(tmp_path, data_seed=seed)[1] for seed in (0, 1))
    assert len(zero) == len(one) == 10
    assert zero != one
    (note,) = task_of(data=str(tmp_path), holdout=0.25, image_size=32).notes()
    assert "30 images of 2 classes (cat, dog) at 32 pixels; 10 more are held out" in note


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["cat/1.png", "cat/2.png"], "two classes or more, got cat"),
        (["1.png", "2.png"], "two classes or more, got none"),
        (["cat/1.png", "cat/2.png", "dog/1.png"], "got 1 in .*dog"),
        (["cat/1.png", "cat/2.png", "dog/1.heic"], "got 0 in .*dog"),
        (["train/cat/1.png", "test/cat/1.png"], "rename test/ to val/"),
    ],
)
def test_class_folders_that_cannot_be_cut_are_refused(tmp_path, files, message):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        held_out(tmp_path)


def test_without_a_share_a_folder_needs_val_and_the_message_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"holdout=0\.2"):
        held_out(tmp_path, holdout=0.0)


@CLASSIFICATION.of("eval_crop")
def test_evaluation_and_prediction_look_at_the_middle_part(folder):
    for crop in (0.5, 0.8, 1.0):
        task = task_of(data=str(folder), image_size=32, eval_crop=crop)
        # the last is the bright ramp, whose red spans the image
        for image in (task.eval_data[5][0], task.prepare(RAMP)):
            red = (image * STD + MEAN)[0]
            assert (red.max() - red.min()).item() == pytest.approx(crop, abs=0.06)
            assert red.mean().item() == pytest.approx(0.49, abs=0.02)


@CLASSIFICATION.of("augmentation")
def test_training_alone_is_augmented(folder):
    task = task_of(data=str(folder), image_size=32, eval_crop=1.0, augmentation=Augmentation(flip=1.0, smallest_crop=1.0))
    trained, evaluated = task.train_data[5][0], task.eval_data[5][0]
    torch.testing.assert_close(trained, evaluated.flip(-1), rtol=0, atol=0.15)
    # as a checkpoint's settings hold it
    assert task_of(augmentation={"flip": 0.25}).config.augmentation == Augmentation(flip=0.25)


class Noting(torch.nn.Module):
    """Notes what it is shown, and answers with fixed logits."""

    def __init__(self, classes=4):
        super().__init__()
        self.logits = torch.linspace(-1, 2, classes)

    def forward(self, images):
        self.seen = images
        return self.logits.expand(len(images), -1) * (1 + images[:, :1, 0, 0].abs())


def shown(seed=0, **settings):
    """Images as the model is shown them, of images that are i everywhere."""
    task, model = task_of(**settings), Noting()
    images = torch.arange(1.0, 7.0)[:, None, None, None].expand(6, 3, 8, 8)
    with random_state_of(seed):
        task.loss(model, (images.clone(), torch.arange(6) % 4))
    return images, model.seen


@CLASSIFICATION.of("mixup")
def test_images_are_mixed_with_each_other():
    images, seen = shown(mixup=0.8)
    part = (seen - images.flip(0)) / (images - images.flip(0))
    # one share for the whole batch, every pixel alike
    assert part.std() < 1e-5
    assert 0 < part.mean() < 1
    images, seen = shown()
    assert torch.equal(images, seen)

    # a small alpha mixes little: the share is near 0 or 1
    def share(alpha, seed):
        images, seen = shown(mixup=alpha, seed=seed)
        return ((seen - images.flip(0)) / (images - images.flip(0))).mean().item()

    spread = {alpha: np.mean([min(s, 1 - s) for s in (share(alpha, seed) for seed in range(20))]) for alpha in (0.05, 8.0)}
    assert spread[0.05] < 0.1 < 0.3 < spread[8.0]


@CLASSIFICATION.of("cutmix")
def test_a_rectangle_comes_from_another_image():
    found = [shown(cutmix=1.0, seed=seed) for seed in range(5)]
    assert any(not torch.equal(images, seen) for images, seen in found)
    for images, seen in found:
        assert ((seen == images) | (seen == images.flip(0))).all()
    # with both, sometimes the one and sometimes the other
    kinds = set()
    for seed in range(12):
        images, seen = shown(mixup=8.0, cutmix=8.0, seed=seed)
        kinds.add(bool(((seen == images) | (seen == images.flip(0))).all()))
    assert kinds == {True, False}


@CLASSIFICATION.of("smoothing")
def test_a_part_of_the_target_goes_to_all_classes_alike():
    # all of one class: mixing changes images and no target
    labels, images = torch.full((6,), 2), torch.randn(6, 3, 8, 8)
    for mixing in ({}, {"mixup": 0.8}, {"cutmix": 1.0}):
        losses = []
        for smoothing in (0.0, 0.1, 0.6):
            model = Noting()
            with random_state_of(1):
                loss = task_of(smoothing=smoothing, **mixing).loss(model, (images, labels))
            expected = F.cross_entropy(model(model.seen), labels, label_smoothing=smoothing)
            assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
            losses.append(loss.total.item())
        assert len(set(losses)) == 3


# ---- generated images


def generated(name, split="val", count=12, **options):
    data = GENERATED[name](split=split, samples=count, **options)
    return data, torch.stack([data[index][0] for index in range(count)]) + 0.5


def cells_of(images, cells, size):
    """[B, cells * cells, 3, size, size]."""
    split = images.unflatten(2, (cells, size)).unflatten(4, (cells, size))
    return split.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


@GENERATORS.of("cue_grid.cells", "cue_grid.cell_size", "count_grid.cells", "count_grid.cell_size")
def test_a_grid_has_so_many_cells_of_that_size():
    for name in ("cue_grid", "count_grid"):
        data, images = generated(name, cells=7, cell_size=9)
        assert images.shape[-2:] == (63, 63) == (data.image_size,) * 2
        frames = (cells_of(images, 7, 9)[:, :, :, 0] == 1).all(dim=(2, 3)).sum(1)
        assert (frames == 1).all()


@GENERATORS.of("cue_grid.glyphs", "count_grid.glyphs")
def test_so_many_kinds_of_glyphs_are_shown():
    for name in ("cue_grid", "count_grid"):
        for kinds in (2, 6):
            _, images = generated(name, glyphs=kinds)
            cells = cells_of(images, 6, 8)
            inner = cells[~(cells[:, :, :, 0] == 1).all(dim=(2, 3))]
            shapes = {tuple((cell.amax(0) > 0).flatten().tolist()) for cell in inner}
            # and the blank
            assert len(shapes) == kinds + (1 if name == "count_grid" else int(35 % kinds > 0))
    assert len(generated("cue_grid", glyphs=6)[0].classes) == 6


@GENERATORS.of("cue_grid.separation")
def test_no_colour_but_the_answers_is_near_the_cue():
    def nearest(separation):
        angles = []
        for image in generated("cue_grid", separation=separation)[1]:
            cells = cells_of(image[None], 6, 8)[0]
            is_cue = (cells[:, :, 0] == 1).all(dim=(1, 2))
            cue = cells[is_cue][0, :, 4, 4] - 0.5
            colours = cells[~is_cue].flatten(2).amax(2)
            colours = colours[colours.amax(1) > 0] - 0.5
            angle = F.cosine_similarity(colours, cue[None]).clamp(-1, 1).acos().rad2deg()
            angles.append(angle.sort().values[1].item())
        return min(angles)

    assert nearest(0.0) < 20
    assert 20 < nearest(20.0) < 40
    assert nearest(40.0) > 40


@GENERATORS.of("cue_grid.crowding")
def test_training_grids_are_sparse_and_evaluation_is_full():
    def filled(split, crowding):
        images = generated("cue_grid", split=split, count=40, crowding=crowding)[1]
        return (cells_of(images, 6, 8).amax((2, 3, 4)) > 0).float().sum(1).mean().item()

    assert filled("train", 20.0) < 9 < filled("train", 1.0) < 24 < filled("train", 0.05)
    assert filled("val", 20.0) == filled("val", 1.0) == 33


@GENERATORS.of("count_grid.most")
def test_numbers_reach_to_the_most():
    for most in (3, 11):
        data = GENERATED["count_grid"](split="val", samples=120, most=most)
        assert {data[index][1] for index in range(120)} == set(range(most))
        assert data.classes[-1] == str(most)


@GENERATORS.of("marked_pair.image_size")
def test_pairs_lie_in_an_image_of_that_size():
    data, images = generated("marked_pair", image_size=80)
    assert images.shape[-2:] == (80, 80) == (data.image_size,) * 2


def objects(images):
    """Number of lit pixels of the objects outside of the frames, on average."""
    return ((images.amax(1) > 0) & ~(images == 1).all(1)).float().sum((1, 2)).mean().item()


@GENERATORS.of("marked_pair.object_size")
def test_objects_have_their_size():
    small, large = (objects(generated("marked_pair", image_size=96, object_size=size)[1]) for size in (8, 16))
    assert large == pytest.approx(4 * small, rel=0.2)


@GENERATORS.of("marked_pair.distractors")
def test_so_many_objects_are_not_marked():
    few, many = (objects(generated("marked_pair", image_size=128, distractors=count)[1]) for count in (4, 28))
    # 6 and 30 objects of about the same area
    assert many == pytest.approx(5 * few, rel=0.15)
