"""What is kept from one call to the next serves the next, wherever either runs: traced, transformed, in inference mode."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from nalaformer import Rotary, feature_map, linear_attention, use_backend
from nalaformer.attention import build
from nalaformer.attention import layer as layer_module
from nalaformer.attention.hybrid import HybridSettings, function, hybrid_attention
from nalaformer.attention.hybrid.layout import Layout
from nalaformer.feature_maps import norm_aware
from nalaformer.ops import kept_tensors
from nalaformer.ops.backend import INTERPRETING, TRITON_FOUND, why_not_on
from nalaformer.ops.kept_tensors import is_ordinary, kept

CPU = torch.device("cpu")


def under_fake_tensors(call: Callable[[Tensor], object], x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call(mode.from_tensor(x))


def under_strict_fake_tensors(call: Callable[[Tensor], object], x: Tensor) -> None:
    with FakeTensorMode() as mode:
        call(mode.from_tensor(x))


def under_make_fx(call: Callable[[Tensor], object], x: Tensor) -> None:
    make_fx(call, tracing_mode="fake")(x)


def under_inference_mode(call: Callable[[Tensor], object], x: Tensor) -> None:
    with torch.inference_mode():
        call(x)


def under_functional_grad(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    torch.func.grad(lambda x: call(x).sum())(x)


def under_vmap(call: Callable[[Tensor], object], x: Tensor) -> None:
    torch.vmap(call)(x[None])


def under_functionalize(call: Callable[[Tensor], object], x: Tensor) -> None:
    torch.func.functionalize(call)(x)


ENVIRONMENTS = {
    name.removeprefix("under_"): function for name, function in list(globals().items()) if name.startswith("under_")
}


@pytest.fixture(params=ENVIRONMENTS)
def environment(request: pytest.FixtureRequest) -> Callable[..., None]:
    return ENVIRONMENTS[request.param]


def test_what_is_made_elsewhere_is_not_kept_and_what_is_kept_is_not_used_there(environment):
    """The rule itself: the sum of a tensor of the call and a kept one, before and after a call of the ordinary kind."""
    made = []

    def make(size: int, *, device: torch.device) -> Tensor:
        made.append(torch.ones(size, device=device))
        return made[-1]

    row = kept(make, maxsize=4)
    x = torch.randn(3)

    def call(x: Tensor) -> Tensor:
        return x * row(3, device=CPU)

    environment(call, x)
    weight = x.clone().requires_grad_()
    out = call(weight)
    assert is_ordinary(out)
    assert not out.is_inference()
    # saved for the backward pass
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], torch.ones(3))
    count = len(made)
    assert torch.equal(call(x), x)
    assert len(made) == count, "an ordinary call keeps what it made"
    environment(call, x)


@pytest.fixture(params=["fake_tensors", "inference_mode"])
def somewhere_else(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Where a layer with parameters of its own can be called."""
    return ENVIRONMENTS[request.param]


@pytest.fixture(params=[False, True], ids=["elsewhere first", "ordinary first"])
def is_ordinary_first(request: pytest.FixtureRequest) -> bool:
    return request.param


def check(call: Callable[[Tensor], Tensor], x: Tensor, somewhere_else: Callable[..., None], is_ordinary_first: bool) -> Tensor:
    """The output of an ordinary call with gradients, after and before one elsewhere."""
    if is_ordinary_first:
        call(x)
    somewhere_else(call, x)
    out = call(x.clone().requires_grad_())
    assert is_ordinary(out)
    out.sum().backward()
    return out.detach()


@pytest.mark.parametrize("method", ["nalaformer", "polaformerpp", "softmax"])
def test_a_layer_with_positions(method, somewhere_else, is_ordinary_first, monkeypatch):
    monkeypatch.setattr(layer_module, "cached_rotary", kept(Rotary.grid, maxsize=4))
    layer = build(method, dim=16, num_heads=2, position="rotary")
    x = torch.randn(2, 12, 16)
    out = check(lambda x: layer(x, (3, 4)), x, somewhere_else, is_ordinary_first)
    monkeypatch.setattr(layer_module, "cached_rotary", Rotary.grid)
    assert torch.equal(out, layer(x, (3, 4)))


def test_hybrid_attention(somewhere_else, is_ordinary_first, monkeypatch):
    monkeypatch.setattr(function, "cached_layout", kept(Layout, maxsize=4))
    split = feature_map("split", num_heads=2, head_dim=4)
    settings = HybridSettings(chunk_size=4, salient_per_chunk=1)

    def call(x: Tensor) -> Tensor:
        return hybrid_attention(x, x, x, feature_map=split, settings=settings)

    x = torch.randn(2, 11, 2, 4)
    out = check(call, x, somewhere_else, is_ordinary_first)
    monkeypatch.setattr(function, "cached_layout", Layout)
    assert torch.equal(out, call(x))


@pytest.mark.skipif(not (TRITON_FOUND and INTERPRETING), reason="runs the kernels on a CPU")
def test_kernels_train_on_positions_and_powers_that_inference_used_first(monkeypatch):
    monkeypatch.setattr(norm_aware, "cached_spec", kept(norm_aware.build_fixed_spec, maxsize=4))
    mapped, rotary = feature_map("norm_aware", num_heads=2, head_dim=4), Rotary.grid(2, 3, 4)

    def call(x: Tensor) -> Tensor:
        with use_backend("triton"):
            return linear_attention(x, x, x, feature_map=mapped, rotary=rotary)

    x = torch.randn(1, 6, 2, 4)
    out = check(call, x, under_inference_mode, is_ordinary_first=False)
    assert (out - linear_attention(x, x, x, feature_map=mapped, rotary=rotary)).abs().max() < 1e-5


@pytest.mark.skipif(not (TRITON_FOUND and INTERPRETING), reason="runs the kernels on a CPU")
@pytest.mark.parametrize("mode", ["fake", "real", "symbolic", "FakeTensorMode"])
def test_kernels_leave_calls_that_are_traced_to_plain_torch(mode):
    x = torch.randn(1, 6, 2, 4)
    asked = []

    def call(x: Tensor) -> Tensor:
        asked.append(why_not_on(x))
        return 2 * x

    with use_backend("triton"):
        assert why_not_on(x) is None
        if mode == "FakeTensorMode":
            under_strict_fake_tensors(call, x)
        else:
            make_fx(call, tracing_mode=mode)(x)
    assert asked == ["FakeTensorMode and make_fx follow plain torch alone"]


def test_tables_made_while_traced_are_not_kept():
    rotary = Rotary.grid(2, 3, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not is_ordinary(rotary.tables()[0])
    assert torch.equal(rotary.tables()[0], rotary.cos_sin(torch.float32)[0])
    assert rotary.tables()[0] is rotary.tables()[0]


def test_a_captured_graph_uses_what_is_kept_and_keeps_nothing(monkeypatch):
    """What a graph computes has no value before it runs; what was there before has."""
    made = []

    def make(size: int, *, device: torch.device) -> Tensor:
        made.append(torch.ones(size, device=device))
        return made[-1]

    row, rotary, other = kept(make, maxsize=4), Rotary.grid(2, 3, 4), Rotary.grid(2, 3, 4)
    before, table = row(3, device=CPU), rotary.tables()[0]
    with monkeypatch.context() as capture:
        capture.setattr(kept_tensors, "is_captured", lambda device: True)
        capture.setattr("nalaformer.ops.rotary.is_captured", lambda device: True)
        assert row(3, device=CPU) is before
        assert rotary.tables()[0] is table
        passing, passing_table = row(2, device=CPU), other.tables()[0]
    assert row(2, device=CPU) is not passing
    assert other.tables()[0] is not passing_table


def test_only_the_last_results_are_kept():
    made = []

    def make(size: int, *, device: torch.device) -> int:
        made.append(size)
        return size

    row = kept(make, maxsize=2)
    for size in (1, 2, 2, 3, 1):
        row(size, device=CPU)
    assert made == [1, 2, 3, 1]
