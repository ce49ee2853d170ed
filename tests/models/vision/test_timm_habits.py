"""What users of timm do with any of its models works with ours: graphs of fx, features in every form, another input size."""

import pytest
import timm
import torch
from timm.models import create_feature_extractor
from torch import nn

from nalaformer.models.vision.config import BackboneConfig
from nalaformer.models.vision.variants import VARIANTS, build, build_from
from nalaformer.recipes.initial_weights import load_weights

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


@pytest.mark.parametrize("layout", ["pvt", "vit"])
@torch.no_grad()
def test_a_file_of_another_image_size_is_resampled_and_says_so(layout, tmp_path):
    model, path = small(layout), tmp_path / "weights.pth"
    torch.save({"model": model.state_dict()}, path)
    with pytest.warns(UserWarning, match=r"of another image size; resampled: stages\.0\.\S+table: \d+ x \d+ -> "):
        loaded = small(layout, img_size=96, checkpoint_path=str(path))
    started = small(layout, img_size=96)
    assert "of another image size and resampled: stages.0" in load_weights(started, None, path)
    model.set_input_size(96)
    image = torch.randn(1, 3, 96, 96)
    assert torch.equal(loaded(image), model(image))
    assert torch.equal(started(image), model(image))


@torch.no_grad()
def test_windows_of_another_size_are_resampled_as_timm_does_for_swin(tmp_path):
    sizes = {"embed_dim": 8, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 1, 1), "num_classes": 5}
    theirs = timm.create_model("swin_tiny_patch4_window7_224", img_size=96, window_size=3, **sizes)
    name = "relative_position_bias_table"
    known = theirs.get_submodule("layers.2.blocks.1.attn").get_parameter(name).clone()
    theirs.set_input_size((160, 160), window_size=(5, 5))
    weights = small("swin").state_dict()
    weights["stages.2.blocks.1.attention.relative_bias.bias"] = known
    torch.save(weights, tmp_path / "weights.pth")
    with pytest.warns(UserWarning, match="windows of 3 -> 5"):
        ours = small("swin", softmax_window=5, checkpoint_path=str(tmp_path / "weights.pth"))
    found = ours.stages[2].blocks[1].attention.relative_bias.bias
    assert torch.equal(found, theirs.get_submodule("layers.2.blocks.1.attn").get_parameter(name))


def test_a_table_that_no_square_image_has_is_refused_as_before(tmp_path):
    weights = small("pvt").state_dict()
    weights["stages.0.positions.table"] = torch.zeros(1, 7, 8)
    with pytest.raises(RuntimeError, match=r"size mismatch for stages\.0\.positions\.table"):
        small("pvt").load_state_dict(weights)


@pytest.mark.parametrize("name", ["polaformer_swin_b_384", "flatten_swin_b_384"])
def test_the_names_of_384_have_the_windows_and_tables_of_their_files(name):
    shapes = {key: tuple(value.shape) for key, value in build(name, device="meta").state_dict().items()}
    assert shapes["stages.2.blocks.0.attention.relative_bias.bias"] == (23**2, 16)
    assert shapes["stages.0.blocks.0.attention.table.table"] == (1, 96**2, 128)
    assert timm.get_pretrained_cfg(name).input_size == (3, *VARIANTS[name].config.input_size) == (3, 384, 384)


@pytest.mark.parametrize("front", ["module.", "_orig_mod.module.", "model.", "model_ema.module.", "backbone."])
def test_names_that_stand_before_the_networks_are_left_out(front, tmp_path):
    weights = small("swin").state_dict()
    torch.save({front + name: value for name, value in weights.items()}, tmp_path / "weights.pth")
    loaded = small("swin", checkpoint_path=str(tmp_path / "weights.pth"))
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())


def test_of_two_copies_of_a_network_the_averaged_one_is_taken():
    plain, averaged = small("swin").state_dict(), small("swin").state_dict()
    both = {f"model.{name}": value for name, value in plain.items()}
    both |= {f"model_ema.module.{name}": value for name, value in averaged.items()}
    loaded = small("swin")
    with pytest.warns(UserWarning, match=rf"left out: model \({len(plain)} tensors\)"):
        loaded.load_state_dict(both)
    assert torch.equal(loaded.head.fc.weight, averaged["head.fc.weight"])


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
