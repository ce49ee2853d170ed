"""Maps of one layer and of all layers, against all pairs written out."""

import pytest
import torch

from helpers.looked_at_models import looked_at
from nalaformer.analysis import attention_map, map_of, record, rollout
from nalaformer.analysis.maps import enlarge, spread_evenly

pytestmark = pytest.mark.usefixtures("one_thread")


def shares(found):
    """[B, N, M], mean over the heads, from rows."""
    rows = found.rows(torch.arange(found.num_tokens)).abs()
    return (rows / rows.sum(-1, keepdim=True)).mean(1)


def cover(coarse, fine, stride):
    """[coarse cells, fine cells]: each coarse cell's amount shared by its square of stride x stride fine cells."""
    matrix = torch.zeros(coarse[0] * coarse[1], fine[0] * fine[1])
    for y in range(fine[0]):
        for x in range(fine[1]):
            matrix[(y // stride) * coarse[1] + x // stride, y * fine[1] + x] = 1
    return matrix / matrix.sum(1, keepdim=True)


def test_rollout_is_the_product_of_the_layers_matrices():
    model, images = looked_at("timm vit")
    records = record(model, images)
    product = torch.eye(10).expand(2, 10, 10)
    for found in records[::-1]:
        product = product @ (torch.eye(10) + shares(found)) / 2
    expected = product[:, 1 + 3 * 1 + 2, 1:]  # the token in row 1, column 2, without what came from the class token
    expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(rollout(records, (1, 2)).flatten(1), expected, atol=1e-6, rtol=1e-4)
    expected = product[:, 0, 1:] / product[:, 0, 1:].sum(1, keepdim=True)
    torch.testing.assert_close(rollout(records, "class").flatten(1), expected, atol=1e-6, rtol=1e-4)


def test_rollout_goes_from_the_coarse_grid_to_the_fine_one():
    model, images = looked_at("nalaformer")
    fine, *coarse = record(model, images)
    product = torch.full((2, 1, 25), 1 / 25)
    for found in coarse[::-1]:
        product = product @ (torch.eye(25) + shares(found)) / 2
    product = product @ cover((5, 5), (10, 10), 2) @ (torch.eye(100) + shares(fine)) / 2
    torch.testing.assert_close(rollout([fine, *coarse]).flatten(1), product[:, 0], atol=1e-6, rtol=1e-4)


def test_rollout_spreads_reduced_keys_over_the_tokens_they_were_made_of():
    model, images = looked_at("reduced keys")
    found = record(model, images)[0]
    assert (found.grid, found.key_grid) == ((10, 10), (4, 4))
    # 10 cells in steps of 3: the last key has one row or column of its own
    back = shares(found) @ cover((4, 4), (10, 10), 3)
    expected = (torch.eye(100) + back)[:, 42] / 2
    torch.testing.assert_close(rollout([found], (4, 2)).flatten(1), expected, atol=1e-6, rtol=1e-4)


def test_rollout_stays_a_distribution_over_windows_of_every_kind():
    for name in ("swin", "timm swin", "converted swin"):
        model, images = looked_at(name)
        heat = rollout(record(model, images))
        assert heat.shape == (2, 10, 10)
        assert heat.min() >= 0
        torch.testing.assert_close(heat.sum((1, 2)), torch.ones(2))


@pytest.mark.parametrize(("coarse", "fine"), [((2, 3), (4, 6)), ((2, 2), (3, 3)), ((4, 4), (10, 10)), ((1, 1), (5, 2))])
def test_spreading_keeps_the_amount(coarse, fine):
    amounts = torch.rand(2, coarse[0] * coarse[1])
    torch.testing.assert_close(spread_evenly(amounts, coarse, fine).sum(1), amounts.sum(1))


def test_a_map_is_the_row_of_its_token():
    model, images = looked_at("timm vit")
    found = record(model, images[:1])[1]
    rows = found.rows(torch.tensor([1 + 3 * 2 + 1]))[0, :, 0, 1:]
    one = attention_map(model, images[0], token=(2, 1), layer=1, head=1)
    torch.testing.assert_close(one.flatten(), rows[1] / rows[1].sum())
    named = attention_map(model, images[0], token=7 + 1, layer=found.name)
    expected = found.rows(torch.tensor([8]))[0, :, 0, 1:].mean(0)
    torch.testing.assert_close(named.flatten(), expected / expected.sum())


def test_a_map_of_reduced_keys_has_their_grid():
    model, images = looked_at("reduced keys")
    assert attention_map(model, images[0], token=(9, 9), layer=0).shape == (4, 4)


@pytest.mark.parametrize(
    ("token", "message"),
    [((5, 0), "grid of 3 x 3"), ("centre", '"mean" or "class"'), (10, "below the 10 tokens"), ((1, 2, 3), "a token is")],
)
def test_a_token_outside_the_grid_is_refused(token, message):
    model, images = looked_at("timm vit")
    with pytest.raises(ValueError, match=message):
        attention_map(model, images[0], token=token)


def test_maps_refuse_what_they_cannot_show():
    model, images = looked_at("nalaformer")
    records = record(model, images)
    with pytest.raises(ValueError, match="no class token"):
        rollout(records, "class")
    with pytest.raises(ValueError, match="head must be below the 2 heads"):
        map_of(records[-1], "mean", head=2)
    with pytest.raises(ValueError, match="at least one layer"):
        rollout([])
    text, tokens = looked_at("language")
    with pytest.raises(ValueError, match="no grid"):
        rollout(record(text, tokens), 3)


def test_an_enlarged_map_shows_each_cell_as_a_square():
    heat = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    assert enlarge(heat, (4, 4))[0].tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]
