"""What users of transformers do with any of its models works with ours, or is refused with a way out."""

import copy

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from helpers.language_models import GREEDY, VOCABULARY, each_layout, main_layouts, make, text
from nalaformer.models.language import NaLaCache, NaLaForSequenceClassification
from nalaformer.training.trainer import checkpoint_activations

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT = ["softmax", "hybrid"]


@pytest.mark.parametrize("layout", EXACT)
@torch.no_grad()
def test_weights_of_exact_layers_are_those_that_the_formula_gives(layout):
    model, tokens = make(layout), text(2, 7)
    out = model(tokens, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == model.config.layer_types.count("full_attention")
    number = model.config.layer_types.index("full_attention")
    block, states = model.model.layers[number], out.hidden_states[number]
    q, k, _ = block.mixer.qkv_proj(block.mixer_norm(states)).split(block.mixer.sizes, dim=-1)
    angles = torch.arange(7)[:, None] * 10000.0 ** -(torch.arange(16, dtype=torch.float64) / 16)

    def turned(x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 16, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2).transpose(1, 2)

    q, k = turned(q), turned(k)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT / 32**0.5
    expected = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(out.attentions[0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.logits, model(tokens).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", EXACT)
@torch.no_grad()
def test_attention_written_out_gives_the_same_tokens_and_logits(layout):
    model, tokens = make(layout), text(2, 9)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    expected = model(tokens, attention_mask=mask).logits, model.generate(tokens, attention_mask=mask, **GREEDY)
    model.set_attn_implementation("eager")
    assert model.model.layers[-1].mixer.is_eager
    found = model(tokens, attention_mask=mask).logits, model.generate(tokens, attention_mask=mask, **GREEDY)
    torch.testing.assert_close(found[0][mask.bool()], expected[0][mask.bool()], rtol=0, atol=1e-10)
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("name", ["paged|eager", "of_the_user"])
def test_an_attention_that_would_not_be_called_is_refused(name, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "of_the_user", lambda *_, **__: None)
    model = make("softmax")
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=r"must be 'sdpa' or 'eager', got '(paged\|eager|of_the_user)'"):
        model(text(1, 5))


def test_recurrent_layers_say_where_their_weights_are_to_be_had():
    with pytest.raises(ValueError, match=r"output_attentions needs a layer with softmax attention.*attention_weights"):
        make("linear")(text(1, 5), output_attentions=True)


@pytest.mark.parametrize("kind", ["base", "causal", "classes"])
def test_a_misspelt_argument_is_refused(kind):
    model, tokens = make(), text(1, 5)
    model = {"base": model.model, "causal": model, "classes": NaLaForSequenceClassification(model.config)}[kind]
    with pytest.raises(ValueError, match=r"unknown argument 'atention_mask'.*attention_mask"):
        model(tokens, atention_mask=torch.ones_like(tokens))
    # what trainers and collators say to every model
    model(tokens, num_items_in_batch=None, max_length_q=5)


def test_continuous_batching_is_refused():
    model = make()
    for call in (model.generate_batch, model.init_continuous_batching, model.continuous_batching_context_manager):
        with pytest.raises(ValueError, match=r"continuous batching keeps keys and values in pages"):
            call(inputs=[[1, 2]])


@main_layouts
def test_generation_while_blocks_are_recomputed_gives_the_same_tokens(layout):
    model, prompt = make(layout), text(1, 6)
    expected = model.generate(prompt, **GREEDY)
    checkpoint_activations(model)
    assert sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules()) == 2
    assert torch.equal(model.train().generate(prompt, **GREEDY), expected)


@each_layout
def test_a_cache_filled_in_inference_mode_goes_on_outside(layout):
    model, tokens = make(layout), text(1, 9)
    cache = NaLaCache(model.config)
    with torch.inference_mode():
        model(tokens[:, :5], past_key_values=cache)
        model(tokens[:, 5:6], past_key_values=cache)
    with torch.no_grad():
        later = [model(tokens[:, at : at + 1], past_key_values=cache).logits for at in (6, 7, 8)]
        torch.testing.assert_close(torch.cat(later, dim=1), model(tokens).logits[:, 6:], rtol=0, atol=1e-10)


def test_the_config_names_its_layers_in_the_words_of_transformers():
    assert make("hybrid").config.layer_types == ["linear_attention", "full_attention"]
    config = copy.deepcopy(make("hybrid").config)
    assert type(config).from_dict(config.to_dict()).mixers == config.mixers


@each_layout
def test_only_modules_that_exist_are_kept_in_float32(layout):
    model = make(layout)
    kept = set(model._keep_in_fp32_modules_strict or ())
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    assert kept <= names
    assert bool(kept) == ("A_log" in names)


@each_layout
@torch.no_grad()
def test_hidden_states_of_chosen_blocks_are_those_of_all(layout):
    model, tokens = make(layout), text(2, 9)
    every = model(tokens, output_hidden_states=True).hidden_states
    assert len(every) == 3
    assert torch.equal(every[0], model.model.embed_tokens(tokens))
    assert torch.equal(model.lm_head(every[-1]), model(tokens).logits)
    # releases count blocks, or the states with the embeddings first
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY)).eval()
    for chosen in ([0], [1], [0, 1]):
        assert places_of_states(model, tokens, chosen) == places_of_states(theirs, tokens, chosen)


def places_of_states(model, tokens, chosen):
    """Which of all hidden states are given where some are asked for; None where there is none."""
    every = model(tokens, output_hidden_states=True).hidden_states
    given = model(tokens, output_hidden_states=chosen).hidden_states
    return [None if state is None else next(i for i, x in enumerate(every) if torch.equal(x, state)) for state in given]


@torch.no_grad()
def test_the_config_asks_for_hidden_states_and_a_call_has_the_last_word():
    model, tokens = make("hybrid"), text(2, 9)
    model.config.output_hidden_states = True
    assert len(model(tokens).hidden_states) == 3
    assert len(model(tokens, output_hidden_states=None).hidden_states) == 3
    assert model(tokens, output_hidden_states=False).hidden_states is None


def test_a_loss_of_ones_own_hears_nothing_of_hidden_states():
    model, tokens = make("linear"), text(2, 9)
    model.loss_function = lambda logits, labels, vocab_size: logits.sum()
    assert model(tokens, labels=tokens, output_hidden_states=True).loss == model(tokens).logits.sum()
