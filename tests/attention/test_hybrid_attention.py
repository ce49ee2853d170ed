"""Hybrid attention: exact for the near and the salient, linear for the rest, one function for every way to call it."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import nalaformer
from helpers.hybrid_definition import reference_attention, salient_by_score
from helpers.hybrid_inputs import SMALL, make_inputs, make_map
from nalaformer.attention.hybrid import (
    SELECTIONS,
    HybridAttention,
    HybridSettings,
    distant_attention,
    hybrid_attention,
    hybrid_settings,
    recurrent_hybrid_attention,
)
from nalaformer.attention.hybrid.selection import for_heads

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.pairwise]

# sequences of any length: none, some and many chunks leave the window
LENGTHS = [1, 7, 8, 16, 17, 61]
RULES = [name for name in SELECTIONS.names() if not SELECTIONS[name].needs_scores]


def call(q, k, v, settings, **options):
    options.setdefault("feature_map", make_map(q.shape[2], q.shape[3], q.dtype))
    return hybrid_attention(q, k, v, settings=settings, **options)


def softmax_attention(q, k, v):
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def in_pieces(q, k, v, settings, sizes, feature_map, **options):
    state, outputs, start = None, [], 0
    for size in sizes:
        piece = slice(start, start + size)
        given = {name: value[:, piece] for name, value in options.items()}
        out, state = recurrent_hybrid_attention(
            q[:, piece], k[:, piece], v[:, piece], feature_map=feature_map, settings=settings, state=state, **given
        )
        outputs.append(out)
        start += size
    assert start == q.shape[1]
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("max_salient", [0, 1000])
def test_every_token_salient_is_exact_softmax(tokens, max_salient):
    q, k, v = make_inputs(tokens, dtype=torch.float32)
    settings = HybridSettings(chunk_size=8, salient_per_chunk=8, max_salient=max_salient)
    # room: eps takes up to 1e-6 of values of up to 4, on every machine; rounding is a tenth of that
    torch.testing.assert_close(call(q, k, v, settings), softmax_attention(q, k, v), rtol=0, atol=1e-5)


def test_softmax_method_is_exact_softmax():
    q, k, v = make_inputs(50, dtype=torch.float32)
    out = call(q, k, v, hybrid_settings("softmax", chunk_size=8))
    # room: as above
    torch.testing.assert_close(out, softmax_attention(q, k, v), rtol=0, atol=1e-5)


@pytest.mark.parametrize("merge", ["released", "exact"])
@pytest.mark.parametrize("max_salient", [0, 3])
@pytest.mark.parametrize("select_per", ["key_head", "query_head"])
def test_outputs_are_those_of_the_definition(merge, max_salient, select_per):
    settings = HybridSettings(
        chunk_size=4, salient_per_chunk=2, max_salient=max_salient, merge=merge, select_per=select_per, linear_mass=5
    )
    tokens = 23
    q, k, v = make_inputs(tokens, batch=1)
    gate = torch.rand(1, tokens, 4, 6, dtype=torch.float64)
    feature_map = make_map()
    out = call(q, k, v, settings, feature_map=feature_map, gate=gate)
    keys, values = k.repeat_interleave(2, 2)[0], v.repeat_interleave(2, 2)[0]
    scores = keys.float().norm(dim=-1).bfloat16().float()
    salient = salient_by_score(scores, settings=settings)
    expected = reference_attention(q[0], keys, values, salient, feature_map=feature_map, settings=settings, gate=gate[0])
    torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_salient", [0, 3])
def test_gradients_are_those_of_the_definition(max_salient):
    settings = HybridSettings(chunk_size=4, salient_per_chunk=1, max_salient=max_salient, linear_mass=5)
    tokens = 19
    inputs = [x.requires_grad_() for x in make_inputs(tokens, batch=1, heads=2, key_heads=2)]
    gate = torch.rand(1, tokens, 2, 1, dtype=torch.float64, requires_grad=True)
    feature_map = make_map(2)
    weights = torch.randn(tokens, 2, 6, dtype=torch.float64)
    leaves = [*inputs, gate, *feature_map.parameters()]
    ours = torch.autograd.grad((call(*inputs, settings, feature_map=feature_map, gate=gate)[0] * weights).sum(), leaves)
    q, k, v = (x[0] for x in inputs)
    salient = salient_by_score(k.detach().float().norm(dim=-1).bfloat16().float(), settings=settings)
    expected = reference_attention(q, k, v, salient, feature_map=feature_map, settings=settings, gate=gate[0])
    for mine, right in zip(ours, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("max_salient", [0, 3])
@pytest.mark.parametrize("sizes", [[1] * 45, [13, 1, 1, 1, 20, 9], [8, 8, 8, 8, 8, 5], [44, 1]], ids=str)
def test_pieces_of_any_sizes_give_the_same_outputs(rule, max_salient, sizes):
    settings = dataclasses.replace(SMALL, selection=rule, max_salient=max_salient)
    q, k, v = make_inputs(45, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    whole, after = in_pieces(q, k, v, settings, [45], feature_map)
    pieces, state = in_pieces(q, k, v, settings, sizes, feature_map)
    # the choice first: tokens by their scores, then the numbers
    assert torch.equal(after.salient_scores.sort().values, state.salient_scores.sort().values)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [SMALL, dataclasses.replace(SMALL, max_salient=3), hybrid_settings("linear")], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(settings, side):
    lengths = [37, 20, 1, 44]
    q, k, v = make_inputs(44, batch=4, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    mask = torch.zeros(4, 44, dtype=torch.bool)
    for sample, length in enumerate(lengths):
        mask[sample, slice(44 - length, 44) if side == "left" else slice(0, length)] = True
    poisoned = [torch.where(mask[:, :, None, None], x, torch.nan) for x in (q, k, v)]
    out = call(*poisoned, settings, feature_map=feature_map, key_mask=mask)
    assert torch.equal(out[~mask], torch.zeros_like(out[~mask]))
    for sample in range(4):
        alone = [x[sample : sample + 1, mask[sample]] for x in (q, k, v)]
        torch.testing.assert_close(
            out[sample, mask[sample]], call(*alone, settings, feature_map=feature_map)[0], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("rule", RULES)
def test_padded_samples_go_on_token_by_token(rule):
    settings = dataclasses.replace(SMALL, selection=rule, max_salient=5)
    q, k, v = make_inputs(60, batch=3, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    mask = torch.arange(60) >= torch.tensor([[0], [11], [25]])
    out, _ = in_pieces(q, k, v, settings, [30, *[1] * 25, 5], feature_map, key_mask=mask)
    for sample in range(3):
        alone = [x[sample : sample + 1, mask[sample]] for x in (q, k, v)]
        torch.testing.assert_close(
            out[sample, mask[sample]], call(*alone, settings, feature_map=feature_map)[0], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("changed", [0, 15, 16, 40])
def test_a_token_changes_no_earlier_output(rule, changed):
    settings = dataclasses.replace(SMALL, selection=rule, max_salient=4)
    q, k, v = make_inputs(50, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    before = call(q, k, v, settings, feature_map=feature_map)
    for x in (q, k, v):
        x[:, changed] += 10
    after = call(q, k, v, settings, feature_map=feature_map)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed:], after[:, changed:])


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_reaches_only_itself_and_later_ones(name, bad):
    inputs = dict(zip("qkv", make_inputs(50, dtype=torch.float32), strict=True))
    feature_map = make_map(dtype=torch.float32)
    clean = call(**inputs, settings=SMALL, feature_map=feature_map)
    inputs[name][0, 20, 0, 0] = bad
    out = call(**inputs, settings=SMALL, feature_map=feature_map)
    assert torch.equal(out[0, :20], clean[0, :20])
    assert torch.equal(out[1], clean[1])
    assert not out[0, 20].isfinite().all()


def test_a_zero_query_is_finite_with_finite_gradients():
    q, k, v = make_inputs(30, dtype=torch.float32)
    q[:, 20] = 0
    k[:, 3] = 0
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = call(*inputs, SMALL)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_one_token_alone_gives_its_value():
    q, k, v = make_inputs(1, dtype=torch.float32)
    # room: its weight is 1, so eps takes 1e-6 of the value; the rest is for a handful of roundings of 6e-8
    torch.testing.assert_close(call(q, k, v, SMALL), v.repeat_interleave(2, 2), rtol=2e-6, atol=0)


@pytest.mark.parametrize("rule", ["key_norm", "received"])
def test_grouped_heads_are_expanded_heads(rule):
    settings = dataclasses.replace(SMALL, selection=rule, select_per="query_head")
    q, k, v = make_inputs(45)
    feature_map = make_map()
    grouped = call(q, k, v, settings, feature_map=feature_map)
    expanded = call(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), settings, feature_map=feature_map)
    torch.testing.assert_close(grouped, expanded, rtol=1e-12, atol=1e-12)


def test_a_sample_does_not_depend_on_its_mates():
    q, k, v = make_inputs(45, batch=3, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    together = call(q, k, v, SMALL, feature_map=feature_map)
    alone = torch.cat([call(*(x[i : i + 1] for x in (q, k, v)), SMALL, feature_map=feature_map) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_self_saliency_ranks_as_the_divergence_that_defines_it():
    tokens, size, tiny = 20, 8, 1e-9
    q, k, v = make_inputs(tokens, batch=1, heads=1, key_heads=1)
    settings = HybridSettings(chunk_size=size, salient_per_chunk=2, selection="self_saliency", keep_first=False)
    divergences = []
    for t in range(size):
        logits = (k[0, max(0, t - size + 1) : t + 1, 0] @ q[0, t, 0]) * 6**-0.5
        with_self = logits.softmax(-1)
        # without the self term: its probability is tiny, the others are renormalised
        without = torch.cat((logits[:-1].softmax(-1), torch.zeros(1, dtype=torch.float64))) + tiny
        divergences.append((with_self * (with_self.clamp(min=1e-300) / without).log()).sum())
    _, state = in_pieces(q, k, v, settings, [tokens], make_map(1))
    expected = torch.stack(divergences).topk(2).indices
    kept = state.salient_keys[0, 0]
    assert kept.shape == (2, 6)
    assert {tuple(row) for row in kept.tolist()} == {tuple(row) for row in k[0, expected, 0].tolist()}


def test_received_is_the_mean_weight_that_later_queries_of_the_window_give():
    size, tokens = 6, 24
    q, k, v = make_inputs(tokens, batch=1, heads=1, key_heads=1)
    settings = HybridSettings(chunk_size=size, salient_per_chunk=size, selection="received", keep_first=False)
    _, state = in_pieces(q, k, v, settings, [tokens], make_map(1))
    received = torch.zeros(size, dtype=torch.float64)
    for query in range(2 * size):
        weights = ((k[0, : query + 1, 0] @ q[0, query, 0]) * 6**-0.5).softmax(-1)
        for key in range(min(query, size)):
            received[key] += weights[key] / (2 * size - 1 - key)
    stored = {
        tuple(row): score for row, score in zip(state.salient_keys[0, 0].tolist(), state.salient_scores[0, 0], strict=True)
    }
    found = torch.stack([stored[tuple(row)] for row in k[0, :size, 0].tolist()])
    # room: scores are rounded to bfloat16 before they are compared, which costs at most half a unit, 2^-8
    torch.testing.assert_close(found.double(), received, rtol=2**-8, atol=1e-6)


def test_the_cap_keeps_the_best_and_loses_nothing():
    q, k, v = make_inputs(80, batch=1)
    settings = HybridSettings(chunk_size=8, salient_per_chunk=4, max_salient=6)
    _, state = in_pieces(q, k, v, settings, [80], make_map())
    # ten chunks, nine of them complete before the current one; the last complete one is in the window
    # scores are compared in bfloat16, so of tokens that are equal there either may stay
    lengths = k[0, :72].float().norm(dim=-1).bfloat16().float()
    for head in range(2):
        # a chunk brings its best four, and the cap keeps the first token and the best five of what all chunks have brought
        brought = torch.cat((lengths[1:8, head].topk(3).values, lengths[8:, head].view(8, 8).topk(4).values.flatten()))
        expected = torch.cat((lengths[:1, head], brought.topk(5).values)).sort().values
        kept = state.salient_keys[0, head].float().norm(dim=-1).bfloat16().float().sort().values
        assert torch.equal(kept, expected)
    # features of one token sum to 2: all others are in the sums
    torch.testing.assert_close(state.linear.key_sum.sum(-1), torch.full((1, 4), 2.0 * (72 - 6), dtype=torch.float64))


def test_the_capped_state_does_not_grow():
    settings = dataclasses.replace(SMALL, max_salient=6)
    feature_map = make_map(dtype=torch.float32)
    sizes = []
    for tokens in (100, 900):
        q, k, v = make_inputs(tokens, dtype=torch.float32)
        sizes.append(in_pieces(q, k, v, settings, [tokens], feature_map)[1].nbytes)
    assert sizes[0] == sizes[1]


def test_a_state_with_more_salient_tokens_than_the_cap_is_refused():
    q, k, v = make_inputs(60, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    _, state = in_pieces(q, k, v, SMALL, [60], feature_map)
    capped = dataclasses.replace(SMALL, max_salient=5)
    with pytest.raises(ValueError, match=r"12 salient tokens of a head, more than max_salient \(5\)"):
        recurrent_hybrid_attention(q, k, v, feature_map=feature_map, settings=capped, state=state)


def test_beam_reorder_takes_samples_with_their_lengths():
    q, k, v = make_inputs(40, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    mask = torch.arange(40) >= torch.tensor([[0], [9]])
    _, state = in_pieces(q[:, :30], k[:, :30], v[:, :30], SMALL, [30], feature_map, key_mask=mask[:, :30])
    swapped = state.select([1, 0, 1])
    assert swapped.lengths == (21, 30, 21)
    rest = [x[[1, 0, 1], 30:] for x in (q, k, v)]
    out, _ = recurrent_hybrid_attention(*rest, feature_map=feature_map, settings=SMALL, state=swapped)
    whole = call(q, k, v, SMALL, feature_map=feature_map, key_mask=mask)
    torch.testing.assert_close(out, whole[[1, 0, 1], 30:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_its_inputs_allow(dtype):
    q, k, v = (x.to(dtype) for x in make_inputs(61))
    feature_map = make_map()
    single = make_map(dtype=torch.float32)
    single.load_state_dict({n: t.float() for n, t in feature_map.state_dict().items()})
    out = call(q, k, v, SMALL, feature_map=single)
    assert out.dtype == dtype
    exact = call(q.double(), k.double(), v.double(), SMALL, feature_map=feature_map)
    error = (out.double() - exact).norm() / exact.norm()
    # room: half a unit is the most that rounding the output costs; the computation is in float32
    assert error < {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


def test_autocast_changes_nothing():
    q, k, v = make_inputs(40, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    plain = call(q, k, v, SMALL, feature_map=feature_map)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(q, k, v, SMALL, feature_map=feature_map), plain)


def test_pieces_within_a_call_give_the_same_outputs_and_gradients(monkeypatch):
    from nalaformer.attention.hybrid import function

    inputs = [x.requires_grad_() for x in make_inputs(100)]
    feature_map = make_map()
    settings = dataclasses.replace(SMALL, max_salient=5)
    leaves = [*inputs, *feature_map.parameters()]
    whole = call(*inputs, settings, feature_map=feature_map)
    expected = torch.autograd.grad(whole.square().sum(), leaves)
    monkeypatch.setattr(function, "MOST_CHUNKS", 2)
    out = call(*inputs, settings, feature_map=feature_map)
    torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-12)
    for mine, right in zip(torch.autograd.grad(out.square().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-10)


def test_window_method_has_no_salient_tokens_and_linear_no_window():
    q, k, v = make_inputs(50, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    _, window = in_pieces(q, k, v, hybrid_settings("window", chunk_size=8), [50], feature_map)
    assert window.salient_keys.shape[2] == 0
    _, linear = in_pieces(q, k, v, hybrid_settings("linear"), [50], feature_map)
    assert linear.keys.shape[2] == 0
    out = call(q, k, v, hybrid_settings("linear"), feature_map=feature_map)
    expected = nalaformer.linear_attention(q, k, v, feature_map=feature_map, causal=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_distant_attention_is_the_largest_weight_from_afar():
    q, k, _ = make_inputs(30, batch=1, heads=2, key_heads=1)
    received = distant_attention(q, k, chunk_size=4)
    for h in range(1):
        weights = torch.stack([(q[0, :, g] @ k[0, :, h].T * 6**-0.5) for g in range(2)])
        weights = weights.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf).softmax(-1)
        rows, columns = torch.meshgrid(torch.arange(30) // 4, torch.arange(30) // 4, indexing="ij")
        expected = weights.masked_fill(columns > rows - 2, 0).amax((0, 1))
        torch.testing.assert_close(received[0, :, h].double(), expected, rtol=1e-5, atol=1e-6)


def test_oracle_and_learned_choose_by_their_scores():
    q, k, v = make_inputs(50, dtype=torch.float32)
    x = torch.randn(2, 50, 12)
    for rule in ("oracle", "learned"):
        layer = HybridAttention(dataclasses.replace(SMALL, selection=rule), dim=12, num_heads=4, num_key_heads=2, head_dim=6)
        out, state = layer(q, k, v, x)
        assert out.shape == q.shape
        # five chunks have left the window; each keeps its two best, and the very first token is kept in any case
        scores = layer.scores(q, k, x, scale=None, state=None)[:, :40].bfloat16().float().transpose(1, 2)
        scores[:, :, 0] = float("inf")
        expected = scores.unflatten(2, (5, 8)).topk(2).values.flatten(2).sort().values
        assert torch.equal(state.salient_scores.sort().values, expected)
    oracle = HybridAttention(dataclasses.replace(SMALL, selection="oracle"), dim=12, num_heads=4, num_key_heads=2, head_dim=6)
    with pytest.raises(ValueError, match="whole sequence"):
        oracle(q, k, v, x, state=state)


def test_scorer_learns_what_distant_queries_want():
    q, k, _ = make_inputs(64, dtype=torch.float32)
    x = torch.randn(2, 64, 12)
    layer = HybridAttention(dataclasses.replace(SMALL, selection="learned"), dim=12, num_heads=4, num_key_heads=2, head_dim=6)
    loss = layer.scorer_loss(q, k, x)
    loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.scorer.parameters())
    assert layer.scorer_loss(q[:, :10], k[:, :10], x[:, :10]) == 0


def test_scores_of_heads_that_share_keys_are_joined_by_the_highest():
    scores = torch.tensor([[1.0, 5.0, 2.0, 0.0]])
    assert for_heads(scores, 2).tolist() == [[5.0, 2.0]]
    assert for_heads(scores[:, :2], 4).tolist() == [[1.0, 1.0, 5.0, 5.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be positive"),
        ({"salient_per_chunk": 65}, "salient_per_chunk must be between"),
        ({"selection": "key_nrom"}, "did you mean 'key_norm'"),
        ({"merge": "sum"}, "unknown merge"),
        ({"exact": False, "linear": False}, "must not both be off"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        HybridSettings(**change)


def test_wrong_inputs_are_refused():
    q, k, v = make_inputs(10)
    for wrong, message in (
        ({"q": q[:, :5]}, "same samples and tokens"),
        ({"q": q[:, :, :3]}, "multiple"),
        ({"gate": torch.ones(2, 10, 4, 3)}, "gate must be"),
        ({"k": k[:, :0], "q": q[:, :0], "v": v[:, :0]}, "at least one token"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**({"q": q, "k": k, "v": v, "feature_map": make_map()} | wrong), settings=SMALL)


def test_an_empty_batch_gives_an_empty_output():
    q, k, v = (x[:0] for x in make_inputs(20))
    assert call(q, k, v, SMALL, feature_map=make_map()).shape == (0, 20, 4, 6)


def test_training_follows_inference_mode_with_the_same_sizes():
    q, k, v = make_inputs(29, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    with torch.inference_mode():
        call(q, k, v, SMALL, feature_map=feature_map)
    call(q, k, v, SMALL, feature_map=feature_map).sum().backward()


def test_a_bad_token_of_a_step_spoils_its_sample_alone():
    q, k, v = make_inputs(50, dtype=torch.float32)
    feature_map = make_map(dtype=torch.float32)
    clean = call(q, k, v, SMALL, feature_map=feature_map)
    v[0, 20] = float("nan")
    out, _ = in_pieces(q, k, v, SMALL, [20, *[1] * 20, 10], feature_map)
    torch.testing.assert_close(out[1], clean[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(out[0, :20], clean[0, :20], rtol=0, atol=1e-5)
    assert out[0, 20:].isnan().all()


def test_no_tensor_grows_with_the_square_of_the_tokens():
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    q, k, v = make_inputs(4096, batch=1, heads=1, key_heads=1, dtype=torch.float32)
    feature_map = make_map(1, dtype=torch.float32)
    with torch.no_grad(), Watch():
        call(q, k, v, HybridSettings(max_salient=64), feature_map=feature_map)
    assert max(sizes) < 4096 * 4096 / 16


@pytest.mark.parametrize("tokens", [200, 203])
def test_a_state_holds_no_memory_of_the_tokens_before(make_qkv, tokens):
    q, k, v = make_qkv(batch=1, tokens=tokens, heads=2, key_heads=1, dtype=torch.float32)
    phi = nalaformer.feature_map("norm_preserving", num_heads=2, head_dim=8)
    with torch.no_grad():
        _, state = recurrent_hybrid_attention(q, k, v, feature_map=phi, settings=HybridSettings(chunk_size=8, max_salient=4))
    for name, tensor in state.tensors().items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
