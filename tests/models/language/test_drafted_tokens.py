"""Generation with drafts: a recording cache takes back the tokens that were not accepted."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.language_models import GREEDY, VOCABULARY, each_layout, main_layouts, make, text
from nalaformer.models.language import NaLaCache, NaLaConfig, NaLaForCausalLM, RecurrentLayer
from nalaformer.models.language.cache import RECORDED_TOKENS
from nalaformer.models.language.config import RECURRENT_MIXERS

pytestmark = pytest.mark.usefixtures("one_thread")


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).double().eval()


@main_layouts
def test_drafts_change_no_token(layout):
    """The assistant is nearly the model: some of its tokens are accepted, some are not."""
    model, prompt = make(layout), text(1, 9)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    expected = model.generate(prompt, **GREEDY)
    for drafts in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(prompt, **GREEDY, **drafts), expected)


def test_models_of_both_kinds_draft_for_each_other():
    ours, theirs, prompt = make("gated_delta"), llama(), text(1, 9)
    for model, assistant in ((ours, theirs), (theirs, ours)):
        assert torch.equal(model.generate(prompt, **GREEDY, assistant_model=assistant), model.generate(prompt, **GREEDY))


@pytest.mark.parametrize("drafts", ["assistant_model", "prompt_lookup_num_tokens"])
def test_drafts_after_a_filled_cache_are_refused(drafts):
    """transformers gives the whole text to the model again there: what the cache holds of it would count twice."""
    model, prompt, cache = make(), text(1, 9), NaLaCache(make().config)
    empty = model.generate(prompt, **GREEDY, past_key_values=cache, **{drafts: llama() if drafts == "assistant_model" else 3})
    assert torch.equal(empty, model.generate(prompt, **GREEDY))
    with pytest.raises(ValueError, match="drafting needs an empty cache, got past_key_values of 20 tokens"):
        model.generate(empty, **GREEDY, past_key_values=cache, **{drafts: llama() if drafts == "assistant_model" else 3})


@each_layout
@torch.no_grad()
def test_tokens_that_were_taken_back_leave_no_trace(layout):
    """Taken back from a piece of several tokens, from single steps, and from both at once."""
    model, tokens = make(layout), text(2, 90)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    cache = NaLaCache(model.config)
    cache.activate_past_recording()

    def add(start, stop):
        return model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits

    # more tokens than are recorded
    add(0, 80)
    cache.crop(-7)
    add(73, 76), add(76, 77), add(77, 78)
    cache.crop(-4)
    assert cache.get_seq_length() == 74
    cache.crop(0)
    expected = model(tokens, attention_mask=mask).logits[:, 74:]
    torch.testing.assert_close(add(74, 90), expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_recording_cache_takes_back_no_more_than_it_recorded():
    model, tokens = make("hybrid"), text(1, 100)
    cache = NaLaCache(model.config)
    cache.activate_past_recording()
    for start in range(100):
        model(tokens[:, start : start + 1], past_key_values=cache)
    recurrent = next(layer for layer in cache.layers if isinstance(layer, RecurrentLayer))
    assert RECORDED_TOKENS <= sum(each.length for each in recurrent.recorded) <= RECORDED_TOKENS + 1
    for number in (-RECORDED_TOKENS - 2, 1):
        with pytest.raises(ValueError, match=r"crop takes back the last tokens by a negative number"):
            cache.crop(number)
    assert cache.layers[1].get_seq_length() == 100, "a refused crop has cut a layer"
    cache.reset()
    assert recurrent.recorded == [] or recurrent not in cache.layers


@pytest.mark.parametrize("mixer", RECURRENT_MIXERS)
def test_a_copied_cache_takes_tokens_back_by_itself(mixer):
    torch.manual_seed(0)
    model = NaLaForCausalLM(NaLaConfig.from_size("nano", vocab_size=30, mixers=mixer)).eval()
    tokens = torch.randint(1, 30, (1, 12))
    cache = NaLaCache(model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(tokens[:, :6], past_key_values=cache)
        model(tokens[:, 6:10], past_key_values=cache)
        copied = copy.deepcopy(cache)
        copied.crop(-2)
        expected = model(tokens[:, :10]).logits[:, -2:]
        found = model(tokens[:, 8:10], past_key_values=copied).logits
        after = model(tokens[:, 10:], past_key_values=cache).logits
        whole = model(tokens).logits[:, -2:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, whole, atol=1e-4, rtol=1e-4)
