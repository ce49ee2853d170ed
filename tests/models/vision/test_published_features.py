"""Feature maps and dense predictors from files with the names that the authors of RALA and MALA give to their parameters."""

import pytest
import timm
import torch

import nalaformer
from helpers.golden_models import golden
from nalaformer.models.vision.features import network_of
from nalaformer.models.vision.segmentation import create_segmentation_network
from nalaformer.recipes.initial_weights import load_weights
from nalaformer.tasks import Segmentation

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[("rala_hybrid", "ravlt_t"), ("mala_linear", "mavit_t")], ids=["rala", "mala"])
def published(request, tmp_path):
    """A file with the authors' names, the name of its network here, its config, and the feature maps of its four stages."""
    golden_name, variant = request.param
    weights, config, tensors = golden(golden_name)
    path = tmp_path / "published.pth"
    torch.save({"model": weights}, path)
    network = nalaformer.published.load(weights, golden_name.split("_")[0], **config)
    with torch.no_grad():
        maps = network.forward_intermediates(tensors["input"], intermediates_only=True)
    return str(path), variant, config, tensors["input"], maps


@torch.no_grad()
def test_timms_features_only_reads_a_published_file(published):
    path, variant, config, image, maps = published
    model = timm.create_model(variant, features_only=True, out_indices=(1, 3), checkpoint_path=path, **config).eval()
    found = model(image)
    assert [x.shape[1] for x in found] == model.feature_info.channels()
    assert all(torch.equal(x, y) for x, y in zip(found, (maps[1], maps[3]), strict=True))


@torch.no_grad()
def test_a_segmenter_starts_from_a_published_file(published):
    path, variant, config, image, maps = published
    segmenter = create_segmentation_network(f"semantic_fpn:{variant}", classes=3, decoder_channels=64, **config).eval()
    told = load_weights(segmenter, Segmentation, path)
    assert "not in the file" not in told
    found = network_of(Segmentation.backbone(segmenter)).forward_intermediates(image, intermediates_only=True)
    assert all(torch.equal(x, y) for x, y in zip(found, maps, strict=True))


def test_features_of_our_own_file_load_and_a_name_that_no_network_has_is_refused(tmp_path):
    config = {"embed_dims": (16, 32, 48, 64), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4), "projection": 64}
    weights = timm.create_model("mavit_t", **config).state_dict()
    path = tmp_path / "ours.pth"
    torch.save(weights, path)
    model = timm.create_model("mavit_t", features_only=True, checkpoint_path=str(path), **config)
    assert torch.equal(model.model.stages[3].blocks[0].norm1.weight, weights["stages.3.blocks.0.norm1.weight"])
    torch.save(weights | {"stages.9.weight": torch.zeros(2)}, path)
    with pytest.raises(RuntimeError, match=r"stages\.9\.weight"):
        timm.create_model("mavit_t", features_only=True, checkpoint_path=str(path), **config)
