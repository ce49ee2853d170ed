"""The generated set of objects, read by the reader of real data."""

import json

import numpy as np
import pytest

from nalaformer.data.detection import CocoFolder, EvalSamples, OverlappingShapes, TrainingSamples
from nalaformer.data.generated_folders import written_once

TRAIN = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return OverlappingShapes(crowd=0.3, empty=0.2).folder(tmp_path_factory.mktemp("shapes"), train=TRAIN, val=6, seed=0)


@pytest.fixture(scope="module")
def annotations(folder):
    return json.loads((folder / "annotations" / "instances_train.json").read_text())["annotations"]


def test_every_kind_of_image_and_annotation_is_there(folder, annotations):
    split = CocoFolder(folder, "train")
    assert 0 < split.is_empty.sum() < TRAIN / 2
    kinds = {(type(each["segmentation"]).__name__, each["iscrowd"]) for each in annotations}
    # whole ones, covered ones, crowds
    assert kinds == {("list", 0), ("dict", 0), ("dict", 1)}
    areas = [each["area"] for each in annotations]
    assert max(areas) > 10 * min(areas)
    assert len({split.read_image(index).size for index in range(TRAIN)}) > TRAIN / 2


def test_the_box_of_an_object_fits_its_mask(folder):
    samples = TrainingSamples(
        CocoFolder(folder, "train"), masks=True, short_sides=(), longest_side=0, flip=0.0, empty_images=True
    )
    for index in range(TRAIN):
        _, target = samples[index]
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = np.nonzero(mask.numpy())
            around = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            assert box.tolist() == pytest.approx(around, abs=2)


def test_no_pixel_belongs_to_two_covered_objects(folder):
    samples = EvalSamples(CocoFolder(folder, "val"), masks=True, short_side=0, longest_side=0)
    for index in range(6):
        _, target = samples[index]
        # polygons are filled a little differently at their edges
        assert (target["masks"].sum(0) > 1).sum() < 0.1 * target["masks"].sum().clamp(min=40)


def test_the_same_set_is_written_once_and_another_beside_it(tmp_path):
    shapes = OverlappingShapes()
    first = shapes.folder(tmp_path, train=2, val=1, seed=0)
    before = (first / "train" / "000000.png").stat().st_mtime_ns
    assert shapes.folder(tmp_path, train=2, val=1, seed=0) == first
    assert (first / "train" / "000000.png").stat().st_mtime_ns == before
    other = shapes.folder(tmp_path, train=2, val=1, seed=1)
    assert other != first
    ours, theirs = (CocoFolder(place, "train").read_image(0) for place in (first, other))
    assert ours.tobytes() != theirs.tobytes()


def test_a_set_that_was_not_finished_does_not_count(tmp_path):
    def stopped(folder):
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written_once(tmp_path / "set", stopped)
    assert list(tmp_path.iterdir()) == []
    assert (written_once(tmp_path / "set", lambda folder: (folder / "whole").touch()) / "whole").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shortest_side": 20}, "at least 48"),
        ({"longest_side": 40}, "in order"),
        ({"most_objects": 0}, "most_objects"),
        ({"empty": 1.0}, "empty"),
        ({"crowd": -0.1}, "crowd"),
    ],
)
def test_options_that_nothing_can_be_drawn_with_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OverlappingShapes(**options)


def test_options_change_what_is_drawn():
    def draw(seed, **options):
        return OverlappingShapes(**options).draw(np.random.default_rng(seed), is_empty=False)

    sizes = {draw(seed, shortest_side=50, longest_side=52)[0].shape[:2] for seed in range(8)}
    assert all(50 <= side <= 52 for size in sizes for side in size)
    assert max(len(draw(seed, most_objects=2, crowd=0.0)[1]) for seed in range(8)) == 2
    assert all(draw(seed, crowd=0.999)[1][0]["iscrowd"] for seed in range(3))
