"""Generation with tensors that stay in their place: the same tokens, one compiled step, and masks for each pair."""

import copy

import pytest
import torch
from transformers import CompileConfig

from helpers.language_models import GREEDY, LAYOUTS, each_layout, main_layouts, make, padded_prompts, text
from nalaformer.models.language import NaLaCache, NaLaStaticCache

pytestmark = pytest.mark.usefixtures("one_thread")
STATIC = GREEDY | {"cache_implementation": "static"}


@main_layouts
def test_a_static_cache_gives_the_tokens_of_a_growing_one(layout):
    model = make(layout)
    for prompts in ({"input_ids": text(2, 9)}, padded_prompts()):
        assert torch.equal(model.generate(**prompts, **STATIC), model.generate(**prompts, **GREEDY))


@each_layout
@torch.no_grad()
def test_pieces_with_padding_give_the_logits_of_the_whole_rows(layout):
    model = make(layout)
    tokens, mask = text(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[1, :4] = 0
    expected = model(tokens, attention_mask=mask, use_cache=False).logits[:, 4:]
    cache = NaLaStaticCache(model.config, 15)
    found = [
        model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        for start, stop in ((0, 5), (5, 6), (6, 10), (10, 11), (11, 12))
    ]
    torch.testing.assert_close(torch.cat(found, dim=1)[:, 4:], expected, rtol=0, atol=1e-9)
    assert int(cache.get_seq_length()) == 12


@each_layout
@torch.no_grad()
def test_tensors_stay_in_their_place(layout):
    model, tokens = make(layout), text(2, 12)
    cache = NaLaStaticCache(model.config, 12)
    model(tokens[:, :4], past_key_values=cache)
    places = {name: tensor.data_ptr() for name, tensor in cache.tensors().items()}
    before = {name: tensor.clone() for name, tensor in cache.tensors().items()}
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, 6] = 0
    model(tokens[:, 4:8], attention_mask=mask, past_key_values=cache)
    model(tokens[:, 8:9], past_key_values=cache)
    assert {name: tensor.data_ptr() for name, tensor in cache.tensors().items()} == places
    assert not all(torch.equal(tensor, before[name]) for name, tensor in cache.tensors().items())


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name == "hybrid" else pytest.mark.slow) for name in LAYOUTS])
def test_one_compiled_step_serves_every_token_and_the_next_call(layout):
    torch.compiler.reset()
    model, prompt = make(layout), text(2, 9)
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    expected = model.generate(prompt, **GREEDY)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model.generate(prompt, compile_config=compiled, **STATIC), expected)
        shorter = model.generate(prompt, compile_config=compiled, **(STATIC | {"max_new_tokens": 3}))
    assert torch.equal(shorter, expected[:, :12])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_there_is_room_for_the_longest_call_so_far():
    model, prompt = make("softmax"), text(1, 5)
    caches = [
        model.generate(prompt, return_dict_in_generate=True, **(STATIC | {"max_new_tokens": count})).past_key_values
        for count in (6, 2, 9)
    ]
    # the last token of a call is never read
    assert [cache.max_cache_len for cache in caches] == [10, 10, 13]
    assert caches[1].layers[0].keys.shape[2] == 10


def test_a_static_cache_takes_no_token_back():
    model = make("hybrid")
    with pytest.raises(ValueError, match=r"a static cache cannot remove tokens, got crop\(-1\); use a NaLaCache"):
        NaLaStaticCache(model.config, 9).crop(-1)
    with pytest.raises(ValueError, match="drafting needs a cache that can remove tokens"):
        model.generate(text(1, 5), prompt_lookup_num_tokens=2, past_key_values=NaLaStaticCache(model.config, 30), **GREEDY)


@torch.no_grad()
def test_a_reset_static_cache_begins_again():
    model, tokens = make("hybrid"), text(2, 6)
    cache = NaLaStaticCache(model.config, 6)
    expected = model(tokens, past_key_values=cache).logits
    cache.reset()
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected, rtol=0, atol=1e-10)


def test_other_kinds_of_caches_are_refused():
    with pytest.raises(ValueError, match=r"cache_implementation must be None, 'dynamic' or 'static'.*got 'quantized'"):
        make().generate(text(1, 5), cache_implementation="quantized", **GREEDY)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("form", ["yes or no", "numbers that are added"])
@torch.no_grad()
def test_a_mask_for_each_pair_lets_two_endings_share_a_beginning(implementation, form):
    model = make("softmax")
    model.set_attn_implementation(implementation)
    tokens = text(1, 7)
    # tokens 0-2, then two endings of two tokens each that do not see each other
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    seen[5:, 3:5] = False
    positions = torch.tensor([[0, 1, 2, 3, 4, 3, 4]])
    mask = seen if form == "yes or no" else torch.where(seen, 0.0, -1e30)
    found = model(tokens, attention_mask=mask[None, None], position_ids=positions).logits
    for ending in ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6]):
        torch.testing.assert_close(found[:, ending], model(tokens[:, ending]).logits, rtol=0, atol=1e-9)


def test_a_mask_for_each_pair_is_refused_where_states_hold_all_earlier_tokens():
    with pytest.raises(ValueError, match=r"needs `softmax` mixers alone.*got.*\(1, 1, 5, 5\) and 1 layers with 'gated_delta'"):
        make("hybrid")(text(1, 5), attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))


@torch.no_grad()
def test_a_copied_static_cache_goes_its_own_way():
    model, tokens = make("hybrid"), text(1, 8)
    cache = NaLaStaticCache(model.config, 8)
    model(tokens[:, :5], past_key_values=cache)
    copied = copy.deepcopy(cache)
    model(text(1, 1), past_key_values=cache)
    found = model(tokens[:, 5:6], past_key_values=copied).logits
    growing = NaLaCache(model.config)
    model(tokens[:, :5], past_key_values=growing)
    torch.testing.assert_close(found, model(tokens[:, 5:6], past_key_values=growing).logits, rtol=0, atol=1e-10)


def test_beams_choose_rows_of_a_static_cache():
    model, prompts = make("hybrid"), padded_prompts()
    assert torch.equal(model.generate(**prompts, **STATIC, num_beams=3), model.generate(**prompts, **GREEDY, num_beams=3))
