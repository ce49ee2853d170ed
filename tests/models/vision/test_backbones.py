"""Every named backbone: counts of the full size, timm's contract on a cut-down one."""

import importlib
import importlib.resources
import importlib.util
import math
import re
import sys
from dataclasses import replace

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from typer.testing import CliRunner

import nalaformer
from helpers.products import FULL
from nalaformer import cli
from nalaformer.attention import METHODS
from nalaformer.models.vision import VARIANTS, Backbone, build, card, count_multiply_adds
from nalaformer.models.vision.known_costs import KNOWN_COSTS
from nalaformer.models.vision.multiply_adds import attention_multiply_adds

pytestmark = pytest.mark.usefixtures("one_thread")

# parameters and multiply-adds (G) measured on the published code
MEASURED = {
    "nalaformer_xt": (6_142_248, 0.645),
    "nalaformer_t": (15_907_752, 2.857),
    "nalaformer_s": (25_654_184, 5.035),
    "nalaformer_b": (52_002_952, 11.740),
    "nalaformer_l": (95_426_760, 17.680),
}


def cut_down(name):
    """Few channels and blocks; what the named backbone is made of stays."""
    config = VARIANTS[name].config
    dims = (32,) * 4 if config.downsampling == "none" else (16, 32, 32, 64)
    size = {"embed_dims": dims, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 4), "img_size": 64, "drop_path_rate": 0.0}
    size |= {"mlp_ratios": 2} | ({} if config.projection is None else {"projection": 48})
    # layer scales that start near zero would hide what is behind them
    return size | ({} if None in config.layer_scale else {"layer_scale": (1.0,) * 4})


def small(name, **options):
    return timm.create_model(name, **{"num_classes": 7} | cut_down(name) | options)


# cut down, backbones that differ in sizes alone are the same network: the first of them stands for all
DISTINCT = list({repr(replace(VARIANTS[name].config, **cut_down(name))): name for name in reversed(VARIANTS)}.values())[::-1]
NAMES = list(VARIANTS) if FULL else DISTINCT


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


every_name = pytest.mark.parametrize("name", VARIANTS)


# --- counts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEASURED)
def test_counts_equal_those_of_the_published_code(name):
    parameters, giga = MEASURED[name]
    found = card(name)
    assert found.parameters == parameters
    # room: counted, not drawn; the published figure is rounded
    assert found.multiply_adds / 1e9 == pytest.approx(giga, rel=1e-3)


@every_name
def test_the_parameters_that_cards_show_are_those_of_the_network(name):
    parameters = sum(parameter.numel() for parameter in build(name, device="meta").parameters())
    assert card(name).parameters == parameters


# to run the deep ones takes long even without numbers
@pytest.mark.parametrize("name", [name for name in NAMES if FULL or sum(VARIANTS[name].config.depths) <= 12])
def test_the_multiply_adds_that_cards_show_are_those_of_the_network(name):
    assert card(name).multiply_adds == count_multiply_adds(build(name, device="meta"), VARIANTS[name].config.input_size)


def test_there_are_figures_of_no_other_backbone():
    assert set(KNOWN_COSTS) == set(VARIANTS)


def test_a_backbone_without_figures_is_counted(monkeypatch):
    counted = KNOWN_COSTS["nalaformer_xt"]
    monkeypatch.delitem(KNOWN_COSTS, "nalaformer_xt")
    found = card("nalaformer_xt")
    assert (found.parameters, found.multiply_adds) == counted


def test_to_list_all_backbones_builds_none(monkeypatch):
    # the package has a function of the module's name
    module = importlib.import_module("nalaformer.models.vision.cards")
    monkeypatch.setattr(module, "build", lambda *_, **__: pytest.fail("built"))
    result = CliRunner().invoke(cli.build_app(), ["models"], catch_exceptions=False)
    assert all(name in result.output for name in VARIANTS)


def test_the_paper_sizes_come_out():
    # room: counted, not drawn; the published figure is rounded
    assert card("nalaformer_xt_paper").parameters / 1e6 == pytest.approx(7.8, abs=0.05)
    assert card("nalaformer_xt_paper").multiply_adds / 1e9 == pytest.approx(0.98, abs=0.005)
    assert card("nalaformer_t_paper").parameters / 1e6 == pytest.approx(15, abs=0.1)


def test_a_card_says_which_stages_are_linear():
    assert card("nalaformer_t").stages == "llvv"
    assert card("nalaformer_t_linear").stages == "llll"
    assert card("polaformer_pvt_t").stages == "llll"


def test_softmax_as_the_method_makes_every_stage_exact():
    model = small("nalaformer_t", attention="softmax")
    assert all(block.attention.map is None for stage in model.stages for block in stage.blocks)


def test_multiply_adds_of_softmax_grow_with_the_square_of_the_tokens():
    linear, softmax = (build("vit_nala_tiny_patch16", device="meta", attention=name) for name in ("linear", "softmax"))
    # doubling the side makes 4 times the tokens
    linear_growth, softmax_growth = (
        count_multiply_adds(model, (512, 512)) / count_multiply_adds(model, (256, 256)) for model in (linear, softmax)
    )
    assert linear_growth == pytest.approx(4, rel=1e-3)
    assert softmax_growth > 4.5


@pytest.mark.parametrize(
    ("method", "options", "grid", "expected"),
    [
        # 15 tokens, 2 heads of 4: scores and their use
        ("softmax", {}, (3, 5), 2 * 15 * 15 * 8),
        # F = 4: the state, its reading, the normaliser
        ("linear", {}, (3, 5), 15 * 4 * 8 + 15 * 4 * 8 + 2 * 15 * 4),
        # F = 8, two streams with a normaliser each; 3 x 5 in blocks of 2 are 2 x 3 keys
        ("polaformer", {"key_reduction": 2}, (3, 5), 6 * 8 * 8 + 15 * 8 * 8 + 2 * 2 * 15 * 8),
        # four windows of 3 x 3 with padding
        ("softmax", {"window": 3}, (4, 6), 4 * 2 * 9 * 9 * 8),
    ],
)
def test_attention_products_are_counted(method, options, grid, expected):
    layer = nalaformer.attention.build(method, dim=8, num_heads=2, **options)
    assert attention_multiply_adds(layer, *grid) == expected


# --- timm's contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(70, 45), (1, 1)], ids=str)
def test_any_size_goes_through_and_back(name, size):
    model = small(name)
    image = torch.randn(2, 3, *size, requires_grad=True)
    logits = model(image)
    logits.square().sum().backward()
    assert logits.shape == (2, 7)
    assert image.grad.isfinite().all()
    unused = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert unused == []


def test_bad_batches_stay_what_they_are(name):
    model = small(name).eval()
    with torch.no_grad():
        assert model(torch.randn(0, 3, 64, 64)).shape == (0, 7)
        images = torch.randn(3, 3, 64, 64)
        spoilt = images.clone()
        spoilt[1, 0, 5, 5] = math.nan
        before, after = model(images), model(spoilt)
        assert torch.equal(after[[0, 2]], before[[0, 2]])
        assert after[1].isnan().any()


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_training_under_autocast_stays_finite(name, scale):
    model = small(name).train()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(scale * torch.randn(2, 3, 64, 64))
    logits.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_features_have_the_announced_channels_and_strides(name):
    model = small(name, features_only=True).eval()
    features = model(torch.randn(1, 3, 70, 45))
    assert len(features) == 4
    for feature, channels, stride in zip(features, model.feature_info.channels(), model.feature_info.reduction(), strict=True):
        assert feature.shape == (1, channels, -(-70 // stride), -(-45 // stride))


def test_chosen_features_are_those_of_the_whole_model(name):
    torch.manual_seed(0)
    whole = small(name).eval()
    image = torch.randn(1, 3, 64, 64)
    end, every = whole.forward_intermediates(image)
    assert torch.equal(end, whole.forward_features(image))
    assert torch.equal(whole.forward_intermediates(image, norm=True, intermediates_only=True)[-1], end)
    (third,) = whole.forward_intermediates(image, indices=[2], intermediates_only=True)
    assert torch.equal(third, every[2])
    torch.manual_seed(0)
    pruned = small(name, features_only=True, out_indices=(1, 2)).eval()
    assert len(pruned.model.stages) == 3
    assert torch.equal(pruned(image)[1], every[2])


def test_the_classifier_comes_off_and_on(name):
    model = small(name).eval()
    image = torch.randn(2, 3, 64, 64)
    assert model.get_classifier().out_features == 7
    assert model.forward_features(image).shape[1] == model.num_features
    before = model.forward_head(model.forward_features(image), pre_logits=True)
    model.reset_classifier(0)
    assert torch.equal(model(image), before)
    assert before.shape == (2, model.head_hidden_size)
    model.reset_classifier(5)
    assert model(image).shape == (2, 5)


def test_first_convolution_and_classifier_are_where_timm_looks_for_them(name):
    model = small(name, in_chans=1)
    config = model.pretrained_cfg
    assert model.get_submodule(config["first_conv"]).in_channels == 1
    assert model.get_submodule(config["classifier"]) is model.get_classifier()
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 7)


def test_recomputed_blocks_give_the_same_gradients(name):
    # with dropped paths, which must be the same ones the second time
    model = small(name, drop_path_rate=0.3).train()
    image = torch.randn(2, 3, 64, 64)
    calls = []
    model.stages[1].blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        model.zero_grad()
        model(image).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert len(calls) == 1 + 2
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


def test_every_parameter_belongs_to_a_depth(name):
    model = small(name)
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay())
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    first, last, head = (
        scale[id(next(module.parameters()))] for module in (model.stem, model.stages[3].blocks[-1], model.head)
    )
    assert first < last <= head == 1.0
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    for key, parameter in model.named_parameters():
        if ".map." in key or "table" in key:
            assert decay[id(parameter)] == 0.0, key


def test_drop_path_grows_with_depth():
    model = small("nalaformer_t", drop_path_rate=0.4)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_dropout_acts_before_the_classifier():
    model = small("nalaformer_t", drop_rate=0.5).train()
    features = model.forward_features(torch.randn(2, 3, 64, 64))
    assert (model.forward_head(features, pre_logits=True) == 0).float().mean() > 0.2


@pytest.mark.parametrize("attention", METHODS)
@pytest.mark.parametrize("name", ["nalaformer_t_linear", "polaformer_pvt_t", "flatten_swin_t", "vit_nala_tiny_patch16"])
def test_every_method_fits_every_layout(name, attention):
    model = small(name, attention=attention).eval()
    image = torch.randn(2, 3, 50, 70)
    with torch.no_grad():
        assert model(image).isfinite().all()
        # batch mates do not matter
        assert (model(image)[:1] - model(image[:1])).abs().max() < 1e-5


def test_options_reach_every_stage_and_map_options_the_linear_ones():
    model = small("nalaformer_t", attention_options={"local_mix": "none", "direction": "cosine"})
    layers = [block.attention for stage in model.stages for block in stage.blocks]
    assert all(layer.local_mix is None for layer in layers)
    assert [layer.map is not None and layer.map.direction == "cosine" for layer in layers] == [True, True, False, False, False]


def test_another_map_in_the_same_shell_stays_out_of_softmax_stages():
    model = small("nalaformer_t", attention_options={"feature_map": "elu"})
    layers = [block.attention for stage in model.stages for block in stage.blocks]
    assert [layer.config.feature_map for layer in layers] == ["elu", "elu", None, None, None]
    assert all(layer.local_mix is not None and layer.norm is not None for layer in layers)


def test_options_of_a_layout_stay_beside_those_that_are_given():
    model = small("polaformer_pvt_t", attention_options={"kernel_size": 3})
    config = model.stages[0].blocks[0].attention.config
    assert (config.kernel_size, config.value_upsampling) == (3, "flat")


def test_a_model_of_low_precision_is_built_so(name):
    model = small(name, dtype=torch.bfloat16, device="cpu").eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        logits = model(torch.randn(1, 3, 64, 64, dtype=torch.bfloat16))
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "nalaforme"}, r"unknown attention 'nalaforme'; did you mean 'nalaformer'"),
        ({"attention_stages": "llsv"}, r'attention_stages must be "l" \(linear\) or "v"'),
        ({"num_heads": (1, 2, 3)}, r"num_heads must have one entry for each of the 4 stages"),
        ({"attention_options": {"gat": "none"}}, r"'gat'; did you mean 'gate'"),
        ({"attention": "softmax", "attention_options": {"gat": "none"}}, r"'gat'; did you mean 'gate'"),
        ({"drop_path_rate": 1.0}, r"drop_path_rate must be at least 0 and below 1"),
    ],
)
def test_a_wrong_option_says_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        small("nalaformer_t", **options)


def test_an_argument_that_backbones_do_not_have_is_refused_as_python_does():
    with pytest.raises(TypeError, match="unknown option of a backbone: 'depth'; did you mean 'depths'"):
        small("nalaformer_t", depth=(1, 1, 1, 1))


def test_wrong_images_say_the_rule():
    with pytest.raises(ValueError, match=r"images must be \[batch, 3, height, width\]"):
        small("nalaformer_t")(torch.randn(2, 1, 64, 64))


# --- registration -------------------------------------------------------------------------------------------------------


def test_every_backbone_is_a_timm_model():
    assert set(VARIANTS) <= set(timm.list_models())
    assert isinstance(timm.create_model("nalaformer_xt", device="meta"), Backbone)
    assert nalaformer.models.vision.VARIANTS is VARIANTS


# --- the command --------------------------------------------------------------------------------------------------------


def test_the_command_lists_stages_counts_and_published_accuracy():
    result = CliRunner().invoke(cli.build_app(), ["models", "*_xt*"])
    assert result.exit_code == 0, result.output
    rows = {
        row[0]: row[1:] for row in (re.findall(r"[^│ ](?:[^│]*[^│ ])?", line) for line in result.output.splitlines()) if row
    }
    assert rows["nalaformer_xt"] == ["nalaformer", "llvv", "6.1 M", "0.64 G", "-", "-"]
    assert rows["nalaformer_xt_paper"] == ["nalaformer", "llvv", "7.8 M", "0.98 G", "79.1", "announced"]
    assert rows["nalaformer_xt_linear"][1] == "llll"
    assert "top-1: as the authors publish it" in " ".join(result.output.split())
    assert "nalaformer_xt: released size" in result.output
    assert "nalaformer_s" not in result.output


def test_the_command_says_when_no_name_fits():
    result = CliRunner().invoke(cli.build_app(), ["models", "resnet*"])
    assert isinstance(result.exception, ValueError)
    assert "no backbone is named like 'resnet*'" in str(result.exception)


def test_without_timm_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nalaformer", "models"])
    for name in [name for name in sys.modules if name.startswith("nalaformer.models.vision")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(SystemExit, match=r"timm: pip install 'nalaformer\[vision\]'"):
        cli.main()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("attention", ["polaformer", "nalaformer", "mala"])
def test_every_convolution_has_its_channels_side_by_side(monkeypatch, attention, batch):
    """The faster format on a CPU too; a batch of one is told from others by a stride that is never used."""
    strides = []
    conv2d = torch.nn.functional.conv2d

    def watched(image, weight, *rest, **more):
        out = conv2d(image, weight, *rest, **more)
        strides.extend((image.stride(), out.stride()))
        return out

    model = timm.create_model("nalaformer_t_linear", **cut_down("nalaformer_t_linear"), attention=attention).eval()
    monkeypatch.setattr(torch.nn.functional, "conv2d", watched)
    with torch.inference_mode():
        model(torch.randn(batch, 3, 64, 96))
    assert len(strides) > 20
    assert all(images > rows > columns > channels == 1 for images, channels, rows, columns in strides)
