"""The backbone inside the files of the authors' detectors and segmenters."""

import pytest
import timm
import torch
from typer.testing import CliRunner

import nalaformer
from helpers.golden_models import golden
from nalaformer import cli
from nalaformer.models.vision.detectors import DetectorConfig, build_detector
from nalaformer.models.vision.features import network_of
from nalaformer.recipes.initial_weights import load_weights
from nalaformer.tasks import Detection

pytestmark = pytest.mark.usefixtures("one_thread")


def relative_error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def file_of_a_detector(path, name="mala_hybrid", wrapped=""):
    """The golden model as its authors' detection code would save it: behind `backbone.`, norms of outputs, no head, a neck."""
    weights, config, tensors = golden(name)
    weights = {key: value for key, value in weights.items() if not key.startswith(("proj.", "norm.", "head."))}
    for stage, channels in enumerate(config["embed_dims"]):
        weights[f"extra_norms.{stage}.{wrapped}weight"] = torch.rand(channels)
        weights[f"extra_norms.{stage}.{wrapped}bias"] = torch.randn(channels)
    weights = {f"backbone.{key}": value for key, value in weights.items()}
    others = {"neck.lateral_convs.0.conv.weight": torch.zeros(2), "bbox_head.bias": torch.zeros(3)}
    torch.save({"meta": {"epoch": 12}, "state_dict": weights | others}, path)
    return weights, {key: value for key, value in config.items() if key != "projection"}, tensors


LEFT_OUT = r"left out: neck \(1 tensors\), bbox_head \(1 tensors\)"


@pytest.mark.parametrize("wrapped", ["", "norm."])
@torch.no_grad()
def test_the_backbone_of_a_detectors_file_loads_with_its_norms_and_says_what_is_left_out(wrapped, tmp_path):
    path = tmp_path / "detector.pth"
    given, config, tensors = file_of_a_detector(path, wrapped=wrapped)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        model = nalaformer.published.load(path, "mala", **config)
    rope = [name for name in given if "RoPE" in name]
    assert len(model.state_dict()) == len(given) - len(rope)
    classifier = nalaformer.published.load(golden("mala_hybrid")[0], "mala", **config, projection=64)
    found = model.forward_intermediates(tensors["input"], intermediates_only=True)
    plain = classifier.forward_intermediates(tensors["input"], intermediates_only=True)
    for stage, (features, before) in enumerate(zip(found, plain, strict=True)):
        norm = [given[f"backbone.extra_norms.{stage}.{wrapped}{part}"] for part in ("weight", "bias")]
        expected = torch.nn.functional.layer_norm(before.movedim(1, -1), before.shape[1:2], *norm, eps=1e-6)
        assert relative_error(features, expected.movedim(-1, 1)) < 1e-6


def test_stages_alone_make_a_backbone_without_head_and_norms():
    weights, config, _ = golden("rala_linear")
    stages = {key: value for key, value in weights.items() if not key.startswith(("proj.", "norm.", "head."))}
    model = nalaformer.published.load(stages, "rala", **config | {"projection": None})
    assert (model.num_classes, model.output_norms) == (0, None)
    assert len(model.state_dict()) == len([key for key in stages if "RoPE" not in key])


@torch.no_grad()
def test_a_detectors_file_loads_through_timm_and_into_another_detector(tmp_path):
    path = tmp_path / "detector.pth"
    _, config, tensors = file_of_a_detector(path)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        expected = nalaformer.published.load(path, "mala", **config)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        by_timm = timm.create_model(
            "mavit_t", checkpoint_path=str(path), num_classes=0, projection=0, output_norms=True, **config
        ).eval()
    config_of_detector = DetectorConfig(kind="mask_rcnn", classes=2, channels=16, hidden=8)
    detector = build_detector(config_of_detector, "mavit_t", config | {"output_norms": True}).eval()
    told = load_weights(detector, Detection, path)
    assert "not in the file" not in told
    assert "not used" not in told
    assert "2 of other parts of the file and left out: neck, bbox_head" in told
    wanted = expected.forward_intermediates(tensors["input"], intermediates_only=True)
    pairs = zip(wanted, by_timm.forward_intermediates(tensors["input"], intermediates_only=True), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    features = network_of(Detection.backbone(detector)).forward_intermediates(tensors["input"], intermediates_only=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(wanted, features, strict=True))


def test_the_command_converts_a_detectors_file_and_names_what_it_leaves_out(tmp_path):
    path, out = tmp_path / "detector.pth", tmp_path / "ours.safetensors"
    given, config, _ = file_of_a_detector(path)
    with pytest.warns(UserWarning, match=LEFT_OUT):
        result = CliRunner().invoke(cli.build_app(), ["convert", str(path), "--family", "mala", "--out", str(out)])
    assert result.exit_code == 0, result.output
    model = timm.create_model("mavit_t", checkpoint_path=str(out), num_classes=0, projection=0, output_norms=True, **config)
    assert torch.equal(model.output_norms[2].weight, given["backbone.extra_norms.2.weight"])


def test_a_name_that_no_published_backbone_has_is_refused(tmp_path):
    path = tmp_path / "detector.pth"
    weights, config, _ = file_of_a_detector(path)
    torch.save(weights | {"backbone.extra_layers.0.weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"got 1 others: extra_layers\.0\.weight"):
        nalaformer.published.load(path, "mala", **config)
