"""COCO's format as it is read: layouts, objects, masks, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from nalaformer.data import BadSample, batches_from
from nalaformer.data.detection import CocoFolder, EvalSamples, TrainingSamples, decode_runs, encode_runs, read_mask

SIZE = (40, 30)  # width, height
BOX = {"id": 7, "image_id": 1, "category_id": 5, "bbox": [4, 6, 10, 8], "area": 80, "iscrowd": 0}
SQUARE = [[4, 6, 14, 6, 14, 14, 4, 14]]


def make_folder(root, annotations=None, *, split="train", image=SIZE, **changes):
    """One image with these annotations, BOX if none are given; changes replace whole fields of the file."""
    (root / "annotations").mkdir(exist_ok=True)
    (root / split).mkdir(exist_ok=True)
    if image:
        Image.new("RGB", image, (10, 20, 30)).save(root / split / "a.png")
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": SIZE[0], "height": SIZE[1]}],
        "annotations": [BOX | {"segmentation": SQUARE}] if annotations is None else annotations,
        "categories": [{"id": 9, "name": "late"}, {"id": 5, "name": "early"}],
    }
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content | changes))
    return root


def training_samples(root, *, masks=True, short_sides=(), longest_side=0, flip=0.0, empty_images=True):
    return TrainingSamples(
        CocoFolder(root, "train"),
        masks=masks,
        short_sides=short_sides,
        longest_side=longest_side,
        flip=flip,
        empty_images=empty_images,
    )


def test_boxes_are_corners_and_labels_follow_the_ids_of_the_categories(tmp_path):
    other = BOX | {"id": 8, "category_id": 9, "bbox": [0, 0, 40, 30], "segmentation": SQUARE}
    samples = training_samples(make_folder(tmp_path, [other, BOX | {"segmentation": SQUARE}]))
    image, target = samples[0]
    assert samples.folder.classes == ("early", "late")
    assert (image.shape, image.dtype) == ((3, 30, 40), torch.uint8)
    assert target["boxes"].tolist() == [[0, 0, 40, 30], [4, 6, 14, 14]]
    assert target["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("annotations/instances_train2017.json", "train2017"),
        ("annotations/instances_train.json", "images/train"),
        ("annotations/instances_train.json", "images"),
        ("train/_annotations.coco.json", "train"),
    ],
)
def test_usual_layouts_are_found(tmp_path, file, images):
    made = tmp_path / "made"
    made.mkdir()
    make_folder(made)
    for source, target in (("annotations/instances_train.json", file), ("train/a.png", f"{images}/a.png")):
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        (made / source).rename(tmp_path / target)
    assert training_samples(tmp_path)[0][0].shape == (3, 30, 40)


@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("annotations/instances_train.json", "train"),
        ("annotations/instances_default.json", "images/default"),
        ("_annotations.coco.json", "."),
    ],
)
def test_a_folder_without_val_holds_out_a_share_by_the_names_of_its_files(tmp_path, file, images):
    made = tmp_path / "made"
    made.mkdir()
    entries = [{"id": i, "file_name": f"{i}.png", "width": SIZE[0], "height": SIZE[1]} for i in range(10)]
    make_folder(made, [BOX | {"id": i, "image_id": i} for i in range(10)], images=entries)
    root = tmp_path / "root"
    for source, target in (("annotations/instances_train.json", file), ("train/a.png", f"{images}/a.png")):
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (made / source).rename(root / target)

    def names(split, seed=0):
        folder = CocoFolder(root, split, holdout=0.2, seed=seed)
        return {folder.path(index).name for index in range(len(folder))}

    train, val = names("train"), names("val")
    assert (len(train), len(val), len(train | val)) == (8, 2, 10)
    assert val == names("val") != names("val", seed=1)
    assert CocoFolder(root, "val", holdout=0.2).path(0).parent.resolve() == (root / images).resolve()
    with pytest.raises(ValueError, match=r"holdout=0\.2 would set a fifth of the images aside"):
        CocoFolder(root, "val")


def test_a_val_split_of_its_own_is_taken_whole(tmp_path):
    for split in ("train", "val"):
        make_folder(tmp_path, split=split)
    assert [len(CocoFolder(tmp_path, split, holdout=0.5)) for split in ("train", "val")] == [1, 1]
    (tmp_path / "annotations" / "instances_val.json").unlink()
    with pytest.raises(ValueError, match="must list two images or more"):
        CocoFolder(tmp_path, "train", holdout=0.5)


def test_a_folder_without_annotations_says_what_is_expected(tmp_path):
    with pytest.raises(ValueError, match=r"instances_train\.json"):
        CocoFolder(tmp_path, "train")
    with pytest.raises(ValueError, match="nowhere"):
        CocoFolder(tmp_path / "nowhere", "train")


# ---- sizes


def test_images_keep_their_shape_and_objects_go_with_them(tmp_path):
    samples = training_samples(make_folder(tmp_path), short_sides=(60,))
    image, target = samples[0]
    assert image.shape == (3, 60, 80)
    assert target["boxes"].tolist() == [[8, 12, 28, 28]]
    assert target["masks"].sum() == 20 * 16
    assert target["masks"][0, 12:28, 8:28].all()


def test_the_short_side_is_drawn_and_the_long_one_capped(tmp_path):
    samples = training_samples(make_folder(tmp_path), short_sides=(30, 45, 90), longest_side=100)
    sizes = {tuple(samples[0][0].shape[1:]) for _ in range(60)}
    # 90 x 120 becomes 75 x 100
    assert sizes == {(30, 40), (45, 60), (75, 100)}


def test_a_mirrored_image_has_mirrored_objects(tmp_path):
    make_folder(tmp_path)
    marked = np.zeros((30, 40, 3), dtype=np.uint8)
    marked[6:14, 4:14] = 255
    Image.fromarray(marked).save(tmp_path / "train" / "a.png")
    image, target = training_samples(tmp_path, flip=1.0)[0]
    assert target["boxes"].tolist() == [[26, 6, 36, 14]]
    assert torch.equal(image[0] == 255, target["masks"][0] == 1)


def test_crowds_are_not_learned_and_are_told_to_the_metric(tmp_path):
    crowd = BOX | {"id": 8, "iscrowd": 1, "segmentation": encode_runs(np.ones((30, 40), dtype=bool))}
    annotations = [crowd, BOX | {"segmentation": SQUARE}]
    for split in ("train", "val"):
        make_folder(tmp_path, annotations, split=split)
    assert len(training_samples(tmp_path)[0][1]["labels"]) == 1
    samples = EvalSamples(CocoFolder(tmp_path, "val"), masks=True, short_side=60, longest_side=0)
    image, target = samples[0]
    # the image is resized, and the objects stay where the annotation has them
    assert image.shape == (3, 60, 80)
    assert target["iscrowd"].tolist() == [1, 0]
    assert target["masks"].sum((1, 2)).tolist() == [1200, 80]
    assert target["area"].tolist() == [80, 80]


def test_images_without_objects_may_be_left_out(tmp_path):
    Image.new("RGB", SIZE).save(make_folder(tmp_path) / "train" / "b.png")
    entries = [{"id": i, "file_name": f"{name}.png", "width": 40, "height": 30} for i, name in ((1, "a"), (2, "b"))]
    make_folder(tmp_path, images=entries)
    samples = training_samples(tmp_path)
    assert samples[1][1]["boxes"].shape == (0, 4)
    assert samples[1][1]["masks"].shape == (0, 30, 40)
    assert len(training_samples(tmp_path, empty_images=False)) == 1


# ---- masks


def test_runs_of_pixels_are_read_as_they_were_written():
    random = np.random.default_rng(0)
    for density in (0, 0.1, 0.5, 1):
        mask = random.random((7, 5)) < density
        runs = encode_runs(mask)
        assert np.array_equal(decode_runs(runs, 7, 5), mask)
        # the reference codec packs and unpacks the same
        from faster_coco_eval.core import mask as codec

        packed = codec.encode(np.asfortranarray(mask.astype(np.uint8)))
        text = packed["counts"].decode() if isinstance(packed["counts"], bytes) else packed["counts"]
        assert np.array_equal(read_mask({"size": [7, 5], "counts": text}, 7, 5), mask)


def test_long_runs_are_unpacked():
    from faster_coco_eval.core import mask as codec

    mask = np.zeros((400, 300), dtype=bool)
    mask[50:350, 20:280] = True
    mask[100:120] = False
    packed = codec.encode(np.asfortranarray(mask.astype(np.uint8)))
    text = packed["counts"].decode() if isinstance(packed["counts"], bytes) else packed["counts"]
    assert np.array_equal(read_mask({"size": [400, 300], "counts": text}, 400, 300), mask)


def test_several_polygons_are_one_mask():
    mask = read_mask([SQUARE[0], [20, 0, 24, 0, 24, 5, 20, 5]], 30, 40)
    assert mask.sum() == 80 + 20
    assert mask[6:14, 4:14].all()


# ---- what is wrong with an image


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bbox": [4, 6, 0, 8]}, "bbox must have a positive width and height, got .4, 6, 0, 8."),
        ({"bbox": [4, 6, 10, -8]}, "bbox must have a positive width and height"),
        ({"bbox": [35, 6, 10, 8]}, "bbox must lie inside the image of 40 x 30, got .35, 6, 10, 8."),
        ({"bbox": [-0.9, 6, 0.5, 8]}, r"bbox must have a width and height of at least 0\.001 inside the image"),
        # float32 knows no number between its left and its right
        ({"bbox": [39.99999999, 6, 0.5, 8]}, r"bbox must have a width and height of at least 0\.001 inside the image"),
        ({"bbox": [4, 6, 10]}, "bbox must be .x, y, width, height."),
        ({"bbox": [4, 6, float("nan"), 8]}, "bbox must be .x, y, width, height."),
        ({"bbox": [4, 6, 10**400, 8]}, r"bbox must be .x, y, width, height., got \[4, 6, 1000"),
        ({"area": 10**400}, "area must be a number of pixels, got 1000"),
        ({"segmentation": [[4, 6, 10**400, 8, 9, 9]]}, "at least 3 points"),
        ({"iscrowd": "no"}, "iscrowd must be 0 or 1, got 'no'"),
        ({"iscrowd": 2}, "iscrowd must be 0 or 1, got 2"),
        ({"iscrowd": [1]}, "iscrowd must be 0 or 1, got .1."),
        ({"bbox": None}, "bbox must be .x, y, width, height., got None"),
        ({"category_id": 6}, "category_id must be the id of a category .5, 9., got 6"),
        ({"category_id": [5]}, "category_id must be"),
        ({"area": "large"}, "area must be a number"),
        ({"segmentation": {"size": [40, 30], "counts": [1200]}}, r"segmentation: size must be .* \[30, 40\] .* got \[40, 30\]"),
        (
            {"segmentation": {"size": [30, 40], "counts": [1199]}},
            "counts must add up to the 1200 pixels of the image, got 1199",
        ),
        ({"segmentation": {"size": [30, 40], "counts": [-1, 1201]}}, "counts must be a list"),
        ({"segmentation": {"size": [30, 40], "counts": "~~"}}, "counts must be packed"),
        ({"segmentation": {"size": [30, 40], "counts": "o" * 50}}, "more than 60 bits"),
        ({"segmentation": {"size": [30, 40], "counts": "oo"}}, "cut off"),
        ({"segmentation": [[1, 2, 3, 4]]}, "at least 3 points"),
        ({"segmentation": [[1, 2, 3, 4, 5, "6"]]}, "at least 3 points"),
        ({"segmentation": [[1, 2, 300, 4, 5, 6]]}, "polygon must lie inside the image of 40 x 30"),
        ({"segmentation": []}, "at least one polygon"),
        ({"segmentation": None}, "list of polygons or an object"),
    ],
)
def test_a_wrong_annotation_is_named_with_file_and_field(tmp_path, changes, message):
    samples = training_samples(make_folder(tmp_path, [BOX | {"segmentation": SQUARE} | changes]))
    with pytest.raises(BadSample, match=message) as raised:
        samples[0]
    assert raised.value.path.endswith("a.png")
    assert "annotation 7 in" in str(raised.value)
    assert "instances_train.json" in str(raised.value)


def test_a_box_that_leaves_the_image_by_a_rounding_is_cut(tmp_path):
    samples = training_samples(make_folder(tmp_path, [BOX | {"bbox": [-0.5, 6, 41, 8]}]), masks=False)
    assert samples[0][1]["boxes"].tolist() == [[0, 6, 40, 14]]


def test_boxes_alone_need_no_masks(tmp_path):
    samples = training_samples(make_folder(tmp_path, [BOX]), masks=False)
    assert samples[0][1].keys() == {"boxes", "labels"}


def test_an_image_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadSample, match=r"a\.png cannot be used: .*file_name of an image in .*instances_train\.json"):
        training_samples(make_folder(tmp_path, image=None))[0]


def test_an_image_of_another_size_is_named(tmp_path):
    with pytest.raises(BadSample, match=r"width and height in .* must be those of the image, \(41, 30\), got \(40, 30\)"):
        training_samples(make_folder(tmp_path, image=(41, 30)))[0]


def test_a_photograph_is_turned_as_its_entry_states_the_size(tmp_path):
    path = make_folder(tmp_path) / "train" / "a.png"
    shown = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    # shown upright, what is stored lies on its side; or its entry is of what is stored
    notes = Image.Exif()
    notes[0x0112] = 6
    for stored in (np.rot90(shown), shown):
        Image.fromarray(stored.copy()).save(path, exif=notes)
        image, _ = training_samples(tmp_path)[0]
        assert np.array_equal(image.permute(1, 2, 0).numpy(), shown)


def test_a_truncated_image_is_named(tmp_path):
    path = make_folder(tmp_path) / "train" / "a.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(BadSample, match=r"a\.png"):
        training_samples(tmp_path)[0]


@pytest.mark.parametrize(("mode", "value"), [("L", 77), ("CMYK", (10, 20, 30, 0)), ("I;16", 20000)])
def test_images_of_other_kinds_become_colours(tmp_path, mode, value):
    make_folder(tmp_path)
    entries = [{"id": 1, "file_name": "a.tif", "width": 40, "height": 30}]
    make_folder(tmp_path, images=entries)
    Image.new(mode, SIZE, value).save(tmp_path / "train" / "a.tif")
    image, _ = training_samples(tmp_path)[0]
    assert image.shape == (3, 30, 40)
    assert image.float().std() < 120


def test_bad_samples_give_way_to_good_ones_and_are_reported(tmp_path):
    entries = [{"id": i, "file_name": "a.png", "width": 40, "height": 30} for i in range(3)]
    annotations = [BOX | {"id": i, "image_id": i, "segmentation": SQUARE, "category_id": 6 if i == 1 else 5} for i in range(3)]
    samples = training_samples(make_folder(tmp_path, annotations, images=entries))
    (batch,) = batches_from(0, samples, seed=0, batch_size=3, last_step=1)
    images, targets = batch.content
    assert len(images) == len(targets) == 3
    (line,) = batch.rejected
    assert "category_id" in line


# ---- what is wrong with a file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be COCO's JSON"),
        ("{", "must be COCO's JSON"),
        ("[]", "must be an object"),
        ("{}", "images must be a list with at least one entry"),
    ],
)
def test_a_file_that_is_no_annotation_file_is_named(tmp_path, text, message):
    (make_folder(tmp_path) / "annotations" / "instances_train.json").write_text(text)
    with pytest.raises(ValueError, match=rf"instances_train\.json.*{message}"):
        CocoFolder(tmp_path, "train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": []}, "images must be a list with at least one entry"),
        ({"annotations": []}, "annotations must be a list with at least one entry"),
        ({"categories": {}}, "categories must be a list"),
        ({"categories": [{"id": 5}]}, "name of each of its categories must be text"),
        ({"categories": [{"id": 5, "name": "a"}, {"id": 5, "name": "b"}]}, "categories must have different ids"),
        ({"images": [{"id": 1, "file_name": "a.png", "width": 40}]}, "height of each of its images"),
        ({"images": [{"id": 1, "file_name": "../a.png", "width": 40, "height": 30}]}, "file_name must lie in the folder"),
        ({"images": 2 * [{"id": 1, "file_name": "a.png", "width": 40, "height": 30}]}, "images must have different ids"),
        ({"annotations": [BOX, BOX | {"bbox": [0, 0, 4, 4]}]}, "annotations must have different ids, got 7 twice"),
        ({"annotations": [BOX | {"image_id": 2}]}, "image_id of annotation 7"),
        ({"annotations": [BOX | {"iscrowd": 1}]}, "annotations must hold at least one object that is no crowd"),
    ],
)
def test_a_broken_file_is_refused_when_it_is_opened(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"instances_train\.json: {message}"):
        CocoFolder(make_folder(tmp_path, **changes), "train")
