"""The network that enlarges images."""

import pytest
import torch

from helpers.option_effects import Effects
from nalaformer.data.super_resolution import enlarge
from nalaformer.models.vision import SuperResolution, build_super_resolution
from nalaformer.models.vision.super_resolution import ATTENTIONS, LAYOUTS, WINDOWS, attention_config

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = Effects(("scale", "attention", "attention_options", "embed_dim", "depths", "num_heads", "mlp_ratio", "skip"))
SMALL = {"embed_dim": 16, "depths": (1,), "num_heads": 2}


def test_no_option_is_without_a_test_of_its_effect():
    assert OPTIONS.missing() == []


def network(**options):
    torch.manual_seed(0)
    return SuperResolution(**({"scale": 2, "attention": "linear"} | SMALL | options)).eval()


@OPTIONS.of("scale")
@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_images_of_any_size_grow_by_the_scale(attention, scale):
    model = network(attention=attention, scale=scale)
    for height, width in ((1, 1), (9, 13)):
        with torch.no_grad():
            assert model(torch.rand(2, 3, height, width)).shape == (2, 3, scale * height, scale * width)


@OPTIONS.of("attention")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_sees_the_whole_image_unless_it_has_windows(attention):
    model = network(attention=attention).double()
    image = torch.rand(1, 3, 24, 24, dtype=torch.float64)
    image.requires_grad_()
    # convolutions reach a few pixels, windows eight
    reached = torch.autograd.grad(model(image)[0, :, :2, :2].sum(), image)[0].abs().amax(1)[0]
    assert reached[:4, :4].all()
    assert (reached[-4:, -4:] > 0).any() == (attention != WINDOWS)


def test_windows_of_every_second_block_are_shifted():
    shifted = [attention_config(WINDOWS, {}, block).shifted for block in range(5)]
    assert shifted == [False, True, False, True, False]
    assert {attention_config(WINDOWS, {}, block).window for block in range(5)} == {8}
    # the second block's windows straddle the borders of the first one's
    reach = []
    for depth in (1, 2):
        image = torch.rand(1, 3, 32, 32, dtype=torch.float64, requires_grad=True)
        model = network(attention=WINDOWS, depths=(depth,)).double()
        # the pixels of a token within rows 8 to 15
        gradient = torch.autograd.grad(model(image)[0, :, 24:26, 24:26].sum(), image)[0]
        rows = gradient.abs().amax((0, 1, 3)).nonzero()
        reach.append((rows.min().item(), rows.max().item()))
    # one more on either side by the first convolution
    assert reach == [(7, 16), (0, 24)]


@OPTIONS.of("attention_options")
def test_options_reach_every_attention():
    model = network(attention="nalaformer", depths=(2, 1), attention_options={"gate": "none", "key_power": 2.0})
    blocks = [block for group in model.features.groups for block in group.blocks]
    assert len(blocks) == 3
    assert all(block.attention.config.gate == "none" for block in blocks)
    assert all(block.attention.config.map_options["key_power"] == 2.0 for block in blocks)


@OPTIONS.of("embed_dim", "depths", "num_heads", "mlp_ratio")
def test_the_layout_is_the_one_that_is_asked_for():
    model = network(embed_dim=24, depths=(2, 3), num_heads=3, mlp_ratio=1.5)
    assert [len(group.blocks) for group in model.features.groups] == [2, 3]
    block = model.features.groups[1].blocks[2]
    assert (block.attention.dim, block.attention.num_heads, block.feed_forward.fc1.out_features) == (24, 3, 36)


def test_the_light_network_has_the_published_layout():
    model = build_super_resolution("super_resolution_light", scale=3)
    assert [len(group.blocks) for group in model.features.groups] == [5, 5, 5, 5]
    attention = model.features.groups[0].blocks[0].attention
    assert (attention.dim, attention.num_heads, attention.config.feature_map) == (48, 4, "norm_aware")
    assert model.upsampling.out_channels == 27


@OPTIONS.of("skip")
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_with_a_skip_the_network_starts_as_bicubic_interpolation(scale):
    image = torch.rand(1, 3, 10, 12)
    with torch.no_grad():
        with_skip, without = (network(scale=scale, skip=skip)(image) for skip in ("bicubic", "none"))
    inside = (..., slice(2 * scale, -2 * scale), slice(2 * scale, -2 * scale))
    assert torch.allclose(with_skip[inside], enlarge(image, scale)[inside], atol=1e-5)
    assert not torch.allclose(without[inside], enlarge(image, scale)[inside], atol=0.05)


def test_pixels_are_float32_under_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        large = network()(torch.rand(1, 3, 9, 9))
    assert large.dtype == torch.float32
    assert not torch.equal(large, large.bfloat16().float())


def test_recomputed_activations_change_no_gradient():
    image = torch.rand(1, 3, 6, 7)
    gradients = []
    for recompute in (False, True):
        model = network(depths=(2,)).train()
        model.set_grad_checkpointing(recompute)
        gradients.append(torch.autograd.grad(model(image).square().sum(), list(model.parameters())))
    assert all(map(torch.equal, *gradients))


def test_biases_of_windows_and_parameters_of_maps_do_not_decay():
    windows = network(attention=WINDOWS).no_weight_decay()
    assert windows == {"features.groups.0.blocks.0.attention.relative_bias.bias"}
    maps = network(attention="polaformer").no_weight_decay()
    assert any(".attention.map." in name for name in maps)
    assert any(".attention.table." in name for name in maps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 5}, "scale must be 2, 3 or 4, got 5"),
        ({"attention": "windows"}, "unknown attention 'windows'; did you mean 'softmax_windows'"),
        ({"skip": "cubic"}, "unknown skip 'cubic'; did you mean 'bicubic'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        network(**options)


def test_a_wrong_name_shows_the_known_ones():
    with pytest.raises(ValueError, match="unknown super-resolution model 'light'.*" + ".*".join(sorted(LAYOUTS))):
        build_super_resolution("light", scale=2)


def test_an_image_of_other_channels_is_refused():
    with pytest.raises(ValueError, match=r"\[batch, 3, height, width\].*got \(1, 1, 8, 8\); repeat"):
        network()(torch.rand(1, 1, 8, 8))
