"""The delta rule as a layer of sequence models."""

import pytest
import torch
import torch.nn.functional as F

from research.models import RecallModel, sequence_attention, state_size

pytestmark = pytest.mark.usefixtures("one_thread")


def layer(name, **options):
    return sequence_attention(name, dim=8, num_heads=2, causal=True, options=options).double()


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def unit_features(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()


@pytest.mark.parametrize("name", ["delta", "gated_delta"])
@pytest.mark.parametrize("map_name", [None, "norm_aware"])
def test_a_token_corrects_what_the_state_holds_under_its_key(name, map_name):
    torch.manual_seed(0)
    made, x = layer(name, **({} if map_name is None else {"feature_map": map_name})), torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = made.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
    if map_name is None:
        q, k = unit(F.silu(q))[0], unit(F.silu(k))[0]
    else:
        q, k = unit_features(made.map.query(q))[0], unit_features(made.map.key(k))[0]
    v, beta = F.silu(v)[0], made.beta(x).sigmoid()[0]
    fading = torch.zeros(5, 2, dtype=torch.float64)
    if name == "gated_delta":
        decay = made.fading
        fading = -decay.rate.exp() * F.softplus(decay.projection(x)[0] + decay.step)
    rows = []
    for head in range(2):
        state = torch.zeros(q.shape[-1], 4, dtype=torch.float64)
        outs = []
        for t in range(5):
            state = fading[t, head].exp() * state
            state = state + beta[t, head] * torch.outer(k[t, head], v[t, head] - k[t, head] @ state)
            outs.append(q[t, head] @ state * q.shape[-1] ** -0.5)
        rows.append(torch.stack(outs))
    out = torch.stack(rows, dim=1)
    normed = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(made(x)[0], made.projection(normed.flatten(1)), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("options", "factor"), [({}, 1), ({"feature_map": "norm_aware"}, 2)])
def test_a_delta_rule_state_is_counted(options, factor):
    sizes = {"answers": "tokens", "outputs": 8, "length": 8, "vocabulary": 8, "dim": 16, "depth": 3}
    model = RecallModel(**sizes, attention="gated_delta", attention_options=options)
    assert state_size(model) == 3 * 2 * factor * 8 * 8


def test_bidirectional_delta_rules_and_options_without_a_map_raise():
    with pytest.raises(ValueError, match="delta needs a causal model"):
        sequence_attention("delta", dim=8, num_heads=2)
    with pytest.raises(ValueError, match="options of a map need a map, got powers"):
        layer("delta", powers="mild")
