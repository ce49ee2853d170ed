"""Blocks of tokens with states of their own, which queries mix (MHLA), against the formula over all pairs."""

import math

import pytest
import torch

from nalaformer import Rotary, feature_map, linear_attention
from nalaformer.analysis import record
from nalaformer.analysis.records import linear_forms
from nalaformer.attention import build
from nalaformer.models.vision import build as build_backbone
from nalaformer.models.vision.multiply_adds import count_multiply_adds
from nalaformer.ops.mixed_states import blocks_of, mixed_linear_attention

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = torch.device("cpu")
GRIDS = [(8, 8), (7, 5), (3, 10), (1, 23), (2, 3), (1, 1)]


def block_numbers(grid, shape):
    """Cell by cell: block r holds the rows y with r <= y rows / height < r + 1."""
    (height, width), (rows, columns) = grid, shape
    if height == 1:
        return torch.tensor([x * rows * columns // width for x in range(width)])
    return torch.tensor([(y * rows // height) * columns + x * columns // width for y in range(height) for x in range(width)])


def mixed_formula(single, q, k, v, pairs, *, key_mask=None, turned=None, eps=1e-6):
    """The definition over all pairs; pairs: [N, M]."""
    phi_k, outputs = single.key(k), []
    streams = single.streams_as_numbers(q)
    for phi_q, values in zip(streams, v.chunk(len(streams), -1), strict=True):
        plain = torch.einsum("bihf,bjhf->bhij", phi_q, phi_k) * pairs
        above = plain
        if turned is not None:
            above = torch.einsum("bihf,bjhf->bhij", turned.rotate(phi_q), turned.rotate(phi_k)) * pairs
        count = torch.full((len(q), 1, 1, 1), float(k.shape[1]), dtype=q.dtype)
        if key_mask is not None:
            visible = key_mask[:, None, None].to(q.dtype)
            plain, above, count = plain * visible, above * visible, visible.sum(-1, keepdim=True)
        outputs.append(torch.einsum("bhij,bjhv->bihv", above / (plain.sum(-1, keepdim=True) + eps * count), values))
    return torch.cat(outputs, -1)


def inputs(tokens, heads=2, size=6):
    return [torch.randn(2, tokens, heads, size, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (1, 4), (4, 4)])
def test_blocks_hold_every_token_once(grid, shape):
    blocks = blocks_of(*grid, *shape, device=HERE)
    tokens = grid[0] * grid[1]
    assert blocks.places[blocks.places >= 0].sort().values.tolist() == list(range(tokens))
    assert torch.equal(blocks.of_tokens, block_numbers(grid, shape))
    x = torch.randn(2, tokens, 3)
    assert torch.equal(blocks.scatter(blocks.gather(x)), x)
    assert blocks.gather(x).sum((1, 2)).allclose(x.sum(1), atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["relu", "norm_aware", "polarity"])
def test_the_op_is_its_formula(grid, name):
    shape, tokens = (3, 2), grid[0] * grid[1]
    single = feature_map(name, num_heads=2, head_dim=6).double()
    q, k, v = inputs(tokens)
    mixing, blocks = torch.rand(6, 6, dtype=torch.float64) + 0.1, blocks_of(*grid, *shape, device=HERE)
    number = block_numbers(grid, shape)
    key_mask = torch.rand(2, tokens) > 0.3
    for mask in (None, key_mask):
        found = mixed_linear_attention(q, k, v, feature_map=single, mixing=mixing, blocks=(blocks, blocks), key_mask=mask)
        expected = mixed_formula(single, q, k, v, mixing[number][:, number], key_mask=mask)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_positions_turn_the_numerator_alone():
    grid, single = (4, 6), feature_map("elu", num_heads=2, head_dim=8).double()
    q, k, v = inputs(24, size=8)
    turned = Rotary.grid(*grid, 8, device=HERE)
    blocks, mixing = blocks_of(*grid, 2, 2, device=HERE), torch.rand(4, 4, dtype=torch.float64)
    options = {"feature_map": single, "mixing": mixing, "blocks": (blocks, blocks), "rotary": (turned, turned)}
    number = block_numbers(grid, (2, 2))
    expected = mixed_formula(single, q, k, v, mixing[number][:, number], turned=turned)
    torch.testing.assert_close(mixed_linear_attention(q, k, v, **options), expected, rtol=1e-9, atol=1e-9)


def test_equal_numbers_for_all_blocks_are_plain_linear_attention():
    q, k, v = (x.float() for x in inputs(35))
    single, blocks = feature_map("norm_aware", num_heads=2, head_dim=6), blocks_of(7, 5, 3, 3, device=HERE)
    found = mixed_linear_attention(q, k, v, feature_map=single, mixing=torch.full((9, 9), 1.0), blocks=(blocks, blocks))
    torch.testing.assert_close(found, linear_attention(q, k, v, feature_map=single), rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_small_steps():
    single, blocks = feature_map("elu", num_heads=1, head_dim=4).double(), blocks_of(3, 4, 2, 2, device=HERE)
    tensors = [x.requires_grad_() for x in (*inputs(12, heads=1, size=4), torch.rand(4, 4, dtype=torch.float64) + 0.1)]

    def attend(q, k, v, mixing):
        return mixed_linear_attention(q, k, v, feature_map=single, mixing=mixing, blocks=(blocks, blocks))

    assert torch.autograd.gradcheck(attend, tensors)


def test_huge_keys_and_hidden_nan_leave_numbers():
    single, blocks = feature_map("polarity", num_heads=2, head_dim=6), blocks_of(4, 4, 2, 2, device=HERE)
    q, k, v = (x.float() for x in inputs(16))
    options = {"feature_map": single, "mixing": torch.rand(4, 4) + 0.1, "blocks": (blocks, blocks)}
    assert mixed_linear_attention(1e6 * q, 1e6 * k, v, **options).isfinite().all()
    key_mask = torch.ones(2, 16, dtype=torch.bool)
    key_mask[:, 5] = False
    k[:, 5], v[:, 5] = torch.nan, torch.nan
    assert mixed_linear_attention(q, k, v, key_mask=key_mask, **options).isfinite().all()
    nothing = mixed_linear_attention(q, k, v, key_mask=torch.zeros_like(key_mask), **options)
    assert (nothing == 0).all()


# ---- the layer


def test_a_layer_mixes_more_of_what_is_near_and_takes_every_grid():
    layer = build("linear", dim=16, num_heads=2, mixed_blocks=[4, 4], local_mix="channels")
    start = layer.block_mix()
    assert start.shape == (16, 16)
    # columns sum to one; of the two ends of a diagonal the cosine of pi / 4 beside that of 0
    torch.testing.assert_close(start.sum(0), torch.ones(16))
    assert (start[15, 0] / start[0, 0]).item() == pytest.approx(math.cos(math.pi / 4), abs=1e-5)
    for grid in ((8, 8), (5, 9), (1, 40)):
        x = torch.randn(2, grid[0] * grid[1], 16, requires_grad=True)
        layer(x, grid).sum().backward()
        assert x.grad.isfinite().all()
    assert layer.block_mix.log_mixing.grad.abs().max() > 0
    assert build("linear", dim=16, num_heads=2).block_mix is None


def test_padding_and_groups_reach_no_other_token():
    layer = build("linear", dim=16, num_heads=2, mixed_blocks=(2, 2)).double()
    x, visible = torch.randn(2, 30, 16, dtype=torch.float64), torch.ones(2, 30, dtype=torch.bool)
    visible[:, 7] = False
    other = x.clone()
    other[:, 7] = torch.nan
    found, again = (layer(each, (5, 6), key_mask=visible)[:, visible[0]] for each in (x, other))
    torch.testing.assert_close(found, again)
    groups = torch.arange(30).remainder(2).expand(2, -1)
    changed = x.clone()
    changed[:, 1::2] += 1.0
    torch.testing.assert_close(layer(x, (5, 6), groups=groups)[:, ::2], layer(changed, (5, 6), groups=groups)[:, ::2])


@pytest.mark.parametrize("options", [{}, {"position": "rotary"}, {"feature_map": "polarity"}, {"key_reduction": 2}])
def test_records_have_the_rows_that_the_layer_used(options):
    torch.manual_seed(0)
    layer = build("linear", dim=16, num_heads=2, mixed_blocks=(2, 2), **options).double()
    with torch.no_grad():
        layer.block_mix.log_mixing.add_(torch.randn(4, 4))
    model = torch.nn.ModuleDict({"attention": layer})
    model.forward = lambda x: layer(x, (4, 6))
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    (found,) = record(model, x)
    weights = found.rows(torch.arange(24))
    if layer.map.streams == 1:
        q, k, v, _, key_grid = layer.project(x, (4, 6), None)
        gathered = layer.attend(q, k, v, (4, 6), key_grid, None, None)
        torch.testing.assert_close(torch.einsum("bhij,bjhv->bihv", weights, v), gathered)
    product = (
        sum(form.queries @ form.keys.transpose(-1, -2) for form in linear_forms(found, found.key_mask)) / layer.map.streams
    )
    torch.testing.assert_close(product, weights)
    assert all(0 < each.effective_rank <= 24 for each in found.statistics())


def test_mixing_costs_a_product_of_states_for_each_pair_of_blocks_and_is_not_decayed():
    size = {"embed_dims": (16,) * 4, "depths": (1,) * 4, "num_heads": (2,) * 4, "attention_stages": "lvvv", "projection": 16}
    size |= {"num_classes": 3, "attention": "linear"}
    plain, mixed = (
        build_backbone("nalaformer_t", attention_options=options, **size) for options in ({}, {"mixed_blocks": (2, 3)})
    )
    extra = count_multiply_adds(mixed, (64, 64)) - count_multiply_adds(plain, (64, 64))
    assert extra == 6 * 6 * 2 * 8 * 8
    # softmax stages have none
    assert mixed.no_weight_decay() - plain.no_weight_decay() == {"stages.0.blocks.0.attention.block_mix.log_mixing"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_blocks": (0, 2)}, r"mixed_blocks must be rows and columns of blocks, both positive, got \(0, 2\)"),
        ({"mixed_blocks": (2, 2), "causal": True}, r"got \{'causal': True\} with mixed_blocks=\(2, 2\)"),
        ({"mixed_blocks": (2, 2), "contrast": "learned"}, r"got \{'contrast': 'learned'\}"),
        ({"mixed_blocks": (2, 2), "feature_map": None}, r"got \{'feature_map': None\}"),
        ({"mixed_blocks": 4}, r"mixed_blocks must be"),
    ],
)
def test_what_blocks_cannot_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build("linear", dim=16, num_heads=2, **options)


def test_some_tokens_of_a_grid_and_received_attention_are_refused():
    layer, x = build("linear", dim=16, num_heads=2, mixed_blocks=(2, 2)), torch.randn(1, 16, 16)
    with pytest.raises(ValueError, match=r"mixed_blocks=\(1, 1\)"):
        layer.received_attention(x, (4, 4))
    with pytest.raises(ValueError, match=r"mixed_blocks=\(1, 1\)"):
        layer.forward_at(x[:, :3], (4, 4), torch.tensor([[0, 1, 5]]))


@pytest.mark.slow
def test_an_exported_and_a_traced_program_cut_other_grids_as_the_layer_does():
    layer = build("linear", dim=16, num_heads=2, mixed_blocks=(2, 2)).eval()

    class OnImages(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, image):
            return self.layer(image.flatten(2).transpose(1, 2), (image.shape[2], image.shape[3]))

    model, image = OnImages().eval(), torch.randn(2, 16, 6, 10)
    sides = {2: torch.export.Dim("height", min=4, max=64), 3: torch.export.Dim("width", min=4, max=64)}
    exported = torch.export.export(model, (image,), dynamic_shapes=(sides,)).module()
    with torch.no_grad():
        traced = torch.jit.trace(model, (image,))
        for other in (torch.randn(2, 16, 9, 4), torch.randn(2, 16, 14, 15)):
            torch.testing.assert_close(exported(other), model(other), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(traced(other), model(other), rtol=1e-4, atol=1e-5)
