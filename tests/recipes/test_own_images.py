"""A folder of one's own images: the recipe `images`, and weights to start from."""

import io
import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
import timm
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from nalaformer import cli
from nalaformer.recipes import build_model, changed, evaluate_run, load_run, make_trainer, predict, recipe_with
from nalaformer.recipes.image_programs import writer_of
from nalaformer.recipes.initial_weights import load_weights
from nalaformer.tasks import Classification
from nalaformer.training import Checkpoint, Checkpoints, plan_lines
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {
    **{"embed_dims": [16], "depths": [1], "num_heads": [2], "mlp_ratios": 1, "attention_stages": "l", "layer_scale": [None]},
    **{"key_reduction": 1, "softmax_key_reduction": 1, "patch_size": 8, "img_size": 32},
}
SMALL = ["model=vit_nala_tiny_patch16", f"model_options={json.dumps(TINY)}", "device=cpu", "learning_rate=1e-2"]
COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """Ten images of 20 pixels in each of three class folders; their colour says which."""
    root = tmp_path_factory.mktemp("colours")
    for name, colour in COLOURS.items():
        (root / name).mkdir()
        for number in range(10):
            Image.new("RGB", (20, 20), tuple(part + 5 * number for part in colour)).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def settings(colours):
    return [*SMALL, f"data={colours}", "warmup=0"]


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory):
    """The recipe on the colours, and what it said."""
    folder = tmp_path_factory.mktemp("run")
    written = io.StringIO()
    make_trainer(recipe_with("images", [*settings, "epochs=8"]), folder, console=Console(file=written, width=300)).fit()
    (folder / "said.txt").write_text(written.getvalue())
    return folder


def test_a_folder_of_classes_is_learned_and_its_images_are_named(run, colours):
    # 24 images in batches of 4, and an evaluation after each pass
    rows = read_log(run / "log.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [6 * epoch for epoch in range(1, 9)]
    metrics = evaluate_run(run).metrics
    assert (metrics["top1"], metrics["images"]) == (1.0, 6)
    for name in COLOURS:
        (prediction,) = predict([colours / name / "3.png"], run)
        assert prediction.answer.values[0][0] == name


def test_a_checkpoint_that_is_not_of_the_whole_model_is_refused(run, tmp_path):
    step, checkpoint = Checkpoints(run / "checkpoints").newest()
    part = "ema" if "ema" in checkpoint.tensors else "model"
    name, value = next(item for item in checkpoint.tensors[part].items() if item[1].dim() == 2)
    others = {name: other for name, other in checkpoint.tensors[part].items() if other is not value}
    for weights, message in (
        (others, f"got none for {re.escape(name)} in"),
        (others | {name: value, "extra": value}, "got others: extra in"),
        (others | {name: value[:1]}, f"must have the shapes of this model.*{re.escape(name)}"),
        (others | {name: value * torch.nan}, f"got NaN or infinity in {re.escape(name)} of"),
    ):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        state = checkpoint.state | {"progress": checkpoint.state["progress"] | {"best_step": step}}
        changed_one = Checkpoint(tensors=checkpoint.tensors | {part: weights}, state=state)
        Checkpoints(tmp_path / "checkpoints").save(step, changed_one)
        with pytest.raises(ValueError, match=message):
            load_run(tmp_path)


def test_what_is_held_out_is_said_and_logged(run):
    (note,) = [row["text"] for row in read_log(run / "log.jsonl") if row["kind"] == "note"]
    assert "24 images of 3 classes (blue, green, red) at 32 pixels; 6 more are held out" in note
    assert note in (run / "said.txt").read_text()


def test_the_choices_that_the_data_made_are_kept_and_the_same_command_goes_on(run, settings):
    recipe = load_run(run).recipe
    assert (recipe.task.image_size, recipe.training.batch_size) == (32, 4)
    assert "finished" in plan_lines(make_trainer(recipe_with("images", [*settings, "epochs=8"]), run))[0]


@pytest.mark.parametrize(("duration", "steps"), [("epochs=2", 12), ("steps=5", 5), ("epochs=0.5", 3)])
def test_a_duration_means_what_it_says(settings, tmp_path, duration, steps):
    assert make_trainer(recipe_with("images", [*settings, duration]), tmp_path).total_steps == steps


def test_a_plan_says_why_an_imagenet_recipe_takes_more_steps(settings, tmp_path):
    more = [*settings, "holdout=0.2", "epochs=2", "batch_size=4", "image_size=32"]
    lines = "\n".join(plan_lines(make_trainer(recipe_with("imagenet_nalaformer_xt", more), tmp_path)))
    assert "the run takes 72 steps (6 an epoch): 2 epochs and a cool-down of 10" in lines
    assert "cooldown=0 leaves it out" in lines
    assert "an epoch shows 1/3 of them; repeats=1 shows all" in lines


def test_a_set_smaller_than_a_batch_names_the_batch_that_fits(settings, tmp_path):
    with pytest.raises(ValueError, match="use batch_size=24 or less"):
        make_trainer(recipe_with("images", [*settings, "batch_size=64"]), tmp_path)


def test_a_plan_names_a_truncated_image_and_training_says_what_to_do(colours, settings, tmp_path):
    for name in COLOURS:
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            with Image.open(colours / name / f"{number}.png") as image:
                image.save(tmp_path / "images" / name / f"{number}.jpg")
    broken = tmp_path / "images" / "red" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:-200])
    recipe = recipe_with("images", [*settings, f"data={tmp_path / 'images'}", "epochs=1"])
    lines = plan_lines(make_trainer(recipe, tmp_path / "run"))
    assert "tried: all to learn from and all to evaluate on; 1 of these cannot be used" in lines
    (named,) = [line for line in lines if line.startswith("left out: ")]
    assert f"{broken} is no image" in named
    assert named.endswith("mend it or move it away")
    with pytest.raises(ValueError, match=r"red/2\.jpg is no image.*on_corrupt=skip leaves it out"):
        plan_lines(make_trainer(changed(recipe, ["on_corrupt=stop"]), tmp_path / "run"))
    written = io.StringIO()
    make_trainer(recipe, tmp_path / "run", console=Console(file=written, width=300)).fit()
    (said,) = [line for line in written.getvalue().splitlines() if "skipped" in line]
    assert f"skipped {broken} is no image" in said
    assert said.endswith("mend it or move it away")


def test_data_that_is_not_there_names_the_layout(tmp_path):
    with pytest.raises(ValueError, match="a folder of images for each class: data="):
        make_trainer(recipe_with("images", [f"data={tmp_path / 'none'}"]), tmp_path / "run")


# ---- weights to start from


def test_a_run_starts_from_another_without_its_classifier(run, colours, settings, tmp_path):
    (tmp_path / "two").mkdir()
    for name in ("red", "blue"):
        (tmp_path / "two" / name).symlink_to(colours / name)
    recipe = recipe_with("images", [*settings, f"data={tmp_path / 'two'}", f"initial_weights={run}"])
    trainer = make_trainer(recipe, tmp_path / "run")
    trained = load_run(run).model.state_dict()
    names = [name for name in trained if not name.startswith("head.fc")]
    ours = trainer.model.state_dict()
    assert [name for name in names if torch.equal(ours[name], trained[name])] == names
    note = trainer.notes[-1]
    assert f"{len(names)} of {len(trained)} tensors start from {run}" in note
    assert "2 of another shape and left out: head.fc.weight, head.fc.bias" in note
    # with the same classes nothing is left out, and what the other has learned is there from the start
    recipe = changed(replace(recipe, task=replace(recipe.task, data=str(colours))), ["learning_rate=0", "steps=1"])
    trainer = make_trainer(recipe, tmp_path / "same")
    assert "left out" not in trainer.notes[-1]
    assert trainer.fit().metrics["top1"] == 1


def test_a_run_that_goes_on_does_not_need_the_file_that_it_started_from(run, settings, tmp_path):
    weights = tmp_path / "weights.safetensors"
    save_file(load_run(run).model.state_dict(), weights)
    more = [*settings, f"initial_weights={weights}", "steps=2"]
    make_trainer(recipe_with("images", more), tmp_path / "run").fit()
    weights.unlink()
    assert make_trainer(recipe_with("images", more), tmp_path / "run").fit().is_finished
    # eval and predict do not need it either
    assert load_run(tmp_path / "run").step == 2
    with pytest.raises(ValueError, match="does not exist"):
        make_trainer(recipe_with("images", more), tmp_path / "other")


def model_of(run):
    return build_model(load_run(run).recipe, {"classes": ["a", "b"]})


def test_every_tensor_that_is_left_over_is_counted(run, tmp_path):
    model = model_of(run)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {name: value + 1 for name, value in before.items() if name != "stem.0.bias"}
    extra = {f"optimizer.{number}": torch.ones(1) for number in range(5)}
    torch.save({"model": weights | extra, "epoch": 3}, tmp_path / "weights.pth")
    told = load_weights(model, Classification, tmp_path / "weights.pth")
    assert f"{len(weights)} of {len(before)} tensors start" in told
    assert "1 not in the file: stem.0.bias" in told
    assert "5 in the file and not used: optimizer.0, optimizer.1, optimizer.2, ..." in told
    assert "\n" not in told
    after = model.state_dict()
    assert torch.equal(after["stem.0.bias"], before["stem.0.bias"])
    assert torch.equal(after["stem.0.weight"], before["stem.0.weight"] + 1)


def test_another_part_of_a_file_does_not_take_a_name_of_the_backbone(run, tmp_path):
    model = model_of(run)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {f"backbone.{name}": value + 1 for name, value in before.items()} | {"stem.0.bias": before["stem.0.bias"] + 2}
    torch.save(weights, tmp_path / "weights.pth")
    told = load_weights(model, Classification, tmp_path / "weights.pth")
    assert f"{len(before)} of {len(before)} tensors start" in told
    assert "1 in the file and not used: stem.0.bias" in told
    assert torch.equal(model.state_dict()["stem.0.bias"], before["stem.0.bias"] + 1)


def test_a_file_of_which_nothing_but_the_classifier_fits_is_refused(run, tmp_path):
    model = model_of(run)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    head = {name: value + 1 for name, value in before.items() if name.startswith("head.fc")}
    save_file({"conv1.weight": torch.ones(3)} | head, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"nothing does: it has conv1\.weight.* and the model stem"):
        load_weights(model, Classification, tmp_path / "other.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Detector(nn.Module):
    """Features of a timm model inside another one."""

    def __init__(self, name):
        super().__init__()
        self.body = timm.create_model(name, features_only=True, out_indices=(0, 1))
        self.top = nn.Linear(2, 2)

    @staticmethod
    def backbone(model):
        return model.body


# timm names the parts of features_only models in three ways
@pytest.mark.parametrize("name", ["nalaformer_xt", "resnet10t", "convnext_atto"])
def test_a_classifier_starts_the_backbone_of_another_task_and_the_reverse(name, tmp_path):
    classifier = timm.create_model(name, num_classes=3)
    torch.save(classifier.state_dict(), tmp_path / "weights.pth")
    detector = Detector(name)
    total = len(detector.body.state_dict())
    assert f"{total} of {total} tensors start" in load_weights(detector, Detector, tmp_path / "weights.pth")
    # from a file in which the backbone is a part
    save_file(detector.state_dict(), tmp_path / "detector.safetensors")
    told = load_weights(timm.create_model(name, num_classes=5), Classification, tmp_path / "detector.safetensors")
    assert f"{total} of {len(classifier.state_dict())} tensors start" in told
    assert "2 in the file and not used: top.bias, top.weight" in told


# with a stem of convolutions, grids of four sizes and stages of softmax: torch takes long to write them
LARGER = {"embed_dims": [16, 16, 32, 32], "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "projection": 32}


@pytest.mark.parametrize(
    ("model", "options"),
    [("vit_nala_tiny_patch16", TINY), pytest.param("nalaformer_xt", LARGER, marks=pytest.mark.slow)],
)
def test_a_classifier_becomes_a_program_with_its_logits_without_transformers(model, options, tmp_path, monkeypatch):
    import onnxruntime

    for package in ("transformers", "nalaformer.models.language"):
        monkeypatch.setitem(sys.modules, package, None)
    settings = ["steps=1", "train_samples=8", "eval_samples=8", "batch_size=4", "device=cpu"]
    settings += [f"model={model}", "attention=nalaformer", f"model_options={json.dumps(options)}"]
    recipe = recipe_with("cue_grid", settings)
    make_trainer(recipe, tmp_path / "run").fit()
    arguments = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "model.onnx")]
    assert CliRunner().invoke(cli.build_app(), arguments, catch_exceptions=False).exit_code == 0
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    run = load_run(tmp_path / "run")
    images = torch.randn(3, 3, run.task.image_size, run.task.image_size)
    (found,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), run.model(images), rtol=0, atol=1e-4)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == run.facts["classes"]
    # generated images are read as they were made
    assert (json.loads(about["mean"]), json.loads(about["std"])) == ([0.5] * 3, [1.0] * 3)


def test_a_model_that_torch_cannot_export_is_refused_in_one_line(run, tmp_path):
    class ByValue(nn.Module):
        def forward(self, images):
            return images.mean((2, 3)) if images.sum() > 0 else images.amax((2, 3))

    trained = replace(load_run(run), model=ByValue().eval())
    with pytest.raises(
        ValueError, match=r"torch cannot write vit_nala_tiny_patch16 as an ONNX program \(.*choose another model"
    ) as raised:
        writer_of(trained)(tmp_path / "model.onnx")
    assert "\n" not in str(raised.value)
