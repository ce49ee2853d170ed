"""The attention layers: every published method on any grid, with padding, in any dtype, saved and loaded."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.attention_layers import make
from nalaformer import Rotary, linear_attention, use_backend
from nalaformer.attention import METHODS, Attention
from nalaformer.attention.position_table import PositionTable

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]
# a learned table is stretched over the padded grid as well: its positions are those of the padded size, by design
WITHOUT_TABLE = [(name, {"position": "none"} if config.position == "table" else {}) for name, config in METHODS.items()]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def causal_options(method: str) -> dict[str, object]:
    """What a method must give up to be causal: looking around."""
    return {"causal": True, "local_mix": "none"} | ({"variance": False} if method == "mirrorla" else {})


# --- grids --------------------------------------------------------------------------------------------------------------


def test_no_grid_means_a_single_row(method):
    x = torch.randn(2, 11, 16)
    layer = make(method)
    assert torch.equal(layer(x), layer(x, (1, 11)))


@pytest.mark.parametrize("name", ["flatten", "polaformer", "polaformerpp", "nalaformer", "mirrorla"])
def test_the_grid_matters(name):
    x = torch.randn(2, 12, 16)
    layer = make(name)
    assert (layer(x, (3, 4)) - layer(x, (4, 3))).abs().max() > 1e-3


def test_tokens_of_a_plain_layer_are_a_set():
    x = torch.randn(2, 12, 16)
    order = torch.randperm(12)
    layer = make("linear", dtype=torch.float64)
    assert (layer(x.double())[:, order] - layer(x.double()[:, order])).abs().max() < 1e-12


def test_reduced_keys_lose_no_pixel(method):
    # 5 x 7 in blocks of 2: the last row and the last column fill a block with padding
    layer = make(method, key_reduction=2, local_mix="none")
    x = torch.randn(1, 35, 16)
    before = layer(x, (5, 7))
    for pixel in (6, 34):
        moved = x.clone()
        moved[:, pixel] += 1
        assert (layer(moved, (5, 7)) - before)[:, 0].abs().max() > 0


def test_a_grid_of_another_size_stretches_the_position_table():
    table = PositionTable(channels=3, grid=(4, 6))
    assert table((4, 6)) is table.table
    for grid in ((1, 9), (9, 1), (5, 5), (40, 3)):
        assert table(grid).shape == (1, grid[0] * grid[1], 3)


def test_a_stretched_position_table_keeps_constants_and_slopes():
    table = PositionTable(channels=2, grid=(10, 6))
    rows = torch.arange(10.0)[:, None].expand(10, 6).flatten()
    with torch.no_grad():
        table.table.copy_(torch.stack((torch.full((60,), 0.7), rows), -1)[None])
    stretched = table((20, 12)).detach().unflatten(1, (20, 12))[0]
    assert (stretched[..., 0] - 0.7).abs().max() < 1e-6
    # rising throughout, away from the border by one row per row in the mean: a cubic bends a little between two cells
    assert (stretched[..., 1].diff(dim=0) > 0).all()
    # room: the bend is 0.0085 on every machine; rounding is a ten-thousandth of it
    assert abs((stretched[15, 0, 1] - stretched[4, 0, 1]).item() / 11 - 0.5) < 0.02
    assert stretched[..., 1].diff(dim=1).abs().max() < 1e-5


def test_the_position_table_is_trained_through_a_stretch():
    table = PositionTable(channels=3, grid=(4, 6))
    table((7, 9)).square().sum().backward()
    assert (table.table.grad != 0).all()


# --- padding, mates, order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0.0, 1e3, math.nan], ids=str)
def test_what_padding_holds_does_not_matter(method, padding):
    layer = make(method)
    key_mask = torch.rand(3, 12) < 0.6
    x = torch.where(key_mask[..., None], torch.randn(3, 12, 16), 0.5)
    spoilt = torch.where(key_mask[..., None], x, padding)
    before, after = (layer(tokens, (3, 4), key_mask)[key_mask] for tokens in (x, spoilt))
    assert (after - before).abs().max() <= 1e-6


@pytest.mark.parametrize(("name", "options"), WITHOUT_TABLE)
def test_padding_at_the_end_of_a_row_equals_no_padding(name, options):
    layer = make(name, **options)
    x = torch.randn(2, 9, 16)
    padded = torch.cat((x, torch.randn(2, 4, 16)), 1)
    key_mask = (torch.arange(13) < 9).expand(2, 13)
    assert (layer(padded, None, key_mask)[:, :9] - layer(x)).abs().max() <= 1e-6


@pytest.mark.parametrize(("name", "options"), WITHOUT_TABLE)
def test_padding_below_and_right_of_an_image_equals_no_padding(name, options):
    layer = make(name, **options)
    image = torch.randn(2, 3, 4, 16)
    padded = torch.nn.functional.pad(image, (0, 0, 0, 2, 0, 1), value=7.0)
    key_mask = torch.zeros(2, 4, 6, dtype=torch.bool)
    key_mask[:, :3, :4] = True
    out = layer(padded.flatten(1, 2), (4, 6), key_mask.flatten(1)).unflatten(1, (4, 6))[:, :3, :4]
    assert (out - layer(image.flatten(1, 2), (3, 4)).unflatten(1, (3, 4))).abs().max() <= 1e-6


def test_a_sample_of_padding_only_is_finite(method):
    layer = make(method)
    x = torch.randn(2, 12, 16, requires_grad=True)
    key_mask = torch.ones(2, 12, dtype=torch.bool)
    key_mask[1] = False
    out = layer(x, (3, 4), key_mask)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in (x, *layer.parameters()))


def test_batch_mates_do_not_matter(method):
    layer = make(method)
    x = torch.randn(5, 12, 16)
    together = layer(x, (3, 4))
    for i in range(5):
        assert (layer(x[i : i + 1], (3, 4)) - together[i : i + 1]).abs().max() <= 1e-6


def test_a_bad_sample_spoils_no_other(method):
    layer = make(method)
    x = torch.randn(3, 12, 16)
    before = layer(x, (3, 4))
    x[1, 4, 2] = math.nan
    after = layer(x, (3, 4))
    assert (after - before)[[0, 2]].abs().max() <= 1e-6
    assert after[1].isnan().any()


# the weights of RALA look at all queries: refused (test_layer_options.py)
@pytest.mark.parametrize("method", [name for name, config in METHODS.items() if config.key_weight == "none"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("to", [0.5, 1e4], ids=str)
def test_a_causal_layer_does_not_look_ahead(method, masked, to):
    layer = make(method, **causal_options(method))
    key_mask = torch.rand(2, 11) < 0.7 if masked else None
    x = torch.randn(2, 11, 16)
    before = layer(x, None, key_mask)
    moved = x.clone()
    moved[:, 6:] = to
    after = layer(moved, None, key_mask)
    assert (after - before)[:, :6].abs().max() == 0.0
    assert (after - before)[:, 6:].abs().max() > 0


def test_softmax_is_softmax():
    layer = make("softmax", dtype=torch.float64)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    q, k, v = layer.qkvg(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    expected = layer.projection((weights @ v).transpose(1, 2).flatten(2))
    assert (layer(x) - expected).abs().max() < 1e-12


def test_softmax_with_rotary_keeps_float64():
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    layer = make("softmax", dtype=torch.float64, position="rotary")
    q, k, v = layer.qkvg(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # [B, H, N, D]
    turn = torch.zeros(12, 4, dtype=torch.float64)
    for token in range(12):
        row, column = divmod(token, 4)
        turn[token] = torch.tensor([row, row * 1e-4, column, column * 1e-4], dtype=torch.float64)
    q, k = (torch.view_as_complex(y.unflatten(-1, (4, 2)).contiguous()) * torch.exp(1j * turn) for y in (q, k))
    weights = ((q @ k.transpose(-1, -2).conj()).real / 8**0.5).softmax(-1)
    expected = layer.projection((weights @ v).transpose(1, 2).flatten(2))
    assert (layer(x, (3, 4)) - expected).abs().max() < 1e-12


def test_a_causal_softmax_row_with_no_visible_key_is_finite():
    # left padding: the first rows see nothing
    layer = make("softmax", causal=True)
    key_mask = (torch.arange(9) >= 4).expand(2, 9)
    x = torch.randn(2, 9, 16, requires_grad=True)
    out = layer(x, None, key_mask)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


# --- dtypes, training, saving -------------------------------------------------------------------------------------------


# three times the largest error of 60 seeds: rounded projections, sharpened by a power, near a kink of the map
@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 6e-3), (torch.bfloat16, 0.17)], ids=str)
@pytest.mark.parametrize("reduction", [1, 2])
def test_a_layer_of_low_precision_is_near_the_same_one_in_float64(method, dtype, most, reduction):
    layer = make(method, dtype=dtype, key_reduction=reduction)
    x = torch.randn(2, 15, 16, dtype=dtype)
    out = layer(x, (3, 5))
    assert out.dtype == dtype
    expected = layer.double()(x.double(), (3, 5))
    assert ((out - expected).norm() / expected.norm()).item() < most


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_layer_trains_in_low_precision(method, dtype):
    layer = make(method, dtype=dtype)
    layer(torch.randn(2, 15, 16, dtype=dtype), (3, 5)).float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_a_layer_runs_under_autocast(method):
    layer = make(method)
    x = torch.randn(2, 15, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, (3, 5))
    expected = layer(x, (3, 5))
    assert ((out - expected).norm() / expected.norm()).item() < 0.03


@pytest.mark.parametrize("reduction", [1, 2])
def test_gradients_reach_every_parameter(method, reduction):
    layer = make(method, key_reduction=reduction)
    layer(torch.randn(2, 15, 16), (3, 5)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_gradients_reach_every_token(method):
    x = torch.randn(2, 15, 16, requires_grad=True)
    make(method)(x, (3, 5)).square().sum().backward()
    assert (x.grad.abs().amax(-1) > 0).all()


def test_saved_weights_give_the_same_output(method, tmp_path):
    layer, other = make(method), make(method)
    x = torch.randn(2, 15, 16)
    assert not torch.equal(other(x, (3, 5)), layer(x, (3, 5)))
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x, (3, 5)), layer(x, (3, 5)))


def test_the_backends_agree_on_a_layer(method):
    layer = make(method)
    x = torch.randn(2, 15, 16)
    outputs = []
    for name in ("reference", "chunked"):
        with use_backend(name):
            outputs.append(layer(x, (3, 5)))
    assert (outputs[0] - outputs[1]).abs().max() <= 1e-6


def test_an_empty_batch_gives_an_empty_output(method):
    assert make(method)(torch.randn(0, 12, 16), (3, 4)).shape == (0, 12, 16)


# --- parts --------------------------------------------------------------------------------------------------------------


def layer_by_hand(layer: Attention, x: Tensor, grid: tuple[int, int], attended: Tensor) -> Tensor:
    """NaLaFormer's shell around attention [B, N, C]: + 5x5 convolution of the values, LayerNorm, * silu(gate), projection."""
    _, _, v, gate = layer.qkvg(x).chunk(4, dim=-1)
    image = v.transpose(1, 2).unflatten(2, grid)
    conv = layer.local_mix.conv
    near = F.conv2d(image, conv.weight, conv.bias, padding=2, groups=16).flatten(2).transpose(1, 2)
    mixed = attended + near
    centred = mixed - mixed.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight + layer.norm.bias
    return layer.projection(normed * gate * gate.sigmoid())


def test_the_nalaformer_shell_is_the_published_one():
    layer = make("nalaformer", dtype=torch.float64)
    x = torch.randn(2, 15, 16, dtype=torch.float64)
    q, k, v, _ = (y.unflatten(-1, (2, 8)) for y in layer.qkvg(x).chunk(4, dim=-1))
    attended = linear_attention(q, k, v, feature_map=layer.map, rotary=Rotary.grid(3, 5, 8)).flatten(2)
    assert (layer(x, (3, 5)) - layer_by_hand(layer, x, (3, 5), attended)).abs().max() < 1e-12


@pytest.mark.parametrize("mix", ["channels", "heads"])
def test_the_local_mix_reaches_two_pixels_far(mix):
    # a kernel of 5: attention of a zero-valued map adds nothing that depends on the place
    layer = make("linear", local_mix=mix, dtype=torch.float64)
    v = torch.zeros(1, 49, 2, 8, dtype=torch.float64)
    base = layer.local_mix(v, (7, 7))
    v[:, 24] = 1.0
    touched = (layer.local_mix(v, (7, 7)) - base).abs().amax(-1)[0].view(7, 7) > 0
    expected = torch.zeros(7, 7, dtype=torch.bool)
    expected[1:6, 1:6] = True
    assert torch.equal(touched, expected)


def test_a_shared_local_mix_treats_heads_alike():
    layer = make("linear", local_mix="heads", dtype=torch.float64)
    v = torch.randn(2, 15, 2, 8, dtype=torch.float64)
    swapped = layer.local_mix(v.flip(2), (3, 5)).unflatten(-1, (2, 8)).flip(2).flatten(2)
    assert (layer.local_mix(v, (3, 5)) - swapped).abs().max() < 1e-12


@pytest.mark.parametrize(("gate", "activation"), [("linear", lambda x: x), ("silu", torch.nn.functional.silu)])
def test_gates_multiply_what_is_projected(gate, activation):
    gated, plain = make("linear", gate=gate, dtype=torch.float64), make("linear", dtype=torch.float64)
    weights = gated.state_dict() | {"projection.weight": torch.eye(16), "projection.bias": torch.zeros(16)}
    gated.load_state_dict(weights)
    plain.load_state_dict({name: x[:48] if name.startswith("qkvg") else x for name, x in weights.items()})
    x = torch.randn(2, 15, 16, dtype=torch.float64)
    assert (gated(x) - plain(x) * activation(gated.qkvg(x)[..., 48:])).abs().max() < 1e-12
