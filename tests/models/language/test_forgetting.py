"""The `forgetting` mixer: keys fade, by as much as the model says and in every way that a token may come."""

import pytest
import torch

from helpers.language_models import VOCABULARY, make, text
from nalaformer.models.language import NaLaCache, NaLaForCausalLM, NaLaStaticCache

pytestmark = pytest.mark.usefixtures("one_thread")

# softplus(dt_bias) exp(A_log) is what a head forgets at a token, give or take what the projection of the token adds
SLOW, FAST = -9.0, 3.0


def forgetting(*speeds: float, **changes) -> NaLaForCausalLM:
    """A model whose key heads forget at these speeds."""
    model = make("forgetting", num_key_value_heads=len(speeds), **changes)
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.A_log.zero_()
            block.mixer.dt_bias.copy_(torch.tensor(speeds))
    return model


@torch.no_grad()
def changes_of_logits(model: NaLaForCausalLM, *, use_cache: bool) -> torch.Tensor:
    """How much the logits of each of 60 tokens move with the first one."""
    tokens = text(2, 60)
    before = model(tokens, use_cache=use_cache).logits
    tokens[:, 0] = tokens[:, 0] % (VOCABULARY - 1) + 1
    return (model(tokens, use_cache=use_cache).logits - before).abs().amax((0, 2))


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
def test_heads_with_a_large_decay_forget_what_linear_attention_remembers(use_cache):
    models = forgetting(FAST, FAST), forgetting(SLOW, SLOW), make()
    fast, slow, linear = (changes_of_logits(model, use_cache=use_cache) for model in models)
    # the first token itself is seen by all of them
    assert min(fast[0], slow[0], linear[0]) > 0.1
    # exp(-3) at each token: after forty of them nothing is left that float64 could hold
    assert fast[40:].max() < 1e-12
    assert min(slow[40:].min(), linear[40:].min()) > 1e-2


@pytest.mark.parametrize("forgetful", [0, 1])
@torch.no_grad()
def test_each_key_head_forgets_at_its_own_speed(forgetful):
    """Four query heads in two groups: those of the key head that forgets, and those of the one that does not."""
    speeds = [SLOW, SLOW]
    speeds[forgetful] = FAST
    model = forgetting(*speeds, num_attention_heads=4, num_hidden_layers=1)
    mixer, heads = model.model.layers[0].mixer, []
    mixer.norm.register_forward_pre_hook(lambda _, given: heads.append(given[0]))
    tokens = text(2, 60)
    for first in (1, 2):
        tokens[:, 0] = first
        model(tokens)
    moved = (heads[1] - heads[0])[:, 40:].abs().amax((0, 1, 3))
    groups = moved.view(2, 2)
    assert groups[forgetful].max() < 1e-12
    assert groups[1 - forgetful].min() > 1e-6


@pytest.mark.parametrize("speeds", [(SLOW, FAST), (FAST, 6.0), (150.0, SLOW)], ids=str)
@pytest.mark.parametrize("make_cache", [NaLaCache, lambda config: NaLaStaticCache(config, 140)], ids=["growing", "static"])
@torch.no_grad()
def test_decoding_token_by_token_gives_the_logits_of_the_whole(speeds, make_cache):
    # more tokens than a chunk of 128
    model, tokens = forgetting(*speeds, num_hidden_layers=1), text(2, 140)
    cache = make_cache(model.config)
    found = [model(token, past_key_values=cache).logits for token in tokens.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), model(tokens, use_cache=False).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("speeds", [(SLOW, FAST), (150.0, SLOW)], ids=str)
@torch.no_grad()
def test_packed_texts_are_forgotten_as_texts_alone_are(speeds):
    model, lengths = forgetting(*speeds, short_convolution=0), (130, 1, 7, 40)
    rows = [text(1, length) for length in lengths]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    together = model(torch.cat(rows, dim=1), position_ids=places).logits.split(lengths, dim=1)
    for part, row in zip(together, rows, strict=True):
        torch.testing.assert_close(part, model(row).logits, rtol=0, atol=1e-10)


@torch.no_grad()
def test_nothing_is_forgotten_at_padding_between_tokens():
    model, tokens = forgetting(-1.0, 0.0, short_convolution=0), text(1, 30)
    mask = torch.ones(1, 30, dtype=torch.int64)
    mask[:, 10:25] = 0
    alone = model(tokens[mask == 1][None]).logits
    for options in ({"use_cache": False}, {"past_key_values": NaLaCache(model.config)}):
        found = model(tokens, attention_mask=mask, **options).logits
        torch.testing.assert_close(found[mask == 1][None], alone, rtol=0, atol=1e-10)
