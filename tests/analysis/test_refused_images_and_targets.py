"""Maps and explanations of images, layers and classes that do not exist, and under switched-off gradients."""

import pytest
import torch

from helpers.looked_at_models import timm_vit
from nalaformer.analysis import attention_map, explain
from nalaformer.analysis.explanations import EXPLANATIONS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm_vit().eval()


IMAGE = torch.rand(3, 48, 48, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layer", [2, 99, -3])
def test_a_map_of_a_layer_that_is_not_there_is_refused(model, layer):
    with pytest.raises(ValueError, match=f"layer must be a name or a number below 2, .*got {layer}"):
        attention_map(model, IMAGE, layer=layer)


def test_layers_count_from_the_end_too(model):
    assert torch.equal(attention_map(model, IMAGE, layer=-1), attention_map(model, IMAGE, layer=1))
    assert torch.equal(attention_map(model, IMAGE, layer=-2), attention_map(model, IMAGE, layer=0))


def test_a_map_of_several_images_is_refused(model):
    with pytest.raises(ValueError, match="attention_map takes one image, got 2"):
        attention_map(model, torch.stack((IMAGE, IMAGE)))


@pytest.mark.parametrize("look", [attention_map, explain])
@pytest.mark.parametrize(
    ("image", "message"),
    [
        ((IMAGE * 255).to(torch.uint8), r"floats, as the model takes it, got torch\.uint8; .*image\.float\(\) / 255"),
        (IMAGE.numpy(), "got ndarray"),
        (IMAGE[0], r"got shape \(48, 48\)"),
    ],
)
def test_what_is_no_image_for_the_model_is_refused(model, look, image, message):
    with pytest.raises(ValueError, match=message):
        look(model, image)


@pytest.mark.parametrize("method", ["decision_aware", "integrated_gradients"])
@pytest.mark.parametrize("target", ["cat", 3, -1, 1.0, True, [0, 1], torch.tensor([[1]])])
def test_a_target_that_is_no_class_is_refused(model, target, method):
    if method == "integrated_gradients":
        pytest.importorskip("captum")
    with pytest.raises(ValueError, match="target must be the number of a class below 3, or one for each of 1 images, got"):
        explain(model, IMAGE, target, method=method)


@pytest.mark.parametrize("method", EXPLANATIONS)
def test_an_explanation_is_the_same_where_gradients_are_switched_off(model, method):
    if method == "integrated_gradients":
        pytest.importorskip("captum")
    expected = explain(model, IMAGE, 1, method=method, steps=3)
    with torch.inference_mode():
        image = IMAGE.clone()
        assert torch.equal(explain(model, image, 1, method=method, steps=3), expected)
    with torch.no_grad():
        assert torch.equal(explain(model, IMAGE, 1, method=method, steps=3), expected)
