"""The fused kernels of hybrid attention against plain torch in float64: small odd shapes, forward and backward.

In Triton's interpreter on a CPU; with TRITON_INTERPRET=0 the same tests run compiled, on a GPU. Plain torch is itself held
against the definition, in tests/test_hybrid_attention.py.
"""

import pytest
import torch

import nalaformer
from nalaformer.attention.hybrid import HybridSettings, function, fused, hybrid_settings, recurrent_hybrid_attention
from nalaformer.ops.backend import INTERPRETING

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")

DEVICE = "cpu" if INTERPRETING else "cuda"
SMALL = HybridSettings(chunk_size=8, salient_per_chunk=2, linear_mass=6)
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory that nothing wrote is NaN: a missing store fails."""


def make(tokens, *, batch=1, heads=2, key_heads=1, head_dim=8, values=None, gate=None):
    """q, k, v and a gate of as many numbers per head, of values unless told."""
    values = values or head_dim
    gate = values if gate is None else gate
    return [
        2 * torch.randn(batch, tokens, heads, head_dim),
        2 * torch.randn(batch, tokens, key_heads, head_dim),
        torch.randn(batch, tokens, key_heads, values),
        torch.rand(batch, tokens, heads, gate),
    ]


def outcome(backend, dtype, tensors, settings, *, sizes=None, key_mask=None, name="norm_preserving"):
    """Output, the sums after it, and all gradients; in several calls if sizes are given."""
    device = DEVICE if backend == "triton" else "cpu"
    torch.manual_seed(1)
    (_, tokens, heads, head_dim), values = tensors[0].shape, tensors[2].shape[-1]
    feature_map = nalaformer.feature_map(name, num_heads=heads, head_dim=head_dim)
    upstream = torch.randn(*tensors[0].shape[:3], values).to(device)
    feature_map = feature_map.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    inputs = [x.detach().to(device, dtype).requires_grad_() for x in tensors]
    outputs, state, start = [], None, 0
    with nalaformer.use_backend(backend):
        for size in sizes or [tokens]:
            q, k, v, gate = (x[:, start : start + size] for x in inputs)
            mask = None if key_mask is None else key_mask[:, start : start + size].to(device)
            out, state = recurrent_hybrid_attention(
                q, k, v, feature_map=feature_map, settings=settings, state=state, gate=gate, key_mask=mask
            )
            outputs.append(out)
            start += size
    out = torch.cat(outputs, dim=1)
    wanted = [*inputs, *feature_map.parameters()]
    found = torch.autograd.grad(out, wanted, upstream.to(out.dtype), allow_unused=True, materialize_grads=True)
    return [x.detach().cpu() for x in (out, state.linear.state, state.linear.key_sum, *found)]


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-6)).item()


def check(tensors, settings, bar=2e-6, **arguments):
    """Within the bar of float64, or within twice what plain float32 misses it by: some sums over tokens cancel."""
    cases = (("reference", torch.float64), ("reference", torch.float32), ("triton", torch.float32))
    exact, plain, ours = (outcome(backend, dtype, tensors, settings, **arguments) for backend, dtype in cases)
    for x, y, z in zip(ours, exact, plain, strict=True):
        assert relative_error(x, y) < bar + 2 * relative_error(z, y)


def test_heads_that_share_keys_and_salient_tokens():
    check(make(37), SMALL)


def test_features_that_are_computed_outside():
    check(make(37, heads=1), SMALL, name="split")


def test_salient_tokens_for_each_query_head_and_sizes_that_are_no_powers_of_two():
    settings = HybridSettings(chunk_size=4, salient_per_chunk=1, select_per="query_head")
    check(make(19, head_dim=20, values=12), settings)


def test_tokens_that_lose_their_place():
    settings = HybridSettings(chunk_size=4, salient_per_chunk=2, max_salient=3, linear_mass=4)
    check(make(22, heads=1), settings)


def test_the_gradient_of_the_row_maximum_where_the_linear_branch_is_not_scaled_by_it():
    settings = HybridSettings(chunk_size=8, salient_per_chunk=2, merge="released", max_salient=3, linear_mass=4)
    check(make(45, heads=1, gate=1), settings)


def test_a_chunk_larger_than_a_tile():
    check(make(95, heads=1), HybridSettings(chunk_size=40, salient_per_chunk=3))


def test_a_stretch_of_chunks_after_another():
    from nalaformer.ops.kernels.hybrid.linear_op import split_groups

    assert split_groups(1, 1, 9, torch.device("cpu")) == (2, 5) or not INTERPRETING
    check(make(35, heads=1), HybridSettings(chunk_size=4, salient_per_chunk=1))


def test_gradients_of_the_store_in_one_part(monkeypatch):
    from nalaformer.ops.kernels.hybrid import exact_op

    monkeypatch.setattr(exact_op, "STORE_PROGRAMS", 0)
    check(make(29, heads=1), SMALL)


def test_result_does_not_depend_on_tiles(monkeypatch):
    from nalaformer.ops.kernels.hybrid import launch

    tensors = make(70, heads=1)
    settings = HybridSettings(chunk_size=40, salient_per_chunk=3)
    expected = outcome("triton", torch.float32, tensors, settings)
    monkeypatch.setattr(launch, "WIDE", launch.HybridTile(64, 128, 4, 1))
    # a launch that is known would keep its tiles
    launch.LAUNCHES.clear()
    found = outcome("triton", torch.float32, tensors, settings)
    launch.LAUNCHES.clear()
    for x, y in zip(found, expected, strict=True):
        # room: both are float32, and 1e-6 is eight of its units
        assert relative_error(x, y.double()) < 1e-6


@pytest.mark.parametrize("method", ["window", "softmax"])
def test_methods_without_a_branch(method):
    check(make(29, heads=1), hybrid_settings(method, chunk_size=8))


@pytest.mark.parametrize("tokens", [2, 8])
def test_nothing_leaves_the_window(tokens):
    check(make(tokens, heads=1), SMALL)


def test_a_call_goes_on_after_another_and_gradients_go_back():
    settings = HybridSettings(chunk_size=8, salient_per_chunk=2, max_salient=3)
    check(make(41, heads=1), settings, sizes=[8, 11, 1, 21])


def test_padded_samples_of_different_lengths():
    mask = torch.arange(26) >= torch.tensor([[0], [11]])
    tensors = [torch.where(mask[:, :, None, None], x, torch.nan) for x in make(26, batch=2, heads=1)]
    check(tensors, SMALL, key_mask=mask)


def test_pieces_within_a_call(monkeypatch):
    tensors, settings = make(25, heads=1), HybridSettings(chunk_size=4, salient_per_chunk=2, max_salient=3)
    # 88 numbers per token: two chunks at a time, so that one token is left for the last piece
    monkeypatch.setattr(function, "FUSED_WORKSPACE", 88 * 4 * 2)
    check(tensors, settings)


def test_rules_that_look_at_the_window_some_groups_at_a_time(monkeypatch):
    settings = HybridSettings(chunk_size=8, salient_per_chunk=2, selection="received")
    tensors = make(37, heads=1)
    expected = outcome("triton", torch.float32, tensors, settings)
    monkeypatch.setattr(function, "WORKSPACE", 8 * 16 * 2)
    for x, y in zip(outcome("triton", torch.float32, tensors, settings), expected, strict=True):
        assert torch.equal(x, y)


# features, weights and sums are bfloat16 operands too, each half a unit in the last place (2^-9) off; float16 has float32 ones
@pytest.mark.parametrize(("dtype", "factor", "more"), [(torch.bfloat16, 4, 2**-9), (torch.float16, 1.5, 1e-6)])
def test_half_precision_is_as_close_as_its_operands_allow(dtype, factor, more):
    tensors = [x.to(dtype) for x in make(37, heads=1, head_dim=16)]
    exact = outcome("reference", torch.float64, tensors, SMALL)
    plain, ours = (outcome(backend, dtype, tensors, SMALL) for backend in ("reference", "triton"))
    assert ours[0].dtype == dtype
    # room: weights and output are rounded, each by half a unit at the most, which none reaches everywhere
    assert relative_error(ours[0], exact[0]) < 2 * {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for x, y, z in zip(ours, exact, plain, strict=True):
        # room: the first part is what the roundings of operands can cost, the second what the type costs anyhow
        assert relative_error(x, y) < more + factor * relative_error(z, y)


def test_a_call_in_another_type_finds_no_launch_of_the_first():
    tensors = make(40, heads=2, key_heads=2)
    outcome("triton", torch.float16, tensors, SMALL)
    check(tensors, SMALL)


def test_gradients_of_gradients_are_refused():
    q, k, v, _ = (x.to(DEVICE).requires_grad_() for x in make(20))
    feature_map = nalaformer.feature_map("norm_preserving", num_heads=2, head_dim=8).to(DEVICE)
    with nalaformer.use_backend("triton"):
        out, _ = recurrent_hybrid_attention(q, k, v, feature_map=feature_map, settings=SMALL)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="use_backend"):
        dq.sum().backward()


def test_a_bad_token_reaches_only_itself_and_later_ones():
    tensors = make(29, heads=1)
    with torch.no_grad():
        clean = outcome_alone(tensors)
        for which, place in ((0, 12), (1, 20)):
            spoilt = [x.clone() for x in tensors]
            spoilt[which][0, place, 0, 0] = torch.nan
            out = outcome_alone(spoilt)
            assert torch.equal(out[:, :place], clean[:, :place])
            assert not out[:, place].isfinite().any()
            # a query is nobody else's business
            assert out[:, place + 1 :].isfinite().all() == (which == 0)


def outcome_alone(tensors):
    torch.manual_seed(1)
    feature_map = nalaformer.feature_map("norm_preserving", num_heads=1, head_dim=8).to(DEVICE)
    q, k, v, gate = (x.to(DEVICE) for x in tensors)
    with nalaformer.use_backend("triton"):
        return recurrent_hybrid_attention(q, k, v, feature_map=feature_map, settings=SMALL, gate=gate)[0]


def test_a_backend_that_is_asked_for_is_the_one_that_runs(monkeypatch):
    ran = []
    attend = fused.attend
    monkeypatch.setattr(fused, "attend", lambda *tensors, **rest: ran.append(len(tensors)) or attend(*tensors, **rest))
    tensors = make(9, heads=1)
    outcome("reference", torch.float32, tensors, SMALL)
    assert not ran
    outcome("triton", torch.float32, tensors, SMALL)
    assert ran
    # one token has nothing to tile, and float64 has no matrix units
    ran.clear()
    outcome("triton", torch.float32, [x[:, :1] for x in tensors], SMALL)
    outcome("triton", torch.float64, tensors, SMALL)
    assert not ran


def test_operators_keep_the_contract_of_torch_library():
    from nalaformer.ops.kernels.hybrid import exact_op, linear_op, merge_op

    def numbers(*shape):
        return torch.rand(*shape, device=DEVICE, requires_grad=True)

    q, k, v = numbers(1, 8, 2, 8), numbers(1, 12, 1, 8), numbers(1, 12, 1, 8)
    store = numbers(1, 1, 2, 8), numbers(1, 1, 2, 8)
    until = torch.full((1, 1, 2), 9, dtype=torch.int32, device=DEVICE)
    first = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    exact = (q, k, v, *store, until, first, 4, 1, 1, False, True, 0.3)
    torch.library.opcheck(exact_op.forward, exact, test_utils=CHECKS)
    counts = torch.ones(1, 4, 1, dtype=torch.bool, device=DEVICE)
    linear = (numbers(1, 8, 2, 16), numbers(1, 4, 2, 16), numbers(1, 4, 1, 8), counts, numbers(2, 16, 9), 2, 4, "identity")
    torch.library.opcheck(linear_op.forward, linear, test_utils=CHECKS)
    linear = (numbers(1, 8, 2, 8), numbers(1, 4, 2, 8), *linear[2:-1], "softmax")
    torch.library.opcheck(linear_op.forward, linear, test_utils=CHECKS)
    sums = (numbers(1, 8, 2), numbers(1, 8, 2), numbers(1, 8, 2, 8))
    merge = (
        *sums,
        numbers(1, 8, 2),
        numbers(1, 8, 2, 8),
        numbers(1, 8, 2, 1),
        torch.ones(1, 2, device=DEVICE),
        False,
        1e-6,
        torch.float32,
    )
    torch.library.opcheck(merge_op.forward, merge, test_utils=CHECKS)
