"""Classes of tokens and spans that answer: logits, losses, padding, and the Auto classes that find these heads."""

import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from helpers.language_models import make, text
from nalaformer.models.language import NaLaConfig, NaLaForQuestionAnswering, NaLaForTokenClassification

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS = [NaLaForTokenClassification, NaLaForQuestionAnswering]


def labeller(head, **changes):
    return head(NaLaConfig.from_size("nano", vocab_size=61, num_labels=3, **changes)).double().eval()


def unwrap_logits(out) -> torch.Tensor:
    return out.logits if hasattr(out, "logits") else torch.stack((out.start_logits, out.end_logits), dim=-1)


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_every_token_has_logits_whatever_is_padded_beside_it(head):
    model, tokens = labeller(head), text(2, 9)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    found = unwrap_logits(model(tokens, attention_mask=mask))
    assert found.shape == (2, 9, 3 if head is NaLaForTokenClassification else 2)
    torch.testing.assert_close(found[1:, 4:], unwrap_logits(model(tokens[1:, 4:])), rtol=0, atol=1e-10)


@torch.no_grad()
def test_the_loss_of_token_classes_is_the_mean_over_labelled_tokens():
    model, tokens = labeller(NaLaForTokenClassification), text(2, 5)
    labels = torch.tensor([[0, 1, 2, -100, 1], [2, -100, -100, 0, 0]])
    out = model(tokens, labels=labels)
    log_parts = out.logits - out.logits.logsumexp(-1, keepdim=True)
    chosen = [log_parts[row, place, labels[row, place]] for row, place in (labels >= 0).nonzero().tolist()]
    torch.testing.assert_close(out.loss.double(), -torch.stack(chosen).mean(), rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_loss_of_an_answer_is_the_mean_of_its_start_and_end():
    model, tokens = labeller(NaLaForQuestionAnswering), text(1, 6)
    out = model(tokens, start_positions=torch.tensor([2]), end_positions=torch.tensor([4]))
    start, end = (logits[0] - logits[0].logsumexp(0) for logits in (out.start_logits, out.end_logits))
    torch.testing.assert_close(out.loss.double(), -(start[2] + end[4]) / 2, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("auto", "head"), list(zip((AutoModelForTokenClassification, AutoModelForQuestionAnswering), HEADS, strict=True))
)
def test_the_auto_classes_put_a_head_on_a_causal_model(auto, head, tmp_path):
    causal = make(dtype=torch.float32)
    causal.save_pretrained(tmp_path)
    model = auto.from_pretrained(tmp_path)
    assert type(model) is head
    for name, value in causal.model.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], value)


@pytest.mark.parametrize("head", HEADS)
def test_a_misspelt_argument_of_a_labelling_head_is_refused(head):
    with pytest.raises(ValueError, match=r"unknown argument 'atention_mask'.*attention_mask"):
        labeller(head)(text(1, 5), atention_mask=torch.ones(1, 5))
