"""Explanations: the formulas with all pairs written out, and a network whose evidence is known by construction."""

import pytest
import torch
from torch import nn

from helpers.looked_at_models import IMAGE_MODELS, looked_at
from helpers.option_effects import Effects
from nalaformer.analysis import explain, record, rollout
from nalaformer.analysis.explanations import EXPLANATIONS
from nalaformer.analysis.layers import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")
EXPLAIN = Effects(("target", "method", "steps", "baseline"))


def flows(model, images, target):
    """Weights [B, H, N, N], values and gradients [B, N, H, V] of every layer of a model without windows."""
    images = images.clone().requires_grad_()
    with Recorder(model, keep_values=True, image=(48, 48)) as recorder:
        score = model(images)[:, target].sum()
    gradients = torch.autograd.grad(score, [found.gathered for found in recorder.records])
    for found, gradient in zip(recorder.records, gradients, strict=True):
        weights = found.rows(torch.arange(found.num_tokens))
        values = found.values.detach()
        if found.heads_first:
            values, gradient = values.transpose(1, 2), gradient.transpose(1, 2)
        yield weights, values, gradient


@pytest.mark.parametrize("name", ["timm vit", "converted vit"])
@EXPLAIN.of("method")
def test_decision_aware_heat_is_what_each_token_gives_to_the_logit(name):
    model, images = looked_at(name)
    total = torch.zeros(2, 10)
    for weights, values, gradient in flows(model.eval(), images, 2):
        given = torch.einsum("bhij,bihv,bjhv->bhj", weights, gradient, values)
        total += given.clamp(min=0).sum(1)
    expected = total[:, 1:] / total[:, 1:].sum(1, keepdim=True)
    torch.testing.assert_close(explain(model, images, 2).flatten(1), expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["timm vit", "converted vit"])
def test_gradient_rollout_weighs_each_pair_by_its_gradient(name):
    model, images = looked_at(name)
    heat = torch.zeros(2, 1, 10)
    heat[:, 0, 0] = 1  # the classifier reads the class token
    for weights, values, gradient in reversed(list(flows(model.eval(), images, 2))):
        effect = (weights * torch.einsum("bihv,bjhv->bhij", gradient, values)).clamp(min=0).mean(1)
        heat = heat + heat @ effect
    expected = heat[:, 0, 1:] / heat[:, 0, 1:].sum(1, keepdim=True)
    found = explain(model, images, 2, method="gradient_rollout").flatten(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


# integrated gradients see pixels and logits alone: one model stands for all
@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        for name in IMAGE_MODELS
        for method in EXPLANATIONS
        if method != "integrated_gradients" or name == "timm vit"
    ],
)
def test_every_method_maps_every_model_and_leaves_it_as_it_was(name, method):
    model, images = looked_at(name)
    model.requires_grad_(False)
    grid = record(model, images)[0].grid
    heat = explain(model, images, torch.tensor([1, 2]), method=method, steps=2)
    assert heat.shape == (2, *grid)
    assert heat.min() >= 0
    torch.testing.assert_close(heat.sum((1, 2)), torch.ones(2))
    assert all(module.training for module in model.modules())
    assert not heat.requires_grad


def test_an_image_by_itself_is_explained_as_in_a_batch():
    model, images = looked_at("nalaformer")
    torch.testing.assert_close(explain(model, images[1], 0), explain(model, images, 0)[1], atol=1e-5, rtol=1e-3)


@EXPLAIN.of("target")
def test_without_a_target_the_answer_of_the_model_is_explained():
    model, images = looked_at("timm vit")
    answers = model.eval()(images).argmax(1)
    torch.testing.assert_close(explain(model, images), explain(model, images, answers))
    assert not torch.allclose(explain(model, images, (answers + 1) % 3), explain(model, images), atol=1e-3)


def test_rollout_does_not_ask_for_the_class():
    model, images = looked_at("timm vit")
    expected = rollout(record(model, images), "class")
    for target in (0, 1):
        torch.testing.assert_close(explain(model, images, target, method="rollout"), expected)


class FirstPatch(nn.Module):
    """Logit 1 is the squared brightness of the first patch; attention stands beside it and says nothing."""

    def __init__(self):
        super().__init__()
        self.vit = looked_at("timm vit")[0]

    def forward(self, images):
        bright = images[:, :, :16, :16].mean((1, 2, 3))
        return torch.stack((0 * bright, bright**2), dim=1) + 0 * self.vit(images)[:, :2]


@EXPLAIN.of("steps", "baseline")
def test_integrated_gradients_run_from_the_baseline_in_steps():
    images = torch.rand(1, 3, 48, 48) + 1
    heat = explain(FirstPatch(), images, 1, method="integrated_gradients", steps=8)
    assert heat[0, 0, 0].item() == pytest.approx(1, abs=1e-5)
    # a network that is not linear: the way there counts, and how finely it is looked at
    model, noise = looked_at("timm vit")
    maps = [explain(model, noise, 1, method="integrated_gradients", steps=4, baseline=value) for value in (0.0, 2.0)]
    assert not torch.allclose(*maps, atol=1e-3)
    more = explain(model, noise, 1, method="integrated_gradients", steps=1)
    assert not torch.allclose(more, maps[0], atol=1e-4)


def test_a_missing_captum_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "captum.attr", None)
    model, images = looked_at("timm vit")
    with pytest.raises(ImportError, match=r"nalaformer\[explain\]"):
        explain(model, images, method="integrated_gradients")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"method": "gradients"}, "unknown method"), ({"target": 3}, "class below 3"), ({"steps": 0}, "at least 1")],
)
def test_what_cannot_be_explained_is_refused(options, message):
    model, images = looked_at("timm vit")
    with pytest.raises(ValueError, match=message):
        explain(model, images, **options)
    with pytest.raises(ValueError, match="channels, height, width"):
        explain(model, images[0, 0])


def test_every_option_of_an_explanation_has_a_test_of_its_effect():
    assert EXPLAIN.missing() == []


@pytest.mark.parametrize("method", ["decision_aware", "gradient_rollout", "rollout"])
@pytest.mark.parametrize("name", ["timm vit", "converted vit"])
def test_a_model_of_float64_is_explained_in_float64(name, method):
    model, images = looked_at(name)
    model.eval()
    single = explain(model, images, 2, method=method)
    double = explain(model.double(), images.double(), 2, method=method)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single, atol=1e-5, rtol=1e-3)
