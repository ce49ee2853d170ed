"""Statistics of trained attention on the scoreboard."""

import pytest
import torch

from nalaformer.analysis import record
from nalaformer.attention import build
from research.fast_training.data_on_device import Bucket
from research.models import OneAttention, RecallModel, SequenceClassifier
from research.scoreboard.inside import INSIDE, attention_metrics, head_metrics

pytestmark = pytest.mark.usefixtures("one_thread")
NONE = dict.fromkeys(INSIDE, "")


def make_bucket(inputs):
    count = len(inputs)
    return Bucket(inputs=inputs, at=None, targets=torch.zeros(count), group=torch.zeros(count, dtype=torch.long))


def metrics(model, inputs):
    return [float(value) for value in attention_metrics(model.eval(), make_bucket(inputs)).values()]


@pytest.mark.parametrize("attention", ["softmax", "nalaformer", "polaformer", "mala"])
def test_metrics_are_means_over_head_statistics(attention):
    torch.manual_seed(0)
    options = {"attention_options": {"gate": "none"}} if attention == "mala" else {}
    model = SequenceClassifier(
        answers="tokens", outputs=3, length=40, channels=5, dim=16, depth=2, mlp_dim=8, attention=attention, **options
    )
    # long queries, so that something drops
    for block in model.blocks:
        block.attention.qkvg.weight.data.mul_(6)
    inputs = torch.randn(4, 40, 5)
    heads = [head for layer in record(model, inputs) for head in layer.statistics()]
    correlation, drop, rank = metrics(model, inputs)
    assert correlation == pytest.approx(sum(head.spearman for head in heads) / 4, abs=1e-4)
    assert drop == pytest.approx(sum(head.entropy_drop for head in heads) / 4, abs=1e-4)
    if attention == "softmax":
        # effective_rank uses all 40 rows of two sequences instead of four
        few = [head for layer in record(model, inputs[:2]) for head in layer.statistics()]
        assert rank == pytest.approx(sum(head.effective_rank for head in few) / 4, abs=1e-3)
        assert drop > 0.02


def test_longer_causal_queries_that_attend_flatly_do_not_seem_sharper():
    torch.manual_seed(0)
    model = RecallModel(answers="tokens", outputs=11, length=60, vocabulary=11, dim=16, attention="softmax")
    for mixer in (layer.layer for layer in model.layers if hasattr(layer.layer, "qkvg")):
        # keys that are all zero: every query sees what is before it alike, and entropy is the logarithm of how much that is
        mixer.qkvg.weight.data[16:32] = 0
        mixer.qkvg.bias.data[16:32] = 0
    correlation, drop, rank = metrics(model, torch.randint(0, 11, (3, 60)))
    assert (correlation, abs(drop)) == (0.0, 0.0)
    assert rank > 1


@pytest.mark.parametrize("attention", ["softmax", "relu"])
def test_padding_does_not_change_entropies(attention):
    torch.manual_seed(0)
    settings = {"answers": "sequence", "outputs": 3, "vocabulary": 11, "is_padded": True, "dim": 16, "mlp_dim": 8}
    model = SequenceClassifier(length=64, attention=attention, **settings)
    for block in model.blocks:
        block.attention.qkvg.weight.data.mul_(6)
    tokens = torch.randint(1, 11, (4, 40))
    padded = torch.nn.functional.pad(tokens, (0, 24))
    # room: these are rounded to four digits
    assert metrics(model, padded)[:2] == pytest.approx(metrics(model, tokens)[:2], abs=2e-4)


def test_attention_without_weights_or_with_nan_has_no_metrics():
    delta = RecallModel(answers="tokens", outputs=11, length=9, vocabulary=11, dim=16, attention="delta")
    assert attention_metrics(delta, make_bucket(torch.zeros(2, 9, dtype=torch.long))) == NONE
    broken = OneAttention(answers="tokens", outputs=3, length=9, channels=5, dim=8, attention="relu")
    torch.nn.init.constant_(broken.embedding.weight, torch.nan)
    assert attention_metrics(broken, make_bucket(torch.randn(2, 9, 5))) == NONE


def test_masked_tokens_do_not_change_entropies():
    torch.manual_seed(0)
    options = {"answers": "sequence", "outputs": 3, "length": 40, "vocabulary": 9, "dim": 16, "mlp_dim": 8, "attention": "relu"}
    hidden = {"hide_zero": True, "mean_over": "visible"}
    model, short = (SequenceClassifier(**options, **hidden, most_visible=most) for most in (0, 30))
    for block in model.blocks:
        block.attention.qkvg.weight.data.mul_(6)
    short.load_state_dict(model.state_dict())
    inputs = torch.randint(1, 9, (4, 40)) * (torch.rand(4, 40) < 0.5)
    assert 10 < int((inputs != 0).sum(1).max()) < 30
    *entropies, _ = metrics(model, inputs)
    *of_short, _ = metrics(short, inputs)
    assert of_short == pytest.approx(entropies, abs=1e-4)
    assert abs(entropies[1]) > 0.02


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_equal_weights_have_no_entropy_drop_for_any_key_count(kind):
    layer = build(kind, dim=16, num_heads=2, causal=True, block=4).double()
    tokens = 11
    # keys all alike: every query weighs what it sees equally; norms of queries grow from token to token
    x = torch.arange(1.0, tokens + 1, dtype=torch.float64)[None, :, None].expand(2, -1, 16)
    with torch.no_grad():
        layer.qkvg.weight[16:32] = 0
        layer.qkvg.bias[:16] = 0
        layer.qkvg.bias[16:32] = 1
        layer.qkvg.weight[:16].abs_()
        found = record(layer, x)[0]
        # the eps of linear attention is all that is left
        assert head_metrics(found, torch.ones(2, tokens, dtype=torch.bool))[:, 1].abs().max() < 1e-6
