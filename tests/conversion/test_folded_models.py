"""nalaformer.fold: the same outputs from fewer layers."""

import pytest
import torch
from torch import Tensor, nn

import nalaformer
from nalaformer.models.vision import build

SMALL = {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "num_classes": 5}


def shaken(model: nn.Module) -> nn.Module:
    """In float64, with every parameter and statistic away from its start, so that nothing that is forgotten goes unseen."""
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
    return model


def backbone(name: str, **changes: object) -> nn.Module:
    return shaken(build(name, **{**SMALL, "projection": 24, **changes}))


@pytest.mark.parametrize("name", ["nalaformer_t_linear", "polaformerpp_b0", "mavit_t", "polaformer_pvt_t", "mirrorla_t"])
def test_a_folded_backbone_gives_the_same_logits(name):
    model, images = backbone(name), torch.randn(2, 3, 50, 40, dtype=torch.float64)
    expected = model(images)
    found = nalaformer.fold(model)(images)
    assert (found - expected).norm() < 1e-10 * expected.norm()


def test_no_batch_norm_and_no_layer_scale_remains():
    folded = nalaformer.fold(backbone("nalaformer_t_linear"))
    left = [name for name, module in folded.named_modules() if "BatchNorm" in type(module).__name__ or hasattr(module, "gamma")]
    assert left == []


def test_a_folded_model_says_what_went_where():
    folded = nalaformer.fold(backbone("nalaformer_t_linear"))
    assert "stem.1 -> stem.0" in folded.folded
    assert "stages.2.blocks.0.scale2 -> stages.2.blocks.0.feed_forward.fc2" in folded.folded
    # four norms of the stem, three between stages, one of the head; two scales in each of four blocks
    assert len(folded.folded) == 8 + 8


def test_the_given_model_stays_as_it_was():
    model, images = backbone("nalaformer_t_linear"), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before, names = model(images), set(model.state_dict())
    nalaformer.fold(model)
    assert torch.equal(model(images), before)
    assert set(model.state_dict()) == names


def test_features_of_a_folded_backbone_are_the_same():
    model, images = backbone("nalaformer_t_linear"), torch.randn(1, 3, 64, 64, dtype=torch.float64)
    pairs = zip(nalaformer.fold(model).forward_intermediates(images)[1], model.forward_intermediates(images)[1], strict=True)
    assert all((found - expected).norm() < 1e-10 * expected.norm() for found, expected in pairs)


def test_a_static_reflection_is_folded_and_one_that_reads_its_input_is_not():
    for variance, has_map in ((False, True), (True, False)):
        layer = shaken(nalaformer.attention.build("mirrorla", dim=16, num_heads=2, variance=variance))
        x = torch.randn(1, 12, 16, dtype=torch.float64)
        folded = nalaformer.fold(layer)
        assert (folded(x) - layer(x)).norm() < 1e-10 * layer(x).norm()
        assert bool(folded.folded) == has_map


def test_training_mode_is_refused():
    model = backbone("nalaformer_t_linear")
    model.stages[1].train()
    with pytest.raises(ValueError, match=r"training mode \(stages.1\); call model.eval\(\) first"):
        nalaformer.fold(model)


class Towers(nn.Module):
    """One convolution in front of two batch norms, as detectors share a tower between levels."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Conv2d(3, 4, 1)
        self.fine, self.coarse = (nn.Sequential(shared, nn.BatchNorm2d(4)) for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        return self.fine(image) + 2 * self.coarse(image)


class Standardised(nn.Conv2d):
    """A convolution that rids its weight of factors."""

    def forward(self, image: Tensor) -> Tensor:
        return self._conv_forward(image, self.weight / self.weight.norm(), self.bias)


def twice() -> nn.Module:
    layer = nn.Conv2d(3, 3, 1)
    return nn.Sequential(layer, nn.BatchNorm2d(3), layer, nn.BatchNorm2d(3))


def watched() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    model[0].register_forward_hook(lambda module, inputs, output: output.relu())
    return model


@pytest.mark.parametrize(
    "make",
    [
        Towers,
        twice,
        watched,
        lambda: nn.Sequential(Standardised(3, 4, 1), nn.BatchNorm2d(4)),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), nn.BatchNorm2d(4)),
    ],
    ids=["shared", "twice", "watched", "subclass", "no statistics", "parametrised"],
)
def test_what_cannot_be_folded_stays(make):
    model, image = shaken(make()), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    folded = nalaformer.fold(model)
    assert folded.folded == ()
    assert (folded(image) - model(image)).abs().max() < 1e-12


@pytest.mark.parametrize("place", ["stem.1", "stages.0.blocks.0.scale1", "stages.0.blocks.0.feed_forward.fc2"])
def test_a_forward_that_was_replaced_is_not_folded_away(place):
    model, images = backbone("nalaformer_t_linear"), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    module = model.get_submodule(place)
    forward = module.forward
    module.forward = lambda *given: forward(*given).relu()
    expected = model(images)
    assert (nalaformer.fold(model)(images) - expected).norm() < 1e-10 * expected.norm()


@pytest.mark.parametrize("affine", [True, False])
def test_a_convolution_without_bias_takes_the_shift(affine):
    model = shaken(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6, affine=affine), nn.ReLU()))
    image = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    folded = nalaformer.fold(model)
    assert folded.folded == ("1 -> 0",)
    assert (folded(image) - model(image)).norm() < 1e-10 * model(image).norm()
