"""Keys that fade, in plain torch: against the formula in float64, over pieces, states, packed sequences and single weights."""

import pytest
import torch

import nalaformer
from helpers.attention_formula import EXACT, ROUNDING, distance
from helpers.contrast_formula import weighted_and_contrasted
from nalaformer import LinearState, attention_weights, feature_map, linear_attention, recurrent_linear_attention
from nalaformer.ops import recurrent_step_

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "one_thread"), pytest.mark.pairwise]


def make(tokens: int = 150, heads: int = 4, kv_heads: int = 2, size: int = 6, decay: float = 0.5):
    """q, k, v and log_decay in float64, with gradients."""
    shapes = [(2, tokens, heads, size), (2, tokens, kv_heads, size), (2, tokens, kv_heads, size)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    tensors.append(-decay * torch.rand(2, tokens, kv_heads, dtype=torch.float64))
    return [x.requires_grad_() for x in tensors]


def by_formula(mapped, q, k, v, log_decay, **arguments):
    log_decay = log_decay.repeat_interleave(q.shape[2] // log_decay.shape[2], 2)
    return weighted_and_contrasted(mapped, q, k, v, causal=True, log_decay=log_decay, **arguments)


def gradients(out, inputs):
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * upstream).sum(), inputs)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("name", ["relu", "norm_aware", "channel_softmax", "polarity", "polarity_exp"])
@pytest.mark.parametrize("decay", [0.02, 3.0])
def test_keys_fade_as_the_formula_says(backend, name, decay):
    q, k, v, log_decay = inputs = make(decay=decay)
    mapped = feature_map(name, num_heads=4, head_dim=6).double()
    visible = torch.rand(2, 150) > 0.3
    strength = torch.rand(2, 150, 4, dtype=torch.float64)
    # large, so that how it enters is seen
    options = {"key_mask": visible, "contrast": strength, "eps": 0.1}
    with nalaformer.use_backend(backend):
        out = linear_attention(q, k, v, feature_map=mapped, causal=True, log_decay=log_decay, **options)
    expected = by_formula(mapped, *inputs, **options)
    assert distance(out, expected) < EXACT
    for ours, exact in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert distance(ours, exact) < 10 * EXACT


def test_the_formula_is_a_state_that_shrinks_at_each_token():
    q, k, v, log_decay = make(tokens=20, heads=2)
    mapped = feature_map("relu", num_heads=2, head_dim=6).double()
    state, total = torch.zeros(2, 2, 6, 6, dtype=torch.float64), torch.zeros(2, 2, 6, dtype=torch.float64)
    rows = []
    for t in range(20):
        left = log_decay[:, t].exp()
        phi_q, phi_k = q[:, t].relu(), k[:, t].relu()
        state = left[..., None, None] * state + phi_k[..., None] * v[:, t, :, None]
        total = left[..., None] * total + phi_k
        above, below = torch.einsum("bhf,bhfv->bhv", phi_q, state), (phi_q * total).sum(-1, keepdim=True)
        rows.append(above / (below + 0.01))
    assert distance(by_formula(mapped, q, k, v, log_decay, eps=0.01), torch.stack(rows, 1)) < EXACT


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_state_of_keys_that_fade_goes_on_where_it_stopped(backend):
    inputs = make()
    mapped = feature_map("channel_softmax", num_heads=4, head_dim=6).double()
    expected = by_formula(mapped, *inputs, eps=1e-6)
    with nalaformer.use_backend(backend):
        state, parts = None, []
        for start, stop in ((0, 1), (1, 60), (60, 149)):
            here = [x[:, start:stop] for x in inputs]
            out, state = recurrent_linear_attention(*here[:3], feature_map=mapped, state=state, log_decay=here[3])
            parts.append(out)
        last = [x[:, 149:].detach() for x in inputs]
        step = recurrent_step_(state.detach(), *last[:3], feature_map=mapped, log_decay=last[3])
    assert distance(torch.cat(parts, 1), expected[:, :149]) < EXACT
    assert distance(step, expected[:, 149:]) < EXACT
    for ours, exact in zip(gradients(torch.cat(parts, 1), inputs), gradients(expected[:, :149], inputs), strict=True):
        assert distance(ours, exact) < 10 * EXACT


def test_the_gradient_of_a_final_state_knows_how_far_it_has_faded():
    inputs = make(tokens=40)
    mapped = feature_map("relu", num_heads=4, head_dim=6).double()
    found = []
    for backend in ("reference", "chunked"):
        with nalaformer.use_backend(backend):
            state = recurrent_linear_attention(*inputs[:3], feature_map=mapped, log_decay=inputs[3])[1]
        total = state.state.sin().sum() + state.key_sum.cos().sum()
        found.append(torch.autograd.grad(total, inputs[1:]))
    for ours, exact in zip(*found, strict=True):
        assert distance(ours, exact) < 10 * EXACT


def test_packed_sequences_fade_by_themselves():
    q, k, v, log_decay = (x.detach().flatten(0, 1) for x in make(tokens=30))
    mapped = feature_map("norm_aware", num_heads=4, head_dim=6).double()
    bounds = torch.tensor([0, 7, 7, 60])
    out = linear_attention(q, k, v, feature_map=mapped, causal=True, cu_seqlens=bounds, log_decay=log_decay)
    for start, stop in ((0, 7), (7, 60)):
        alone = by_formula(mapped, *(x[None, start:stop] for x in (q, k, v, log_decay)), eps=1e-6)
        assert distance(out[start:stop], alone[0]) < EXACT


def test_single_weights_are_those_of_the_output():
    q, k, v, log_decay = make(heads=2)
    mapped = feature_map("channel_softmax", num_heads=2, head_dim=6).double()
    options = {"feature_map": mapped, "causal": True, "log_decay": log_decay, "contrast": torch.rand(2, 150, 2).double()}
    weights = attention_weights(q, k, rows=[3, 149], **options)
    gathered = torch.einsum("bhrm,bmhv->brhv", weights, v)
    assert distance(gathered, linear_attention(q, k, v, **options)[:, [3, 149]]) < EXACT


def test_without_decay_nothing_is_forgotten():
    q, k, v, log_decay = make(heads=2)
    mapped = feature_map("norm_aware", num_heads=2, head_dim=6).double()
    plain = linear_attention(q, k, v, feature_map=mapped, causal=True, eps=0.0)
    kept = linear_attention(q, k, v, feature_map=mapped, causal=True, eps=0.0, log_decay=torch.zeros_like(log_decay))
    assert distance(kept, plain) < EXACT


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("decay", [-200.0, -1e30, -torch.inf])
def test_a_head_that_forgets_everything_sees_its_own_token(backend, decay):
    q, k, v, log_decay = (x.detach().float() for x in make(heads=2))
    # elu: no feature is zero, so a token has weight for itself
    mapped = feature_map("elu", num_heads=2, head_dim=6)
    log_decay = torch.full_like(log_decay, decay).requires_grad_()
    with nalaformer.use_backend(backend):
        out = linear_attention(q, k, v, feature_map=mapped, causal=True, eps=0.0, log_decay=log_decay)
    assert distance(out, v) < ROUNDING
    assert torch.autograd.grad(out.sum(), log_decay)[0].isfinite().all()


def test_eps_does_not_outgrow_what_is_left_of_many_keys():
    """With eps times the number of tokens, the outputs of a head with a short memory would vanish in a long text."""
    tokens = 4000
    ones = torch.ones(1, tokens, 1, 4)
    mapped = feature_map("relu", num_heads=1, head_dim=4)
    log_decay = torch.full((1, tokens, 1), -1.0)
    out = linear_attention(0.01 * ones, 0.01 * ones, ones, feature_map=mapped, causal=True, eps=1e-6, log_decay=log_decay)
    assert out[:, -1].min() > 0.99


def test_a_decay_for_each_query_head_gives_each_its_own_keys():
    q, k, v, _ = make()
    log_decay = -torch.rand(2, 150, 4, dtype=torch.float64)
    mapped = feature_map("relu", num_heads=4, head_dim=6).double()
    out = linear_attention(q, k, v, feature_map=mapped, causal=True, log_decay=log_decay)
    repeated = [x.repeat_interleave(2, 2) for x in (k, v)]
    assert distance(out, by_formula(mapped, q, *repeated, log_decay, eps=1e-6)) < EXACT


def test_decays_of_query_heads_meet_weights_of_key_heads():
    q, k, v, _ = make()
    log_decay, weight = -torch.rand(2, 150, 4, dtype=torch.float64), torch.rand(2, 150, 2, dtype=torch.float64)
    mapped = feature_map("relu", num_heads=4, head_dim=6).double()
    given = {"feature_map": mapped, "causal": True, "log_decay": log_decay, "key_weight": weight}
    spread_k, spread_v, spread = (x.repeat_interleave(2, 2) for x in (k, v, weight))
    expected = by_formula(mapped, q, spread_k, spread_v, log_decay, key_weight=spread, eps=1e-6)
    assert distance(linear_attention(q, k, v, **given), expected) < EXACT
    weights = attention_weights(q, k, **given)
    assert distance(torch.einsum("bhij,bjhv->bihv", weights, spread_v), expected) < EXACT


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_head_that_forgets_nothing_can_learn_to_forget(backend):
    q, k, v, log_decay = make(decay=0.0)
    mapped = feature_map("relu", num_heads=4, head_dim=6).double()
    with nalaformer.use_backend(backend):
        out = linear_attention(q, k, v, feature_map=mapped, causal=True, log_decay=log_decay)
    # the formula without its bounds, which have no say in a gradient inside of them
    passed = log_decay.repeat_interleave(2, 2).transpose(1, 2).cumsum(-1)
    left = torch.exp((passed[..., :, None] - passed[..., None, :]).tril()).tril()
    spread_k, spread_v = (x.repeat_interleave(2, 2) for x in (k, v))
    weights = torch.einsum("bihf,bjhf->bhij", q.relu(), spread_k.relu()) * left
    exact = torch.einsum("bhij,bjhv->bihv", weights / (weights.sum(-1, keepdim=True) + 1e-6), spread_v)
    found, expected = (gradients(x, [log_decay])[0] for x in (out, exact))
    assert expected.abs().max() > 0.1
    assert distance(found, expected) < EXACT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": False}, "log_decay needs causal attention token by token"),
        ({"block": 4}, "log_decay needs causal attention token by token"),
        ({"log_decay": torch.zeros(2, 150, 3)}, "for each token and head"),
        ({"log_decay": torch.zeros(2, 150, 2, dtype=torch.int64)}, "must be floats"),
        ({"contrast": "mean_score"}, "must be a tensor of scales"),
        ({"log_decay": torch.full((2, 150, 2), 0.5)}, "must be <= 0.* got max 0.5"),
    ],
)
def test_decays_that_make_no_sense_are_refused(change, message):
    q, k, v, log_decay = make()
    mapped = feature_map("relu", num_heads=4, head_dim=6)
    with pytest.raises(ValueError, match=message):
        linear_attention(q, k, v, **({"feature_map": mapped, "causal": True, "log_decay": log_decay} | change))
    with pytest.raises(TypeError, match="must be a torch tensor"):
        linear_attention(q, k, v, feature_map=mapped, causal=True, log_decay=-0.5)


def test_a_state_of_fading_keys_stays_small_over_many_tokens():
    """The scale of a state counts from its last token: sums and scale neither grow nor vanish with the text."""
    mapped = feature_map("relu", num_heads=1, head_dim=4)
    state = LinearState.empty(1, 1, 4, 4)
    x = torch.ones(1, 500, 1, 4)
    for _ in range(4):
        _, state = recurrent_linear_attention(x, x, x, feature_map=mapped, state=state, log_decay=torch.full((1, 500, 1), -1.0))
    # 1 + e^-1 + e^-2 + ..
    assert abs(float((state.key_sum * state.log_scale.exp()[..., None])[0, 0, 0]) - 1 / (1 - 1 / 2.718281828)) < 1e-5
    assert state.log_scale.abs().max() < 1e-6
