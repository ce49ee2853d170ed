"""Finding objects: from files to mAP, in the one trainer, and back to pictures."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from helpers.option_effects import Effects
from nalaformer.cli import build_app
from nalaformer.data import read_image
from nalaformer.recipes import Recipe, evaluate_run, load_run, make_trainer, predict
from nalaformer.tasks import Detection, DetectionConfig
from nalaformer.tasks.detection import DetectionAnswers, MeanPrecision, figures
from nalaformer.training import Checkpoints, TrainingConfig, TrainingStopped, evaluate
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG, ANSWERS = (Effects(field.name for field in fields(kind)) for kind in (DetectionConfig, DetectionAnswers))
BACKBONE = {
    "embed_dims": [16, 16, 24, 32],
    "depths": [1] * 4,
    "num_heads": [1, 1, 1, 2],
    "mlp_ratios": 1,
    "drop_path_rate": 0.0,
}
TINY = BACKBONE | {"channels": 32, "smallest_anchor": 12, "head_norm": True, "head_layers": 1}
TINY_MASKS = TINY | {"hidden": 64, "proposals": 60, "regions": 48}
EASY = {"crowd": 0.0, "empty": 0.0, "most_objects": 2, "shortest_side": 64}


def recipe_of(folder, *, steps=2, task=None, **training):
    task = {"data_options": EASY, "train_samples": 4, "eval_samples": 3, "flip": 0.0} | (task or {})
    sizes = {"short_sides": (), "eval_short_side": 0, "longest_side": 0}
    config = DetectionConfig(**({"data": "overlapping_shapes", "generated_folder": str(folder / "data")} | sizes | task))
    usual = {"batch_size": 4, "learning_rate": 4e-3, "weight_decay": 0.0, "clip_norm": 1.0, "warmup": 5, "device": "cpu"}
    return Recipe(
        model="nalaformer_xt_linear",
        model_options=TINY_MASKS if config.detector == "mask_rcnn" else TINY,
        task=config,
        training=TrainingConfig(steps=steps, **(usual | training)),
    )


def figures_on_train_images(task, model):
    """How well it is known what was learned."""
    samples = Detection(task.config).eval_data
    samples.folder = task.train_data.folder
    return evaluate(model, samples, task.metrics(), batch_size=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that knows its four training images, with masks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("masks")
    make_trainer(recipe_of(folder, steps=60, task={"detector": "mask_rcnn"}), folder / "run").fit()
    torch.set_num_threads(before)
    return folder / "run"


@pytest.fixture(scope="module")
def images(run):
    """Those that it knows."""
    return sorted((Path(load_run(run).task.folder) / "train").iterdir())


def test_no_option_is_without_a_test_of_its_effect():
    assert [*CONFIG.missing(), *ANSWERS.missing()] == []


# ---- learning


# random weights and constant answers stay below 0.05
BY_HEART = 0.5


@CONFIG.of("detector")
def test_a_handful_of_boxes_is_learned_by_heart(tmp_path):
    # known completely after these; masks take longer
    trainer = make_trainer(recipe_of(tmp_path, steps=30), tmp_path / "run")
    metrics = trainer.fit().metrics
    assert next(iter(metrics)) == "box_map"
    assert "mask_map" not in metrics
    assert figures_on_train_images(trainer.task, trainer.model)["box_map_50"] > BY_HEART


def test_a_handful_of_masks_is_learned_by_heart(run):
    loaded = load_run(run)
    metrics = figures_on_train_images(loaded.task, loaded.model)
    assert next(iter(metrics)) == "box_map"
    assert metrics["box_map_50"] > BY_HEART
    assert metrics["mask_map_50"] > BY_HEART


class Constant(nn.Module):
    """The same boxes in every image: a grid of squares of three sizes, each of every class."""

    def forward(self, images):
        places = [
            (x, y, side, label)
            for side in (12, 24, 40)
            for x in range(8, 64, 16)
            for y in range(8, 64, 16)
            for label in range(4)
        ]
        boxes = torch.tensor([[x - s / 2, y - s / 2, x + s / 2, y + s / 2] for x, y, s, _ in places]).clamp(0, 64)
        labels = torch.tensor([label for *_, label in places])
        return [{"boxes": boxes, "labels": labels, "scores": torch.linspace(0.9, 0.1, len(places))} for _ in images]


def test_constant_answers_find_nothing(tmp_path):
    task = Detection(recipe_of(tmp_path, task={"eval_samples": 20, "data_options": {}}).task)
    metrics = task.metrics()
    metrics.metric.warn_on_many_detections = False
    assert evaluate(Constant(), task.eval_data, metrics, batch_size=4)["box_map"] < 0.02


class Oracle(nn.Module):
    """The annotated objects, in the order of the images; some with a wrong score or a shifted box."""

    def __init__(self, samples, *, index=0):
        super().__init__()
        self.samples, self.index, self.step = samples, index, 1

    def forward(self, images):
        _, target = self.samples[self.index]
        self.index += self.step
        alone = target["iscrowd"] == 0
        boxes = target["boxes"][alone] + torch.arange(int(alone.sum()))[:, None] * 2
        return [{"boxes": boxes, "labels": target["labels"][alone], "scores": 0.9 - 0.1 * (boxes[:, 0] % 3)}]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """A task on generated data with crowds and empty images."""
    folder = tmp_path_factory.mktemp("shapes")
    return Detection(recipe_of(folder, task={"eval_samples": 9, "data_options": {"crowd": 0.3, "empty": 0.3}}).task)


def test_the_metric_of_several_processes_is_that_of_one(shapes):
    samples = shapes.eval_data
    alone = evaluate(Oracle(samples), samples, shapes.metrics(), batch_size=4)
    assert 0 < alone["box_map"] < 1
    parts = []
    for rank in range(2):
        metrics, model = shapes.metrics(), Oracle(samples, index=rank)
        model.step = 2
        for index in range(rank, 9, 2):
            metrics.update(model, samples.collate([samples[index]]))
        parts.append(metrics)
    gathered = [(part.indices, dict(part.metric.metric_state)) for part in parts]
    for part in parts:
        part.join(lambda own: gathered)
        assert part.result() == alone
        assert part.indices == list(range(9))


RANKS = """
import os, torch
from pathlib import Path
from nalaformer.recipes import evaluate_run
torch.set_num_threads(1)
figures = evaluate_run(Path({run!r}), device="cpu").metrics
Path({out!r} + os.environ["RANK"]).write_text(str(figures))
"""


@pytest.mark.slow
def test_two_processes_evaluate_to_the_same_figures(run, tmp_path):
    alone = evaluate_run(run, device="cpu").metrics
    assert alone["images"] == 3
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(run=str(run), out=str(tmp_path / "figures")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [(tmp_path / f"figures{rank}").read_text() for rank in range(2)] == [str(alone)] * 2


def test_a_size_without_objects_has_no_figure(shapes):
    computed = {"map": torch.tensor(0.5), "map_50": torch.tensor(0.0), "map_large": torch.tensor(-1.0)}
    assert figures(computed) == {"box_map": 0.5, "box_map_50": 0.0}
    # images of at most 64 pixels have no object of 96 x 96
    assert not [
        name for name in evaluate(Oracle(shapes.eval_data), shapes.eval_data, shapes.metrics(), batch_size=4) if "large" in name
    ]


def test_crowds_are_neither_wanted_nor_punished(shapes):
    class Perfect(Oracle):
        def forward(self, images):
            _, target = self.samples[self.index]
            self.index += 1
            return [{"boxes": target["boxes"], "labels": target["labels"], "scores": torch.ones(len(target["boxes"]))}]

    samples = shapes.eval_data
    assert any(samples[index][1]["iscrowd"].any() for index in range(9))
    assert evaluate(Perfect(samples), samples, shapes.metrics(), batch_size=4)["box_map"] == pytest.approx(1)


@pytest.mark.parametrize(("found", "objects"), [(3, 5), (4, 5), (1, 2)])
def test_a_recall_that_is_one_of_cocos_thresholds_reaches_it(found, objects):
    """Precision is 1 at the thresholds 0, 0.01, ... up to the recall, and 0 at the others of the 101."""
    corners = 20.0 * torch.arange(objects)
    boxes = torch.stack((corners, corners, corners + 10, corners + 10), dim=1)
    labels = torch.zeros(objects, dtype=torch.long)
    metrics = MeanPrecision(has_masks=False)
    answer = {"boxes": boxes[:found], "labels": labels[:found], "scores": torch.linspace(0.9, 0.5, found)}
    metrics.metric.update([answer], [{"boxes": boxes, "labels": labels}])
    metrics.indices.append(0)
    assert metrics.result()["box_map"] == pytest.approx((1 + 100 * found // objects) / 101, rel=1e-6)


def test_without_a_readable_image_there_is_no_figure():
    with pytest.raises(ValueError, match="at least one image"):
        MeanPrecision(has_masks=False).result()


# ---- in the trainer


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
    """Sizes, flips and the regions that are drawn follow from the step."""
    task = {"detector": "mask_rcnn", "flip": 0.5, "short_sides": (48, 64), "train_samples": 6, "data_options": {}}
    recipe = recipe_of(tmp_path, steps=4, task=task, batch_size=2, ema=0.5, save_every=2, keep=4)
    whole = make_trainer(recipe, tmp_path / "whole")
    whole.fit()
    stopped = make_trainer(recipe, tmp_path / "stopped")
    loss = stopped.task.loss

    def counted(model, batch):
        stopped.is_asked_to_stop = stopped.progress.step == 1
        return loss(model, batch)

    stopped.task.loss = counted
    assert stopped.fit().step == 2
    make_trainer(recipe, tmp_path / "stopped").fit()
    assert read_log(tmp_path / "stopped" / "log.jsonl") == read_log(tmp_path / "whole" / "log.jsonl")
    ours, theirs = (Checkpoints(tmp_path / name / "checkpoints").load(4).tensors for name in ("whole", "stopped"))
    for part in ("model", "ema", "optimizer"):
        assert all(torch.equal(value, theirs[part][name]) for name, value in ours[part].items())


def test_a_step_logs_the_parts_of_its_loss(tmp_path):
    make_trainer(recipe_of(tmp_path, steps=1), tmp_path / "run").fit()
    row = next(row for row in read_log(tmp_path / "run" / "log.jsonl") if row["kind"] == "step")
    assert row["loss"] == pytest.approx(row["classification"] + row["bbox_regression"], rel=1e-5)


def damage(folder):
    """The first training image gets a box of zero area; the folder of the data."""
    (place,) = (folder / "data").iterdir()
    file = place / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["bbox"][2] = 0
    file.write_text(json.dumps(content))
    return place


def test_bad_annotations_are_skipped_and_counted_or_stop_the_run(tmp_path):
    recipe = recipe_of(tmp_path, steps=1)
    Detection(recipe.task).train_data  # noqa: B018
    damage(tmp_path)
    make_trainer(recipe, tmp_path / "run").fit()
    (line,) = (tmp_path / "run" / "rejected.txt").read_text().splitlines()
    assert "000000.png" in line
    assert "annotation 1 in" in line
    assert "bbox must have a positive width" in line
    strict = replace(recipe, training=replace(recipe.training, on_corrupt="stop"))
    with pytest.raises(TrainingStopped, match="bbox must have a positive width"):
        make_trainer(strict, tmp_path / "strict").fit()


def test_train_and_val_must_name_the_same_classes(tmp_path):
    recipe = recipe_of(tmp_path)
    place = Path(Detection(recipe.task).folder)
    file = place / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["categories"][0]["name"] = "circle"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"circle.*instances_train\.json and disc.*instances_val\.json"):
        make_trainer(recipe, tmp_path / "run")


# ---- answers


def test_answers_name_classes_scores_boxes_and_masks(run, images):
    (prediction,) = predict(images[:1], run, device="cpu", options=["score=0.3"])
    answer, size = prediction.answer, read_image(images[0]).size
    assert answer.values
    assert answer.cells[0] == str(len(answer.values))
    for value in answer.values:
        assert f"{value['class']} {value['score']:.2f}" in answer.cells[1]
        left, top, right, bottom = value["box"]
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]
        assert value["mask"].shape == size[::-1]
        rows, columns = np.nonzero(value["mask"])
        assert columns.min() >= left - 2
        assert rows.max() <= bottom + 2


def test_boxes_and_masks_are_drawn_where_they_were_found(run, images):
    (prediction,) = predict(images[:1], run, device="cpu", options=["score=0.3"])
    source, picture = read_image(images[0]), prediction.answer.picture
    # small images are drawn larger, for the names
    scale = picture.width // source.width
    assert picture.size == (scale * source.width, scale * source.height)
    plain = np.asarray(source.resize(picture.size, Image.Resampling.NEAREST)).astype(int)
    changed = np.abs(np.asarray(picture).astype(int) - plain).sum(2) > 30
    value = prediction.answer.values[0]
    mask = value["mask"].repeat(scale, 0).repeat(scale, 1)
    assert changed[mask].mean() > 0.5
    left, top, _, bottom = (round(scale * side) for side in value["box"])
    assert changed[top:bottom, left].mean() > 0.5
    assert changed.mean() < 0.9


def test_an_answer_without_objects_says_which_score_shows_one(run, images):
    (prediction,) = predict(images[:1], run, device="cpu", options=["score=1"])
    said = prediction.answer.cells[1]
    assert "none reaches 1, the best has" in said
    (prediction,) = predict(images[:1], run, device="cpu", options=[said.rpartition(" ")[2]])
    assert len(prediction.answer.values) >= 1


@ANSWERS.of("score")
def test_only_objects_of_that_score_are_shown(run, images):
    for least in (0.1, 0.5, 1.0):
        (prediction,) = predict(images[:1], run, device="cpu", options=[f"score={least}"])
        assert all(value["score"] >= least for value in prediction.answer.values)
    assert prediction.answer.values == ()
    assert prediction.answer.cells[0] == "0"


@pytest.mark.filterwarnings("error:Found annotation id 0")
def test_written_results_have_the_mean_precision_of_the_evaluation(run, tmp_path):
    from faster_coco_eval import COCO, COCOeval_faster

    folder = Path(load_run(run).task.folder)
    file = folder / "annotations" / "instances_val.json"
    arguments = ["predict", folder / "val", "--run", run, "--coco", tmp_path / "a.json", "--annotations", file]
    arguments += ["--out", tmp_path, "--set", "score=0", "--device", "cpu"]
    done = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    truth, expected = COCO(str(file)), evaluate_run(run, device="cpu").metrics
    for kind, name in (("bbox", "box_map"), ("segm", "mask_map")):
        judged = COCOeval_faster(truth, truth.loadRes(str(tmp_path / "a.json")), kind)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
        assert judged.stats[0] == pytest.approx(expected[name], abs=1e-6)


def test_a_run_answers_where_its_data_is_gone(run, images, tmp_path):
    photo = tmp_path / "photo.png"
    # of another size than any it has seen
    Image.open(images[0]).resize((131, 77)).save(photo)
    (prediction,) = predict([photo], run, device="cpu")
    assert prediction.answer.picture.width % 131 == 0


def test_the_backbone_inside_is_timms(run):
    model = load_run(run).model
    assert type(Detection.backbone(model)).__name__ == "Backbone"


# ---- settings


def task_of(folder, **settings):
    return Detection(recipe_of(folder, task=settings).task)


@CONFIG.of("data", "generated_folder")
def test_data_is_a_folder_or_generated_in_one(tmp_path):
    generated = task_of(tmp_path, generated_folder=str(tmp_path / "elsewhere"))
    assert Path(generated.folder).parent == tmp_path / "elsewhere"
    read = task_of(tmp_path, data=generated.folder)
    assert torch.equal(read.train_data[0][0], generated.train_data[0][0])
    with pytest.raises(ValueError, match="no_such_folder"):
        task_of(tmp_path, data="no_such_folder").eval_data  # noqa: B018


@CONFIG.of("data_options", "data_seed", "train_samples", "eval_samples")
def test_generated_data_is_as_it_was_asked_for(tmp_path):
    task = task_of(tmp_path, data_options={"shortest_side": 70, "longest_side": 70}, train_samples=3, eval_samples=2)
    assert (len(task.train_data), len(task.eval_data)) == (3, 2)
    assert task.train_data[0][0].shape == (3, 70, 70)
    other = task_of(tmp_path, data_options={"shortest_side": 70, "longest_side": 70}, data_seed=1)
    assert not torch.equal(task.train_data[0][0], other.train_data[0][0])
    with pytest.raises(ValueError, match="sides"):
        task_of(tmp_path, data_options={"sides": 3}).folder  # noqa: B018


@CONFIG.of("short_sides", "eval_short_side", "longest_side")
def test_images_are_resized_as_asked(tmp_path):
    task = task_of(tmp_path, short_sides=(32, 128), eval_short_side=96)
    assert {task.train_data[0][0].shape[1] for _ in range(20)} == {32, 128}
    assert task.eval_data[0][0].shape == (3, 96, 96)
    assert task_of(tmp_path, longest_side=48).train_data[0][0].shape == (3, 48, 48)
    assert task_of(tmp_path, longest_side=48).eval_data[0][0].shape == (3, 48, 48)


def test_a_short_side_of_zero_leaves_an_image_as_it_is(tmp_path):
    own = task_of(tmp_path).train_data[0][0].shape
    data = task_of(tmp_path, short_sides=(0, 128)).train_data
    assert {data[0][0].shape[1:] == own[1:] for _ in range(20)} == {True, False}


@CONFIG.of("holdout")
def test_images_are_held_out_where_there_is_no_val(tmp_path):
    folder = Path(task_of(tmp_path, train_samples=8).folder)
    (folder / "annotations" / "instances_val.json").unlink()
    task = task_of(tmp_path, data=str(folder), holdout=0.25)
    assert (len(task.train_data), len(task.eval_data)) == (6, 2)
    (note,) = task.notes()
    assert note.startswith("6 images to learn from; 2 more are held out to evaluate on: 25% of all")
    with pytest.raises(ValueError, match=r"holdout=0\.2"):
        task_of(tmp_path, data=str(folder)).eval_data  # noqa: B018


@CONFIG.of("flip")
def test_images_are_mirrored_as_often_as_asked(tmp_path):
    for flip, seen in ((0.0, {False}), (1.0, {True}), (0.5, {False, True})):
        data = task_of(tmp_path, flip=flip).train_data
        plain = task_of(tmp_path).train_data[0][0]
        assert {torch.equal(data[0][0], plain.flip(2)) for _ in range(20)} == seen


@CONFIG.of("empty_images")
def test_empty_images_are_learned_from_or_not(tmp_path):
    options = {"empty": 0.6}
    with_them, without = (
        task_of(tmp_path, data_options=options, train_samples=12, empty_images=value).train_data for value in (True, False)
    )
    assert len(with_them) == 12 > len(without) > 0
    assert all(len(without[index][1]["labels"]) for index in range(len(without)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"detector": "yolo"}, "detector"),
        ({"short_sides": (-1,)}, "short_sides must not be negative"),
        ({"holdout": 1.0}, "holdout must be at least 0 and below 1"),
        ({"short_sides": 800}, "short_sides must be a tuple"),
        ({"eval_short_side": -1}, "eval_short_side must not be negative"),
        ({"longest_side": -1}, "longest_side must not be negative"),
        ({"flip": 2.0}, "flip must be between 0 and 1"),
        ({"train_samples": 0}, "train_samples must be positive"),
        ({"data_seed": -1}, "data_seed must not be negative"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DetectionConfig(data="d", **settings)


def test_without_the_metric_the_error_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'nalaformer\[detection\]'"):
        MeanPrecision(has_masks=False)
