"""What surrounds attention: depth-wise convolution, layer norm with its gate, residual; on kernels and in plain torch."""

import pytest
import torch
import torch.nn.functional as F

import nalaformer
from nalaformer.ops import depthwise_conv, layer_norm, scaled_residual
from nalaformer.ops.backend import INTERPRETING

pytestmark = pytest.mark.kernels

DEVICE = "cpu" if INTERPRETING else "cuda"
# float32 sums of a few thousand products, against float64
BAR = 2e-6


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    """torch's own convolutions on a GPU would round their inputs to eleven bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-6)).item()


def make(*shapes):
    return [torch.randn(shape).to(DEVICE) for shape in shapes]


def convolved(x, weight, bias, grid):
    """The definition, sample by sample and head by head, in the type of x."""
    heads = x.shape[2] // weight.shape[0]
    images = x.unflatten(1, grid).movedim(3, 1)  # [B, C, height, width]
    parts = [F.conv2d(y, weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0]) for y in images.chunk(heads, 1)]
    return torch.cat(parts, dim=1).flatten(2).transpose(1, 2)


def normalised(x, weight, bias, eps, gate):
    out = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt() * weight + bias
    return out if gate is None else out * gate * torch.sigmoid(gate)


def gradients(function, tensors, upstream):
    tensors = [None if x is None else x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    return [out, *torch.autograd.grad(out, [x for x in tensors if x is not None], upstream.to(out.dtype))]


def double(tensors):
    return [None if x is None else x.double() for x in tensors]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("plus", ["none", "itself", "other"])
@pytest.mark.parametrize(("channels", "kernels", "size"), [(70, 70, 3), (12, 4, 5)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_convolution_and_its_gradients(backend, plus, channels, kernels, size, has_bias, poisoned_memory):
    grid = (7, 13)
    x, other, weight, bias, upstream = make(
        (2, 91, channels), (2, 91, channels), (kernels, 1, size, size), (kernels,), (2, 91, channels)
    )
    tensors = [x, other if plus == "other" else None, weight, bias if has_bias else None]

    def ours(x, other, weight, bias):
        return depthwise_conv(x, weight, bias, grid=grid, plus={"none": None, "itself": x, "other": other}[plus])

    def exact(x, other, weight, bias):
        return convolved(x, weight, bias, grid) + {"none": 0, "itself": x, "other": other}[plus]

    with nalaformer.use_backend(backend):
        found = gradients(ours, tensors, upstream)
    for a, b in zip(found, gradients(exact, double(tensors), upstream), strict=True):
        assert relative_error(a, b) < BAR


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_convolution_reads_a_slice_of_a_projection_where_it_lies(backend):
    wide, weight = make((2, 12, 40), (10, 1, 3, 3))
    with nalaformer.use_backend(backend):
        out = depthwise_conv(wide[..., 20:30], weight, None, grid=(3, 4))
    assert relative_error(out, convolved(wide[..., 20:30].double(), weight.double(), None, (3, 4))) < BAR


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("channels", [5, 48, 320])
def test_layer_norm_and_its_gradients(backend, channels, gated, poisoned_memory):
    x, projection, weight, bias, upstream = make(
        (2, 37, channels), (2, 37, 3 * channels), (channels,), (channels,), (2, 37, channels)
    )
    # far from zero, where a variance as a difference of squares would fail
    x = 3 * x + 50
    tensors = [x, projection[..., channels : 2 * channels] if gated else None, weight, bias]

    def ours(x, gate, weight, bias):
        return layer_norm(x, weight, bias, eps=1e-3, gate=gate)

    def exact(x, gate, weight, bias):
        return normalised(x, weight, bias, 1e-3, gate)

    with nalaformer.use_backend(backend):
        found = gradients(ours, tensors, upstream)
    # x - mean loses bits that stand in x: six for values of 50 around which x varies by 3
    for a, b in zip(found, gradients(exact, double(tensors), upstream), strict=True):
        assert relative_error(a, b) < 16 * BAR


@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("has_keep", [False, True])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_residual_and_its_gradients(backend, has_scale, has_keep, poisoned_memory):
    x, y, scale, upstream = make((3, 37, 70), (3, 37, 70), (70,), (3, 37, 70))
    keep = torch.tensor([0.0, 1.25, 1.25], device=DEVICE) if has_keep else None

    def ours(x, y, scale):
        return scaled_residual(x, y, scale=scale, keep=keep)

    def exact(x, y, scale):
        return x + y * (1 if scale is None else scale) * (1 if keep is None else keep.double()[:, None, None])

    tensors = [x, y, scale if has_scale else None]
    with nalaformer.use_backend(backend):
        found = gradients(ours, tensors, upstream)
    for a, b in zip(found, gradients(exact, double(tensors), upstream), strict=True):
        assert relative_error(a, b) < BAR


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_not_a_number_stays_in_its_sample(backend):
    x, weight, bias = make((3, 20, 6), (6, 1, 5, 5), (6,))
    x[1] = float("nan")
    with nalaformer.use_backend(backend):
        out = layer_norm(depthwise_conv(x, weight, bias, grid=(4, 5), plus=x), bias, bias, eps=1e-5)
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()
    assert out[1].isnan().all()


def test_the_kernels_are_operators_that_torch_library_accepts():
    from nalaformer.ops.kernels.tokenwise import depthwise_op, layer_norm_op, residual_op

    # aot_dispatch compiles, minutes long in the interpreter
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    x, weight, bias = (y.requires_grad_() for y in make((2, 12, 6), (6, 1, 3, 3), (6,)))
    torch.library.opcheck(depthwise_op.forward, (x, x, weight, bias, 3, 4, False, True), test_utils=checks)
    torch.library.opcheck(depthwise_op.backward, (x, x, weight, 3, 4, True, True, True, True), test_utils=checks)
    rows, scale, shift = (y.requires_grad_() for y in make((9, 6), (6,), (6,)))
    torch.library.opcheck(layer_norm_op.forward, (rows, rows, scale, shift, 1e-5), test_utils=checks)
    arguments = (rows, rows, rows, scale, shift, torch.ones(2, 9, device=DEVICE))
    torch.library.opcheck(layer_norm_op.backward, arguments, test_utils=checks)
    torch.library.opcheck(residual_op.forward, (x, x, bias, bias[:2].detach()), test_utils=checks)
    torch.library.opcheck(residual_op.backward, (x, x, bias, bias[:2].detach()), test_utils=checks)


def test_wrong_shapes_say_what_is_wrong():
    x, weight = torch.randn(1, 12, 6), torch.randn(4, 1, 3, 3)
    with pytest.raises(ValueError, match=r"3 x 5 = 15, got 12 tokens"):
        depthwise_conv(x, weight, None, grid=(3, 5))
    with pytest.raises(ValueError, match=r"multiple of the kernels \(4\), got 6"):
        depthwise_conv(x, weight, None, grid=(3, 4))
