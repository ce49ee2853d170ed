"""Wrong arguments: each error names the argument, what came, and what to do. And 200 random calls that must not crash."""

import math

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nalaformer
from nalaformer import FEATURE_MAPS, LinearState, Rotary, attention_weights, linear_attention, recurrent_linear_attention
from nalaformer.attention import METHODS, build

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]

OPS = [linear_attention, recurrent_linear_attention]


def arguments(**changes) -> dict:
    """A call that works: 2 samples, 7 tokens, 4 heads of 8 channels."""
    made = {name: torch.randn(2, 7, 4, 8) for name in ("q", "k", "v")}
    return made | {"feature_map": nalaformer.feature_map("norm_aware", num_heads=4, head_dim=8)} | changes


def test_the_call_that_the_errors_start_from_works():
    assert linear_attention(**arguments()).shape == (2, 7, 4, 8)


# --- tensors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.randn(7, 4, 8), r"{} must be \[batch, tokens, heads, channels\], got shape \(7, 4, 8\); .* need cu_seqlens"),
        (torch.randn(2, 0, 4, 8), r"{} must hold at least one token, got shape \(2, 0, 4, 8\); an empty batch is fine"),
        (torch.ones(2, 7, 4, 8, dtype=torch.int64), r"{} must hold floats, got torch.int64; convert it with .float\(\)"),
        (torch.ones(2, 7, 4, 8, dtype=torch.complex64), r"{} must hold floats, got torch.complex64"),
    ],
    ids=["dimensions", "tokens", "integers", "complex"],
)
def test_a_wrong_tensor_is_named(op, name, tensor, message):
    with pytest.raises(ValueError, match=message.format(name)):
        op(**arguments(**{name: tensor}))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (3, 7, 4, 8)}, "one batch size, got 2 for q and 3 for k"),
        ({"v": (1, 7, 4, 8)}, "one batch size, got 2 for q and 1 for v"),
        ({"v": (2, 6, 4, 8)}, "k and v must have the same tokens, got 7 and 6"),
        ({"v": (2, 7, 2, 8)}, "k and v must have the same heads, got 4 and 2"),
        ({"k": (2, 7, 3, 8), "v": (2, 7, 3, 8)}, "query heads must be a multiple of the key heads, got 4 and 3; each key head"),
        ({"k": (2, 7, 4, 6)}, "q and k must have the same head size, got 8 and 6"),
        (
            {"q": (2, 7, 4, 6), "k": (2, 7, 4, 6)},
            "made for head_dim 8, got q with 6 channels a head; make the map with head_dim=6",
        ),
        (
            {"q": (2, 7, 8, 8), "k": (2, 7, 1, 8), "v": (2, 7, 1, 8)},
            "made for 4 heads, got 8 query and 1 key heads; make the map",
        ),
        ({"k": (2, 7, 0, 8), "v": (2, 7, 0, 8)}, "heads.*got .*0"),
    ],
    ids=["batch of k", "batch of v", "tokens", "heads", "groups", "sizes", "map size", "map heads", "no key heads"],
)
def test_sizes_that_do_not_fit_are_named(op, changes, message):
    with pytest.raises(ValueError, match=message):
        op(**arguments(**{name: torch.randn(shape) for name, shape in changes.items()}))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["k", "v"])
def test_tensors_of_two_devices_are_refused(op, name):
    with pytest.raises(ValueError, match=rf"one device, got q on cpu and {name} on meta; move it with .to\(\)"):
        op(**arguments(**{name: torch.randn(2, 7, 4, 8, device="meta")}))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_refused_by_name(op, name):
    with pytest.raises(TypeError, match=f"{name} must be a .*[Tt]ensor, got ndarray"):
        op(**arguments(**{name: numpy.zeros((2, 7, 4, 8), dtype=numpy.float32)}))


@pytest.mark.parametrize("op", OPS)
def test_a_map_by_name_only_is_refused(op):
    with pytest.raises(TypeError, match=r"feature_map must be a FeatureMap, got 'norm_aware'; make one with nalaformer"):
        op(**arguments(feature_map="norm_aware"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_none_in_the_place_of_a_tensor_is_refused(op, name):
    with pytest.raises(TypeError, match=f"{name} must be a torch tensor, got NoneType"):
        op(**arguments(**{name: None}))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["polarity", "polarity_exp"])
def test_two_streams_want_an_even_value_size(op, name):
    feature_map = nalaformer.feature_map(name, num_heads=4, head_dim=8)
    with pytest.raises(ValueError, match=r"divisible by the map's streams \(2\), got 7; choose an even head_dim"):
        op(**arguments(feature_map=feature_map, v=torch.randn(2, 7, 4, 7)))


@pytest.mark.parametrize("name", ["polarity", "polarity_exp"])
def test_two_streams_ask_nothing_of_the_head_size(name):
    """Values alone are shared out among the streams; what looks at queries and keys alone takes heads of any size."""
    feature_map = nalaformer.feature_map(name, num_heads=2, head_dim=5)
    q, k = torch.randn(2, 1, 6, 2, 5)
    weights = [nalaformer.attention_weights(q, k, feature_map=feature_map, stream=stream) for stream in range(2)]
    v = torch.randn(1, 6, 2, 4)
    expected = torch.cat(
        [torch.einsum("bhij,bjhv->bihv", w, part) for w, part in zip(weights, v.chunk(2, -1), strict=True)], -1
    )
    torch.testing.assert_close(nalaformer.linear_attention(q, k, v, feature_map=feature_map), expected)
    assert nalaformer.linear_attention(q, k, v, feature_map=feature_map, key_weight="global_query").isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_a_reflection_across_heads_refuses_other_heads(op):
    feature_map = nalaformer.feature_map("reflection", num_heads=2, head_dim=8)
    grouped = {name: torch.randn(2, 7, 2, 8) for name in ("k", "v")}
    with pytest.raises(ValueError, match=r"the heads that it was made for \(2\), got 4; use cross_head=False"):
        op(**arguments(feature_map=feature_map, **grouped))


def test_causal_attention_wants_as_many_queries_as_keys():
    with pytest.raises(ValueError, match=r"as many queries as keys, got 5 and 7; .* use recurrent_linear_attention"):
        linear_attention(**arguments(q=torch.randn(2, 5, 4, 8)), causal=True)


# --- masks, rotary, packing, state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("key_mask", "got"),
    [
        (torch.ones(2, 7), r"torch.float32 \(2, 7\)"),
        (torch.ones(2, 7, dtype=torch.int64), r"torch.int64 \(2, 7\)"),
        (torch.ones(2, 6, dtype=torch.bool), r"torch.bool \(2, 6\)"),
        (torch.ones(1, 7, dtype=torch.bool), r"torch.bool \(1, 7\)"),
        (torch.ones(2, 7, 7, dtype=torch.bool), r"torch.bool \(2, 7, 7\)"),
    ],
    ids=["float", "integer", "short", "batch", "square"],
)
def test_a_wrong_mask_is_refused(op, key_mask, got):
    with pytest.raises(ValueError, match=rf"key_mask must be bool \[batch, keys\] = \(2, 7\), .*, got {got}; .* converted"):
        op(**arguments(key_mask=key_mask))


@pytest.mark.parametrize("op", OPS)
def test_a_mask_on_another_device_is_refused(op):
    mask = torch.ones(2, 7, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match=r"key_mask must be on the device of k \(cpu\), got meta; move it"):
        op(**arguments(key_mask=mask))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("rotary", "error", "message"),
    [
        (Rotary.sequence(6, 8), ValueError, r"a position for each token of q \(7\), got 6; for cross-attention pass a pair"),
        ((Rotary.sequence(7, 8), Rotary.sequence(6, 8)), ValueError, r"a position for each token of k \(7\), got 6"),
        (Rotary(torch.zeros(3, 7, 1), torch.ones(4)), ValueError, r"the batch size of q \(2\), got 3"),
        (torch.zeros(7, 1), TypeError, "rotary must be a nalaformer.Rotary, got Tensor; make one with Rotary.sequence"),
        (
            Rotary.sequence(7, 6),
            ValueError,
            r"a multiple of the rotary's channels \(6\), got 16; make the rotary for the head size",
        ),
        (Rotary.sequence(7, 8, device="meta"), ValueError, r"on the device of q \(cpu\), got meta; pass device="),
        ((Rotary.sequence(7, 8),) * 3, ValueError, "rotary"),
    ],
    ids=["tokens", "pair", "batch", "type", "channels", "device", "three"],
)
def test_a_wrong_rotary_is_refused(op, rotary, error, message):
    with pytest.raises(error, match=message):
        op(**arguments(rotary=rotary))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary.sequence(7, 5), "1-D rotary needs an even number of channels, got 5; choose an even head_dim"),
        (lambda: Rotary.grid(2, 3, 6), "2-D rotary needs channels in multiples of 4, got 6; choose head_dim divisible by 4"),
        (lambda: Rotary(torch.zeros(7), torch.ones(4)), r"must be \[N, axes\] or \[B, N, axes\], got shape \(7,\); use Rotary"),
    ],
    ids=["sequence", "grid", "positions"],
)
def test_a_rotary_that_cannot_be_made_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def packed(**changes) -> dict:
    made = {name: torch.randn(8, 4, 8) for name in ("q", "k", "v")} | {"cu_seqlens": torch.tensor([0, 3, 8])}
    return made | {"feature_map": nalaformer.feature_map("norm_aware", num_heads=4, head_dim=8)} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cu_seqlens": torch.tensor([0, 3, 7])},
            r"cu_seqlens must rise from 0 to the number of tokens \(8\), got \[0, 3, 7\]",
        ),
        ({"cu_seqlens": torch.tensor([1, 3, 8])}, r"cu_seqlens must rise from 0 .*, got \[1, 3, 8\]; .* beginning with 0"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, r"cu_seqlens must rise from 0 .*, got \[0, 5, 3, 8\]"),
        (
            {"cu_seqlens": torch.tensor([0.0, 3.0, 8.0])},
            r"cu_seqlens must be .*integers .*, got torch.float32 \(3,\); for lengths",
        ),
        ({"cu_seqlens": torch.tensor([[0, 3, 8]])}, r"cu_seqlens must be .*, got torch.int64 \(1, 3\)"),
        ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens must be .*, got torch.int64 \(1,\)"),
        (
            {"q": torch.randn(1, 8, 4, 8)},
            r"with cu_seqlens, q must be \[tokens, heads, channels\] .*; drop the batch dimension",
        ),
        ({"k": torch.randn(7, 4, 8)}, r"with cu_seqlens, k must be .* the tokens of q \(8\), got shape \(7, 4, 8\)"),
        (
            {"key_mask": torch.ones(8, dtype=torch.bool)},
            "key_mask and cu_seqlens exclude each other, got both; packed sequences",
        ),
        ({"rotary": Rotary.sequence(7, 8)}, r"a position for each token of q \(8\), got 7"),
    ],
)
def test_wrong_packing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(**packed(**changes))


def test_packing_by_a_plain_list_is_refused_by_name():
    with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
        linear_attention(**packed(cu_seqlens=[0, 3, 8]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 4, 16, 8), r"features and value size \(2, 4, 16, 8\), got \(3, 4, 16, 8\); .*LinearState.select"),
        ((2, 2, 16, 8), r"features and value size \(2, 4, 16, 8\), got \(2, 2, 16, 8\)"),
        ((2, 4, 16, 6), r"features and value size \(2, 4, 16, 8\), got \(2, 4, 16, 6\)"),
        # the state of another map, or of the same with another rotary
        ((2, 4, 24, 8), "state .*features?.* 16.* got .*24"),
    ],
    ids=["batch", "heads", "values", "features"],
)
def test_the_state_of_another_layer_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        recurrent_linear_attention(**arguments(), state=LinearState.empty(*sizes))


def test_a_state_on_another_device_is_refused():
    state = LinearState.empty(2, 4, 16, 8, device="meta")
    with pytest.raises(ValueError, match=r"state must be on the device of k \(cpu\), got meta; move it with state.to\(\)"):
        recurrent_linear_attention(**arguments(), state=state)


# --- weights, backends, eps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [-1, 1])
def test_a_stream_that_the_map_lacks_is_refused(stream):
    call = arguments()
    with pytest.raises(ValueError, match=rf"stream must be below the map's number of streams \(1\), got {stream}"):
        attention_weights(call["q"], call["k"], feature_map=call["feature_map"], stream=stream)


@pytest.mark.parametrize("rows", [[7], [0, -1], torch.tensor([99])], ids=str)
def test_rows_beyond_the_queries_are_refused(rows):
    call = arguments()
    with pytest.raises(ValueError, match="rows must"):
        attention_weights(call["q"], call["k"], feature_map=call["feature_map"], rows=rows)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("eps", [-1e-6, math.nan], ids=str)
def test_an_eps_that_makes_no_sense_is_refused(op, eps):
    with pytest.raises(ValueError, match=f"eps must .*, got {eps}"):
        op(**arguments(eps=eps))


def test_an_unknown_backend_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"unknown backend 'chunk'; did you mean 'chunked'\? known: auto, chunked, reference"):
        nalaformer.set_backend("chunk")


def test_a_backend_that_cannot_run_here_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # the tests run Triton's interpreter, with which it could
    monkeypatch.setattr("nalaformer.ops.backend.INTERPRETING", False)
    with pytest.raises(ValueError, match="the triton backend cannot run here: no CUDA device was found; use 'auto' or"):
        nalaformer.set_backend("triton")


def test_a_refused_backend_leaves_the_setting_alone():
    before = nalaformer.get_backend()
    with pytest.raises(ValueError, match="unknown backend"):
        nalaformer.set_backend("fast")
    assert nalaformer.get_backend() == before


# --- random calls -------------------------------------------------------------------------------------------------------

# sizes whose product is bounded: 200 calls in seconds, and still every single size over its whole range
LARGEST_CALL = 2**18


@st.composite
def calls(draw: st.DrawFn) -> dict[str, int | str | bool]:
    tokens = draw(st.one_of(st.integers(1, 20), st.integers(1, 300), st.integers(1, 4096)))
    head_dim = draw(st.one_of(st.integers(2, 20), st.integers(2, 256)))
    head_dim = min(head_dim, max(2, LARGEST_CALL // (4 * tokens)))
    room = LARGEST_CALL // (tokens * head_dim)
    key_heads = draw(st.integers(1, max(1, min(4, room))))
    group = draw(st.integers(1, max(1, min(3, room // key_heads))))
    batch = draw(st.integers(0, max(1, min(8, room // (key_heads * group)))))
    causal = draw(st.booleans())
    return {
        "name": draw(st.sampled_from(FEATURE_MAPS.names())),
        "batch": batch,
        "tokens": tokens,
        "keys": tokens if causal else draw(st.integers(1, 2 * tokens)),
        "heads": key_heads * group,
        "key_heads": key_heads,
        "head_dim": head_dim,
        "values": draw(st.sampled_from([head_dim, 2, 5])),
        "causal": causal,
        "masked": draw(st.booleans()),
        "rotary": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "seed": draw(st.integers(0, 1000)),
    }


def why_refused(call: dict) -> str | None:
    """The rules that a random call may break, each with the words that its error must hold."""
    if call["name"] == "reflection" and call["head_dim"] % 2:
        return "head_dim must be even"
    if call["rotary"] and call["head_dim"] % 2:
        return "even number of channels"
    if call["name"] in ("polarity", "polarity_exp") and call["values"] % 2:
        return "divisible by the map's streams"
    return None


@given(call=calls())
@settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_calls_give_finite_outputs_or_the_right_error(call):
    torch.manual_seed(call["seed"])
    dtype = getattr(torch, call["dtype"])
    q = torch.randn(call["batch"], call["tokens"], call["heads"], call["head_dim"]).to(dtype)
    k = torch.randn(call["batch"], call["keys"], call["key_heads"], call["head_dim"]).to(dtype)
    v = torch.randn(call["batch"], call["keys"], call["key_heads"], call["values"]).to(dtype)

    def attend() -> torch.Tensor:
        feature_map = nalaformer.feature_map(call["name"], num_heads=call["heads"], head_dim=call["head_dim"])
        rotary = None
        if call["rotary"]:
            rotary = tuple(Rotary.sequence(n, call["head_dim"], normalised=True) for n in (call["tokens"], call["keys"]))
        key_mask = torch.rand(call["batch"], call["keys"]) < 0.7 if call["masked"] else None
        return linear_attention(q, k, v, feature_map=feature_map, causal=call["causal"], rotary=rotary, key_mask=key_mask)

    expected_error = why_refused(call)
    if expected_error is not None:
        with pytest.raises(ValueError, match=expected_error):
            attend()
        return
    out = attend()
    assert (out.shape, out.dtype) == ((*q.shape[:3], call["values"]), dtype)
    assert out.isfinite().all()


@given(
    method=st.sampled_from(list(METHODS)),
    batch=st.integers(0, 8),
    height=st.integers(1, 13),
    width=st.integers(1, 13),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 8, 12, 20]),
    reduction=st.sampled_from([1, 1, 2, 3]),
    masked=st.booleans(),
)
@settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_images_pass_every_layer(method, batch, height, width, heads, head_dim, reduction, masked):
    layer = build(method, dim=heads * head_dim, num_heads=heads, key_reduction=reduction)
    x = torch.randn(batch, height * width, heads * head_dim)
    key_mask = torch.rand(batch, height * width) < 0.7 if masked and reduction == 1 else None
    out = layer(x, (height, width), key_mask)
    assert out.shape == x.shape
    assert out.isfinite().all()


# --- maps of users ------------------------------------------------------------------------------------------------------


class NarrowQueries(nalaformer.FeatureMap):
    """One feature of a query and eight of a key, which torch would multiply in silence."""

    def query(self, q):
        return q[..., :1].square()

    def key(self, k):
        return k.square()


class OnlyQueries(nalaformer.FeatureMap):
    def query(self, q):
        return q.square()


class OnlyKeys(nalaformer.FeatureMap):
    def key(self, k):
        return k.square()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_queries_and_keys_with_different_numbers_of_features_are_refused(backend, causal):
    message = "must give queries and keys as many features, got 1 and 8 of NarrowQueries; let its methods query and key return"
    with nalaformer.use_backend(backend), pytest.raises(ValueError, match=message):
        linear_attention(**arguments(feature_map=NarrowQueries(num_heads=4, head_dim=8)), causal=causal)


@pytest.mark.parametrize(("kind", "missing"), [(OnlyQueries, "key"), (OnlyKeys, "query")])
def test_a_map_without_one_of_its_methods_says_which(kind, missing):
    message = rf"must have the methods query and key, got {kind.__name__} without {missing}; add def {missing}\(self, "
    with pytest.raises(NotImplementedError, match=message):
        linear_attention(**arguments(feature_map=kind(num_heads=4, head_dim=8)))
