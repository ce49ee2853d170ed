"""Rotary positions for texts longer than those of training: transformers' rope_parameters mean what they mean there."""

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers.language_models import make, text
from nalaformer.models.language import NaLaConfig, NaLaForCausalLM
from nalaformer.models.language.positions import SCALINGS, RotaryPositions

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINED = 32
KINDS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 3.0, "truncate": False},
    "yarn, two scales": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn, given temperature": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def config(kind: str, **more) -> NaLaConfig:
    settings = KINDS[kind] | more
    return NaLaConfig.from_size("nano", mixers="softmax", max_position_embeddings=TRAINED, rope_parameters=settings)


@pytest.mark.parametrize("length", [5, TRAINED, 50, 400])
@pytest.mark.parametrize("part", [1.0, 0.5])
@each_kind
def test_frequencies_and_temperature_are_those_of_transformers(kind, part, length):
    settings = config(kind, rope_theta=500.0, partial_rotary_factor=part)
    places = RotaryPositions(settings)
    theirs, temperature = ROPE_INIT_FUNCTIONS[settings.rope_parameters["rope_type"]](settings, "cpu", seq_len=length)
    ours = places.at(torch.arange(length)[None]).frequencies
    # theirs are float32
    torch.testing.assert_close(ours[: len(theirs)].float(), theirs, rtol=1e-5, atol=0)
    assert ours[len(theirs) :].tolist() == [0.0] * (16 - len(theirs))
    assert places.temperature == pytest.approx(temperature, rel=1e-6)


def test_every_kind_is_compared_with_transformers():
    assert {settings["rope_type"] for settings in KINDS.values()} | {"default"} == set(SCALINGS)


@torch.no_grad()
def test_the_temperature_sharpens_exact_attention():
    model, tokens = make("softmax", rope_parameters=KINDS["yarn"] | {"attention_factor": 1.0}), text(1, 20)
    plain = model(tokens, output_attentions=True).attentions[0]
    model.config.rope_parameters["attention_factor"] = 1.5
    sharp = model(tokens, output_attentions=True).attentions[0]
    torch.testing.assert_close(sharp, (plain.log() * 1.5**2).softmax(-1))


@pytest.mark.parametrize("part", [1.0, 0.5])
@torch.no_grad()
def test_scores_are_those_of_transformers_also_where_a_part_of_the_channels_turns(part):
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    settings = KINDS["yarn"] | {"rope_theta": 500.0, "partial_rotary_factor": part, "attention_factor": 1.5}
    model = make("softmax", rope_parameters=settings, max_position_embeddings=TRAINED)
    head, heads = model.config.head_dim, model.config.num_attention_heads
    seen, tokens = [], text(1, 20)
    mixer = model.model.layers[0].mixer
    mixer.qkv_proj.register_forward_hook(lambda _, __, out: seen.append(out))
    found = model(tokens, output_attentions=True).attentions[0]
    q, k, _ = (each.unflatten(-1, (-1, head)).transpose(1, 2) for each in seen[0].split(mixer.sizes, dim=-1))
    # pairs are neighbours here and halves of the turning channels there
    turning = int(head * part)
    order = torch.cat((torch.arange(turning).view(-1, 2).T.flatten(), torch.arange(turning, head)))
    config = Qwen3NextConfig(head_dim=head, rope_parameters=settings, max_position_embeddings=TRAINED)
    cos, sin = theirs.Qwen3NextRotaryEmbedding(config)(q, torch.arange(20)[None])
    q, k = theirs.apply_rotary_pos_emb(q[..., order], k[..., order], cos, sin)
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    scores = q @ k.mT / head**0.5
    expected = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["softmax", "linear+rotary+grouped"])
@torch.no_grad()
def test_dynamic_positions_change_nothing_up_to_the_trained_length(layout):
    model, tokens = make(layout, max_position_embeddings=TRAINED), text(1, 50)
    whole, short = model(tokens).logits, model(tokens[:, :TRAINED]).logits
    model.config.rope_parameters |= KINDS["dynamic"]
    assert torch.equal(model(tokens[:, :TRAINED]).logits, short)
    assert not torch.allclose(model(tokens).logits, whole)


@each_kind
@torch.no_grad()
def test_a_saved_model_keeps_its_positions_and_generates_alike_with_a_static_cache(kind, tmp_path):
    model = make("softmax", dtype=torch.float32, max_position_embeddings=TRAINED, rope_parameters=KINDS[kind])
    tokens = text(2, 30)
    model.save_pretrained(tmp_path)
    loaded = NaLaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    tokens = tokens[:, :20]
    expected = model.generate(tokens, max_new_tokens=30, do_sample=False)
    assert torch.equal(loaded.generate(tokens, max_new_tokens=30, do_sample=False, cache_implementation="static"), expected)


@torch.no_grad()
def test_one_graph_serves_lengths_on_both_sides_of_the_trained_one():
    model = make("softmax", dtype=torch.float32, max_position_embeddings=TRAINED, rope_parameters=KINDS["dynamic"])
    program = torch.export.export(
        model,
        (text(1, 9),),
        {"use_cache": False},
        dynamic_shapes={"input_ids": {1: torch.export.Dim.DYNAMIC}, "use_cache": None},
    )
    for length in (5, 60):
        tokens = text(1, length)
        found = program.module()(tokens, use_cache=False).logits
        torch.testing.assert_close(found, model(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_the_base_has_one_value_under_all_its_names():
    settings = NaLaConfig(rotary_base=50.0, mixers="softmax")
    assert settings.rope_theta == settings.rope_parameters["rope_theta"] == 50.0
    settings.rotary_base = 70.0
    assert settings.rope_theta == settings.rope_parameters["rope_theta"] == 70.0
    for arguments in ({"rope_theta": 60.0}, {"rope_parameters": {"rope_theta": 60.0}, "rotary_base": 5.0}):
        again = NaLaConfig(mixers="softmax", **arguments)
        assert again.rotary_base == again.rope_parameters["rope_theta"] == 60.0


@pytest.mark.parametrize(
    "given", [{"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}, {"rope_theta": 50.0}, {}, None]
)
@torch.no_grad()
def test_parameters_given_to_a_model_later_mean_what_they_mean_at_first(given):
    model, tokens = make("softmax", rotary_base=300.0), text(1, 20)
    first = make("softmax", rotary_base=300.0, rope_parameters=given)
    first.load_state_dict(model.state_dict())
    model.config.rope_parameters = given
    assert torch.equal(model(tokens).logits, first(tokens).logits)
    assert model.config.rope_theta == model.config.rotary_base == first.config.rotary_base


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "yarrn", "factor": 2.0}, "unknown rope_type 'yarrn'; did you mean 'yarn'"),
        ({"rope_type": "linear"}, "need a positive 'factor', got None"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "need a positive 'high_freq_factor', got None"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor must be above 0"),
        ({"partial_rotary_factor": 0.1}, "rotate an even number of channels, got 0.1 of 32 channels"),
        ({"partial_rotary_factor": 0.01}, "rotate an even number of channels, got 0.01 of 32 channels"),
    ],
)
def test_positions_that_cannot_be_followed_are_refused(settings, message):
    with pytest.raises((ValueError, KeyError), match=message):
        NaLaConfig.from_size("nano", mixers="softmax", rope_parameters=settings)


def test_scaled_positions_without_a_layer_that_turns_are_refused():
    with pytest.raises(ValueError, match="need a layer with rotary positions, got the type 'linear' and none"):
        NaLaConfig.from_size("nano", mixers="delta", rope_parameters=KINDS["linear"])


def test_heads_of_odd_sizes_are_saved_where_nothing_turns(tmp_path):
    NaLaConfig(hidden_size=14, num_attention_heads=2, mixers="linear").save_pretrained(tmp_path)
    assert NaLaConfig.from_pretrained(tmp_path).head_dim == 7
