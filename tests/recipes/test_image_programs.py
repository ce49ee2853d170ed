"""Networks on images as ONNX programs: what they compute, and what their files say."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from nalaformer import cli
from nalaformer.models.vision.detectors import DenseRetinaNet
from nalaformer.recipes import RECIPES, LoadedRun, build_model, changed, make_trainer
from nalaformer.recipes.image_programs import image_program, write_program
from nalaformer.tasks import TASKS, task_name

pytestmark = pytest.mark.usefixtures("one_thread")
BACKBONE = {"embed_dims": [16, 16, 24, 32], "depths": [1] * 4, "num_heads": [1, 1, 1, 2], "mlp_ratios": 1}
HEADS = {"channels": 32, "smallest_anchor": 12, "head_norm": True, "head_layers": 1}
RUNS = {
    "segmentation": (
        BACKBONE | {"decoder_channels": 64},
        {"classes": ["sky", "ground"], "colours": [[0, 0, 255], [90, 60, 0]]},
        ["short_side=64"],
    ),
    "super_resolution": ({"embed_dim": 16, "depths": [1], "skip": "bicubic"}, {"scale": 2}, []),
    "detection": (BACKBONE | HEADS, {"classes": ["disc", "cross"], "detector": "retinanet"}, ["eval_short_side=60"]),
}


def untrained(name):
    """A run of a recipe whose data is not there, with the weights that it starts from."""
    options, facts, settings = RUNS[name]
    recipe = changed(RECIPES[name](), [f"model_options={json.dumps(options)}", *settings])
    model = build_model(recipe, facts).eval()
    return LoadedRun(recipe=recipe, model=model, task=TASKS[task_name(recipe.task)](recipe.task), facts=facts, step=7)


def test_what_a_program_says_of_itself_is_what_the_run_knows():
    about = image_program(untrained("segmentation")).about
    assert about["classes"] == ["sky", "ground"]
    assert about["mean"] == pytest.approx([0.485, 0.456, 0.406])
    assert about["short_side"] == 64
    about = image_program(untrained("super_resolution")).about
    assert (about["scale"], about["mean"], about["std"]) == (2, [0.0] * 3, [1.0] * 3)
    program = image_program(untrained("detection"))
    assert program.about["std"] == pytest.approx([0.229, 0.224, 0.225])
    # the pyramid needs multiples of 32
    assert program.images.shape == (2, 3, 64, 64)


@torch.no_grad()
def test_the_anchors_of_a_detector_hold_what_it_finds():
    model = untrained("detection").model
    # scores that are worth showing
    model.network.head.classification_head.cls_logits.bias.zero_()
    images = torch.rand(2, 3, 64, 64)
    mean, std = (
        torch.tensor(part)[:, None, None] for part in (model.network.transform.image_mean, model.network.transform.image_std)
    )
    boxes, scores = DenseRetinaNet(model)((images - mean) / std)
    for place, found in enumerate(model(list(images))):
        best, label = found["boxes"][0], found["labels"][0]
        inside = boxes[place].clamp(0, 64)
        nearest = (inside - best).abs().sum(1) + (scores[place, :, label] - found["scores"][0]).abs()
        assert nearest.min() < 1e-3


# tracing takes half a minute of one core
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_becomes_a_program_with_its_answers(name, tmp_path):
    import onnxruntime

    run = untrained(name)
    program = image_program(run)
    write_program(program, run, tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == list(program.outputs)
    images = torch.rand(3, 3, *((70, 131) if program.any_size else program.images.shape[2:]))
    with torch.no_grad():
        expected = program.network(images)
    for ours, theirs in zip(
        session.run(None, {"images": images.numpy()}), expected if name == "detection" else [expected], strict=True
    ):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-3)
    written = session.get_modelmeta().custom_metadata_map
    assert written["step"] == "7"
    assert written["model"] == run.recipe.model
    if "classes" in run.facts:
        assert json.loads(written["classes"]) == run.facts["classes"]


def test_what_cannot_be_a_program_is_refused_before_the_work_is_announced(tmp_path):
    options = BACKBONE | HEADS | {"hidden": 32, "proposals": 8, "regions": 8}
    few = ["steps=1", "warmup=0", "batch_size=2", "train_samples=2", "eval_samples=2", "eval_every=0", "save_every=0"]
    settings = [*few, f"model_options={json.dumps(options)}", f"generated_folder={tmp_path}", "device=cpu"]
    make_trainer(changed(RECIPES["shapes_mask_rcnn"](), settings), tmp_path / "run").fit()
    asked = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "a.onnx")]
    done = CliRunner().invoke(cli.build_app(), asked)
    assert "a detector must be a retinanet to become an ONNX program, got mask_rcnn" in str(done.exception)
    assert "tracing" not in done.output
