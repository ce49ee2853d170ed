"""Pretrained decoders with hybrid attention: the same function however it is run, and most of the ability kept."""

import copy
import json
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from helpers.converted_models import BUDGET, FAMILIES, SMALL, converted, make_model  # noqa: E402
from nalaformer.attention.hybrid import hybrid_settings  # noqa: E402
from nalaformer.linearize.compatibility import check_model  # noqa: E402
from nalaformer.models.hybrid.attention import attention_mode, converted_attentions  # noqa: E402
from nalaformer.models.hybrid.cache import HybridCache  # noqa: E402
from nalaformer.models.hybrid.model import HybridForCausalLM  # noqa: E402
from nalaformer.training.trainer import checkpoint_activations  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


# "linear" has no steps in place, so it is drawn apart
@pytest.fixture(scope="module", params=[None, BUDGET, [["linear", "full"]] * 2], ids=["alike", "budget", "linear"])
def model(request):
    return converted(budget=request.param)


@pytest.fixture
def tokens():
    return torch.randint(3, 50, (2, 45))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_with_every_token_exact_a_family_is_what_it_was(family, tokens):
    original = make_model(family)
    expected = original(tokens).logits
    exact = HybridForCausalLM.convert(copy.deepcopy(original), hybrid_settings("softmax", chunk_size=8)).eval()
    torch.testing.assert_close(exact(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    with attention_mode(exact, "softmax"):
        torch.testing.assert_close(exact(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    hybrid = converted(family)
    assert (hybrid(tokens).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("family", "budget"), [("llama", None), ("qwen3", BUDGET), ("phi3", None)])
@torch.no_grad()
def test_saved_models_are_loaded_by_the_auto_classes(family, budget, tokens, tmp_path):
    hybrid = converted(family, budget=budget, tie_word_embeddings=family == "llama")
    hybrid.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is HybridForCausalLM
    assert loaded.config.settings == SMALL
    assert loaded.config.budget == budget
    assert torch.equal(loaded(tokens).logits, hybrid(tokens).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "nala_hybrid"
    assert config["text_config"]["model_type"] == family


@torch.no_grad()
def test_maps_stay_float32_in_a_bfloat16_model(tokens, tmp_path):
    converted(dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    attention = converted_attentions(loaded)[0]
    assert attention.hybrid.parts[0].map.query_weight.dtype == torch.float32
    assert attention.hybrid.parts[0].gate.weight.dtype == torch.bfloat16
    assert attention.original.q_proj.weight.dtype == torch.bfloat16
    assert loaded(tokens).logits.dtype == torch.bfloat16
    assert loaded.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 48)


@pytest.mark.parametrize("sizes", [[1] * 45, [20, 1, 1, 17, 6]], ids=str)
@torch.no_grad()
def test_prompts_in_pieces_give_the_same_logits(model, tokens, sizes):
    whole = model(tokens, use_cache=False).logits
    cache = HybridCache(model.config)
    pieces = [model(piece, past_key_values=cache).logits for piece in tokens.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-4)
    assert cache.get_seq_length() == 45


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
@torch.no_grad()
def test_dynamic_quantization_leaves_a_model_that_generates_and_changes_little(tokens):
    model = converted(settings=replace(SMALL, selection="learned"), budget=BUDGET)
    before = model(tokens).logits
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert not any(type(module) is torch.nn.Linear for module in quantized.modules())
    change = quantized(tokens).logits - before
    # 8 bits a weight, after two layers
    assert change.square().mean() < 0.1 * before.square().mean()
    assert quantized.generate(tokens, max_new_tokens=12, do_sample=False).shape == (2, 57)


def test_greedy_tokens_do_not_depend_on_cache_or_pieces(model, tokens):
    plain = model.generate(tokens, max_new_tokens=30, do_sample=False, use_cache=False)
    assert torch.equal(model.generate(tokens, max_new_tokens=30, do_sample=False), plain)
    assert torch.equal(model.generate(tokens, max_new_tokens=30, do_sample=False, prefill_chunk_size=13), plain)


def test_left_padding_changes_no_generated_token(model, tokens):
    short = tokens[:1, :19]
    padded = torch.cat((torch.zeros(1, 26, dtype=torch.int64), short), 1)
    batch = torch.cat((tokens[1:], padded))
    mask = torch.ones_like(batch)
    mask[1, :26] = 0
    both = model.generate(batch, attention_mask=mask, max_new_tokens=25, do_sample=False)
    assert torch.equal(both[1, 26:], model.generate(short, max_new_tokens=25, do_sample=False)[0])
    assert torch.equal(both[0], model.generate(tokens[1:], max_new_tokens=25, do_sample=False)[0])


@torch.no_grad()
def test_left_padding_changes_no_logits(model, tokens):
    rows = torch.cat((torch.zeros(2, 11, dtype=torch.int64), tokens), 1)
    mask = torch.ones_like(rows)
    mask[:, :11] = 0
    # chunks hold real tokens alone, and so rounding is all that may differ
    whole = model(tokens, use_cache=False).logits
    torch.testing.assert_close(model(rows, attention_mask=mask, use_cache=False).logits[:, 11:], whole, rtol=0, atol=1e-4)
    cache = HybridCache(model.config)
    first = model(rows[:, :30], attention_mask=mask[:, :30], past_key_values=cache).logits[:, 11:]
    second = model(rows[:, 30:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=0, atol=1e-4)


def test_beam_search_and_sampling_are_those_without_a_cache(model, tokens):
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_cache=False, **options))
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        drawn.append(model.generate(tokens, max_new_tokens=12, do_sample=True, top_k=5, use_cache=use_cache))
    assert torch.equal(*drawn)


def test_a_conversation_goes_on_with_its_cache(model, tokens):
    first = model.generate(tokens, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    more = torch.cat((first.sequences, torch.randint(3, 50, (2, 7))), 1)
    cached = model.generate(more, past_key_values=first.past_key_values, max_new_tokens=9, do_sample=False)
    assert torch.equal(cached, model.generate(more, max_new_tokens=9, do_sample=False))


@torch.no_grad()
def test_copies_of_a_sample_stand_side_by_side_in_a_repeated_cache(model, tokens):
    cache = HybridCache(model.config)
    model(tokens[:, :30], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    logits = model(tokens[:, 30:].repeat_interleave(2, 0), past_key_values=cache).logits
    whole = model(tokens, use_cache=False).logits[:, 30:]
    torch.testing.assert_close(logits, whole.repeat_interleave(2, 0), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_cache_does_not_grow_once_it_is_full():
    model, sizes = converted(budget=[["salient", "window"], ["linear", "salient"]]), []
    for length in (100, 400):
        cache = HybridCache(model.config)
        model(torch.randint(3, 50, (1, length)), past_key_values=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]


def test_what_a_hybrid_cache_cannot_do_is_refused(model, tokens):
    with pytest.raises(ValueError, match="cannot be cropped"):
        HybridCache(model.config).crop(1)
    with pytest.raises(ValueError, match="must be a HybridCache"):
        model(tokens, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="cache of its own"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match=r"[Aa]ssisted"):
        model.generate(tokens[:1], max_new_tokens=2, assistant_model=make_model())


@pytest.mark.parametrize("shape", [(1, 6), (1, 2), (2, 4)])
def test_a_mask_of_another_size_is_refused(model, tokens, shape):
    with pytest.raises(ValueError, match=r"attention_mask must be .*= \(1, 4\), got"):
        model(tokens[:1, :4], attention_mask=torch.ones(shape, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(5,), (1, 0), (1, 2, 3)])
def test_tokens_of_another_shape_are_refused(model, shape):
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, tokens\] with at least one token.*input_ids\[None\]"):
        model(torch.ones(shape, dtype=torch.int64))


def test_what_came_before_a_cache_cannot_be_recorded(model, tokens):
    from nalaformer.analysis import record

    cache = model(tokens[:, :10], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds 10 tokens already; pass all tokens at once"):
        record(model, {"input_ids": tokens[:, 10:14], "past_key_values": cache})


def test_weights_that_nobody_makes_are_refused(model, tokens):
    with pytest.raises(ValueError, match="hybrid attention computes no weights"):
        model(tokens, output_attentions=True)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("hidden", [None, [], [20], [0, 30]])
def test_packed_sequences_are_refused_with_a_cache_and_with_a_mask_too(model, tokens, use_cache, hidden):
    options = {"use_cache": use_cache}
    if hidden is not None:
        options["attention_mask"] = torch.ones(1, 45, dtype=torch.int64)
        options["attention_mask"][:, hidden] = 0
    places = torch.cat((torch.arange(20), torch.arange(25)))
    with pytest.raises(ValueError, match="packed"):
        model(tokens[:1, :45], position_ids=places[None], **options)
    with pytest.raises(ValueError, match="packed"):
        model(tokens[:1, :45], cu_seq_lens_q=torch.tensor([0, 20, 45]), **options)
    with pytest.raises(ValueError, match="packed"):
        model(tokens[:1, :45], seq_idx=torch.tensor([[0] * 20 + [1] * 25]), **options)
    model(tokens[:1, :45], seq_idx=torch.zeros(1, 45, dtype=torch.int64), **options)
    # those of one sequence, counted from anywhere
    model(tokens[:1, :45], position_ids=torch.arange(3, 48)[None], **options)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 16}, "sliding window of 16"),
        ("gemma2", {"head_dim": 8}, "sliding_attention|other kinds|caps"),
        ("gpt2", {}, "model.layers"),
    ],
)
def test_other_attention_is_refused_with_its_reason(family, changes, message):
    config = AutoConfig.for_model(family, vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **changes)
    with pytest.raises(ValueError, match=message):
        HybridForCausalLM.convert(AutoModelForCausalLM.from_config(config), SMALL)


def test_a_model_that_attends_otherwise_is_refused(monkeypatch):
    original = make_model()
    attention = original.model.layers[0].self_attn
    forward = attention.forward

    def odd(*args, **kwargs):
        out, weights = forward(*args, **kwargs)
        return (out, weights) if "hybrid_call" in kwargs else (2 * out, weights)

    monkeypatch.setattr(attention, "forward", odd)
    with pytest.raises(ValueError, match="a way of its own"):
        check_model(original)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_is_supported_passes_the_check(family):
    check_model(make_model(family))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("diffllama", {}, "DiffLlamaAttention attends more than once in a pass"),
        ("xglm", {"d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4}, "XGLMAttention attends by itself"),
    ],
)
def test_attention_that_would_be_converted_in_part_or_not_at_all_is_refused(family, changes, message):
    original = make_model(family, **changes)
    with pytest.raises(ValueError, match=message):
        check_model(original)
    # nor does it run where nobody checked
    with pytest.raises(ValueError, match=message):
        HybridForCausalLM.convert(original, SMALL)(torch.arange(9)[None])


def without_padding(monkeypatch, original):
    from nalaformer.models.hybrid import attention

    attend = attention.AttentionPass.attend
    monkeypatch.setattr(
        attention.AttentionPass, "attend", lambda call, q, k, v, mask, scale: attend(call, q, k, v, None, scale)
    )


def without_the_past(monkeypatch, original):
    from nalaformer.models.hybrid.cache import HybridCacheLayer

    attend = HybridCacheLayer.attend

    def forgetful(layer, *args, **kwargs):
        layer.state = None
        return attend(layer, *args, **kwargs)

    monkeypatch.setattr(HybridCacheLayer, "attend", forgetful)


def without_other_chunks(monkeypatch, original):
    from nalaformer.models.hybrid import attention

    attend = attention.AttentionPass.attend

    def chunk_by_chunk(call, q, k, v, mask, scale):
        parts = []
        for pieces in zip(*(x.split(24, dim=1) for x in (q, k, v)), strict=True):
            call.has_attended = False
            parts.append(attend(call, *pieces, None, scale))
        return torch.cat(parts, dim=1)

    monkeypatch.setattr(attention.AttentionPass, "attend", chunk_by_chunk)


def with_a_weight_that_is_not_finite(monkeypatch, model):
    model.model.norm.weight.data[3] = torch.nan


def with_a_weight_that_no_config_tells_of(monkeypatch, original):
    original.model.layers[1].self_attn.extra = torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_padding, "logits of a padded batch differ by"),
        (without_the_past, "logits of a padded batch, piece by piece with a cache, differ by"),
        (without_other_chunks, "logits of a whole sequence differ by"),
        (with_a_weight_that_is_not_finite, r"got NaN or infinity in model\.norm\.weight of LlamaForCausalLM"),
        (with_a_weight_that_no_config_tells_of, r"1 of its tensors would not be what was saved \(.*layers.1.*extra"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_check_sees_what_would_go_wrong_later(fault, message, monkeypatch):
    original = make_model()
    fault(monkeypatch, original)
    with pytest.raises(ValueError, match=message):
        check_model(original)
    assert not converted_attentions(original)


@torch.no_grad()
def test_checking_leaves_a_model_as_it_came(tokens):
    original = make_model()
    before = original(tokens).logits
    check_model(original)
    assert torch.equal(original(tokens).logits, before)
    assert not converted_attentions(original)
    # other models made from the same config are not touched either
    twin = AutoModelForCausalLM.from_config(original.config)
    HybridForCausalLM.convert(original, SMALL)
    twin(tokens)


def test_gradient_checkpointing_gives_the_same_gradients(tokens):
    gradients = []
    for checkpointing in (False, True):
        hybrid = converted(dtype=torch.float64)
        hybrid.train()
        if checkpointing:
            checkpoint_activations(hybrid)
        hybrid(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in hybrid.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_the_auto_classes_build_the_model_of_its_config():
    # in either order of imports: tests/test_language_models.py
    sizes = {"hidden_size": 16, "vocab_size": 9, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("nala_hybrid", text_config={"model_type": "llama"} | sizes)
    assert type(AutoModelForCausalLM.from_config(config)) is HybridForCausalLM
