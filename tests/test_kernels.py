"""The fused kernels against the float64 definition: small odd shapes, forward and backward.

In Triton's interpreter on a CPU; with TRITON_INTERPRET=0 the same tests run compiled, on a GPU.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nalaformer
from nalaformer import Rotary
from nalaformer.ops.backend import INTERPRETING

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")

DEVICE = "cpu" if INTERPRETING else "cuda"
MAPS = {
    "relu": {},
    "elu": {},
    "split": {},
    "norm_aware": {},
    "norm_aware cosine": {"direction": "cosine"},
    "norm_aware learnable": {"learnable": True},
    "norm_aware mild": {"powers": "mild"},
    "polarity": {},
    "polarity_exp": {},
    "focused head": {"norm_over": "head"},
    "reflection pairs": {"cross_head": False},
    # a matrix product first, the rest in registers
    "hedgehog": {},
    "norm_preserving": {},
    # rows of all heads together: written out before attention unless there is one head
    "focused": {},
    "reflection": {},
    "reflection across": {"blockwise": False},
    # parameters of each sample: written out
    "reflection variance": {"variance": True},
    "reflection variance pairs": {"variance": True, "cross_head": False},
}


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-6)).item()


def outcome(backend, name, dtype, tensors, upstream, *, heads, head_dim, **arguments):
    """Output and all gradients, and the parameters that were used."""
    torch.manual_seed(0)
    feature_map = nalaformer.feature_map(name.split()[0], num_heads=heads, head_dim=head_dim, **MAPS[name])
    feature_map = feature_map.to(DEVICE, torch.float64 if dtype == torch.float64 else torch.float32)
    for parameter in feature_map.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape).to(parameter)
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    with nalaformer.use_backend(backend):
        out = nalaformer.linear_attention(*inputs, feature_map=feature_map, **arguments)
    wanted = [*inputs, *feature_map.parameters()]
    return [out, *torch.autograd.grad(out, wanted, upstream.to(out.dtype), allow_unused=True, materialize_grads=True)]


# compiled, logarithms and powers are the GPU's own, which miss by 2^-22 where rounding misses by 2^-24
BAR, OF_PLAIN = (2e-6, 2) if INTERPRETING else (4e-6, 4)


def check(name, tensors, *, heads, head_dim, bar=BAR, **arguments):
    """Within the bar of float64, or within some times what plain float32 misses it by: some sums over tokens cancel.

    The most that it misses, of inputs that differ by a rounding: a single number may be right by luck.
    """
    upstream = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1]).to(DEVICE)

    def errors(backend, inputs):
        exact, found = (
            outcome(backend, name, dtype, inputs, upstream, heads=heads, head_dim=head_dim, **arguments)
            for backend, dtype in (("reference", torch.float64), (backend, torch.float32))
        )
        return [relative_error(x, y) for x, y in zip(found, exact, strict=True)]

    alike = [[x * (1 + 2**-23 * torch.randn_like(x)) for x in tensors] for _ in range(2)]
    plain = [errors("reference", inputs) for inputs in (tensors, *alike)]
    for ours, *near in zip(errors("triton", tensors), *plain, strict=True):
        assert ours < bar + OF_PLAIN * max(near)


def make(*shapes, scale=1.0):
    return [(torch.randn(shape) * scale).to(DEVICE) for shape in shapes]


@pytest.fixture(params=MAPS)
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory that nothing wrote is NaN: a missing store fails."""


def test_short_inputs_in_one_launch(name):
    check(name, make(*[(2, 37, 2, 8)] * 3), heads=2, head_dim=8)


def test_long_inputs_are_split_over_programs(name, monkeypatch):
    from nalaformer.ops.kernels import launch, library

    # what counts as long is a setting, and the interpreter is slow
    monkeypatch.setattr(launch, "WHOLE_TOKENS", 100)
    monkeypatch.setattr(launch, "SPREAD", dict.fromkeys(launch.SPREAD, (2, 1)))
    monkeypatch.setattr(library, "_calls", {})
    # three programs: two tiles, two tiles, and a part of one
    check(name, make(*[(1, 150, 1, 8)] * 3), heads=1, head_dim=8)


def test_head_and_value_sizes_that_are_no_powers_of_two(name):
    check(name, make((2, 50, 2, 20), (2, 23, 2, 20), (2, 23, 2, 12)), heads=2, head_dim=20)


def test_rotary_and_key_mask(name):
    rotary = Rotary.sequence(37, 8, device=DEVICE), Rotary.sequence(21, 8, device=DEVICE)
    visible = torch.rand(2, 21, device=DEVICE) > 0.3
    check(name, make((2, 37, 2, 8), (2, 21, 2, 8), (2, 21, 2, 8)), heads=2, head_dim=8, rotary=rotary, key_mask=visible)


def test_packed_sequences_with_positions(name):
    bounds = torch.tensor([0, 5, 5, 40], device=DEVICE)
    check(name, make(*[(40, 2, 8)] * 3), heads=2, head_dim=8, cu_seqlens=bounds, rotary=Rotary.packed(bounds, 8))


# a reflection across heads belongs to the heads that it was made for
@pytest.mark.parametrize("name", [name for name in MAPS if not name.startswith("reflection") or name == "reflection pairs"])
def test_grouped_heads(name):
    check(name, make((2, 21, 4, 8), (2, 21, 2, 8), (2, 21, 2, 8)), heads=2, head_dim=8)


def test_grouped_heads_with_a_map_for_each_query_head(name):
    check(name, make((2, 21, 4, 8), (2, 21, 2, 8), (2, 21, 2, 8)), heads=4, head_dim=8)


def test_large_inputs(name):
    # powers and exponentials of these leave every float format: the scale of keys and queries must cancel
    check(name, make(*[(2, 37, 2, 8)] * 3, scale=30.0), heads=2, head_dim=8, bar=2e-5)


@pytest.mark.parametrize("name", ["polarity", "polarity_exp", "norm_aware", "split"])
def test_rotary_over_both_halves_of_the_features(name):
    check(name, make(*[(2, 35, 2, 8)] * 3), heads=2, head_dim=8, rotary=Rotary.grid(5, 7, 16, device=DEVICE))


@pytest.mark.parametrize("name", ["relu", "norm_aware", "focused"])
def test_normalised_rotary(name):
    check(name, make(*[(2, 35, 2, 8)] * 3), heads=2, head_dim=8, rotary=Rotary.grid(5, 7, 8, normalised=True, device=DEVICE))


def test_views_of_one_projection_are_read_in_place(name):
    check(name, torch.randn(2, 21, 3, 2, 8, device=DEVICE).unbind(2), heads=2, head_dim=8)


@pytest.mark.parametrize(
    "name",
    ["norm_aware", "norm_aware cosine", "polarity", "polarity_exp", "focused", "focused head", "norm_preserving", "reflection"],
)
def test_degenerate_tokens_stay_finite(name):
    q, k, v = make(*[(2, 21, 2, 8)] * 3)
    q[0, 3], k[0, 5], q[1] = 0, 0, q[1] * 1e-20
    visible = torch.ones(2, 21, dtype=torch.bool, device=DEVICE)
    visible[1] = False
    v[1], k[1] = torch.nan, torch.nan
    out, *gradients = outcome(
        "triton", name, torch.float32, (q, k, v), torch.ones(2, 21, 2, 8, device=DEVICE), heads=2, head_dim=8, key_mask=visible
    )
    assert (out[1] == 0).all()
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("name", ["norm_aware", "focused", "hedgehog"])
def test_tokens_cut_out_of_longer_samples_are_read_in_place(name):
    check(name, [x[:, 3:20] for x in make(*[(2, 25, 2, 8)] * 3)], heads=2, head_dim=8)


def test_products_in_float32_do_not_slow_the_kernels_down():
    from nalaformer.ops.kernels.library import types_of

    product, value = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    assert types_of("softmax", product, product, value) == (torch.bfloat16, torch.bfloat16)
    assert types_of("relu", product, product, value) == (torch.float32, torch.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["norm_aware", "hedgehog", "norm_preserving", "focused", "focused head", "reflection"])
def test_float16_stays_near_float64(name, causal):
    tensors = [x.half() for x in make(*[(2, 37, 2, 16)] * 3)]
    upstream = torch.randn(2, 37, 2, 16, device=DEVICE).half()
    arguments = {"heads": 2, "head_dim": 16, "causal": causal}
    exact = outcome("reference", name, torch.float64, tensors, upstream, **arguments)
    ours = outcome("triton", name, torch.float16, tensors, upstream, **arguments)
    assert ours[0].dtype == torch.float16
    # gradients pass through one rounding more where features are written out
    for x, y, bar in zip(ours[:4], exact[:4], (5e-4, 1e-3, 1e-3, 5e-4), strict=True):
        assert relative_error(x, y) < bar


if INTERPRETING:

    def check_bfloat16(name, tensors, upstream, **arguments):
        exact, plain, ours = (
            outcome(backend, name, dtype, tensors, upstream, **arguments)
            for backend, dtype in (("reference", torch.float64), ("reference", torch.bfloat16), ("triton", torch.bfloat16))
        )
        # gradients of parameters are sums over all tokens that may cancel, and are left to float32
        for x, y, z in zip(ours[:4], exact[:4], plain[:4], strict=True):
            assert relative_error(x, y) < relative_error(z, y) + 2**-8

    @pytest.mark.parametrize("with_rotary", [False, True])
    def test_products_in_place_of_conversions(name, with_rotary, monkeypatch):
        """What bfloat16 takes, in a type that shows more of its digits."""
        from nalaformer.ops.kernels import bidirectional, bidirectional_gradient, launch

        asked = []
        for module in (bidirectional, bidirectional_gradient):
            monkeypatch.setattr(module, "is_lean", lambda DOT, BD, BV: asked.append(BD) or True)
        monkeypatch.setattr(launch, "WHOLE_TOKENS", 16)
        tensors = make((2, 50, 2, 12), (2, 23, 2, 12), (2, 23, 2, 20))
        arguments = {"key_mask": torch.rand(2, 23) > 0.3}
        if with_rotary:
            arguments["rotary"] = Rotary.sequence(50, 12), Rotary.sequence(23, 12)
        # a zero query fades into one that favours no channel
        tensors[0][0, 3] = 0
        # a row's factor goes into the exponent of its features, and the 2^30 of norm-aware keys takes five bits there
        check(name, tensors, heads=2, head_dim=12, bar=1e-5, **arguments)
        assert asked

    @pytest.mark.parametrize("case", ["one launch", "split", "split with rotary", "values with a mean"])
    @pytest.mark.parametrize("name", [name for name in MAPS if "variance" not in name])
    def test_bfloat16_stays_near_float64(name, case, monkeypatch):
        """Compiled, tests/test_gpu.py sees the same."""
        from bfloat16_in_the_interpreter import teach_bfloat16
        from nalaformer.ops.kernels import launch

        teach_bfloat16(monkeypatch)
        monkeypatch.setattr(launch, "WHOLE_TOKENS", 100 if case == "one launch" else 16)
        tensors = [x.bfloat16() for x in make((2, 50, 2, 28), (2, 43, 2, 28), (2, 43, 2, 20))]
        if case == "values with a mean":
            # the output has few digits beside it, and gradients of queries do not contain it
            tensors[2] += 10
        # a zero query fades into one that favours no channel
        tensors[0][0, 3] = 0
        arguments = {"heads": 2, "head_dim": 28, "key_mask": torch.rand(2, 43) > 0.3}
        if case == "split with rotary":
            arguments["rotary"] = Rotary.sequence(50, 28), Rotary.sequence(43, 28)
        check_bfloat16(name, tensors, torch.randn(2, 50, 2, 20).bfloat16(), **arguments)

    @pytest.mark.parametrize("case", ["plain", "rotary", "values with a mean"])
    @pytest.mark.parametrize("name", ["relu", "norm_aware", "norm_aware cosine", "focused head", "hedgehog"])
    def test_causal_bfloat16_stays_near_float64(name, case, monkeypatch):
        from bfloat16_in_the_interpreter import teach_bfloat16
        from nalaformer.ops.kernels import launch

        teach_bfloat16(monkeypatch)
        # three stretches
        monkeypatch.setattr(launch, "SPREAD", dict.fromkeys(launch.SPREAD, (64, 1)))
        tensors = [x.bfloat16() for x in make((1, 150, 2, 28), (1, 150, 1, 28), (1, 150, 1, 20))]
        arguments = {"heads": 2, "head_dim": 28, "causal": True, "key_mask": torch.rand(1, 150) > 0.3}
        if case == "rotary":
            arguments["rotary"] = Rotary.sequence(150, 28)
        if case == "values with a mean":
            tensors[2] += 10
        check_bfloat16(name, tensors, torch.randn(1, 150, 2, 20).bfloat16(), **arguments)

    @pytest.mark.parametrize(
        ("calls", "kernels"),
        [
            ("bidirectional", "dk_kernel dq_kernel dsums_kernel merge_kernel output_kernel state_kernel whole_kernel"),
            (
                "causal",
                "causal_dk_kernel causal_dq_kernel causal_dv_kernel causal_kernel dsums_kernel prefix_kernel state_kernel",
            ),
        ],
    )
    def test_kernels_compile_for_a_gpu_that_is_not_here(calls, kernels, tmp_path):
        script = Path(__file__).with_name("compile_kernels.py")
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
        run = subprocess.run([sys.executable, script, calls], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == kernels.split()


@pytest.mark.parametrize("name", ["focused", "reflection"])
def test_rows_of_one_head_stay_in_registers(name, monkeypatch):
    from nalaformer.ops.kernels import over_heads

    monkeypatch.setattr(over_heads, "features", None)
    check(name, make(*[(2, 21, 1, 8)] * 3), heads=1, head_dim=8)


@pytest.mark.parametrize("tokens", [3, 30])
def test_rows_of_many_heads_are_mapped_in_several_programs(tokens, monkeypatch):
    from nalaformer.ops.kernels import over_heads

    # two programs for all tokens: each walks over several tiles, the last of them not full
    monkeypatch.setattr(over_heads, "TILE_CHANNELS", 256)
    monkeypatch.setattr(over_heads, "PROGRAMS_PER_PROCESSOR", 1)
    for name in ("focused", "reflection"):
        check(name, make(*[(2, tokens, 5, 12)] * 3), heads=5, head_dim=12)


def test_reflections_across_heads_refuse_other_heads():
    q, k, v = make((1, 9, 4, 8), *[(1, 9, 2, 8)] * 2)
    feature_map = nalaformer.feature_map("reflection", num_heads=2, head_dim=8).to(DEVICE)
    with nalaformer.use_backend("triton"), pytest.raises(ValueError, match=r"made for \(2\), got 4; use cross_head=False"):
        nalaformer.linear_attention(q, k, v, feature_map=feature_map)


@pytest.mark.parametrize("longest_whole", [2048, 10])
def test_result_does_not_depend_on_tiles(longest_whole, monkeypatch):
    from nalaformer.ops.kernels import launch, library

    tokens = 150
    monkeypatch.setattr(launch, "WHOLE_TOKENS", longest_whole)
    tensors = make(*[(1, tokens, 1, 8)] * 3)
    arguments = {"heads": 1, "head_dim": 8}
    first = outcome("triton", "norm_aware", torch.float32, tensors, torch.ones(1, tokens, 1, 8, device=DEVICE), **arguments)
    monkeypatch.setattr(launch, "TILES", {kernel: {256: launch.Tile(128, 4, 1)} for kernel in launch.TILES})
    monkeypatch.setattr(library, "_calls", {})
    second = outcome("triton", "norm_aware", torch.float32, tensors, torch.ones(1, tokens, 1, 8, device=DEVICE), **arguments)
    for x, y in zip(first, second, strict=True):
        assert relative_error(x, y.double()) < 1e-6


@pytest.mark.parametrize("name", ["norm_aware", "polarity"])
def test_operator_keeps_the_contract_of_torch_library(name):
    from nalaformer.ops.kernels import library

    spec = nalaformer.feature_map(name, num_heads=2, head_dim=8).to(DEVICE).kernel_spec(torch.device(DEVICE))
    q, k, v = (x.requires_grad_() for x in make(*[(1, 9, 2, 8)] * 3))
    settings = (0, spec.name, spec.parts, spec.parts if name == "polarity" else 1, 1.0, 0.0, 1e-6)
    flags = (spec.is_guarded, spec.is_cube, True)
    arguments = (q, k, v, spec.parameters.detach(), None, None, None, None, None, None, *settings, *flags)
    # aot_dispatch repeats what tests/test_export.py asks of torch.compile, minutes long in the interpreter
    torch.library.opcheck(
        library.bidirectional, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("name", ["focused", "reflection"])
def test_map_over_heads_keeps_the_contract_of_torch_library(name):
    from nalaformer.ops.kernels.over_heads import map_over_heads

    (x,) = make((1, 9, 2, 8))
    rows = torch.rand(1, 16 if name == "focused" else 32, device=DEVICE, requires_grad=True)
    torch.library.opcheck(
        map_over_heads,
        (x.requires_grad_(), rows, name, 3.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


# keys without a bound need a scale per row, which the causal kernels lack; a token variance is not causal
CAUSAL_MAPS = [name for name in MAPS if not name.startswith("polarity") and "variance" not in name]


@pytest.fixture(params=[False, True], ids=["one stretch", "two stretches"])
def stretches(request, monkeypatch):
    """All tokens in one stretch of tokens, or over two programs: 75 tokens, or 37 in the smaller tiles of rotary."""
    from nalaformer.ops.kernels import launch, library

    spread = (64, 1) if request.param else (1, 100)
    monkeypatch.setattr(launch, "SPREAD", dict.fromkeys(launch.SPREAD, spread))
    # compiled launches remember how the tokens were spread
    monkeypatch.setattr(library, "_calls", {})


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_causal_attention(name, stretches):
    check(name, make(*[(1, 75, 2, 8)] * 3), heads=2, head_dim=8, causal=True)


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_causal_attention_with_rotary_and_key_mask(name, stretches):
    arguments = {"rotary": Rotary.sequence(37, 8, device=DEVICE), "key_mask": torch.rand(2, 37, device=DEVICE) > 0.3}
    check(name, make(*[(2, 37, 2, 8)] * 3), heads=2, head_dim=8, causal=True, **arguments)


def test_causal_attention_with_other_positions_of_keys(stretches):
    # three stretches where others have two: the last one follows on the sums of both before it
    rotary = Rotary.sequence(75, 8, start=3, device=DEVICE), Rotary.sequence(75, 8, device=DEVICE)
    check("norm_aware", make(*[(1, 75, 1, 8)] * 3), heads=1, head_dim=8, causal=True, rotary=rotary)


@pytest.mark.parametrize("name", ["relu", "norm_aware", "norm_aware mild", "hedgehog"])
def test_causal_attention_of_packed_sequences_with_grouped_heads(name, stretches):
    bounds = torch.tensor([0, 5, 5, 42], device=DEVICE)
    tensors = make((42, 4, 20), (42, 2, 20), (42, 2, 12))
    check(name, tensors, heads=4, head_dim=20, causal=True, cu_seqlens=bounds, rotary=Rotary.packed(bounds, 20))


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_causal_outputs_ignore_later_tokens_whatever_they_hold(spoilt, stretches):
    tensors = make(*[(1, 75, 1, 8)] * 3)
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=8)
    with nalaformer.use_backend("triton"):
        expected = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=True)
        for x in tensors:
            x[:, 41] = spoilt
        found = nalaformer.linear_attention(*tensors, feature_map=feature_map, causal=True)
    assert torch.equal(found[:, :41], expected[:, :41])
    assert not found[:, 41:].isfinite().any()


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_recurrent_pieces_and_steps_are_causal_attention(name, stretches):
    torch.manual_seed(0)
    feature_map = nalaformer.feature_map(name.split()[0], num_heads=4, head_dim=8, **MAPS[name]).to(DEVICE)
    kv_heads = 4 if feature_map.heads_have_own_keys else 2
    q, k, v = make((2, 44, 4, 8), (2, 44, kv_heads, 8), (2, 44, kv_heads, 8))
    rotary = Rotary.sequence(44, 8, device=DEVICE)
    state, outputs = None, []
    with nalaformer.use_backend("reference"), torch.no_grad():
        expected = nalaformer.linear_attention(
            *(x.double() for x in (q, k, v)), feature_map=feature_map.double(), causal=True, rotary=rotary
        )
    feature_map = feature_map.float()
    with nalaformer.use_backend("triton"), torch.no_grad():
        for piece in (slice(0, 7), slice(7, 42)):
            tokens = (x[:, piece] for x in (q, k, v))
            out, state = nalaformer.recurrent_linear_attention(
                *tokens, feature_map=feature_map, state=state, rotary=rotary.tokens(piece.start, piece.stop)
            )
            outputs.append(out)
        for t in range(42, 44):
            tokens = (x[:, t : t + 1] for x in (q, k, v))
            outputs.append(nalaformer.recurrent_step_(state, *tokens, feature_map=feature_map, rotary=rotary.tokens(t, t + 1)))
    assert relative_error(torch.cat(outputs, dim=1), expected) < (1e-4 if "cosine" in name else 2e-6)
    assert state.count.tolist() == [44, 44]


@pytest.mark.parametrize("name", ["polarity", "polarity_exp"])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_steps_rescale_the_state_when_a_larger_key_comes(name, scale):
    feature_map = nalaformer.feature_map(name, num_heads=2, head_dim=8).to(DEVICE)
    q, k, v = make(*[(2, 6, 2, 8)] * 3)
    k = k * torch.linspace(0.1, scale, 6, device=DEVICE)[:, None, None]
    state = nalaformer.LinearState.empty(2, 2, 16, 8, device=DEVICE)
    with torch.no_grad():
        expected = nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=True)
        with nalaformer.use_backend("triton"):
            steps = [
                nalaformer.recurrent_step_(state, *(x[:, t : t + 1] for x in (q, k, v)), feature_map=feature_map)
                for t in range(6)
            ]
    assert relative_error(torch.cat(steps, dim=1), expected.double()) < 1e-5


def test_gradients_flow_through_the_state(stretches):
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8)
    tensors = make(*[(2, 75, 2, 8)] * 3)
    upstream = torch.randn(2, 75, 2, 8, device=DEVICE)

    def gradients(backend, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
        with nalaformer.use_backend(backend):
            first, state = nalaformer.recurrent_linear_attention(*(x[:, :40] for x in inputs), feature_map=feature_map)
            second, _ = nalaformer.recurrent_linear_attention(
                *(x[:, 40:] for x in inputs), feature_map=feature_map, state=state
            )
        return torch.autograd.grad(torch.cat((first, second), dim=1), inputs, upstream.to(dtype))

    for ours, exact in zip(gradients("triton", torch.float32), gradients("chunked", torch.float64), strict=True):
        assert relative_error(ours, exact) < 2e-6


def test_causal_operator_keeps_the_contract_of_torch_library():
    from nalaformer.ops.kernels import causal_library
    from nalaformer.ops.kernels.step import step

    parameters = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=8).kernel_spec(torch.device(DEVICE)).parameters
    q, k, v = (x.requires_grad_() for x in make(*[(1, 9, 2, 8)] * 3))
    settings = (0, "norm_aware_split", 2, 1.0, 0.0, 1e-6, True, True, True)
    arguments = (q, k, v, parameters, *[None] * 7, *settings)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(causal_library.causal, arguments, test_utils=checks)
    state = nalaformer.LinearState.empty(1, 2, 16, 8, device=DEVICE)
    token = [x[:, :1].detach() for x in (q, k, v)]
    settings = ("norm_aware_split", 2, 1, 1.0, 0.0, 1e-6, 30.0, False, True)
    torch.library.opcheck(step, (*token, parameters, *[None] * 4, *state.tensors().values(), *settings), test_utils=checks[::2])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"causal": True, "name": "polarity"}, "a scale per row in causal attention"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 160}, "more than 128 channels"),
        ({"head_dim": 80}, "more than 64 channels do not fit on chip unless"),
        (
            {"head_dim": 80, "causal": True},
            "unless all are bfloat16, were seen right with these maps alone: norm_aware",
        ),
        ({"samples": 32_768}, "32768 samples of 2 heads are more than a grid holds, 65,535"),
    ],
)
def test_explicit_choice_of_the_kernels_says_why_it_cannot_serve(change, reason):
    head_dim, dtype = change.get("head_dim", 8), change.get("dtype", torch.float32)
    samples = change.get("samples", 1)
    q, k, v = (x.to(dtype).expand(samples, -1, -1, -1) for x in make(*[(1, 9, 2, head_dim)] * 3))
    feature_map = nalaformer.feature_map(change.get("name", "relu"), num_heads=2, head_dim=head_dim)
    with nalaformer.use_backend("triton"), pytest.raises(ValueError, match=f"triton backend cannot serve.*{reason}"):
        nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=change.get("causal", False))


def test_positions_may_be_a_transposed_view():
    positions = torch.randint(0, 50, (37, 2, 1), device=DEVICE).transpose(0, 1)
    rotary = replace(Rotary.sequence(37, 8, device=DEVICE), positions=positions.double())
    check("norm_aware", make(*[(2, 37, 2, 8)] * 3), heads=2, head_dim=8, rotary=rotary)


def test_a_step_in_a_large_head_uses_the_kernel(monkeypatch):
    from nalaformer.ops import kernels

    calls = []
    monkeypatch.setattr(kernels, "step_", lambda state, q, k, v, **given: calls.append(1) or q)
    q, k, v = make(*[(1, 1, 2, 80)] * 3)
    feature_map = nalaformer.feature_map("relu", num_heads=2, head_dim=80)
    with nalaformer.use_backend("triton"):
        nalaformer.recurrent_step_(nalaformer.LinearState.empty(1, 2, 80, 80, device=DEVICE), q, k, v, feature_map=feature_map)
    assert calls


def test_features_too_wide_for_the_chip_are_refused_with_the_reason():
    # 96 channels, both signs, and the pair lengths of a normalised rotary: 288 features
    q, k, v = make(*[(1, 9, 2, 96)] * 3)
    feature_map = nalaformer.feature_map("split", num_heads=2, head_dim=96).to(DEVICE)
    rotary = Rotary.sequence(9, 96, normalised=True, device=DEVICE)
    with nalaformer.use_backend("triton"), pytest.raises(ValueError, match=r"cannot serve.*288 features"):
        nalaformer.linear_attention(q, k, v, feature_map=feature_map, rotary=rotary)


def test_sums_of_stretches_are_merged_by_group_and_by_scale():
    from nalaformer.ops.kernels.split_sums import merge, merge_scaled

    # more stretches than a program reads at once, and more numbers than one holds
    (sums,) = make((21, 6, 2, 9, 10))
    assert relative_error(merge({}, sums, group=3), sums.double().unflatten(1, (2, 3)).sum((0, 2))) < 1e-6
    scale = torch.rand(21, 6, device=DEVICE) * 8
    weight = torch.exp2(scale - scale.amax(0)).double()[..., None, None, None].expand(sums.shape).clone()
    weight[..., -1] = 1  # the number of keys is not scaled
    total, largest = merge_scaled({}, sums, scale)
    assert relative_error(total, (sums * weight).sum(0)) < 1e-6
    torch.testing.assert_close(largest, scale.amax(0), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_layer_keeps_the_kernels(causal):
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=16)
    graphs = []

    def attend(x):
        return nalaformer.linear_attention(x, x, x, feature_map=feature_map, causal=causal)

    def look(graph, inputs):
        graphs.append(graph)
        return graph

    with nalaformer.use_backend("triton"):
        torch.compile(attend, backend=look, fullgraph=True)(torch.randn(1, 9, 2, 16, device=DEVICE))
    names = [str(node.target) for node in graphs[0].graph.nodes]
    # a plain formula in the graph would be right, and slow
    assert any(name.startswith("nalaformer.causal" if causal else "nalaformer.bidirectional") for name in names)


@pytest.fixture
def call(monkeypatch):
    """What the launches for some input share."""
    from nalaformer.ops.kernels import library

    monkeypatch.setattr(library, "_calls", {})
    with nalaformer.use_backend("triton"):
        relu = nalaformer.feature_map("relu", num_heads=1, head_dim=8)
        nalaformer.linear_attention(*make(*[(1, 5, 1, 8)] * 3), feature_map=relu)
    (made,) = library._calls.values()
    return made


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_tiles_follow_the_wider_of_head_and_values_and_what_the_chip_holds(call, reads_ahead, monkeypatch):
    from nalaformer.ops.kernels import launch

    monkeypatch.setattr(launch, "reads_ahead", lambda device: reads_ahead)
    for value_dim, size in ((8, 64), (100, 128)):
        chosen, entry = replace(call, operand=torch.bfloat16, value_dim=value_dim).tile("dk"), launch.TILES["dk"][size]
        assert chosen == (entry if reads_ahead else replace(entry, stages=1))


def test_programs_come_in_full_rounds(call, monkeypatch):
    from nalaformer.ops.kernels import launch

    monkeypatch.setattr(launch, "SPREAD", dict.fromkeys(launch.SPREAD, (2, 2)))
    monkeypatch.setattr(launch, "processors", lambda device: 2)
    tile = call.tile("output").tokens
    # four programs at once and six rows: halves of them in three full rounds, not whole ones in two of which one is half empty
    six = replace(call, samples=6, launches={})
    assert six.splits("output", 49 * tile, 1) == (2, 25 * tile)
    # rows that fill a round are not split, nor are tokens that make a step too few
    assert replace(call, samples=4, launches={}).splits("output", 49 * tile, 1) == (1, 49 * tile)
    assert replace(call, launches={}).splits("output", 3 * tile, 1) == (1, 3 * tile)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["split", "cosine"])
def test_a_zero_query_has_no_side_to_grow_to(direction, causal):
    # its power is 1, with which a slope at zero does not vanish by itself
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=8, direction=direction, lambda_=1.0, tau=1.0).to(
        DEVICE
    )
    q, k, v, upstream = make(*[(1, 21, 1, 8)] * 4)
    q[0, 3] = 0

    def gradient(backend, dtype):
        own = q.to(dtype).requires_grad_()
        with nalaformer.use_backend(backend):
            out = nalaformer.linear_attention(own, k.to(dtype), v.to(dtype), feature_map=feature_map, causal=causal)
        return torch.autograd.grad(out, own, upstream.to(dtype))[0]

    assert relative_error(gradient("triton", torch.float32), gradient("reference", torch.float64)) < 1e-5
