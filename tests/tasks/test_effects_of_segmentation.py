"""Every setting of segmentation, and every choice of its answers, does what its documentation says."""

import shutil
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from helpers.option_effects import Effects
from nalaformer.data.loading import random_state_of
from nalaformer.data.segmentation import IGNORED, SCENE_CLASSES, write_scenes
from nalaformer.tasks import Segmentation, SegmentationConfig
from nalaformer.tasks.segmentation import SegmentationAnswers, draw_overlay

SEGMENTATION = Effects(field.name for field in fields(SegmentationConfig))
ANSWERS = Effects(field.name for field in fields(SegmentationAnswers))


def test_no_setting_of_segmentation_is_without_a_test_of_its_effect():
    assert [*SEGMENTATION.missing(), *ANSWERS.missing()] == []


def test_defaults_of_segmentation_are_those_that_figures_were_measured_with():
    """Recipes leave these out: another default changes every run of theirs."""
    crops = {
        "crop": 512,
        "smallest_scale": 0.5,
        "largest_scale": 2.0,
        "most_of_one_class": 0.75,
        "flip": 0.5,
        "color_jitter": 0.0,
    }
    scenes = {"generated_folder": "runs/data", "holdout": 0.0, "data_seed": 0, "train_samples": 600, "eval_samples": 100}
    others = {"short_side": 0, "auxiliary_weight": 0.4, "window": 0, "window_stride": 0, "binary": False}
    assert asdict(SegmentationConfig(data="d")) == {"data": "d"} | crops | scenes | others


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, train=3, val=2)
    return folder


@pytest.fixture
def task_of(scenes):
    """A task on three scenes that are cut without chance, unless told."""
    still = {"smallest_scale": 1.0, "largest_scale": 1.0, "flip": 0.0, "most_of_one_class": 1.0, "crop": 64}
    return lambda **settings: Segmentation(SegmentationConfig(**({"data": str(scenes)} | still | settings)))


def drawn(task, index=0, seed=0):
    with random_state_of(seed):
        return task.train_data[index]


# ---- data


@SEGMENTATION.of("holdout")
def test_images_are_held_out_where_there_is_no_val(scenes, task_of, tmp_path):
    shutil.copytree(scenes, tmp_path / "scenes")
    for kind in ("images", "annotations"):
        shutil.rmtree(tmp_path / "scenes" / kind / "validation")
    task = task_of(data=str(tmp_path / "scenes"), holdout=0.3)
    assert (len(task.train_data), len(task.eval_data)) == (2, 1)
    (note,) = task.notes()
    assert note.startswith("2 images to learn from; 1 more are held out to evaluate on: 30% of all")


@SEGMENTATION.of("data", "generated_folder", "train_samples", "eval_samples", "data_seed")
def test_scenes_are_written_once_below_their_folder_in_the_numbers_asked_for(tmp_path):
    usual = SegmentationConfig(data="scenes", generated_folder=str(tmp_path), train_samples=3, eval_samples=2)
    task, other = Segmentation(usual), Segmentation(replace(usual, data_seed=1))
    assert (len(task.train_data), len(task.eval_data)) == (3, 2)
    assert task.folder.parent == tmp_path
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    Segmentation(usual).eval_data[0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    images = [np.asarray(each.eval_data.read(0)[0]) for each in (task, other)]
    assert images[0].shape != images[1].shape or (images[0] != images[1]).any()
    # the folder is data like any other
    again = Segmentation(replace(usual, data=str(task.folder)))
    assert torch.equal(again.eval_data[1][0], task.eval_data[1][0])
    assert again.facts()["classes"] == list(SCENE_CLASSES)


def write_masks(folder, ids, *, names=""):
    """The plain layout, the same mask everywhere."""
    for split in ("train", "val"):
        for kind, pixels in (("images", np.zeros((*ids.shape, 3), np.uint8)), ("masks", ids)):
            (folder / kind / split).mkdir(parents=True)
            for number in range(2):
                Image.fromarray(pixels).save(folder / kind / split / f"{number}.png")
    if names:
        (folder / "classes.txt").write_text(names)
    return str(folder)


@pytest.mark.parametrize("names", ["", "ground\nthing\n"])
@pytest.mark.parametrize("largest", [255, 65535])
@SEGMENTATION.of("binary")
def test_binary_masks_have_background_and_an_object_of_any_other_id(tmp_path, names, largest):
    ids = np.array([[0, 1, 7], [largest, largest, 0]]).astype(np.uint8 if largest < 256 else np.uint16)
    folder = write_masks(tmp_path, ids, names=names)
    task = Segmentation(SegmentationConfig(data=folder, binary=True))
    assert task.facts()["classes"] == (names.split() or ["background", "object"])
    assert task.eval_data[0][1].tolist() == [[0, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("names", ["", "ground\nthing\n"])
def test_masks_whose_object_is_not_counted_are_refused_with_the_way_out(tmp_path, names):
    """As annotation tools export them: all that could be learned is the background, with mIoU 1."""
    folder = write_masks(tmp_path, np.array([[0, 255, 255]], np.uint8), names=names)
    with pytest.raises(ValueError, match=r"more, got .* alone, of the ids 0, 255 in .*; 255 is not .*binary=true"):
        Segmentation(SegmentationConfig(data=folder)).facts()


@pytest.mark.parametrize("binary", [False, True])
def test_masks_of_one_class_are_refused(tmp_path, binary):
    folder = write_masks(tmp_path, np.ones((1, 3), np.uint8), names="ground\nthing\n")
    with pytest.raises(ValueError, match=r"got thing alone, of the ids 1 in .*masks/train; label two classes or more"):
        len(Segmentation(SegmentationConfig(data=folder, binary=binary)).train_data)


def test_binary_masks_have_two_names_and_the_plain_layout(scenes, tmp_path):
    folder = write_masks(tmp_path, np.array([[0, 255]], np.uint8), names="a\nb\nc\n")
    for data, message in ((folder, r"two classes for binary masks, got 3"), (str(scenes), "lie in masks/train and masks/val")):
        with pytest.raises(ValueError, match=message):
            Segmentation(SegmentationConfig(data=data, binary=True)).facts()


def test_a_folder_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"must be a folder of images and masks, or \"scenes\", got 'nowhere'"):
        Segmentation(SegmentationConfig(data="nowhere")).facts()


# ---- crops


@SEGMENTATION.of("crop")
def test_crops_have_their_side(task_of):
    image, labels = drawn(task_of(crop=40))
    assert (image.shape, labels.shape) == ((3, 40, 40), (40, 40))


@SEGMENTATION.of("short_side")
def test_the_short_side_is_resized_for_training_and_evaluation(task_of):
    small = task_of(short_side=30)
    image, labels = small.eval_data[0]
    assert min(image.shape[1:]) == 30
    assert min(labels.shape) >= 192
    counted = drawn(small)[1] != IGNORED
    assert counted.any(1).sum() == 30


@SEGMENTATION.of("smallest_scale", "largest_scale")
def test_scales_lie_between_their_bounds(task_of):
    task = task_of(smallest_scale=0.25, largest_scale=0.5, short_side=100, crop=300)
    heights = [int((drawn(task, seed=seed)[1] != IGNORED).any(1).sum()) for seed in range(40)]
    assert 25 <= min(heights) < 30 < 45 < max(heights) <= 50


@SEGMENTATION.of("most_of_one_class")
def test_crops_of_one_class_are_drawn_again(task_of):
    def share_of_largest(task, seed):
        counts = torch.bincount(drawn(task, seed=seed)[1].flatten().long(), minlength=256)[:IGNORED]
        return (counts.max() / counts.sum()).item()

    free, bound = ([share_of_largest(task_of(most_of_one_class=most), seed) for seed in range(30)] for most in (1.0, 0.75))
    assert sum(share > 0.75 for share in free) > 10
    assert sum(share > 0.75 for share in bound) < 4


@SEGMENTATION.of("flip")
def test_images_are_flipped_with_their_labels(task_of):
    plain, flipped = (drawn(task_of(flip=flip, short_side=64)) for flip in (0.0, 1.0))
    assert torch.equal(flipped[0], plain[0].flip(2))
    assert torch.equal(flipped[1], plain[1].flip(1))


@SEGMENTATION.of("color_jitter")
def test_jitter_changes_colours_and_no_label(task_of):
    plain, varied = drawn(task_of()), drawn(task_of(color_jitter=0.8))
    assert torch.equal(plain[1], varied[1])
    assert (plain[0] - varied[0]).abs().mean() > 0.05


# ---- loss and evaluation


class Windowed(nn.Module):
    """Names each pixel by what share of the height of what it is shown lies above it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, images):
        self.seen.append(tuple(images.shape[-2:]))
        height, width = images.shape[-2:]
        steps = torch.arange(7.0)[:, None, None] / 6
        rows = torch.linspace(0, 1, height)[None, :, None]
        logits = -self.scale * (rows - steps).square()
        return logits.expand(len(images), 7, height, width), logits.expand(len(images), 7, height, width) * 2


@SEGMENTATION.of("auxiliary_weight")
def test_the_auxiliary_loss_has_its_weight(task_of):
    def total(weight):
        task = task_of(auxiliary_weight=weight)
        loss = task.loss(Windowed(), task.train_data.collate([drawn(task)]))
        return loss.total.item(), loss.parts["auxiliary"].item()

    (none, auxiliary), (half, _) = total(0.0), total(0.5)
    assert half - none == pytest.approx(0.5 * auxiliary, rel=1e-4)


@SEGMENTATION.of("window", "window_stride")
def test_evaluation_slides_its_window(task_of):
    def shapes(**settings):
        task, model = task_of(short_side=48, **settings), Windowed()
        metrics = task.metrics()
        metrics.update(model, task.eval_data.collate([task.eval_data[0]]))
        return model.seen

    (whole,) = shapes()
    assert min(whole) == 48 < max(whole)
    assert set(shapes(window=24)) == {(24, 24)}
    assert len(shapes(window=24, window_stride=8)) > len(shapes(window=24)) > len(shapes(window=24, window_stride=24)) >= 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": 0}, "crop must be positive"),
        ({"window": -1}, "window must not be negative"),
        ({"window": 4, "window_stride": 5}, "pixels are left out, got 5 and 4"),
        ({"smallest_scale": 3.0}, "at most largest_scale, got 3.0 and 2.0"),
        ({"flip": 1.5}, "flip must be between"),
        ({"most_of_one_class": 0.0}, "most_of_one_class must be above 0"),
        ({"crop": 0.5}, "crop must be a whole number"),
    ],
)
def test_settings_of_segmentation_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SegmentationConfig(data="scenes", **settings)


# ---- answers

PHOTO = Image.fromarray(np.full((60, 40, 3), 100, dtype=np.uint8))


def answer(task, **options):
    model = Windowed()
    return task.answer(model, PHOTO, task.facts(), SegmentationAnswers(**options)), model.seen


@ANSWERS.of("window", "window_stride")
def test_an_answer_slides_the_window_of_its_run_or_another(task_of):
    def windows(run_window, **options):
        return set(answer(task_of(window=run_window), **options)[1])

    assert windows(0) == windows(32, window=0) == {(60, 40)}
    assert windows(32) == windows(0, window=32) == {(32, 32)}
    few, many = (len(answer(task_of(), window=32, window_stride=stride)[1]) for stride in (0, 4))
    assert many > few


@ANSWERS.of("opacity")
def test_colours_cover_the_image_by_their_opacity(task_of):
    for opacity in (0.0, 0.25, 1.0):
        found, _ = answer(task_of(), opacity=opacity, legend=False)
        colours = np.array(task_of().facts()["colours"])[found.values]
        expected = (1 - opacity) * 100 + opacity * colours
        assert np.abs(np.asarray(found.picture) - expected).max() <= 0.5


@ANSWERS.of("legend")
def test_the_legend_stands_beside_the_picture(task_of):
    plain, named = (np.asarray(answer(task_of(), legend=legend)[0].picture) for legend in (False, True))
    assert plain.shape == (60, 40, 3)
    assert np.array_equal(named[:60, :40], plain)
    assert named.shape[1] > 60


def test_the_legend_shows_the_colours_of_the_classes_that_occur():
    colours = [(200, 10, 10), (10, 200, 10), (10, 10, 200)]
    labels = np.array([[0, 2]] * 30, dtype=np.uint8)
    picture = draw_overlay(
        Image.new("RGB", (2, 30)), labels, classes=["one", "two", "three"], colours=colours, opacity=0.5, legend=True
    )
    beside = {tuple(pixel) for pixel in np.asarray(picture)[:, 2:].reshape(-1, 3).tolist()}
    assert [colour in beside for colour in colours] == [True, False, True]


@pytest.mark.parametrize("options", [{"opacity": 1.5}, {"window": -2}, {"window": 3, "window_stride": 4}])
def test_choices_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        SegmentationAnswers(**options)
