"""Converted models that decode in place: logits and tokens are those of the model with its ordinary cache."""

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")
from helpers.converted_models import BUDGET, SMALL, converted
from nalaformer.attention.hybrid import hybrid_settings
from nalaformer.models.hybrid.cache import HybridCache
from nalaformer.models.hybrid.decoder import SteppingDecoder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tokens():
    return torch.randint(3, 50, (2, 60))


@torch.no_grad()
def both_logits(model, tokens, start, **options):
    """Logits of the tokens after the first `start`, of a decoder and of the whole text at once; the decoder."""
    decoder = SteppingDecoder(model, model(tokens[:, :start], use_cache=True).past_key_values, **options)
    ours = [decoder.step(token).clone() for token in tokens[:, start:].unbind(1)]
    return torch.stack(ours, 1), model(tokens, use_cache=False).logits[:, start:], decoder


@pytest.mark.parametrize(
    ("family", "settings", "budget"),
    [
        ("llama", SMALL, None),
        ("qwen3", replace(SMALL, selection="self_saliency"), BUDGET),
        ("smollm3", replace(SMALL, selection="learned", select_per="query_head"), None),
        ("gemma", replace(SMALL, gate="head", merge="released"), None),
        ("llama", hybrid_settings("window", chunk_size=8), None),
    ],
)
def test_logits_in_place_are_those_of_the_whole_text(family, settings, budget, tokens):
    model, tokens = converted(family, settings, budget), tokens[:, :40]
    ours, expected, _ = both_logits(model, tokens, 13, capacity=60)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    # the cache's own steps are in place too, but with gradients, which take the way of prompts
    for with_gradient in (False, True):
        with torch.set_grad_enabled(with_gradient):
            cache = model(tokens[:, :13], use_cache=True).past_key_values
            steps = [model(token, past_key_values=cache).logits.detach() for token in tokens[:, 13:].split(1, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-4)


def test_logits_without_a_cap_are_those_of_the_whole_text(tokens):
    ours, expected, decoder = both_logits(converted(settings=replace(SMALL, max_salient=0)), tokens, 20, capacity=63)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    for _ in range(3):
        decoder.step(tokens[:, 0])
    before = [state.clone() for state in decoder.cache.states]
    with pytest.raises(ValueError, match=r"room for texts of 63 tokens, got one of 64; .* larger capacity"):
        decoder.step(tokens[:, 0])
    for old, state in zip(before, decoder.cache.states, strict=True):
        assert old.lengths == state.lengths
        assert all(torch.equal(x, y) for x, y in zip(old.tensors().values(), state.tensors().values(), strict=True))


def test_greedy_tokens_after_padded_prompts_are_those_of_generate(tokens):
    model = converted()
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :7] = 0
    prompt = torch.where(mask.bool(), tokens[:, :20], 0)
    expected = model.generate(prompt, attention_mask=mask, max_new_tokens=30, do_sample=False)[:, 20:]
    with torch.no_grad():
        out = model(prompt, attention_mask=mask, use_cache=True)
    decoder, found = SteppingDecoder(model, out.past_key_values), [out.logits[:, -1].argmax(-1)]
    for _ in range(29):
        found.append(decoder.step(found[-1]).argmax(-1))
    assert torch.equal(torch.stack(found, 1), expected)


@torch.no_grad()
def test_a_conversation_goes_on_after_steps_in_place(tokens):
    model = converted()
    _, _, decoder = both_logits(model, tokens[:, :50], 20)
    cache = decoder.cache.to_cache(model.config)
    assert cache.get_seq_length() == 50
    out = model(tokens[:, 50:], past_key_values=cache).logits
    torch.testing.assert_close(out, model(tokens, use_cache=False).logits[:, 50:], rtol=0, atol=1e-4)


@torch.no_grad()
def test_memory_in_place_has_one_size_and_leaves_the_prompts_cache_alone(tokens):
    model = converted()
    cache = model(tokens[:, :20], use_cache=True).past_key_values
    before = {name: tensor.clone() for name, tensor in cache.layers[0].state.tensors().items()}
    decoder = SteppingDecoder(model, cache)
    sizes = set()
    for token in tokens[:, 20:].unbind(1):
        decoder.step(token)
        sizes.add(decoder.cache.nbytes)
    assert len(sizes) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.layers[0].state.tensors().items())


@torch.no_grad()
def test_what_memory_of_fixed_size_cannot_do_is_refused(tokens):
    model = converted()
    with pytest.raises(ValueError, match="got an empty cache"):
        SteppingDecoder(model, HybridCache(model.config))
    decoder = SteppingDecoder(model, model(tokens[:, :20], use_cache=True).past_key_values)
    with pytest.raises(ValueError, match=r"token of each of the 2 samples, got shape \(1,\)"):
        decoder.step(tokens[0, :1])
    cache = decoder.cache
    # steps that the decoder does not count would be lost
    for some in (tokens, tokens[:, :1]):
        with pytest.raises(ValueError, match="must be a HybridCache, got SteppingCache"):
            model(some, past_key_values=cache)
    with pytest.raises(ValueError, match=r"states of its own sizes, \(2, .* got \(1, "):
        cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"states of its own sizes, \(2, .* got \(1, "):
        cache.load_(model(tokens[:1, :20], use_cache=True).past_key_values)


@torch.no_grad()
def test_a_decoder_goes_on_from_another_text(tokens):
    model = converted()
    _, _, decoder = both_logits(model, tokens[:, :50], 20)
    other = tokens.flip(1)
    prompt = model(other[:, :27], use_cache=True)
    decoder.cache.load_(prompt.past_key_values)
    ours = torch.stack([decoder.step(token).clone() for token in other[:, 27:].unbind(1)], 1)
    torch.testing.assert_close(ours, model(other, use_cache=False).logits[:, 27:], rtol=0, atol=1e-4)
    assert decoder.cache.to_cache(model.config).get_seq_length() == 60


@torch.no_grad()
def test_samples_of_a_decoder_change_places(tokens):
    model = converted()
    decoder = SteppingDecoder(model, model(tokens[:, :20], use_cache=True).past_key_values)
    decoder.cache.reorder_cache(torch.tensor([1, 0]))
    ours = torch.stack([decoder.step(token).clone() for token in tokens[:, 20:].flip(0).unbind(1)], 1)
    torch.testing.assert_close(ours.flip(0), model(tokens, use_cache=False).logits[:, 20:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("max_salient", [0, 6])
def test_a_prompt_of_inference_mode_goes_on_outside(max_salient, tokens):
    model = converted(settings=replace(SMALL, max_salient=max_salient))
    with torch.inference_mode():
        cache = model(tokens[:, :20], use_cache=True).past_key_values
        model(tokens[:, 20:21], past_key_values=cache)
    with torch.no_grad():
        logits = [model(token, past_key_values=cache).logits for token in tokens[:, 21:].split(1, 1)]
        expected = model(tokens, use_cache=False).logits[:, 21:]
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_states_that_were_asked_for_and_copied_caches_stay_as_they_were(tokens):
    model = converted()
    cache = model(tokens[:, :20], use_cache=True).past_key_values
    asked, twin = cache.layers[0].state, deepcopy(cache)
    before = asked.clone()
    for token in tokens[:, 20:].split(1, 1):
        model(token, past_key_values=cache)
    assert cache.layers[0].state.lengths == (60, 60)
    for state in (asked, twin.layers[0].state):
        assert state.lengths == before.lengths
        assert all(torch.equal(x, y) for x, y in zip(state.tensors().values(), before.tensors().values(), strict=True))


@torch.no_grad()
def test_steps_do_not_copy_what_is_remembered(tokens):
    model = converted(settings=replace(SMALL, max_salient=0))
    cache, places = model(tokens[:, :20], use_cache=True).past_key_values, []
    for token in tokens[:, 20:].split(1, 1):
        model(token, past_key_values=cache)
        places.append([layer.held.keys.data_ptr() for layer in cache.layers])
    # room for 2 salient tokens doubles to 4, 8 and 16
    assert sum(one != other for one, other in pairwise(places)) == 3


@torch.no_grad()
def test_a_step_does_not_ask_again_who_takes_it(tokens, monkeypatch):
    model = converted()
    cache = model(tokens[:, :20], use_cache=True).past_key_values
    expected = model(tokens, use_cache=False).logits[:, 20]

    def enter(*args, **kwargs):
        raise AssertionError("a decoder's step has entered the model that gave it away")

    monkeypatch.setattr(type(model), "forward", enter)
    torch.testing.assert_close(SteppingDecoder(model, cache).step(tokens[:, 20]), expected, rtol=0, atol=1e-4)
