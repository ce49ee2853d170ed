"""Training, evaluating and predicting, as a user meets them."""

import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from nalaformer import cli
from nalaformer.data import CueGrid
from nalaformer.recipes import RECIPES, grouped_recipes, recipe_words
from nalaformer.training import Checkpoints
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ("steps=6", "warmup=1", "batch_size=8", "eval_every=3", "save_every=3", "eval_samples=16", "device=cpu")


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


@pytest.fixture
def trained(run, tmp_path):
    folder = tmp_path / "run"
    result = run("train", "cue_grid", "attention=linear", *SHORT, "--out", folder)
    assert result.exit_code == 0, result.output
    return folder


def test_train_reports_its_figures_and_keeps_the_run(run, tmp_path):
    result = run("train", "cue_grid", "attention=linear", *SHORT, "--out", tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps()[-1] == 6
    evaluations = [row for row in read_log(tmp_path / "log.jsonl") if row["kind"] == "eval"]
    assert [row["step"] for row in evaluations] == [3, 6]
    for row in evaluations:
        assert f"cue_grid: step {row['step']}  top1 {row['top1']:.4g}" in result.output
    assert f"finished: top1 {evaluations[-1]['top1']:.4g}" in result.output


def test_the_same_command_again_finds_the_run_finished(trained, run):
    result = run("train", "cue_grid", "attention=linear", *SHORT, "--out", trained)
    assert result.exit_code == 0
    assert "finished: top1" in result.output


def test_the_step_of_every_figure_is_named(run, tmp_path):
    # nothing is learned, so the first evaluation stays the best
    said = run("train", "cue_grid", "attention=linear", *SHORT, "learning_rate=0", "--out", tmp_path / "run").output
    first, _ = [row for row in read_log(tmp_path / "run" / "log.jsonl") if row["kind"] == "eval"]
    assert f"(step 6); run: {tmp_path / 'run'}" in said
    assert f"best: top1 {first['top1']:.4g} (step 3); other commands use these weights" in said
    CueGrid(split="val", samples=1, cells=8).write(tmp_path / "images")
    assert "step 3, the best" in run("predict", tmp_path / "images", "--run", tmp_path / "run", "--device", "cpu").output
    assert "step 3, the best" in run("eval", tmp_path / "run", "--device", "cpu").output


def test_eval_gives_the_figures_of_the_training(trained, run):
    top1 = [row for row in read_log(trained / "log.jsonl") if row["kind"] == "eval"][-1]["top1"]
    result = run("eval", trained, "--step", 6, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert f"{top1:.4g}" in result.output
    # of four classes, the right one is always among five
    assert "top5" not in result.output
    # images have train and val alone
    refused = run("eval", trained, "--split", "test", "--device", "cpu")
    assert "has no test split" in str(refused.exception)


def test_predict_names_the_likeliest_classes_of_a_folder(trained, run, tmp_path):
    CueGrid(split="val", samples=3, cells=8).write(tmp_path / "images")
    result = run("predict", tmp_path / "images", "--run", trained, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.output.count("%") == 3 * 4
    assert all(name in result.output for name in ("disc", "square", "cross", "ring"))


def test_predict_says_the_same_of_an_image_as_of_the_sample_it_was_made_of(trained, tmp_path):
    from nalaformer.recipes import load_run, predict

    data = CueGrid(split="val", samples=1, cells=8)
    path = next(data.write(tmp_path / "images").rglob("*.png"))
    (prediction,) = predict([path], trained, device="cpu")
    loaded = load_run(trained)
    expected = loaded.model(data[0][0][None]).softmax(1)[0].max().item()
    assert prediction.answer.values[0][1] == pytest.approx(expected, abs=0.01)


def test_predict_says_the_same_of_an_image_of_16_bits_as_of_8(trained, tmp_path):
    from nalaformer.recipes import predict

    pixels = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "8.png")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "16.png")
    short, long = predict([tmp_path / "8.png", tmp_path / "16.png"], trained, device="cpu")
    assert short.answer.values == long.answer.values


def test_predict_of_a_broken_image_says_so_and_goes_on(trained, run, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"nothing")
    Image.fromarray(np.zeros((50, 70, 3), np.uint8)).save(tmp_path / "good.png")
    result = run("predict", tmp_path / "broken.png", tmp_path / "good.png", "--run", trained, "--device", "cpu")
    assert result.exit_code == 1
    assert f"left out: {tmp_path / 'broken.png'} is no image that can be used" in result.output
    assert result.output.count("%") == 4


def test_recipes_lists_all_and_shows_one(run):
    listed = run("recipes").output
    assert all(name in listed for name in RECIPES.names())
    shown = run("recipes", "cue_grid").output
    assert all(word in shown for word in ("Cost:", "Expected:", "learning_rate", "0.002"))


def test_recipes_on_own_data_come_first_and_each_recipe_once(run):
    groups = grouped_recipes()
    assert sorted(name for names in groups.values() for name in names) == sorted(RECIPES.names())
    own, generated, published = groups.values()
    # the title says what is needed
    assert [name for name in RECIPES.names() if "your own" in recipe_words(name).splitlines()[0]] == [
        name for name in RECIPES.names() if name in own
    ]
    assert {"cue_grid", "scenes", "shapes_dit_tiny", "lm_tiny"} <= set(generated)
    assert {"imagenet_nalaformer_t", "coco_mask_rcnn_1x", "div2k_x2", "nala_lm_340m"} <= set(published)
    lines = [line.split()[0] if line.startswith("  ") else line for line in run("recipes").output.splitlines() if line.strip()]
    assert lines[:2] == ["your own data", "images"]
    assert [line for line in lines if line in groups] == list(groups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "cue_gird"), "did you mean 'cue_grid'"),
        (("train", "cue_grid", "learning_rat=1"), "did you mean 'learning_rate'"),
        (("train", "imagenet_nalaformer_t"), "unknown data"),
        (("eval", "/no/such/run"), "folder of a run"),
        (("predict", "/no/such/image.png", "--run", "/no"), "must exist"),
        (("recipes", "cue"), "did you mean 'cue_grid'"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_two(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nalaformer", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_a_run_that_cannot_go_on_is_one_line_and_exit_code_one(monkeypatch, capsys, tmp_path):
    settings = [*SHORT, "learning_rate=1e30", "clip_norm=0", "bad_steps=2"]
    monkeypatch.setattr(sys, "argv", ["nalaformer", "train", "cue_grid", *settings, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert "not finite in 2 steps in a row" in capsys.readouterr().err


def test_without_timm_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cli.app, "build_app", lambda: (_ for _ in ()).throw(ModuleNotFoundError("no", name="timm")))
    with pytest.raises(SystemExit, match=r"timm: pip install 'nalaformer\[vision\]'"):
        cli.main()
