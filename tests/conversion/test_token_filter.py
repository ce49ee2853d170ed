"""Tokens that blocks leave out: which, what becomes of them, and what it saves."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import nalaformer
from helpers.looked_at_models import pyramid, timm_vit
from helpers.option_effects import Effects
from nalaformer.attention import METHODS
from nalaformer.attention.cells import cells_at, on_grid, put_back
from nalaformer.ops import received_attention

pytestmark = pytest.mark.usefixtures("one_thread")
FILTER = Effects(("keep", "by"))
KEPT = torch.tensor([[0, 3, 4, 7, 11], [1, 2, 5, 9, 10]])


def away_from_start(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def vit(**options):
    return away_from_start(timm_vit(**options))


@pytest.mark.parametrize("method", METHODS)
def test_some_tokens_of_a_grid_attend_as_if_the_others_were_hidden(method):
    layer = away_from_start(nalaformer.attention.build(method, dim=16, num_heads=2, table_grid=(3, 4)))
    x = torch.randn(2, 12, 16)
    visible = torch.zeros(2, 12, dtype=torch.bool).scatter(1, KEPT, True)
    expected = cells_at(layer(x, (3, 4), key_mask=visible), KEPT)
    torch.testing.assert_close(layer.forward_at(cells_at(x, KEPT), (3, 4), KEPT), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"window": 2}, {"key_reduction": 2}, {"causal": True, "local_mix": "none"}])
def test_some_tokens_of_windows_reduced_keys_or_texts_are_refused(options):
    layer = nalaformer.attention.build("nalaformer", dim=16, num_heads=2, **options)
    with pytest.raises(ValueError, match="attend globally"):
        layer.forward_at(torch.randn(2, 5, 16), (3, 4), KEPT)


def test_cells_are_taken_out_and_put_back():
    x = torch.randn(2, 12, 3, 2)
    taken = cells_at(x, KEPT)
    assert torch.equal(taken[1, 3], x[1, 9])
    assert torch.equal(put_back(x, taken, KEPT), x)
    alone = on_grid(taken, (3, 4), KEPT)
    assert torch.equal(alone[0, [0, 3, 4, 7, 11]], x[0, [0, 3, 4, 7, 11]])
    assert alone[0, 1].abs().sum() == 0


@pytest.mark.parametrize("name", ["relu", "norm_aware", "polarity", None])
def test_received_attention_is_the_mean_of_each_column(name):
    q, k = torch.randn(2, 3, 300, 2, 8)
    if name is None:
        phi = None
        weights = torch.einsum("bihd,bjhd->bhij", q * 8**-0.5, k).softmax(-1)
    else:
        phi = nalaformer.feature_map(name, num_heads=2, head_dim=8)
        streams = [nalaformer.attention_weights(q, k, feature_map=phi, stream=number) for number in range(phi.streams)]
        weights = sum(streams) / len(streams)
    received = received_attention(q, k, feature_map=phi)
    torch.testing.assert_close(received, weights.mean((1, 2)), atol=1e-6, rtol=1e-4)
    asked = received_attention(q, k, feature_map=phi, prefix=2)
    torch.testing.assert_close(asked, weights[:, :, :2].mean((1, 2)), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_tells_what_its_tokens_receive(method):
    layer = away_from_start(nalaformer.attention.build(method, dim=16, num_heads=2, table_grid=(3, 4)))
    x = torch.randn(2, 12, 16)
    q, k, *_ = layer.project(x, (3, 4), None)
    if layer.table is not None:
        k = k + layer.table((3, 4)).unflatten(-1, (2, 8))
    weight = nalaformer.global_query_weight(q, k, feature_map=layer.map) if method == "rala" else None
    expected = received_attention(q, k, feature_map=layer.map, key_weight=weight, prefix=1)
    if weight is not None:
        rows = nalaformer.attention_weights(q, k, feature_map=layer.map, rows=[0], key_weight=weight)
        torch.testing.assert_close(expected, rows.mean((1, 2)), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(layer.received_attention(x, (3, 4), prefix=1), expected, atol=1e-6, rtol=1e-4)


def test_a_converted_vit_asks_its_class_token():
    model = away_from_start(nalaformer.convert(timm_vit()))
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = nalaformer.filter_tokens(model, {1: 0.3})
    model(torch.randn(2, 3, 48, 48))
    block = model.blocks[1]
    received = block.attn.attention.received_attention(block.norm1(seen[0]), prefix=1)[:, 1:]
    assert torch.equal(found.kept[1][:, 1:], received.topk(3).indices.sort(1).values + 1)


@pytest.mark.parametrize("variant", ["nalaformer_xt", "polaformer_pvt_t", "vit_nala_tiny_patch16"])
def test_our_blocks_leave_dropped_tokens_as_they_are(variant):
    plain = {"patch_size": 4, "embed_dims": (8, 8)} if variant.startswith("vit") else {}
    model = away_from_start(pyramid(variant, **plain))
    x, grid = torch.randn(2, 100, 8), (10, 10)
    block = model.stages[0].blocks[0]
    kept = torch.stack([torch.randperm(100)[:40].sort().values for _ in range(2)])
    out = block(x, grid, kept)
    dropped = torch.ones(2, 100, dtype=torch.bool).scatter(1, kept, False)
    assert torch.equal(out[dropped], x[dropped])
    assert not torch.isclose(cells_at(out, kept), cells_at(x, kept)).all(-1).any()
    everything = torch.arange(100).expand(2, 100)
    torch.testing.assert_close(block(x, grid, everything), block(x, grid), atol=1e-5, rtol=1e-4)


@FILTER.of("keep")
def test_a_plain_vit_goes_on_with_the_most_attended_tokens_and_the_class_token():
    model = vit(depth=3)
    images = torch.randn(2, 3, 48, 48)
    found = nalaformer.filter_tokens(model, {1: 0.5})
    out = model(images)
    kept = found.kept[1]
    found.remove()
    # by hand
    x = model.blocks[0](model._pos_embed(model.patch_embed(images)))
    block = model.blocks[1]
    q, k, _ = block.attn.qkv(block.norm1(x)).reshape(2, 10, 3, 2, 8).unbind(2)
    weights = torch.einsum("bhd,bjhd->bhj", q[:, 0], k).mul(8**-0.5).softmax(-1).mean(1)  # of the class token
    best = weights[:, 1:].argsort(dim=1, descending=True)[:, :5] + 1
    expected = torch.cat((torch.zeros(2, 1, dtype=torch.long), best), dim=1).sort(1).values
    assert torch.equal(kept, expected)
    tokens = cells_at(x, kept)
    for later in model.blocks[1:]:
        tokens = later(tokens)
    torch.testing.assert_close(out, model.forward_head(model.norm(put_back(x, tokens, kept))), atol=1e-5, rtol=1e-4)


def test_a_later_choice_is_made_among_all_tokens():
    model = vit(depth=4)
    found = nalaformer.filter_tokens(model, {1: 0.2, 2: 0.8})
    model(torch.randn(2, 3, 48, 48))
    assert (found.kept[1].shape, found.kept[2].shape) == ((2, 1 + 2), (2, 1 + 8))


@pytest.mark.parametrize("attention", ["softmax", "nalaformer"])
def test_a_share_of_one_changes_nothing(attention):
    model = vit() if attention == "softmax" else away_from_start(nalaformer.convert(timm_vit(), attention))
    images = torch.randn(2, 3, 48, 48)
    expected = model(images)
    found = nalaformer.filter_tokens(model, {0: 1.0})
    assert torch.equal(model(images), expected)
    found.remove()
    nalaformer.filter_tokens(model, {0: 0.95})  # all 9 tokens, through the filter
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-4)


def test_the_feature_map_of_a_filtered_stage_is_whole():
    model = away_from_start(pyramid(projection=None))
    images = torch.randn(2, 3, 40, 40)
    seen = []
    hook = model.stages[1].blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = nalaformer.filter_tokens(model, {1: 0.4})
    features = model.forward_intermediates(images, intermediates_only=True)
    hook.remove()
    assert [tuple(x.shape) for x in features] == [(2, 8, 10, 10), (2, 16, 5, 5)]
    assert found.kept[1].shape == (2, 10)
    dropped = torch.ones(2, 25, dtype=torch.bool).scatter(1, found.kept[1], False)
    last = features[1].flatten(2).transpose(1, 2)
    assert torch.equal(last[dropped], seen[0][dropped])
    assert last[~dropped].isfinite().all()


def test_a_stage_keeps_the_tokens_that_its_first_block_attends_to():
    model = away_from_start(pyramid())
    seen = []
    model.stages[1].blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = nalaformer.filter_tokens(model, {1: 0.2})
    model(torch.randn(2, 3, 40, 40))
    received = model.stages[1].blocks[0].received_attention(seen[0], (5, 5))
    assert torch.equal(found.kept[1], received.topk(5).indices.sort(1).values)


@FILTER.of("by")
def test_random_tokens_are_the_baseline():
    model = vit()
    images = torch.randn(4, 3, 48, 48)
    found = nalaformer.filter_tokens(model, {1: 0.5}, by="random")
    torch.manual_seed(0)
    model(images)
    first = found.kept[1]
    model(images)
    assert not torch.equal(found.kept[1], first)
    assert (first[:, 0] == 0).all()
    assert len({tuple(row) for row in first.tolist()}) > 1


@pytest.mark.parametrize("make", [lambda: pyramid(depths=(1, 8)), lambda: timm_vit(depth=4)])
def test_fewer_tokens_take_fewer_operations(make):
    model, images = make().eval(), torch.randn(1, 3, 48, 48)
    counts = []
    for share in (1.0, 0.5, 0.25):
        found = nalaformer.filter_tokens(model, {1: share})
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(images)
        counts.append(counter.get_total_flops())
        found.remove()
    # the stem and the first block take theirs always
    assert counts[0] > 1.1 * counts[1] > 1.1 * 1.05 * counts[2]


def test_a_filtered_model_trains_and_keeps_its_names():
    model = pyramid().train()
    names = set(model.state_dict())
    nalaformer.filter_tokens(model, {0: 0.5, 1: 0.5})
    assert set(model.state_dict()) == names
    model(torch.randn(4, 3, 40, 40)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_copy_has_a_filter_of_its_own():
    model = vit()
    found = nalaformer.filter_tokens(model, {1: 0.5})
    images = torch.randn(2, 3, 48, 48)
    expected = model(images)
    other = copy.deepcopy(model)
    found.kept.clear()
    torch.testing.assert_close(other(images), expected)
    assert found.kept == {}


@pytest.mark.parametrize(
    ("make", "keep", "options", "message"),
    [
        (vit, {2: 0.5}, {}, "blocks by number, 0 to 1"),
        (pyramid, {2: 0.5}, {}, "stages by number, 0 to 1"),
        (vit, {0: 0.0}, {}, "above 0 and at most 1"),
        (vit, {0: 0.5}, {"by": "norm"}, "unknown rule"),
        (lambda: torch.nn.Linear(2, 2), {0: 0.5}, {}, "our backbones and in timm's plain ViTs"),
        (lambda: pyramid("flatten_pvt_t", key_reduction=(2, 1)), {0: 0.5}, {}, "reduced keys"),
        (lambda: pyramid("flatten_swin_t", softmax_window=4), {0: 0.5, 1: 0.5}, {}, "windows"),
    ],
)
def test_a_filter_that_cannot_be_is_refused_and_the_model_stays(make, keep, options, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        nalaformer.filter_tokens(model, keep, **options)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_every_option_of_the_filter_has_a_test_of_its_effect():
    assert FILTER.missing() == []


@pytest.mark.parametrize("make", [lambda: vit(), lambda: away_from_start(nalaformer.convert(timm_vit()))], ids=["timm", "ours"])
def test_a_second_filter_is_refused_until_the_first_is_removed(make):
    model = make()
    first = nalaformer.filter_tokens(model, {1: 0.5})
    with pytest.raises(ValueError, match=r"one token filter at a time.*remove\(\)"):
        nalaformer.filter_tokens(model, {1: 0.5})
    first.remove()
    nalaformer.filter_tokens(model, {1: 0.5})
    model(torch.randn(1, 3, 48, 48))
