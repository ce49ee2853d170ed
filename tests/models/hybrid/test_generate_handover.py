"""Steps of `generate` that a decoder takes over: the tokens and the cache are those of the model by itself.

Uncaptured or recorded, so that they run anywhere; tests/test_stepping_gpu.py has the same on CUDA graphs.
"""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from torch import nn

from helpers.converted_models import SMALL, converted
from helpers.steps_of_generate import GREEDY, NEW_TOKENS, TAKEN, UNCAPPED, both, prompts, with_steps
from nalaformer.attention.hybrid import hybrid_settings
from nalaformer.models.hybrid.attention import attention_mode
from nalaformer.models.hybrid.cache import HybridCache
from nalaformer.models.hybrid.decoder import SteppingDecoder
from nalaformer.models.hybrid.stepping import Stepping

pytest_plugins = "helpers.steps_of_generate"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", SMALL),
        ("llama", UNCAPPED),
        ("qwen3", replace(SMALL, selection="self_saliency")),
        ("smollm3", replace(SMALL, selection="learned", select_per="query_head")),
        ("gemma", hybrid_settings("window", chunk_size=8)),
    ],
)
def test_greedy_tokens_and_logits_of_padded_prompts_are_the_models_own(family, settings, steps):
    options = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    expected, found = both(converted(family, settings), **prompts(), **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=1e-4)
    assert steps == {"taken": TAKEN, "made": 1}


@pytest.mark.usefixtures("each_way")
def test_positions_of_the_callers_own_are_kept(steps):
    tokens = torch.randint(3, 50, (2, 21))
    positions = torch.arange(21).repeat(2, 1) + torch.tensor([[4], [70]])
    expected, found = both(converted(), input_ids=tokens, position_ids=positions, **GREEDY)
    assert torch.equal(found, expected)
    assert steps["taken"]


@torch.no_grad()
def test_calls_without_positions_count_as_the_host_does(steps):
    model, tokens = converted(), torch.randint(3, 50, (2, 40))
    logits = []
    for stepping in (None, Stepping(after=0, capture=False)):
        model.stepping = stepping
        cache = model(tokens[:, :12], use_cache=True).past_key_values
        logits.append(torch.cat([model(token, past_key_values=cache).logits for token in tokens[:, 12:].split(1, 1)], 1))
        assert cache.get_seq_length() == 40
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    assert steps["taken"] == 28


@pytest.mark.parametrize("settings", [SMALL, UNCAPPED], ids=["capped", "uncapped"])
def test_drawn_tokens_are_the_models_own(settings, steps):
    expected, found = both(converted(settings=settings), **prompts(), max_new_tokens=NEW_TOKENS, do_sample=True, top_k=8)
    assert torch.equal(found, expected)
    assert steps["taken"]


@pytest.mark.usefixtures("each_way")
def test_beams_are_the_models_own_and_reordered_in_place(steps):
    expected, found = both(converted(), **prompts(), **GREEDY, num_beams=3, num_return_sequences=2)
    assert torch.equal(found, expected)
    # were they given back at every step, one decoder would be loaded again and again, or steps be the model's
    assert steps == {"taken": TAKEN, "made": 1}


def test_rows_are_chosen_repeated_and_copied_while_lent(steps):
    model = with_steps(converted())
    out = model.generate(**prompts(), **GREEDY, return_dict_in_generate=True)
    cache, more = out.past_key_values, torch.randint(3, 50, (1, 5))
    assert cache.layers[0].is_lent
    kept = copy.deepcopy(cache)
    assert not kept.layers[0].is_lent
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    with torch.no_grad():
        chosen = model(more.expand(3, -1), past_key_values=cache).logits
        both_rows = model(more.expand(2, -1), past_key_values=kept).logits
    torch.testing.assert_close(chosen, both_rows[1:].expand(3, -1, -1), rtol=0, atol=1e-4)


@torch.no_grad()
def test_samples_of_different_lengths_change_places_while_lent(steps):
    model, given, tokens = with_steps(converted(), after=0), prompts(), torch.randint(3, 50, (30, 2, 1))
    order, logits = torch.tensor([1, 0]), []
    for is_lent in (True, False):
        cache = model(**given, use_cache=True).past_key_values
        for n, token in enumerate(tokens):
            # by then the samples' chunks are full at different steps
            if n == 8:
                cache.reorder_cache(order)
            if not is_lent:
                cache = copy.deepcopy(cache)
                model.stepping = None
            positions = torch.tensor([[21], [12]])[order if n >= 8 else slice(None)] + n
            logits.append(model(token, position_ids=positions, past_key_values=cache).logits)
        # what goes on from here asks each sample's own length
        assert cache.layers[0].state.lengths == (12 + 30, 21 + 30)
    torch.testing.assert_close(*torch.stack(logits).chunk(2), rtol=0, atol=1e-4)
    assert steps["taken"] == 30


def test_a_conversation_goes_on_from_a_lent_cache(steps):
    model, given = with_steps(converted()), prompts()
    first = model.generate(**given, **GREEDY, return_dict_in_generate=True)
    more = torch.cat((first.sequences, torch.randint(3, 50, (2, 7))), 1)
    mask = nn.functional.pad(given["attention_mask"], (0, more.shape[1] - 21), value=1)
    # other texts take the decoder in between
    others = [model.generate(torch.randint(3, 50, (2, 30)), **GREEDY, return_dict_in_generate=True) for _ in range(2)]
    assert not first.past_key_values.layers[0].is_lent
    assert all(other.past_key_values.layers[0].is_lent for other in others)
    found = model.generate(more, attention_mask=mask, past_key_values=copy.deepcopy(first.past_key_values), **GREEDY)
    cache, pieces = first.past_key_values, []
    with torch.no_grad():
        # the last token that was generated is not in the cache; one of the pieces is a step
        for piece in more[:, 20 + NEW_TOKENS :].split((3, 1, 4), 1):
            given = mask[:, : cache.get_seq_length() + piece.shape[1]]
            pieces.append(model(piece, attention_mask=given, past_key_values=cache).logits)
        model.stepping = None
        whole = model(more, attention_mask=mask, use_cache=False).logits[:, 20 + NEW_TOKENS :]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-4)
    assert torch.equal(found, model.generate(more, attention_mask=mask, **GREEDY))
    assert steps["made"] == 2


def test_texts_that_follow_share_one_decoder_from_their_first_step(steps):
    model = converted()
    expected = [model.generate(torch.full((2, n), 7), **GREEDY) for n in (11, 30)]
    with_steps(model)
    found = [model.generate(torch.full((2, n), 7), **GREEDY) for n in (11, 30)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert steps == {"taken": 2 * TAKEN + 3, "made": 1}


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("texts", [2, 3])
def test_texts_that_alternate_do_not_mix(texts, steps, loads):
    model, tokens = converted(), torch.randint(3, 50, (texts, 2, 28))
    with torch.no_grad():
        expected = model(tokens.flatten(0, 1), use_cache=False).logits[:, 12:].unflatten(0, (texts, 2))
        with_steps(model, after=0)
        caches = [model(x[:, :12], use_cache=True).past_key_values for x in tokens]
        for n in range(12, 28):
            for text in range(texts):
                out = model(tokens[text, :, n : n + 1], past_key_values=caches[text]).logits[:, 0]
                torch.testing.assert_close(out, expected[text, :, n - 12], rtol=0, atol=1e-4)
    assert steps == {"taken": 16 * texts, "made": 2}
    # two have a decoder each; the third has to take one from them
    assert bool(loads) == (texts == 3)


@pytest.mark.filterwarnings("ignore:steps of 2 samples cannot be captured")
@pytest.mark.parametrize("failing", [False, True])
def test_negative_prompts_have_a_decoder_of_their_own(failing, steps, loads, monkeypatch):
    if failing:
        make = SteppingDecoder.__init__

        def only_one(self, *args, **kwargs):
            if model.stepping.decoders:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            make(self, *args, **kwargs)

        monkeypatch.setattr(SteppingDecoder, "__init__", only_one)
    model, text = converted(), prompts()
    expected, found = both(model, **text, **GREEDY, guidance_scale=1.5, negative_prompt_ids=torch.full((2, 5), 7))
    assert torch.equal(found, expected)
    # two are wanted as a rule; where there is no memory for them, one goes to and fro
    assert steps == {"taken": 2 * TAKEN, "made": 1 if failing else 2}
    assert bool(loads) == failing


@torch.no_grad()
def test_unusual_steps_are_the_models_own(steps):
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    cache = model(tokens, use_cache=True).past_key_values
    one, padded = tokens[:, :1], torch.ones(2, 13, dtype=torch.int64)
    padded[1, -1] = 0

    def step(**options):
        return model(**({"input_ids": one, "past_key_values": copy.deepcopy(cache)} | options))

    step(attention_mask=torch.ones_like(padded))
    assert steps["taken"] == 1
    step(attention_mask=padded)
    step(labels=one)
    step(input_ids=tokens[:, :2])
    step(input_ids=None, inputs_embeds=model.get_input_embeddings()(one))
    step(past_key_values=HybridCache(model.config))
    assert len(step(output_hidden_states=True).hidden_states) == 3
    assert isinstance(step(return_dict=False), tuple)
    with torch.enable_grad():
        assert step().logits.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step()
    with attention_mode(model, "softmax"), pytest.raises(ValueError, match="computes whole sequences"):
        step()
    model.train()
    step(use_cache=True)
    assert steps["taken"] == 1
    # the hooks that hidden states have left behind are no reason to be slow
    model.eval()
    for _ in range(2):
        step()
    assert steps["taken"] == 3


@torch.no_grad()
def test_logits_are_not_written_over_by_the_next_step():
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    cache = model(tokens, use_cache=True).past_key_values
    first = model(tokens[:, :1], past_key_values=cache).logits
    before = first.clone()
    model(tokens[:, 1:2], past_key_values=cache)
    assert torch.equal(first, before)


def test_a_decoder_of_inference_mode_goes_on_outside(steps):
    model, text = converted(), torch.full((2, 9), 7)
    expected = model.generate(text, **GREEDY)
    with_steps(model)
    with torch.inference_mode():
        assert torch.equal(model.generate(text, **GREEDY), expected)
    assert torch.equal(model.generate(text, **GREEDY), expected)
    assert steps["made"] == 1


def test_nothing_is_taken_over_without_a_gpu_unless_it_is_asked_for(steps):
    model = converted()
    assert model.stepping is not None
    model.generate(torch.full((1, 9), 7), **GREEDY)
    assert steps["taken"] == 0
    with pytest.raises(ValueError, match="must not be negative"):
        Stepping(after=-1)


def test_text_is_streamed_token_by_token(steps):
    class Streamer:
        def __init__(self):
            self.pieces, self.is_over = [], False

        def put(self, piece):
            self.pieces.append(piece.clone())

        def end(self):
            self.is_over = True

    model, streamer = with_steps(converted()), Streamer()
    tokens = model.generate(torch.full((1, 9), 7), **GREEDY, streamer=streamer)
    assert torch.equal(torch.cat([piece.flatten() for piece in streamer.pieces]), tokens[0])
    assert streamer.is_over
    assert steps["taken"] == TAKEN
