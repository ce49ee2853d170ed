"""Records of filtered layers, and of what is not a number."""

import math

import pytest
import torch

import nalaformer
from helpers.looked_at_models import pyramid, timm_vit
from nalaformer import analysis
from nalaformer.analysis.records import SoftmaxRecord
from nalaformer.attention import build

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("make", "side"), [(pyramid, 40), (timm_vit, 48)])
def test_layers_under_a_token_filter_are_not_recorded(make, side):
    model, images = make().eval(), torch.randn(1, 3, side, side)
    whole = [found.name for found in analysis.record(model, images)]
    tokens = nalaformer.filter_tokens(model, {1: 0.5})
    with pytest.raises(ValueError, match=r"under a token filter; take the filter off with its remove\(\)"):
        analysis.record(model, images)
    # layers in front of the filter see all tokens
    assert [found.name for found in analysis.record(model, images, whole[:1])] == whole[:1]
    tokens.remove()
    assert [found.name for found in analysis.record(model, images)] == whole


def softmax_record(bias=None):
    q, k = torch.randn(2, 1, 4, 1, 8)
    return SoftmaxRecord(name="layer", method="softmax", q=q, k=k, scale=1.0, bias=bias)


def test_weights_of_a_query_that_is_not_a_number_are_none_either():
    found = softmax_record()
    found.q[0, 2, 0, 3] = torch.nan
    rows = found.rows(torch.arange(4))
    assert rows[0, 0, 2].isnan().all()
    assert rows[0, 0, [0, 1, 3]].sum(-1).allclose(torch.ones(3))


@pytest.mark.parametrize("side", ["q", "k"])
def test_statistics_of_a_head_with_nan_say_so_and_those_of_others_stay(side):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 12, 2, 8)
    clean = SoftmaxRecord(name="layer", method="softmax", q=q.clone(), k=k.clone(), scale=1.0).statistics()
    (q if side == "q" else k)[0, 2, 0, 3] = torch.nan
    poisoned, other = SoftmaxRecord(name="layer", method="softmax", q=q, k=k, scale=1.0).statistics()
    for figure in ("entropy", "spearman", "entropy_drop", "key_norm_correlation", "effective_rank", "smallest_weight"):
        assert math.isnan(getattr(poisoned, figure)), figure
    assert other == clean[1]


def test_a_query_that_sees_nothing_has_no_weights():
    hidden = torch.zeros(1, 1, 4, 4)
    hidden[0, 0, 1] = -torch.inf
    rows = softmax_record(hidden).rows(torch.arange(4))
    assert rows[0, 0, 1].tolist() == [0.0] * 4
    assert rows[0, 0, [0, 2, 3]].sum(-1).allclose(torch.ones(3))


def recorded_with_mask(method, mask):
    model = build(method, dim=16, num_heads=2, position="none", local_mix="none").double()
    x = torch.randn(len(mask), 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return analysis.record(model, {"x": x, "key_mask": mask})[0]


@pytest.mark.parametrize("method", ["nalaformer", "softmax"])
def test_a_sample_that_is_all_padding_changes_no_figure(method):
    torch.manual_seed(0)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[2] = False
    found = recorded_with_mask(method, mask)
    whole = found.statistics()
    found.q, found.k, found.key_mask = found.q[:2], found.k[:2], found.key_mask[:2]
    if method == "softmax":
        found.bias = None
    for padded, alone in zip(whole, found.statistics(), strict=True):
        for figure in ("entropy", "effective_rank", "key_norm_correlation", "lost_products", "query_norm", "log_denominators"):
            assert getattr(padded, figure) == pytest.approx(getattr(alone, figure), rel=1e-9), figure


@pytest.mark.parametrize("method", ["nalaformer", "softmax"])
def test_statistics_of_padding_alone_are_refused(method):
    found = recorded_with_mask(method, torch.zeros(2, 12, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"statistics need visible tokens, got .* with all 24 masked"):
        found.statistics()
