"""What surrounds attention in language models: short convolution, RMSNorm, SwiGLU, the loss; on kernels and in plain torch."""

import sys

import pytest
import torch
from torch import Tensor

import nalaformer
from nalaformer.ops import (
    add_rms_norm,
    gated_linear,
    linear_cross_entropy,
    rms_norm,
    short_convolution,
    short_convolution_step_,
)
from nalaformer.ops.backend import INTERPRETING

pytestmark = pytest.mark.kernels

DEVICE = "cpu" if INTERPRETING else "cuda"
SIZES = (10, 8, 6)
CHANNELS = sum(SIZES)
# float32 sums of a few hundred products, against float64
BAR = 2e-6
each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    """torch's own convolutions on a GPU would round their inputs to eleven bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-6)).item()


def make(*shapes):
    return [torch.randn(shape).to(DEVICE) for shape in shapes]


def outcome(function, tensors, upstream, dtype):
    """What the function gives, and the gradients of the tensors."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    given = [y.to(out[0].dtype) for y in upstream]
    return [*out, *torch.autograd.grad(out, [x for x in leaves if x is not None], given)]


def assert_near(ours, exact, tensors, upstream, backend, bar=BAR):
    with nalaformer.use_backend(backend):
        found = outcome(ours, tensors, upstream, torch.float32)
    for a, b in zip(found, outcome(exact, tensors, upstream, torch.float64), strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < bar


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, silu: int, earlier=None, sequence=None) -> list[Tensor]:
    """The definition, token by token and tap by tap; `earlier` [B, S - 1, C] comes before the first."""
    size = weight.shape[1]
    rows = []
    for t in range(x.shape[1]):
        row = 0 if bias is None else bias.expand(x.shape[0], -1)
        for s in range(size):
            if t - s >= 0:
                is_own = 1 if sequence is None else (sequence[:, t - s] == sequence[:, t]).to(x.dtype)[:, None]
                row = row + weight[:, s] * x[:, t - s] * is_own
            elif earlier is not None:
                row = row + weight[:, s] * earlier[:, size - 1 + t - s]
        rows.append(row)
    parts = torch.stack(rows, 1).split(SIZES, dim=-1)
    return [part * torch.sigmoid(part) if number >= 3 - silu else part for number, part in enumerate(parts)]


@each_backend
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("size", "silu", "has_bias"), [(4, 1, False), (3, 3, True), (2, 0, True), (5, 1, False)])
def test_short_convolution_and_its_gradients(backend, packed, size, silu, has_bias, poisoned_memory):
    # more tokens than a tile, a slice of a wider projection
    projection, weight, bias = make((2, 41, CHANNELS + 7), (CHANNELS, size), (CHANNELS,))
    sequence = torch.randint(0, 2, (2, 41), device=DEVICE).cumsum(1) if packed else None
    upstream = make(*((2, 41, part) for part in SIZES))

    def ours(projection, weight, bias):
        return short_convolution(projection[..., 3:-4], weight, bias, sizes=SIZES, silu=silu, sequence=sequence)

    def exact(projection, weight, bias):
        return tuple(convolved(projection[..., 3:-4], weight, bias, silu, sequence=sequence))

    assert_near(ours, exact, [projection, weight, bias if has_bias else None], upstream, backend)


@each_backend
def test_short_convolution_of_one_part_leaves_the_others_empty(backend, poisoned_memory):
    x, weight, bias, upstream = make((2, 41, CHANNELS), (CHANNELS, 3), (CHANNELS,), (2, 41, CHANNELS))

    def ours(x, weight, bias):
        whole, *others = short_convolution(x, weight, bias, sizes=(CHANNELS, 0, 0))
        assert [part.shape for part in others] == [(2, 41, 0)] * 2
        return (whole,)

    def exact(x, weight, bias):
        return (torch.cat(convolved(x, weight, bias, 0), -1),)

    assert_near(ours, exact, [x, weight, bias], [upstream], backend)


@each_backend
def test_short_convolution_goes_on_from_the_tokens_before(backend):
    x, weight, earlier = make((2, 3, CHANNELS), (CHANNELS, 4), (2, 3, CHANNELS))
    exact = torch.cat(convolved(x.double(), weight.double(), None, 1, earlier.double()), -1)
    with nalaformer.use_backend(backend), torch.no_grad():
        whole = torch.cat(short_convolution(x, weight, sizes=SIZES, silu=1, before=earlier), -1)
        tail = earlier.clone()
        steps = [short_convolution_step_(tail, token, weight, sizes=SIZES, silu=1) for token in x.split(1, dim=1)]
    assert relative_error(whole, exact) < BAR
    assert relative_error(torch.cat(steps, 1), exact) < BAR
    assert torch.equal(tail, x)


@each_backend
def test_gradients_reach_the_tokens_before(backend):
    x, weight, earlier = make((1, 3, CHANNELS), (CHANNELS, 4), (1, 3, CHANNELS))

    def ours(x, weight, earlier):
        return short_convolution(x, weight, sizes=SIZES, before=earlier)

    def exact(x, weight, earlier):
        return tuple(convolved(x, weight, None, 0, earlier))

    assert_near(ours, exact, [x, weight, earlier], make(*((1, 3, part) for part in SIZES)), backend)


def normalised(x, weight, gate=None):
    out = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    return out if gate is None else out * gate * torch.sigmoid(gate)


@each_backend
@pytest.mark.parametrize("channels", [5, 48, 320])
def test_rms_norm_and_its_gradients(backend, channels, poisoned_memory):
    x, weight, gate, upstream = make((2, 37, channels), (channels,), (2, 37, channels), (2, 37, channels))
    assert_near(lambda x, w: rms_norm(x, w, eps=1e-3), normalised, [x, weight], [upstream], backend)
    assert_near(lambda x, w, g: rms_norm(x, w, eps=1e-3, gate=g), normalised, [x, weight, gate], [upstream], backend)


@each_backend
def test_norm_of_a_sum_and_its_gradients(backend, poisoned_memory):
    x, y, weight, *upstream = make((2, 37, 48), (2, 37, 48), (48,), (2, 37, 48), (2, 37, 48))

    def exact(x, y, weight):
        return x + y, normalised(x + y, weight)

    assert_near(lambda x, y, w: add_rms_norm(x, y, w, eps=1e-3), exact, [x, y, weight], upstream, backend)
    # the sum alone, or its norm alone: no gradient comes for the other
    for number in (0, 1):
        assert_near(
            lambda x, y, w, number=number: add_rms_norm(x, y, w, eps=1e-3)[number] + w.sum(),
            lambda x, y, w, number=number: exact(x, y, w)[number] + w.sum(),
            [x, y, weight],
            upstream[:1],
            backend,
        )


@each_backend
def test_gated_linear_and_its_gradients(backend, poisoned_memory):
    a, b, weight, upstream = make((3, 11, 30), (3, 11, 30), (7, 30), (3, 11, 7))
    exact = lambda a, b, weight: (a * torch.sigmoid(a) * b) @ weight.T  # noqa: E731
    assert_near(gated_linear, exact, [a, b, weight], [upstream], backend)


@each_backend
def test_products_behind_a_norm_get_the_type_of_autocast(backend):
    x, weight, product = make((2, 9, 48), (48,), (5, 48))
    with nalaformer.use_backend(backend), torch.autocast(DEVICE, torch.bfloat16):
        assert rms_norm(x, weight, eps=1e-6).dtype == torch.bfloat16
        total, normed = add_rms_norm(x, x, weight, eps=1e-6)
        assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
        assert gated_linear(normed, normed, product).dtype == torch.bfloat16


def losses(hidden, weight, targets):
    logits = hidden @ weight.T
    chosen = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return ((logits.exp().sum(-1).log() - chosen) * (targets >= 0)).sum()


@pytest.fixture
def small_pieces(monkeypatch):
    """Several pieces of rows for the loss, the last one shorter."""
    from nalaformer.ops.kernels.tokenwise import linear_cross_entropy_op

    monkeypatch.setattr(sys.modules["nalaformer.ops.linear_cross_entropy"], "LOGITS", 37 * 40)
    monkeypatch.setattr(linear_cross_entropy_op, "LOGITS", 37 * 64)


@each_backend
@pytest.mark.parametrize("tokens", [4, 75])
def test_loss_of_a_projection_and_its_gradients(backend, tokens, small_pieces, poisoned_memory):
    hidden, weight, upstream = make((2, tokens, 12), (37, 12), ())
    targets = torch.randint(0, 37, (2, tokens), device=DEVICE)
    targets[0, 1], targets[1, -1] = -100, -100
    assert_near(
        lambda h, w: linear_cross_entropy(h, w, targets),
        lambda h, w: losses(h, w, targets),
        [hidden, weight],
        [upstream],
        backend,
    )
    with nalaformer.use_backend(backend), torch.no_grad():
        assert relative_error(linear_cross_entropy(hidden, weight, targets), losses(hidden, weight, targets).double()) < BAR


def test_a_scale_of_the_loss_is_not_rounded_to_half_precision():
    from nalaformer.ops.kernels.tokenwise.linear_cross_entropy_op import run_backward

    gradient = torch.rand(400, 10).bfloat16()
    # 65536: where the scaler of float16 begins
    for dtype, scale in ((torch.bfloat16, 1 / 1234), (torch.float16, 65536.0)):
        found, _ = run_backward(torch.tensor(scale), gradient.to(dtype) / 4096, gradient.float(), torch.float32)
        exact = gradient.to(dtype).double() / 4096 * scale
        # roundings of 4,000 numbers cancel in the sum, that of a factor does not
        assert abs(found.double().sum() / exact.sum() - 1) < 3e-4


@each_backend
def test_large_logits_make_no_infinity(backend):
    hidden, weight = torch.tensor([[300.0], [-300.0]], device=DEVICE), torch.tensor([[1.0], [0.5], [-1.0]], device=DEVICE)
    with nalaformer.use_backend(backend):
        found = linear_cross_entropy(hidden, weight, torch.tensor([1, 2], device=DEVICE))
    assert found.item() == pytest.approx(150.0)


def test_kernels_take_no_other_target_for_a_class():
    hidden, weight = make((3, 4), (6, 4))
    with nalaformer.use_backend("triton"):
        assert linear_cross_entropy(hidden, weight, torch.tensor([1, 6, 2], device=DEVICE)).isnan()
        assert linear_cross_entropy(hidden, weight, torch.tensor([1, -1, 2], device=DEVICE)).isnan()


def test_logits_of_one_piece_exist_at_a_time(small_pieces):
    hidden, weight = (x.requires_grad_() for x in make((2, 75, 12), (37, 12)))
    targets = torch.randint(0, 37, (2, 75), device=DEVICE)
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            out = operator(*args, **(kwargs or {}))
            found = out if isinstance(out, tuple) else (out,)
            largest.extend(x.numel() for x in found if isinstance(x, Tensor) and x.shape[-1:] == (37,))
            return out

    for backend, rows in (("reference", 40), ("triton", 64)):
        largest.clear()
        with nalaformer.use_backend(backend), Watch():
            linear_cross_entropy(hidden, weight, targets).backward()
        assert max(largest) == rows * 37


def test_kernels_are_operators_that_torch_library_accepts():
    from nalaformer.ops.kernels.tokenwise import gated_linear_op, linear_cross_entropy_op, norm_op, short_convolution_op

    # aot_dispatch compiles, minutes long in the interpreter
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    x, weight, bias = (y.requires_grad_() for y in make((2, 9, CHANNELS), (CHANNELS, 4), (CHANNELS,)))
    sequence, parts = torch.arange(18, device=DEVICE).view(2, 9) // 4, x.detach().split(SIZES, -1)
    check = torch.library.opcheck
    check(short_convolution_op.forward, (x, weight, bias, None, sequence, *SIZES[:2], 18), test_utils=checks)
    check(short_convolution_op.backward, (*parts, x, weight, bias, sequence, 18), test_utils=checks)
    step = (x[:, :1].detach(), weight.detach(), x[:, :3].detach().clone(), 18)
    check(short_convolution_op.step_op, step, test_utils=checks[::2])
    rows, ones = x.detach()[0].requires_grad_(), torch.ones(9, device=DEVICE)
    for y, gate in ((rows, None), (None, rows)):
        check(norm_op.forward, (rows, y, gate, bias, None, 1e-6, torch.float32), test_utils=checks)
        check(norm_op.backward, (rows, y, rows, gate, bias, None, ones), test_utils=checks)
    check(gated_linear_op.forward, (rows, rows, rows), test_utils=checks)
    check(gated_linear_op.backward, (rows[:, :9].contiguous(), rows, rows, rows), test_utils=checks)
    targets = torch.arange(9, device=DEVICE)
    check(linear_cross_entropy_op.forward, (rows, rows, targets, -100, True), test_utils=checks)
    check(linear_cross_entropy_op.backward, (ones[0], rows, rows, torch.float32), test_utils=checks)
