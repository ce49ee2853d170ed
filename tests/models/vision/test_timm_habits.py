"""What users of timm do with any of its models works with ours: graphs of fx, features in every form, another input size."""

import pytest
import timm
import torch
from timm.models import create_feature_extractor
from torch import nn

from nalaformer.models.vision.config import BackboneConfig
from nalaformer.models.vision.variants import build_from

pytestmark = pytest.mark.usefixtures("one_thread")

# every kind of stem, step between stages, position and block
LAYOUTS = {
    "nalaformer": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": 1},
    "pvt": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": 1, "mlp_ratios": 1.0, "img_size": 64},
    "swin": {"depths": (1, 1, 2, 1), "embed_dims": (8, 16, 24, 32), "num_heads": 1, "img_size": 64, "softmax_window": 3},
    "vit": {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 8), "num_heads": 1, "img_size": 64},
}
NAMES = {
    "nalaformer": "nalaformer_xt",
    "pvt": "polaformer_pvt_t",
    "swin": "flatten_swin_t",
    "vit": "vit_nala_tiny_patch16",
}


def small(layout: str, **options) -> nn.Module:
    return timm.create_model(NAMES[layout], num_classes=5, **(LAYOUTS[layout] | options)).eval()


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_graph_of_fx_is_the_model_at_every_size(layout):
    model = small(layout)
    graph = create_feature_extractor(model, {"stages.1": "middle", "stages.2.blocks.0": "tokens", "head": "logits"})
    for size in ((64, 64), (45, 70)):
        image = torch.randn(2, 3, *size)
        found = graph(image)
        assert torch.equal(found["logits"], model(image))
        assert torch.equal(found["middle"], model.forward_intermediates(image, [1], intermediates_only=True)[0])
        assert found["tokens"].dim() == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_of_fx_trains_every_parameter(layout):
    model = small(layout, drop_path_rate=0.1, proj_drop_rate=0.1).train()
    graph = create_feature_extractor(model, ["head"]).train()
    graph(torch.randn(2, 3, 64, 64))["head"].sum().backward()
    assert [name for name, parameter in graph.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("kind", ["fx", "dict", "list", "hook", "getter"])
@torch.no_grad()
def test_features_are_the_same_by_every_extractor_of_timm(kind):
    image = torch.randn(1, 3, 70, 45)
    torch.manual_seed(0)
    expected = small("pvt").forward_intermediates(image, intermediates_only=True)
    torch.manual_seed(0)
    found = small("pvt", features_only=True, feature_cls=kind)(image)
    found = list(found.values()) if isinstance(found, dict) else found
    assert len(found) == 4
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@torch.no_grad()
def test_features_come_in_the_form_that_is_asked_for():
    image = torch.randn(1, 3, 70, 45)
    model = small("nalaformer")
    channels_first, channels_last, tokens = (
        model.forward_intermediates(image, [2], output_fmt=form, intermediates_only=True)[0] for form in ("NCHW", "NHWC", "NLC")
    )
    assert channels_first.shape == (1, 24, 5, 3)
    assert torch.equal(channels_last.movedim(3, 1), channels_first)
    assert torch.equal(tokens.unflatten(1, (5, 3)), channels_last)
    torch.manual_seed(0)
    getter = small("nalaformer", features_only=True, output_fmt="NHWC", feature_cfg={"out_indices": (1,)})
    assert [tuple(feature.shape) for feature in getter(image)] == [(1, 9, 6, 16)]
    with pytest.raises(ValueError, match=r"output_fmt must be one of NCHW, NHWC, NLC, got 'CHW'"):
        model.forward_intermediates(image, output_fmt="CHW")


@torch.no_grad()
def test_intermediate_layers_are_the_tokens_of_the_last_stages():
    image, model = torch.randn(1, 3, 64, 64), small("swin")
    third, fourth = model.get_intermediate_layers(image, 2, norm=True)
    assert (third.shape, fourth.shape) == ((1, 16, 24), (1, 4, 32))
    assert torch.equal(fourth.transpose(1, 2).unflatten(2, (2, 2)), model.forward_features(image))
    (first,) = model.get_intermediate_layers(image, [0], reshape=True)
    assert first.shape == (1, 8, 16, 16)


@pytest.mark.parametrize("layout", ["pvt", "vit"])
@torch.no_grad()
def test_tables_resampled_to_a_size_give_what_they_give_interpolated(layout):
    model, image = small(layout), torch.randn(1, 3, 96, 80)
    logits = model(image)
    model.set_input_size((96, 80))
    first = model.stages[0].positions
    assert first.table.shape[1] == first.grid[0] * first.grid[1] == 96 * 80 // model.config.stride(0) ** 2
    # room: equal but for the order of a sum: the numbers of the tables are the same
    torch.testing.assert_close(model(image), logits, rtol=1e-4, atol=1e-5)
    built = build_from(model.config, num_classes=5)
    built.load_state_dict(model.state_dict())
    assert isinstance(built.config, BackboneConfig)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_new_classifier_has_the_type_device_and_mode_of_the_network(layout):
    model = small(layout).to(device="meta", dtype=torch.float64)
    model.reset_classifier(0)
    model.reset_classifier(2)
    weight = model.get_classifier().weight
    assert (weight.shape[0], weight.dtype, weight.device.type) == (2, torch.float64, "meta")
    assert not any(module.training for module in model.modules())


def test_a_new_classifier_of_a_half_precision_network_computes_in_it():
    model = small("vit").bfloat16()
    model.reset_classifier(0)
    model.reset_classifier(7)
    assert model(torch.randn(1, 3, 64, 64, dtype=torch.bfloat16)).shape == (1, 7)
