"""Naming pixels: what is minimised, what is counted, and runs from data to pictures."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchmetrics.classification import MulticlassJaccardIndex
from typer.testing import CliRunner

from helpers.processes import metrics_on_ranks
from nalaformer.cli import build_app
from nalaformer.data.segmentation import IGNORED, write_scenes
from nalaformer.recipes import RECIPES, answers_of, changed, evaluate_run, load_run, make_trainer
from nalaformer.tasks import Segmentation, SegmentationConfig
from nalaformer.tasks.segmentation import ConfusionMatrix, label_pixels, logits_in_windows
from nalaformer.training import Checkpoints, TrainingStopped
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"embed_dims": [8, 8, 16, 16], "depths": [1] * 4, "num_heads": [1] * 4, "mlp_ratios": 1.0, "decoder_channels": 64}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, train=6, val=4)
    return folder


def recipe_of(data, *settings):
    small = [f"data={data}", f"model_options={json.dumps(TINY)}", "device=cpu", "crop=32", "short_side=48", "batch_size=3"]
    return changed(RECIPES["scenes"](), [*small, "steps=3", "warmup=0", "eval_every=0", "save_every=0", *settings])


# ---- mIoU


def test_the_mean_iou_is_that_of_torchmetrics_over_the_whole_data_set():
    random = torch.Generator().manual_seed(0)
    metrics, theirs = ConfusionMatrix(5), MulticlassJaccardIndex(5, ignore_index=IGNORED, average="macro")
    by_class = MulticlassJaccardIndex(5, ignore_index=IGNORED, average="none")
    for size in ((7, 9), (30, 4), (1, 1)):
        labels = torch.randint(0, 5, size, generator=random)
        answers = torch.where(torch.rand(size, generator=random) < 0.6, labels, torch.randint(0, 5, size, generator=random))
        labels[torch.rand(size, generator=random) < 0.2] = IGNORED
        metrics.add(answers, labels.to(torch.uint8))
        theirs.update(answers[None], labels[None])
        by_class.update(answers[None], labels[None])
    assert metrics.result()["miou"] == pytest.approx(theirs.compute().item(), rel=1e-6)
    assert metrics.by_class().tolist() == pytest.approx(by_class.compute().tolist(), rel=1e-6)


def test_a_class_that_never_occurs_is_left_out_of_the_mean_and_counted():
    metrics, theirs = ConfusionMatrix(4), MulticlassJaccardIndex(4, ignore_index=IGNORED)
    labels, answers = torch.tensor([[0, 0, 1, 1, IGNORED]]), torch.tensor([[0, 1, 1, 1, 2]])
    metrics.add(answers, labels)
    theirs.update(answers, labels)
    result = metrics.result()
    assert result["miou"] == pytest.approx((1 / 2 + 2 / 3) / 2) == pytest.approx(theirs.compute().item())
    assert (result["classes_left_out"], result["pixels"]) == (2, 4)
    # rows are labels, columns answers
    assert metrics.sums[:2, :2].tolist() == [[1, 1], [0, 2]]
    # one that is named where it is not has an IoU of zero
    metrics.add(torch.tensor([[3]]), torch.tensor([[0]]))
    assert metrics.result()["miou"] == pytest.approx((1 / 3 + 2 / 3 + 0) / 3)


def test_masks_without_a_labelled_pixel_have_no_mean():
    metrics = ConfusionMatrix(2)
    metrics.add(torch.zeros(2, 2, dtype=torch.long), torch.full((2, 2), IGNORED))
    with pytest.raises(ValueError, match="at least one labelled pixel"):
        metrics.result()


class Ramp(nn.Module):
    """Logits that follow from the place in what it is shown: (row, column, pixel)."""

    def forward(self, images):
        height, width = images.shape[-2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        return (torch.stack((rows.expand(len(images), -1, -1), columns.expand(len(images), -1, -1), images[:, 0]), dim=1),)


def test_answers_are_compared_at_the_size_of_the_masks():
    """Images of several sizes in one batch, masks of another."""
    images = [torch.rand(3, 4, 6), torch.rand(3, 5, 5), torch.rand(3, 4, 6)]
    labels = [torch.randint(0, 3, size, dtype=torch.uint8) for size in ((8, 12), (5, 5), (3, 3))]
    together, alone = ConfusionMatrix(3), ConfusionMatrix(3)
    together.update(Ramp(), (images, labels))
    for image, label in zip(images, labels, strict=True):
        logits = F.interpolate(Ramp()(image[None])[0], label.shape, mode="bilinear", align_corners=False)
        alone.add(logits.argmax(1)[0], label)
    assert torch.equal(together.sums, alone.sums)
    assert together.sums.sum() == 8 * 12 + 25 + 9


def test_labels_of_many_classes_are_those_of_the_largest_logit():
    logits = torch.randn(2, 37, 5, 6)
    assert torch.equal(label_pixels(logits, (5, 6)), logits.argmax(1))
    larger = F.interpolate(logits, (9, 7), mode="bilinear", align_corners=False)
    assert torch.equal(label_pixels(logits, (9, 7)), larger.argmax(1))
    # of equal ones the first, as argmax has it
    assert label_pixels(torch.zeros(1, 37, 2, 2), (2, 2)).eq(0).all()


# ---- sliding windows


@pytest.mark.parametrize("window", [0, 9, 12, 100])
def test_one_window_that_covers_the_image_is_the_whole_image(window):
    images = torch.randn(2, 3, 9, 7)
    assert torch.equal(logits_in_windows(Ramp(), images, window=window), Ramp()(images)[0])


def test_logits_are_averaged_where_windows_overlap():
    images = torch.randn(1, 3, 4, 10)
    logits = logits_in_windows(Ramp(), images, window=4, stride=3)
    # windows begin at columns 0, 3 and 6: column 3 is the fourth of one and the first of another
    assert logits[0, 1, 0].tolist() == [0, 1, 2, 1.5, 1, 2, 1.5, 1, 2, 3]
    torch.testing.assert_close(logits[0, 2], images[0, 0])


def test_windows_leave_no_pixel_out():
    for size, window, stride in (((11, 23), 5, 0), ((11, 23), 5, 5), ((3, 50), 8, 7), ((1, 1), 1, 0), ((6, 7), 1, 1)):
        images = torch.randn(1, 3, *size)
        torch.testing.assert_close(logits_in_windows(Ramp(), images, window=window, stride=stride)[0, 2], images[0, 0])


# ---- loss


class Fixed(nn.Module):
    """The given logits, whatever it sees."""

    def __init__(self, *logits):
        super().__init__()
        self.logits = logits

    def forward(self, images):
        return self.logits


def test_the_loss_is_the_mean_over_labelled_pixels_plus_the_weighted_auxiliary_one():
    task = Segmentation(SegmentationConfig(data="scenes", auxiliary_weight=0.25))
    decoder, auxiliary = torch.randn(2, 2, 3, 4, 5)
    labels = torch.randint(0, 3, (2, 4, 5))
    labels[0, :2] = IGNORED
    counted = labels != IGNORED
    expected = [
        -logits.log_softmax(1).gather(1, labels.where(counted, 0)[:, None])[:, 0][counted].mean()
        for logits in (decoder, auxiliary)
    ]
    batch = (list(torch.zeros(2, 3, 4, 5)), list(labels.to(torch.uint8)))
    loss = task.loss(Fixed(decoder, auxiliary), batch)
    assert loss.total.item() == pytest.approx((expected[0] + 0.25 * expected[1]).item(), rel=1e-5)
    assert loss.weight == pytest.approx(1.5)
    assert [loss.parts[name].item() for name in ("decoder", "auxiliary")] == pytest.approx(
        [e.item() for e in expected], rel=1e-5
    )
    assert task.loss(Fixed(decoder), batch).total.item() == pytest.approx(expected[0].item(), rel=1e-5)


def test_crops_without_a_labelled_pixel_weigh_nothing():
    task = Segmentation(SegmentationConfig(data="scenes"))
    logits = torch.randn(1, 3, 4, 5, requires_grad=True)
    loss = task.loss(Fixed(logits), ([torch.zeros(3, 4, 5)], [torch.full((4, 5), IGNORED, dtype=torch.uint8)]))
    assert (loss.total.item(), loss.weight) == (0, 0)


# ---- runs


def test_a_handful_of_scenes_is_learned_by_heart(tmp_path, data):
    settings = ["short_side=32", "crop=48", "smallest_scale=1", "largest_scale=1", "flip=0", "batch_size=4", "steps=60"]
    trainer = make_trainer(recipe_of(data, *settings, "learning_rate=5e-3", "weight_decay=0"), tmp_path)
    trainer.task.train_data.files = trainer.task.eval_data.files
    outcome = trainer.fit()
    # 0.6 was seen; one class everywhere has less than 0.1
    assert outcome.metrics["miou"] > 0.25


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, data):
    from helpers.training_example import stop_at

    settings = ["model=upernet:nalaformer_xt_linear", "color_jitter=0.4", "ema=0.5"]
    make_trainer(recipe_of(data, *settings), tmp_path / "whole").fit()
    stopped = make_trainer(recipe_of(data, *settings), tmp_path / "halves")
    stop_at(stopped, 2)
    assert stopped.fit().step == 2
    torch.rand(5)
    make_trainer(recipe_of(data, *settings), tmp_path / "halves").fit()
    assert read_log(tmp_path / "halves" / "log.jsonl") == read_log(tmp_path / "whole" / "log.jsonl")
    one, other = (Checkpoints(tmp_path / name / "checkpoints").load(3) for name in ("whole", "halves"))
    for part in ("model", "ema", "optimizer"):
        assert one.tensors[part].keys() == other.tensors[part].keys()
        assert all(torch.equal(value, other.tensors[part][name]) for name, value in one.tensors[part].items())


@pytest.fixture(scope="module")
def run(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_trainer(recipe_of(data), folder).fit()
    return folder


def test_two_processes_have_the_mean_iou_of_one(tmp_path, run):
    alone = evaluate_run(run, device="cpu").metrics
    for together in metrics_on_ranks(run, tmp_path):
        assert together["pixels"] == alone["pixels"]
        # a sum in another order may turn the answer of a pixel that is a tie
        assert together == pytest.approx(alone, abs=1e-3)


@pytest.fixture
def one_bad_mask(tmp_path):
    folder = tmp_path / "data"
    write_scenes(folder, train=4, val=2)
    bad = folder / "annotations" / "training" / "scene_000002.png"
    Image.new("L", (5, 5)).save(bad)
    return folder


def test_a_bad_mask_is_left_out_and_named(tmp_path, one_bad_mask):
    outcome = make_trainer(recipe_of(one_bad_mask), tmp_path / "run").fit()
    assert outcome.is_finished
    (line,) = (tmp_path / "run" / "rejected.txt").read_text().splitlines()
    assert "scene_000002.png" in line
    assert "the mask is 5 x 5" in line


def test_a_bad_mask_stops_the_run_by_choice(tmp_path, one_bad_mask):
    with pytest.raises(TrainingStopped, match=r"scene_000002\.png .*the mask is 5 x 5"):
        make_trainer(recipe_of(one_bad_mask, "on_corrupt=stop"), tmp_path / "run").fit()


def test_a_run_is_evaluated_to_the_figures_of_its_training(run):
    evaluation = evaluate_run(run, device="cpu")
    logged = [row for row in read_log(run / "log.jsonl") if row["kind"] == "eval"][-1]
    assert {name: logged[name] for name in evaluation.metrics} == evaluation.metrics
    assert not set(evaluation.details) & set(logged)


def test_an_answer_is_a_label_for_each_pixel_and_needs_no_data(tmp_path, run):
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 61, 3)).astype(np.uint8)).save(photo)
    loaded = load_run(run, data=str(tmp_path / "gone"))
    assert loaded.facts["classes"][0] == "sky"
    (prediction,) = answers_of(loaded, [photo], options=["legend=false", "opacity=1"], device="cpu")
    labels, picture = prediction.answer.values, np.asarray(prediction.answer.picture)
    assert labels.shape == (37, 61)
    assert picture.shape == (37, 61, 3)
    assert np.array_equal(picture, np.array(loaded.facts["colours"])[labels])
    named, share = prediction.answer.cells[0].split(", ")[0].rsplit(" ", 1)
    assert share == f"{100 * (labels == loaded.facts['classes'].index(named)).mean():.1f}%"


def test_the_command_writes_pictures_and_lists_parts(tmp_path, run, data):
    images = sorted((data / "images" / "validation").iterdir())[:2]
    arguments = ["predict", *images, "--run", run, "--out", tmp_path / "out", "--set", "window=32", "--device", "cpu"]
    done = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["scene_000000.png", "scene_000001.png"]
    assert "%" in done.output
