"""Training by transformers' Trainer with smoothed labels, and caches that start again."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from helpers.converted_models import converted
from helpers.looked_at_models import nala_language
from nalaformer.models.language import NaLaCache
from nalaformer.models.language.cache import RecurrentLayer

pytestmark = pytest.mark.usefixtures("one_thread")
SMOOTHING = 0.1


@pytest.mark.parametrize("make", [nala_language, converted])
def test_smoothed_labels_are_the_next_tokens(make, tmp_path):
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = make().eval()
    tokens = torch.randint(1, 30, (2, 9))
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=SMOOTHING, report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments)
    found = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
    with torch.no_grad():
        logits = model(tokens).logits.float()
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=SMOOTHING
    )
    torch.testing.assert_close(found.detach(), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_recording_cache_still_records_after_a_reset():
    model = nala_language().eval()
    tokens = torch.randint(1, 30, (1, 12))
    cache = NaLaCache(model.config)
    cache.activate_past_recording()
    model(tokens[:, :5], past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not any(layer.tensors for layer in cache.layers if isinstance(layer, RecurrentLayer))
    model(tokens[:, :10], past_key_values=cache)
    cache.crop(-2)
    found = model(tokens[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(tokens).logits[:, 8:], atol=1e-4, rtol=1e-4)
