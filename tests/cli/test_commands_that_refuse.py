"""Commands that cannot do what is asked say the rule, what came and what to do, before long work begins."""

import os
import re
import socket

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from helpers.golden_models import golden
from nalaformer import NaLaDiT, NaLaDiTPipeline, cli
from nalaformer.recipes import RECIPES, changed, make_trainer
from nalaformer.tasks import TASKS, task_name

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"depth": 1, "dim": 16, "num_heads": 2, "patch_size": 2, "channels": 3, "num_classes": 2, "attention": "linear"}


def refusal(*arguments):
    done = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])
    assert isinstance(done.exception, ValueError), f"{done.output} {done.exception!r}"
    return str(done.exception)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline") / "saved"
    model = NaLaDiT(**TINY, objective="flow", height=4, width=4, class_names=["circle", "ring"])
    NaLaDiTPipeline(model).save_pretrained(folder)
    return folder


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    Image.new("RGB", (32, 32), (80, 90, 10)).save(path)
    return path


# ---- generate images


def test_images_that_could_not_be_written_are_not_drawn(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr(NaLaDiTPipeline, "sample", lambda *_, **__: pytest.fail("images were drawn"))
    folder, file = tmp_path / "folder.png", tmp_path / "file"
    folder.mkdir()
    file.write_text("")
    assert "must be a file to write, got a folder; name a file in it" in refusal(
        "generate", "images", "--run", pipeline, "--out", folder
    )
    said = refusal("generate", "images", "--run", pipeline, "--out", file / "new" / "a.png")
    assert f"got the file {file} in its way; choose another place" in said
    # root may write everywhere, so the right is taken away here
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    assert "without that right; choose another place" in refusal(
        "generate", "images", "--run", pipeline, "--out", tmp_path / "a.png"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def test_a_label_beyond_the_classes_gets_a_remedy_for_who_draws(pipeline, tmp_path):
    said = refusal("generate", "images", "--run", pipeline, "--label", "9", "--out", tmp_path / "a.png")
    assert said.endswith("ask for a class that the network was made for, or make it with more (num_classes)")


# ---- train


def test_a_recipe_for_images_of_ones_own_asks_for_their_path(tmp_path):
    said = refusal("train", "own_images_dit", "--out", tmp_path)
    assert said.startswith("data must be the path of a folder with a folder of images for each class")
    assert "got 'images', which is none; give its path, such as data=/path/to/images" in said


@pytest.mark.parametrize(("recipe", "near"), [("shapes_dit_tiny", "'depth'"), ("div2k_x2", "'depths'")])
def test_a_misspelt_option_of_a_model_is_answered_with_the_nearest(recipe, near):
    options = {"channels": 3, "num_classes": 2, "objective": "flow", "height": 4, "width": 4, "scale": 2}
    found = RECIPES[recipe]()
    with pytest.raises(ValueError, match=f"unknown option of .*: 'dpth'; did you mean {near}"):
        TASKS[task_name(found.task)].create_model(found.model, {"dpth": 3}, options)


# ---- analyze, explore, compare


@pytest.mark.parametrize("command", ["analyze", "compare"])
def test_work_whose_page_could_not_be_written_is_not_begun(command, tmp_path, image, monkeypatch):
    for long_work in ("attention_page.load_subject", "compare_methods"):
        monkeypatch.setattr(f"nalaformer.analysis.{long_work}", lambda *_, **__: pytest.fail("work was begun"))
    arguments = {"analyze": ("analyze", "test_vit", "--images", image)}
    file = tmp_path / "file"
    file.write_text("")
    said = refusal(*arguments.get(command, (command,)), "--out", file)
    assert f"must lie in a folder, got the file {file} in its way; choose another place" in said


def test_a_run_that_makes_images_cannot_be_analyzed(tmp_path, image):
    settings = ["steps=1", "batch_size=2", "train_samples=4", "eval_samples=2", "judged=0", "warmup=0", "device=cpu"]
    options = 'model_options={"depth": 1, "dim": 16, "num_heads": 2, "patch_size": 8}'
    make_trainer(changed(RECIPES["shapes_dit_tiny"](), [*settings, options]), tmp_path / "run").fit()
    said = refusal("analyze", tmp_path / "run", "--images", image, "--out", tmp_path / "report", "--device", "cpu")
    assert "must have learned to answer images (classification, detection, segmentation, super-resolution)" in said
    assert f"got {tmp_path / 'run'}, a run of generation; name one of those" in said


def test_a_model_without_attention_is_refused_with_what_can_be_analyzed(tmp_path, image):
    said = refusal("analyze", "test_efficientnet", "--images", image, "--out", tmp_path / "report", "--device", "cpu")
    assert (
        "must have attention, got test_efficientnet with no attention layer that is known here; name one of `nalaformer models`"
        in said
    )


def test_a_used_port_is_refused_before_the_model_is_loaded(image, monkeypatch):
    monkeypatch.setattr("nalaformer.analysis.attention_page.load_subject", lambda *_, **__: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        said = refusal("explore", "nalaformer_xt", image, "--port", port)
    assert f"--port must name a port of 127.0.0.1 that is free, got {port}" in said
    assert said.endswith("choose another, or omit the option for a free one")


# ---- data, convert


def test_data_encode_advises_its_own_option(tmp_path, image):
    (tmp_path / "images" / "circle").mkdir(parents=True)
    image.rename(tmp_path / "images" / "circle" / "1.png")
    said = refusal("data", "encode", tmp_path / "images", "--autoencoder", tmp_path, "--out", tmp_path / "latents")
    assert "--holdout 0.2 would set a fifth of the images aside" in said
    assert "holdout=" not in said


@pytest.mark.parametrize(
    ("family", "model", "message"),
    [
        ("rala", "", "name the family that they are of: nalaformer"),
        ("nalaformer", "nalaformer_xxt", "unknown backbone 'nalaformer_xxt'; did you mean 'nalaformer_xt"),
        ("nalaformer", "flatten_pvt_t", r"in the model; name the backbone that the weights are of \(`nalaformer models`"),
    ],
)
def test_weights_converted_as_what_they_are_not_are_answered_with_what_they_are(family, model, message, tmp_path):
    torch.save(golden("nalaformer_hybrid")[0], tmp_path / "published.pth")
    arguments = [tmp_path / "published.pth", "--family", family, "--out", tmp_path / "ours.safetensors"]
    said = refusal("convert", *arguments, *(("--model", model) if model else ()))
    assert re.search(message, said), said
