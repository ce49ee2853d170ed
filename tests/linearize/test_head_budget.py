"""The heads that look up what is far away keep all tokens, as many of them as the cache may hold."""

from dataclasses import replace

import pytest
import torch

from helpers.converted_models import converted, make_model
from nalaformer.attention.hybrid import HybridSettings, settings_for
from nalaformer.linearize.head_budget import choose_budget, head_bytes, lookup_scores
from nalaformer.linearize.repeats import WithRepeats, repeat_segments
from nalaformer.models.hybrid.model import HybridForCausalLM, restore_attention_

SETTINGS = HybridSettings(chunk_size=8, salient_per_chunk=2, max_salient=6)
SIZES = {"group": 2, "head_dim": 8, "itemsize": 4}


def test_segments_come_again_and_each_place_knows_what_it_looks_up():
    tokens = torch.arange(1000, 1256)
    repeated, sources = repeat_segments(tokens, torch.Generator().manual_seed(0), segments=3, size=16)
    places = (sources >= 0).nonzero()[:, 0]
    # all tokens of the text differ, so the source is known by what stands before it; a segment's last has no follower
    assert len(places) == 3 * 15
    assert torch.equal(repeated[sources[places] - 1], repeated[places])
    assert torch.equal(repeated[sources[places]], repeated[places + 1])
    assert torch.equal(repeated[: 256 - 48], tokens[: 256 - 48])
    # sources are spread over the text: one in each third
    assert sorted({int(source) // 70 for source in sources[places]}) == [0, 1, 2]


def test_every_second_sample_has_repeats_the_same_each_time():
    samples = [torch.arange(number * 100, number * 100 + 64) for number in range(4)]
    data = WithRepeats(samples, every=2, seed=3)
    for number, sample in enumerate(samples):
        found = data[number]
        assert torch.equal(found["input_ids"], data[number]["input_ids"])
        assert torch.equal(found["input_ids"], sample) == bool(number % 2)
        assert torch.equal(found["targets"][:-1], found["input_ids"][1:])
    assert not torch.equal(WithRepeats(samples, every=2, seed=4)[0]["input_ids"], data[0]["input_ids"])


@torch.no_grad()
def test_scores_are_the_attention_that_repeats_pay_to_what_followed_the_first_time():
    model = make_model()
    data = [torch.randint(3, 50, (96,)) for _ in range(3)]
    hybrid = HybridForCausalLM.convert(model, SETTINGS)
    scores = lookup_scores(hybrid, data, texts=3, length=90, seed=5)
    restore_attention_(model)
    model.set_attn_implementation("eager")
    generator, expected = torch.Generator().manual_seed(5), torch.zeros(2, 2)
    for tokens in data:
        tokens, sources = repeat_segments(tokens[:90], generator)
        rows = (sources >= 0).nonzero()[:, 0]
        for layer, weights in enumerate(model(tokens[None], output_attentions=True).attentions):
            paid = weights[0][:, rows, sources[rows]].mean(-1)  # [H]
            expected[layer] += paid.view(2, 2).amax(-1) / 3
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    assert scores.std() > 0


@pytest.mark.parametrize("feature_map", ["norm_preserving", "relu"])
@pytest.mark.parametrize(
    ("selection", "select_per"), [("key_norm", "key_head"), ("received", "key_head"), ("self_saliency", "query_head")]
)
@pytest.mark.parametrize("max_salient", [0, 6])
@torch.no_grad()
def test_bytes_of_a_head_are_those_of_its_cache(feature_map, selection, select_per, max_salient):
    settings = replace(SETTINGS, max_salient=max_salient, feature_map=feature_map, selection=selection, select_per=select_per)
    for name in ("full", "salient", "window", "linear"):
        model = converted(settings=settings, budget=[[name] * 2] * 2)
        cache = model(torch.randint(3, 50, (1, 168)), use_cache=True).past_key_values
        expected = 4 * head_bytes(name, settings, 168, **SIZES)
        # counters of a layer come on top
        assert expected <= cache.nbytes <= expected + 400, name


def test_the_heads_with_the_highest_scores_keep_all_as_many_as_fit():
    scores = torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.7]])
    length, softmax = 4096, 2 * 4096 * 8 * 4
    settings = settings_for(SETTINGS, "salient")
    taken = {}
    for cache in (0.1, 0.25, 0.5, 1.0):
        budget = choose_budget(scores, cache, settings, length, **SIZES)
        names = [name for row in budget for name in row]
        sizes = {name: head_bytes(name, settings, length, **SIZES) for name in ("full", "salient")}
        assert sum(sizes[name] for name in names) <= cache * 6 * softmax
        # one more would not fit
        assert sum(sizes[name] for name in names) + sizes["full"] - sizes["salient"] > cache * 6 * softmax
        chosen = scores.flatten()[torch.tensor([name == "full" for name in names])]
        assert sorted(chosen.tolist(), reverse=True) == sorted(scores.flatten().tolist(), reverse=True)[: len(chosen)]
        taken[cache] = len(chosen)
    assert 0 == taken[0.1] < taken[0.25] < taken[0.5] < taken[1.0]
    with pytest.raises(ValueError, match=r"cache must hold what every head remembers, 0\.\d+ of softmax at 4096 tokens"):
        choose_budget(scores, 0.001, settings, length, **SIZES)
