"""What surrounds attention: depth-wise convolution, layer norm with its gate, residual; on kernels and in plain torch."""

import pytest
import torch
import torch.nn.functional as F

import nalaformer
from helpers.products import pairs
from nalaformer.ops import add_layer_norm, depthwise_conv, layer_norm, scaled_residual
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


# odd: strips, tiles and channels all overrun; shared kernels; and what comes out even, where kernels need fewer masks
GRIDS = {"odd": (2, (7, 13), 70, 70, 3), "shared": (2, (7, 13), 12, 4, 5), "even": (4, (9, 14), 64, 64, 3)}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    ("shape", "plus", "gelu", "has_bias"), pairs(GRIDS, ["none", "itself", "other"], [False, True], [False, True])
)
def test_convolution_and_its_gradients(backend, shape, plus, gelu, has_bias, poisoned_memory):
    batch, grid, channels, kernels, size = GRIDS[shape]
    x, other, upstream = make(*[(batch, grid[0] * grid[1], channels)] * 3)
    weight, bias = make((kernels, 1, size, size), (kernels,))
    tensors = [x, other if plus == "other" else None, weight, bias if has_bias else None]

    def ours(x, other, weight, bias):
        added = other if plus == "other" else None
        return depthwise_conv(x, weight, bias, grid=grid, plus=added, residual=plus == "itself", gelu=gelu)

    def exact(x, other, weight, bias):
        y = x * (1 + torch.erf(x / 2**0.5)) / 2 if gelu else x
        return convolved(y, weight, bias, grid) + {"none": 0, "itself": y, "other": other}[plus]

    with nalaformer.use_backend(backend):
        found = gradients(ours, tensors, upstream)
    for a, b in zip(found, gradients(exact, double(tensors), upstream), strict=True):
        assert relative_error(a, b) < BAR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolution_of_gelu_in_half_precision_is_rounded_once(dtype):
    x, weight, bias, upstream = (y.to(dtype) for y in make((2, 12, 20), (20, 1, 3, 3), (20,), (2, 12, 20)))

    def ours(x, weight, bias):
        return depthwise_conv(x, weight, bias, grid=(3, 4), residual=True, gelu=True)

    found = []
    for backend, tensors in (("triton", [x, weight, bias]), ("reference", double([x, weight, bias]))):
        with nalaformer.use_backend(backend):
            found.append(gradients(ours, tensors, upstream))
    for a, b in zip(*found, strict=True):
        # room: half a unit in the last place is the most that rounding the result costs
        assert relative_error(a, b) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("moved", ["input", "weight", "bias"])
def test_only_the_gradients_that_are_asked_for_are_computed(moved, monkeypatch):
    from nalaformer.ops.kernels.tokenwise import depthwise_op

    asked = []
    computed = depthwise_op.start
    monkeypatch.setattr(depthwise_op, "start", lambda *given: asked.append(given[-1]()[2]) or computed(*given))
    leaves = dict(zip(("input", "weight", "bias"), make((1, 6, 4), (4, 1, 3, 3), (4,)), strict=True))
    leaves[moved].requires_grad_()
    with nalaformer.use_backend("triton"):
        depthwise_conv(leaves["input"], leaves["weight"], leaves["bias"], grid=(2, 3)).sum().backward()
    assert (asked[-1]["MOVES_INPUT"], asked[-1]["MOVES_WEIGHT"]) == (moved == "input", moved != "input")


def test_a_compiled_residual_convolution_is_told_that_it_is_one():
    graphs = []

    def look(graph, inputs):
        graphs.append(graph)
        return graph

    x, weight = make((1, 6, 4), (4, 1, 3, 3))
    with nalaformer.use_backend("triton"):
        torch.compile(lambda x: depthwise_conv(x, weight, None, grid=(2, 3), plus=x), backend=look, fullgraph=True)(x)
    (call,) = [node for graph in graphs for node in graph.graph.nodes if "depthwise" in str(node.target)]
    plus, is_residual = call.args[1], call.args[6]
    assert plus is None
    assert is_residual


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


@pytest.mark.parametrize("part", ["sum", "norm", "both"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_layer_norm_of_a_sum_and_its_gradients(backend, part, poisoned_memory):
    x, y, weight, bias, upstream = make((2, 37, 48), (2, 37, 48), (48,), (48,), (2, 37, 48))

    def chosen(total, normed):
        return {"sum": total, "norm": normed, "both": total * 2 + normed}[part]

    def ours(x, y, weight, bias):
        return chosen(*add_layer_norm(x, y, weight, bias, eps=1e-3)) + 0 * (weight.sum() + bias.sum())

    def exact(x, y, weight, bias):
        return chosen(x + y, normalised(x + y, weight, bias, 1e-3, None)) + 0 * (weight.sum() + bias.sum())

    tensors = [x, y, weight, bias]
    with nalaformer.use_backend(backend):
        found = gradients(ours, tensors, upstream)
    for a, b in zip(found, gradients(exact, double(tensors), upstream), strict=True):
        assert (a.double() - b).norm() <= 4 * BAR * max(1.0, b.norm())


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_layer_norm_gives_the_type_that_was_asked_for(backend):
    x, weight, bias = make((2, 5, 16), (16,), (16,))
    with nalaformer.use_backend(backend):
        normed = layer_norm(x, weight, bias, eps=1e-5, dtype=torch.bfloat16)
        total, add_norm = add_layer_norm(x, x.bfloat16(), weight, bias, eps=1e-5, dtype=torch.bfloat16)
        assert (normed.dtype, total.dtype, add_norm.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
        assert layer_norm(x.bfloat16(), weight, bias, eps=1e-5).dtype == torch.bfloat16


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
    from nalaformer.ops.kernels.tokenwise import depthwise_op, norm_op, residual_op

    # aot_dispatch compiles, minutes long in the interpreter
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    x, weight, bias = (y.requires_grad_() for y in make((2, 12, 6), (6, 1, 3, 3), (6,)))
    torch.library.opcheck(depthwise_op.forward, (x, x, weight, bias, 3, 4, False, True), test_utils=checks)
    torch.library.opcheck(depthwise_op.backward, (x, x, weight, 3, 4, True, True, True, True), test_utils=checks)
    rows, scale, shift = (y.requires_grad_() for y in make((9, 6), (6,), (6,)))
    for added, gate in ((rows, None), (None, rows)):
        arguments = (rows, added, gate, scale, shift, 1e-5, torch.float32)
        torch.library.opcheck(norm_op.forward, arguments, test_utils=checks)
        arguments = (rows, added, rows, gate, scale, shift, torch.ones(2, 9, device=DEVICE))
        torch.library.opcheck(norm_op.backward, arguments, test_utils=checks)
    torch.library.opcheck(residual_op.forward, (x, x, bias, bias[:2].detach()), test_utils=checks)
    torch.library.opcheck(residual_op.backward, (x, x, bias, bias[:2].detach()), test_utils=checks)


def test_a_compiled_training_step_calls_the_operators_that_know_no_gradients():
    """And has the gradients of the eager one."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    called = set()

    def look(graph, inputs):
        called.update(str(node.target) for node in graph.graph.nodes if "nalaformer" in str(node.target))
        return make_boxed_func(graph.forward)

    def step(x, weight, bias):
        y = depthwise_conv(x, weight, bias, grid=(3, 4), residual=True, gelu=True)
        return scaled_residual(x, layer_norm(y, bias, bias, eps=1e-5), scale=bias)

    tensors, (upstream,) = make((2, 12, 6), (6, 1, 3, 3), (6,)), make((2, 12, 6))
    torch.compiler.reset()
    with nalaformer.use_backend("triton"):
        expected = gradients(step, tensors, upstream)
        found = gradients(torch.compile(step, backend=aot_autograd(fw_compiler=look), fullgraph=True), tensors, upstream)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    names = {
        f"nalaformer.{name}_{way}.default" for name in ("depthwise", "norm", "residual") for way in ("forward", "backward")
    }
    assert called == names


def test_wrong_shapes_say_what_is_wrong():
    x, weight = torch.randn(1, 12, 6), torch.randn(4, 1, 3, 3)
    with pytest.raises(ValueError, match=r"3 x 5 = 15, got 12 tokens"):
        depthwise_conv(x, weight, None, grid=(3, 5))
    with pytest.raises(ValueError, match=r"multiple of the kernels \(4\), got 6"):
        depthwise_conv(x, weight, None, grid=(3, 4))
