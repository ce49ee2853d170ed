"""What only a GPU can show: half precision, compiled graphs, graph replay, long inputs. Run with TRITON_INTERPRET=0."""

import pytest
import torch

import nalaformer
from helpers.kernel_checks import CAUSAL_MAPS, HALF_ULP, MAPS, check_half_precision, outcome, relative_error
from nalaformer import Rotary

pytestmark = pytest.mark.gpu


def make(*shapes, dtype):
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("with_rotary", [False, True])
@pytest.mark.parametrize("name", [name for name in MAPS if "variance" not in name])
def test_half_precision_stays_near_float64(name, with_rotary, dtype):
    q, k, v = make((2, 2500, 2, 64), (2, 2111, 2, 64), (2, 2111, 2, 64), dtype=dtype)
    upstream = torch.randn(2, 2500, 2, 64, device="cuda").to(dtype)
    arguments = {"heads": 2, "head_dim": 64, "key_mask": torch.rand(2, 2111, device="cuda") > 0.3}
    if with_rotary:
        arguments["rotary"] = Rotary.sequence(2500, 64, device="cuda"), Rotary.sequence(2111, 64, device="cuda")
    check_half_precision(name, dtype, (q, k, v), upstream, **arguments)


@pytest.mark.parametrize(
    ("name", "causal"),
    [(name, False) for name in MAPS if "variance" not in name] + [(name, True) for name in CAUSAL_MAPS],
)
def test_the_mean_of_values_costs_gradients_nothing(name, causal):
    q, k, v = make(*[(2, 2000, 2, 64)] * 3, dtype=torch.bfloat16)
    upstream = torch.randn(2, 2000, 2, 64, device="cuda").bfloat16()
    check_half_precision(name, torch.bfloat16, (q, k, v + 10), upstream, heads=2, head_dim=64, causal=causal)


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("with_rotary", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("name", ["norm_aware", "focused head", "reflection pairs", "hedgehog", "channel_softmax"])
def test_causal_half_precision_stays_near_float64(name, kv_heads, dtype, with_rotary):
    q, k, v = make((2, 1000, 4, 64), (2, 1000, kv_heads, 64), (2, 1000, kv_heads, 64), dtype=dtype)
    upstream = torch.randn(2, 1000, 4, 64, device="cuda").to(dtype)
    arguments = {"heads": 4, "head_dim": 64, "causal": True}
    if kv_heads == 4:
        arguments["key_mask"] = torch.rand(2, 1000, device="cuda") > 0.3
    if with_rotary:
        arguments["rotary"] = Rotary.sequence(1000, 64, device="cuda")
    check_half_precision(name, dtype, (q, k, v), upstream, **arguments)


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_rotary", [False, True])
@pytest.mark.parametrize("head_dim", [24, 40, 56, 96, 128])
@pytest.mark.parametrize("name", ["norm_aware", "focused head"])
def test_heads_of_other_sizes_stay_near_float64(name, head_dim, with_rotary, causal, dtype):
    tensors = make((2, 500, 4, head_dim), (2, 500, 2, head_dim), (2, 500, 2, head_dim), dtype=dtype)
    upstream = torch.randn(2, 500, 4, head_dim, device="cuda").to(dtype)
    arguments = {"heads": 4, "head_dim": head_dim, "causal": causal, "key_mask": torch.rand(2, 500, device="cuda") > 0.3}
    if with_rotary:
        arguments["rotary"] = Rotary.sequence(500, head_dim, device="cuda")
    if dtype == torch.float16 and head_dim > 64 and not causal:
        with pytest.raises(ValueError, match="fit on chip unless"):
            check_half_precision(name, dtype, tensors, upstream, **arguments)
    else:
        check_half_precision(name, dtype, tensors, upstream, **arguments)


LARGE = ["relu", "split", "norm_aware learnable", "norm_aware mild", "reflection pairs"]


@pytest.mark.parametrize("with_rotary", [False, True])
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize(
    ("name", "causal"),
    # features without a bound have no causal kernel
    [(name, causal) for name in LARGE for causal in (False, True)] + [("polarity", False), ("polarity_exp", False)],
)
def test_other_maps_in_large_heads_stay_near_float64(name, causal, head_dim, with_rotary):
    tensors = make(*[(2, 500, 4, head_dim)] * 3, dtype=torch.bfloat16)
    upstream = torch.randn(2, 500, 4, head_dim, device="cuda").bfloat16()
    arguments = {"heads": 4, "head_dim": head_dim, "causal": causal, "key_mask": torch.rand(2, 500, device="cuda") > 0.3}
    if with_rotary:
        arguments["rotary"] = Rotary.sequence(500, head_dim, device="cuda")
    check_half_precision(name, torch.bfloat16, tensors, upstream, **arguments)


def test_a_graph_of_decoding_steps_continues_the_state():
    feature_map = nalaformer.feature_map("norm_aware", num_heads=4, head_dim=64)
    prompt = make(*[(2, 100, 4, 64)] * 3, dtype=torch.bfloat16)
    tokens = make(*[(2, 20, 4, 64)] * 3, dtype=torch.bfloat16)
    with torch.no_grad():
        _, state = nalaformer.recurrent_linear_attention(*prompt, feature_map=feature_map)
        expected, _ = nalaformer.recurrent_linear_attention(*tokens, feature_map=feature_map, state=state)
        inputs = [x[:, :1].clone() for x in tokens]
        spare = nalaformer.LinearState(**{name: x.clone() for name, x in state.tensors().items()})
        nalaformer.recurrent_step_(spare, *inputs, feature_map=feature_map)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = nalaformer.recurrent_step_(state, *inputs, feature_map=feature_map)
        found = []
        for t in range(20):
            for x, y in zip(inputs, tokens, strict=True):
                x.copy_(y[:, t : t + 1])
            graph.replay()
            found.append(out.clone())
    assert relative_error(torch.cat(found, dim=1), expected.double()) < 8e-3
    assert state.count.tolist() == [120, 120]


@pytest.mark.parametrize("method", ["nalaformer", "flatten", "mirrorla"])
def test_layer_compiles_into_one_graph_and_trains(method):
    layer = nalaformer.attention.build(method, dim=64, num_heads=2).cuda()
    x = torch.randn(2, 35, 64, device="cuda", requires_grad=True)
    expected = layer(x, (5, 7))
    out = torch.compile(layer, fullgraph=True)(x, (5, 7))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    (ours,) = torch.autograd.grad(out.sum(), x)
    (theirs,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tokens", [200, 5000])
def test_graph_replay_follows_its_inputs(tokens):
    feature_map = nalaformer.feature_map("norm_aware", num_heads=2, head_dim=64)
    q, k, v = make(*[(2, tokens, 2, 64)] * 3, dtype=torch.bfloat16)

    def attend():
        return nalaformer.linear_attention(q, k, v, feature_map=feature_map)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, attend(), rtol=0, atol=0)


def test_a_quarter_million_tokens_repeat_to_the_bit():
    q, k, v = (x.requires_grad_() for x in make(*[(1, 262_144, 2, 64)] * 3, dtype=torch.bfloat16))
    upstream = torch.randn_like(q)
    first = outcome("triton", "norm_aware", torch.bfloat16, (q, k, v), upstream, heads=2, head_dim=64)
    for _ in range(20):
        again = outcome("triton", "norm_aware", torch.bfloat16, (q, k, v), upstream, heads=2, head_dim=64)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
