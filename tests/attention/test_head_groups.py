"""Key heads with budgets of their own: each attends as its budget says, and remembers no more."""

from dataclasses import replace

import pytest
import torch

from helpers.hybrid_definition import reference_attention, salient_by_score
from nalaformer.attention.hybrid import BUDGETS, HeadGroups, HybridSettings

SETTINGS = HybridSettings(chunk_size=4, salient_per_chunk=1, selection="key_norm", linear_mass=3)
SIZES = {"dim": 6, "num_heads": 8, "num_key_heads": 4, "head_dim": 6}
TOKENS = 22


def drawn(budget):
    groups = HeadGroups(SETTINGS, budget, **SIZES).double()
    with torch.no_grad():
        for parameter in groups.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    q, k, v = (torch.randn(1, TOKENS, heads, 6, dtype=torch.float64) for heads in (8, 4, 4))
    return groups, (q, k, v, torch.randn(1, TOKENS, 6, dtype=torch.float64))


def expected_of(groups, number, q, k, v, x):
    """The output of the query heads of key head `number`, [N, 2, D], from the formula and this head's own weights."""
    name = groups.budget[number]
    same = [head for head, other in enumerate(groups.budget) if other == name]
    part = groups.parts[sorted(set(groups.budget), key=list(BUDGETS).index).index(name)]
    # the map and the gate are the group's: formula of all its heads, of which these are two
    rows = [2 * head + twin for head in same for twin in range(2)]
    q, k, v = q[0][:, rows], *(tensor[0][:, same].repeat_interleave(2, 1) for tensor in (k, v))
    if name == "full":
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        weights = torch.einsum("nhd,mhd->hnm", q, k).div(6**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hnm,mhd->nhd", weights, v)
    else:
        per_chunk = {"salient": 1, "window": 0, "linear": 0}[name]
        salient = salient_by_score(k.square().sum(-1), settings=replace(SETTINGS, salient_per_chunk=per_chunk))
        given = {"feature_map": part.map, "settings": part.settings, "gate": part.gates(x)[0]}
        out = reference_attention(q, k, v, salient, **given)
    place = same.index(number)
    return out[:, 2 * place : 2 * place + 2]


@pytest.mark.parametrize(
    "budget", [("full", "salient", "window", "full"), ("salient", "salient", "full", "window"), ("window",) * 4]
)
@torch.no_grad()
def test_each_key_head_attends_as_its_budget_says(budget):
    groups, tensors = drawn(budget)
    out, _ = groups(*tensors)
    for number in range(4):
        expected = expected_of(groups, number, *tensors)
        torch.testing.assert_close(out[0, :, 2 * number : 2 * number + 2], expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_heads_remember_what_their_budget_allows():
    groups, tensors = drawn(("full", "salient", "window", "linear"))
    _, state = groups(*tensors)
    held = [part.keys.shape[2] for part in state.parts]
    # window of two chunks; of 22 tokens four of five chunks have left it
    assert held == [8 + 16, 8 + 4, 8, 0]
    assert state.nbytes == sum(part.nbytes for part in state.parts)


@torch.no_grad()
def test_a_token_that_is_not_a_number_reaches_no_earlier_one_in_heads_that_keep_everything():
    groups, (q, k, v, x) = drawn(("full",) * 4)
    expected, _ = groups(q, k, v, x)
    k[:, 9] = torch.nan
    out, state = groups(q, k, v, x)
    torch.testing.assert_close(out[:, :9], expected[:, :9])
    assert out[:, 9:].isnan().all()
    assert groups(q[:, :1], k[:, :1], v[:, :1], x[:, :1], state=state)[0].isnan().all()


@pytest.mark.parametrize("budget", [("full",) * 3, ("full", "salient", "most", "full")])
def test_a_budget_of_another_size_or_name_is_rejected(budget):
    with pytest.raises(ValueError, match="one of full, salient, window, linear for each of the 4 key heads"):
        HeadGroups(SETTINGS, budget, **SIZES)
