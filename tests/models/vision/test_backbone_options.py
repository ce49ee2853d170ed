"""Every option of a backbone has the effect that its documentation says: the whole network against its formula."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.golden_models import golden
from helpers.option_effects import Effects
from nalaformer.attention import configure
from nalaformer.models.vision import BackboneConfig, build
from nalaformer.models.vision.variants import BACKBONE_ARGUMENTS, build_from

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = Effects(field.name for field in fields(BackboneConfig))
ARGUMENTS = Effects(BACKBONE_ARGUMENTS)
# three small stages whose sizes all differ
SMALL = BackboneConfig(
    family="nalaformer",
    embed_dims=(8, 16, 24),
    depths=(1, 2, 1),
    num_heads=(1, 2, 3),
    mlp_ratios=2.0,
    attention_stages="llv",
    projection=20,
    img_size=32,
)
# what a patch stem and plain blocks are made of
PATCHES = {"stem": "patches", "downsampling": "patches", "local_positions": 0, "feed_forward_mix": False, "projection": None}
# neither side divides by the strides
SIZE = (27, 38)


def make(**options):
    """With parameters and running statistics away from their start, float64, in evaluation mode."""
    model = build_from(SMALL, num_classes=5, **options)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point():
                value.add_(0.1 * torch.rand_like(value) if "running_var" in name else 0.1 * torch.randn_like(value))
    return model.double().eval()


def images() -> Tensor:
    return torch.randn(2, 3, *SIZE, dtype=torch.float64)


# --- the network written out --------------------------------------------------------------------------------------------


def by_hand(model, x: Tensor) -> Tensor:
    """Logits, from the weights and the config alone; attention layers are taken as they are (see test_layer_options.py)."""
    config = model.config
    x = stem(model.stem, x, config)
    for index, stage in enumerate(model.stages):
        x = x if index == 0 else coarser(stage.downsampling, x, config.downsampling)
        grid = x.shape[2:]
        tokens = x.flatten(2).transpose(1, 2)
        has_table = config.positions == "every" or (config.positions == "first" and index == 0)
        assert (stage.positions is not None) == has_table
        if has_table:
            side = -(-config.img_size // config.stride(index))
            assert stage.positions.grid == (side, side)
            tokens = tokens + stage.positions(tuple(grid))
        assert len(stage.blocks) == config.depths[index]
        for block in stage.blocks:
            tokens = block_by_hand(block, tokens, tuple(grid), config, index)
        x = tokens.transpose(1, 2).unflatten(2, grid)
    if config.final_norm:
        x = channel_norm(x, model.norm, config.norm_eps)
    if config.projection:
        assert model.projection[0].out_channels == config.projection
        x = F.silu(batch_norm(F.conv2d(x, model.projection[0].weight, model.projection[0].bias), model.projection[1]))
    return F.linear(x.mean((2, 3)), model.head.fc.weight, model.head.fc.bias)


def stem(layers: nn.Sequential, x: Tensor, config: BackboneConfig) -> Tensor:
    if config.stem == "patches":
        x = patches(x, layers[0], config.patch_size)
        return channel_norm(x, layers[1], 1e-5) if config.stem_norm else x
    for number, stride in enumerate((2, 1, 1, 2)):
        convolution, norm = layers[3 * number], layers[3 * number + 1]
        x = batch_norm(F.conv2d(x, convolution.weight, convolution.bias, stride=stride, padding=1), norm)
        x = F.gelu(x) if number < 3 else x
    return x


def coarser(module: nn.Module, x: Tensor, kind: str) -> Tensor:
    if kind == "convolution":
        return batch_norm(F.conv2d(x, module.reduction.weight, module.reduction.bias, stride=2, padding=1), module.norm)
    if kind == "patches":
        return channel_norm(patches(x, module.reduction, 2), module.norm, 1e-5)
    if kind == "none":
        return x
    x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
    # Swin's order of the four: column by column
    four = torch.cat([x[:, :, row::2, column::2] for column in (0, 1) for row in (0, 1)], 1)
    return F.conv2d(channel_norm(four, module.norm, 1e-5), module.reduction.weight[:, :, None, None])


def patches(x: Tensor, convolution: nn.Conv2d, size: int) -> Tensor:
    assert convolution.kernel_size == (size, size)
    x = F.pad(x, (0, -x.shape[3] % size, 0, -x.shape[2] % size))
    return F.conv2d(x, convolution.weight, convolution.bias, stride=size)


def block_by_hand(block: nn.Module, x: Tensor, grid: tuple[int, int], config: BackboneConfig, stage: int) -> Tensor:
    start = config.stage_value("layer_scale", stage)
    scales = [getattr(block, name).gamma if start is not None else 1.0 for name in ("scale1", "scale2")]
    if config.local_positions > 0:
        x = x + around(x, block.local1, grid)
    x = x + scales[0] * block.attention(layer_norm(x, block.norm1, config.norm_eps), grid)
    if config.local_positions > 1:
        x = x + around(x, block.local2, grid)
    forward = block.feed_forward
    assert forward.fc1.out_features == int(x.shape[-1] * config.stage_value("mlp_ratios", stage))
    y = F.gelu(layer_norm(x, block.norm2, config.norm_eps) @ forward.fc1.weight.T + forward.fc1.bias)
    y = y + around(y, forward.local, grid) if config.feed_forward_mix else y
    return x + scales[1] * (y @ forward.fc2.weight.T + forward.fc2.bias)


def around(x: Tensor, convolution: nn.Conv2d, grid: tuple[int, int]) -> Tensor:
    image = x.transpose(1, 2).unflatten(2, grid)
    return F.conv2d(image, convolution.weight, convolution.bias, padding=1, groups=x.shape[-1]).flatten(2).transpose(1, 2)


def layer_norm(x: Tensor, norm: nn.LayerNorm, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias


def channel_norm(x: Tensor, norm: nn.LayerNorm, eps: float) -> Tensor:
    return layer_norm(x.movedim(1, -1), norm, eps).movedim(-1, 1)


def batch_norm(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5)


def test_every_option_of_a_backbone_is_seen_to():
    assert (CONFIG.missing(), ARGUMENTS.missing()) == ([], [])


@CONFIG.of(
    *("embed_dims", "depths", "mlp_ratios", "stem", "patch_size", "stem_norm", "downsampling", "positions", "local_positions"),
    *("feed_forward_mix", "layer_scale", "projection", "final_norm", "norm_eps", "img_size"),
)
@ARGUMENTS.of("num_classes")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embed_dims": (4, 8, 12), "depths": (2, 1, 1), "num_heads": 1, "mlp_ratios": (1.0, 3.0, 2.0)},
        PATCHES,
        PATCHES | {"patch_size": 8},
        PATCHES | {"stem_norm": False},
        PATCHES | {"downsampling": "merging"},
        PATCHES | {"downsampling": "none", "embed_dims": (8, 8, 8), "num_heads": (1, 2, 1)},
        {"positions": "first"},
        {"positions": "every", "img_size": 48},
        {"local_positions": 1},
        {"local_positions": 0},
        {"feed_forward_mix": False},
        {"layer_scale": 0.3},
        {"layer_scale": (None, 0.1, None)},
        {"projection": None},
        {"projection": 0},
        {"final_norm": True},
        {"norm_eps": 0.5, "final_norm": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_backbone_is_its_formula_whatever_its_options(changes):
    model, image = make(**changes), images()
    logits = model(image)
    assert logits.shape == (2, 5)
    torch.testing.assert_close(logits, by_hand(model, image), rtol=1e-9, atol=1e-9)


@CONFIG.of("output_norms")
@torch.no_grad()
def test_norms_of_outputs_change_the_features_and_not_what_follows():
    model, image = make(output_norms=True), images()
    end, normed = model.forward_intermediates(image)
    norms, model.output_norms = model.output_norms, None
    same_end, plain = model.forward_intermediates(image)
    assert torch.equal(end, same_end)
    for found, features, norm in zip(normed, plain, norms, strict=True):
        torch.testing.assert_close(found, channel_norm(features, norm, 1e-6), rtol=1e-9, atol=1e-9)


@CONFIG.of("layer_scale")
def test_the_scale_of_a_branch_starts_where_it_is_told():
    model = build_from(SMALL, layer_scale=(None, 0.25, 1e-6))
    starts = [[p.unique().item() for name, p in stage.named_parameters() if "scale" in name] for stage in model.stages]
    assert starts == [[], [0.25] * 4, pytest.approx([1e-6] * 2)]


# --- attention of the stages --------------------------------------------------------------------------------------------


def layers_of(**options):
    model = build_from(SMALL, device="meta", **options)
    return [[block.attention.config for block in stage.blocks] for stage in model.stages]


@CONFIG.of("attention", "attention_stages", "softmax_shell", "num_heads")
def test_linear_stages_have_the_method_and_softmax_stages_the_shell():
    first, second, third = layers_of(attention="polaformer", attention_stages="lvl", softmax_shell="nalaformer")
    for found, config in ((first[0], "polaformer"), (third[0], "polaformer")):
        expected = configure(config, {"table_grid": found.table_grid})
        assert found == expected
    shell = configure("nalaformer", {"feature_map": None, "map_options": {}, "table_grid": second[0].table_grid})
    assert second == [shell] * 2
    # neither a contrast nor weights of keys where there is no feature map
    for method in ("rala", "mala"):
        linear, exact, _ = layers_of(attention=method, attention_stages="lvl", softmax_shell=method)
        assert (linear[0].gate, linear[0].contrast, linear[0].key_weight) != ("linear", "none", "none")
        assert (exact[0].gate, exact[0].contrast, exact[0].key_weight) == ("linear", "none", "none")
    assert [layer.table_grid for layer in (first[0], second[0], third[0])] == [(8, 8), (4, 4), (2, 2)]
    # "softmax" makes every stage exact
    assert {layer.feature_map for stage in layers_of(attention="softmax") for layer in stage} == {None}
    model = build_from(SMALL, device="meta", num_heads=(2, 4, 6))
    assert [stage.blocks[0].attention.num_heads for stage in model.stages] == [2, 4, 6]


@CONFIG.of("attention_options")
def test_parts_reach_all_stages_and_options_of_the_map_the_linear_ones():
    options = {"kernel_size": 3, "gate": "linear", "lambda_": 2.0}
    first, _, third = layers_of(attention_options=options, softmax_shell="nalaformer")
    assert (first[0].kernel_size, first[0].gate, first[0].map_options) == (3, "linear", {"lambda_": 2.0})
    assert (third[0].kernel_size, third[0].gate, third[0].map_options) == (3, "linear", {})


@CONFIG.of("softmax_window")
def test_softmax_stages_have_windows_of_which_every_second_is_shifted():
    options = {"attention_stages": "lvv", "softmax_window": 3, "depths": (1, 3, 1)}
    first, second, third = layers_of(**options)
    assert (first[0].window, first[0].position) == (0, "rotary")
    assert [(layer.window, layer.shifted, layer.position) for layer in second] == [
        (3, shifted, "relative") for shifted in (False, True, False)
    ]
    assert not third[0].shifted


@CONFIG.of("key_reduction", "softmax_key_reduction")
def test_each_kind_of_stage_has_its_own_reduction():
    first, second, third = layers_of(key_reduction=(4, 2, 8), softmax_key_reduction=(3, 3, 2), attention="polaformer")
    assert [layers[0].key_reduction for layers in (first, second, third)] == [4, 2, 2]
    # the table covers the keys
    assert [layers[0].table_grid for layers in (first, second, third)] == [(2, 2), (2, 2), (1, 1)]


@CONFIG.of("family")
def test_the_family_decides_how_published_names_are_read():
    weights, options, _ = golden("pola_pvt_model")
    build("polaformer_pvt_t", num_classes=10, family="polaformer", **options).load_state_dict(dict(weights))
    with pytest.raises((RuntimeError, ValueError, KeyError)):
        build("polaformer_pvt_t", num_classes=10, family="polaformerpp", **options).load_state_dict(dict(weights))


@CONFIG.of("drop_path_rate")
def test_blocks_are_skipped_as_often_as_told_in_training_alone():
    torch.manual_seed(0)
    model = build_from(SMALL, depths=(1, 1, 2), drop_path_rate=0.75)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75])
    block, x = model.stages[2].blocks[-1], torch.randn(400, 1, 24)
    # no convolution changes what a skipped block leaves as it is
    block.local1 = block.local2 = None
    skipped = (block.train()(x, (1, 1)) == x).all(-1).float().mean().item()
    # both branches of a sample: 0.75^2
    assert skipped == pytest.approx(0.5625, abs=0.1)
    assert not (block.eval()(x, (1, 1)) == x).all(-1).any()


@CONFIG.of("proj_drop_rate")
def test_both_branches_of_a_block_are_dropped_as_often_as_told_in_training_alone():
    torch.manual_seed(0)
    block = build_from(SMALL, proj_drop_rate=0.7, local_positions=0).stages[0].blocks[0]
    for branch in (block.dropout, block.feed_forward.dropout):
        dropped = (branch.train()(torch.ones(4000)) == 0).float().mean().item()
        assert dropped == pytest.approx(0.7, abs=0.05)
    x = torch.randn(2, 6, 8)
    block.feed_forward.dropout = nn.Dropout(0.999999)
    # nothing of the feed-forward network comes through, and a share of attention
    assert 0.4 < (block.train()(x, (2, 3)) == x).float().mean() < 0.95
    assert torch.equal(block.eval()(x, (2, 3)), block(x, (2, 3)))
    assert not (block(x, (2, 3)) == x).any()


@CONFIG.of("attn_drop_rate")
def test_weights_of_softmax_stages_alone_can_be_dropped():
    first, second, third = layers_of(attn_drop_rate=0.4)
    assert [layers[0].weight_dropout for layers in (first, second, third)] == [0, 0, 0.4]
    with pytest.raises(ValueError, match=r"no weight for each pair; use proj_drop_rate"):
        build_from(SMALL, attn_drop_rate=0.4, attention_stages="lll", device="meta")


@CONFIG.of("act_layer", "norm_layer")
@torch.no_grad()
def test_activation_and_norm_of_a_block_are_those_of_the_name_or_class():
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    for activation, norm in (("relu", "rmsnorm"), (nn.ReLU, nn.RMSNorm)):
        block = make(act_layer=activation, norm_layer=norm, local_positions=0, feed_forward_mix=False).stages[0].blocks[0]

        def normed(y, weight):
            return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

        middle = x + block.attention(normed(x, block.norm1.weight), (2, 3))
        inner = F.linear(normed(middle, block.norm2.weight), block.feed_forward.fc1.weight, block.feed_forward.fc1.bias)
        expected = middle + F.linear(inner.clamp(min=0), block.feed_forward.fc2.weight, block.feed_forward.fc2.bias)
        torch.testing.assert_close(block(x, (2, 3)), expected, rtol=1e-9, atol=1e-9)
    for option in ("act_layer", "norm_layer"):
        with pytest.raises(ValueError, match=rf"{option} must be a name that timm knows or a class, got 'geloo'"):
            make(**{option: "geloo"})


# --- arguments of the network -------------------------------------------------------------------------------------------


@ARGUMENTS.of("num_classes", "in_chans", "global_pool", "drop_rate", "device", "dtype")
@torch.no_grad()
def test_arguments_of_the_network_have_their_effect():
    assert build_from(SMALL, num_classes=9)(torch.randn(1, 3, 32, 32)).shape == (1, 9)
    assert build_from(SMALL, in_chans=1).eval()(torch.randn(1, 1, 32, 32)).shape == (1, 1000)
    average, largest = (build_from(SMALL, global_pool=pool).eval() for pool in ("avg", "max"))
    features = torch.randn(2, 24, 3, 3)
    for model, pooled in ((average, lambda x: x.mean((2, 3))), (largest, lambda x: x.amax((2, 3)))):
        projected = model.projection(features)
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), pooled(projected))
    dropping = build_from(SMALL, drop_rate=0.6).train()
    assert (dropping.forward_head(features, pre_logits=True) == 0).float().mean() > 0.3
    built = build_from(SMALL, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in built.parameters()} == {("meta", torch.bfloat16)}
