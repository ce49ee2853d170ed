"""Generation: the cache changes nothing but cost, and what it holds has one size."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

import nalaformer
from helpers.language_models import GREEDY, LAYOUTS, MAIN_LAYOUTS, each_layout, main_layouts, make, padded_prompts, text
from helpers.products import FULL
from nalaformer.models.language import NaLaCache, RecurrentLayer

pytestmark = pytest.mark.usefixtures("one_thread")
RECURRENT = [layout for layout in (LAYOUTS if FULL else MAIN_LAYOUTS) if layout not in ("softmax", "hybrid")]


@main_layouts
def test_greedy_tokens_are_the_same_without_a_cache(layout):
    model, prompts = make(layout), padded_prompts()
    with_cache = model.generate(**prompts, **GREEDY)
    assert torch.equal(with_cache, model.generate(**prompts, **GREEDY, use_cache=False))
    assert with_cache.shape == (3, 32)
    assert len(with_cache[:, 20:].unique()) > 3, "a constant output would prove little"


@main_layouts
def test_left_padded_batch_gives_the_tokens_of_each_row_alone(layout):
    model, prompts = make(layout), padded_prompts()
    together = model.generate(**prompts, **GREEDY)
    for row in range(3):
        alone = prompts["input_ids"][row : row + 1, prompts["attention_mask"][row] == 1]
        # a mask of ones: without one, transformers takes every token 0 for padding
        alone = {"input_ids": alone, "attention_mask": torch.ones_like(alone)}
        assert torch.equal(model.generate(**alone, **GREEDY)[0, -12:], together[row, -12:])


@each_layout
def test_logits_do_not_depend_on_how_tokens_are_cut(layout):
    model, tokens = make(layout), text(2, 90)
    with torch.no_grad():
        whole = model(tokens).logits
        cache, parts, start = NaLaCache(model.config), [], 0
        for length in (1, 66, 1, 1, 20, 1):
            parts.append(model(tokens[:, start : start + length], past_key_values=cache).logits)
            start += length
    assert cache.get_seq_length() == 90
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


@each_layout
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_a_cached_piece_leaves_no_trace(layout, side):
    """Rows of different lengths, then more tokens for all: also behind padding on the right."""
    model, first, more = make(layout), text(2, 9), text(2, 5)
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[1, : 4 if side == "left" else 9] = 0
    if side == "right":
        mask[1, :5] = 1
    with torch.no_grad():
        cache = NaLaCache(model.config)
        model(first, attention_mask=mask[:, :9], past_key_values=cache)
        together = model(more, attention_mask=mask, past_key_values=cache).logits
        for row in range(2):
            alone = torch.cat((first[row], more[row]))[None, mask[row] == 1]
            torch.testing.assert_close(together[row], model(alone).logits[0, -5:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", RECURRENT)
def test_single_tokens_after_padding_update_the_state_in_place(layout):
    """The step of decoding must not fall back to the slower path because a row was padded once."""
    model, prompts = make(layout), padded_prompts()
    with torch.no_grad():
        cache = NaLaCache(model.config)
        model(**prompts, past_key_values=cache)
        before = {name: x.data_ptr() for name, x in cache.tensors().items()}
        mask = torch.cat((prompts["attention_mask"], torch.ones(3, 1, dtype=torch.int64)), dim=1)
        model(text(3, 1), attention_mask=mask, past_key_values=cache)
    assert {name: x.data_ptr() for name, x in cache.tensors().items()} == before


@main_layouts
def test_prefill_in_chunks_gives_the_same_tokens(layout):
    model, prompts = make(layout), padded_prompts()
    assert torch.equal(model.generate(**prompts, **GREEDY, prefill_chunk_size=7), model.generate(**prompts, **GREEDY))


@main_layouts
def test_beams_with_a_cache_are_those_without(layout):
    model, prompts = make(layout), padded_prompts()
    options = GREEDY | {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(model.generate(**prompts, **options), model.generate(**prompts, **options, use_cache=False))


@main_layouts
def test_sampling_with_a_cache_draws_the_same_tokens(layout):
    model, prompts = make(layout), padded_prompts()
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = GREEDY | {"do_sample": True, "top_p": 0.9, "temperature": 1.3, "use_cache": use_cache}
        drawn.append(model.generate(**prompts, **options))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("layout", RECURRENT)
def test_memory_after_ten_thousand_tokens_is_that_after_a_hundred(layout):
    model = make(layout, dtype=torch.float32, num_hidden_layers=1)
    with torch.no_grad():
        cache = model(text(2, 99)).past_key_values
        model(text(2, 1), past_key_values=cache)
        early, shapes = held_bytes(cache), {name: x.shape for name, x in cache.tensors().items()}
        for piece in text(2, 9899).split(2000, dim=1):
            model(piece, past_key_values=cache)
        model(text(2, 1), past_key_values=cache)
    assert cache.get_seq_length() == 10_000
    assert {name: x.shape for name, x in cache.tensors().items()} == shapes
    assert held_bytes(cache) == early == cache.nbytes


def held_bytes(cache: NaLaCache) -> int:
    """What the tensors keep alive, which is more than they show where one is a view of a larger one."""
    return sum(storage.nbytes() for storage in {x.untyped_storage() for x in cache.tensors().values()})


@main_layouts
def test_saved_cache_goes_on_where_it_was(layout, tmp_path):
    model, prompts = make(layout), padded_prompts()
    expected = model.generate(**prompts, **GREEDY)
    with torch.no_grad():
        cut = {name: x[:, :15] for name, x in prompts.items()}
        cache = NaLaCache(model.config)
        model(**cut, past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
    loaded = NaLaCache.load(tmp_path / "cache.safetensors", model.config)
    assert loaded.get_seq_length() == 15
    assert torch.equal(model.generate(**prompts, **GREEDY, past_key_values=loaded), expected)
    # the model of another layout must not take it, nor one of other features
    others = make("softmax" if layout != "softmax" else "linear").config, copy.deepcopy(model.config)
    others[1].feature_map = "relu" if model.config.feature_map != "relu" else "elu"
    for other in others:
        with pytest.raises(ValueError, match="same mixers and feature map"):
            NaLaCache.load(tmp_path / "cache.safetensors", other)
    save_file({"x": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"that NaLaCache\.save wrote"):
        NaLaCache.load(tmp_path / "weights.safetensors", model.config)


@main_layouts
def test_copied_cache_serves_two_continuations(layout):
    model, prompt = make(layout), text(1, 20)
    with torch.no_grad():
        cache = model(prompt[:, :-1]).past_key_values
    kept = copy.deepcopy(cache)
    for _ in range(2):
        tokens = model.generate(prompt, **GREEDY, past_key_values=cache)
        assert torch.equal(tokens, model.generate(prompt, **GREEDY))
        cache = kept


def test_rows_of_a_cache_are_selected_repeated_and_reset():
    model, prompts = make("hybrid"), text(3, 8)
    with torch.no_grad():
        cache = model(prompts).past_key_values
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        more = text(1, 3).expand(4, 3)
        together = model(more, past_key_values=cache).logits
        for row, source in enumerate((2, 2, 0, 0)):
            alone = model(torch.cat((prompts[source : source + 1], more[:1]), dim=1)).logits[:, -3:]
            torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-10)
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(prompts, past_key_values=cache).logits, model(prompts).logits, rtol=0, atol=1e-10)


def test_what_a_state_cannot_take_back_is_refused():
    model, prompt = make("hybrid"), text(1, 8)
    with torch.no_grad():
        cache = model(prompt).past_key_values
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)
    assert cache.layers[1].get_seq_length() == 8, "a refused crop has cut a layer"
    with pytest.raises(ValueError, match="keeps no keys"):
        next(layer for layer in cache.layers if isinstance(layer, RecurrentLayer)).update(prompt, prompt)


def test_caches_that_would_lose_the_state_are_refused():
    model, prompt = make(), text(1, 8)
    for use in (model, lambda x, **options: model.generate(x, **GREEDY, **options)):
        with pytest.raises(ValueError, match="must be a NaLaCache"):
            use(prompt, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation must be None"):
        model.generate(prompt, **GREEDY, cache_implementation="offloaded")


def test_gradients_flow_through_a_cached_state():
    """Truncated back-propagation through time may cross a cut: steps in place would break it."""
    model, tokens = make("linear"), text(1, 6)
    cache = model(tokens[:, :4]).past_key_values
    model(tokens[:, 4:5], past_key_values=cache)
    model(tokens[:, 5:], past_key_values=cache).logits.sum().backward()
    cut = model.model.layers[0].mixer.qkv_proj.weight.grad.clone()
    model.zero_grad()
    model(tokens).logits[:, 5:].sum().backward()
    torch.testing.assert_close(cut, model.model.layers[0].mixer.qkv_proj.weight.grad)


def test_loaded_models_generate(tmp_path):
    model, prompt = make("hybrid", dtype=torch.float32), text(1, 8)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(prompt, **GREEDY), model.generate(prompt, **GREEDY))


@pytest.fixture
def folder(tmp_path):
    """A model that knows one sentence by heart, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["a", "key", "written", "twice", "holds", "the", "last", "value", "[seen]", "."]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=".").save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = make("hybrid", dtype=torch.float32, vocab_size=len(words), eos_token_id=len(words) - 1).train()
    rows = torch.arange(len(words))[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    return tmp_path


def test_command_streams_the_text_of_a_model_in_a_folder(folder):
    from typer.testing import CliRunner

    from nalaformer.cli import build_app

    arguments = ["generate", "text", "--model", str(folder), "--prompt", "a key", "--device", "cpu"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    first, last = result.output.strip().splitlines()
    assert first == "a key written twice holds the last value [seen]"
    assert last.startswith("8 tokens, ")
    drawn = [CliRunner().invoke(build_app(), [*arguments, "--temperature", "5", "--seed", "1"]).output for _ in range(2)]
    assert drawn[0].splitlines()[0] == drawn[1].splitlines()[0] != first


def test_wrong_folders_and_settings_of_writing_are_named(folder, tmp_path):
    from nalaformer.evaluation import load_language_model
    from nalaformer.models.language.writing import Writer

    with pytest.raises(ValueError, match="must be a folder"):
        load_language_model(tmp_path / "none")
    with pytest.raises(ValueError, match='device must be "cpu", "cuda" or "auto"'):
        load_language_model(folder, device="abacus")
    loaded = load_language_model(folder, device="cpu")
    writer = Writer(loaded.model, loaded.tokenizer)
    with pytest.raises(ValueError, match="top_p above 0"):
        writer.write("a key", top_p=0.0)
    with pytest.raises(ValueError, match="at least one token"):
        writer.write("")


@pytest.mark.parametrize(
    "layout", ["linear", "linear+polarity", "forgetting+rotary+grouped"] + FULL * ["linear+rotary+grouped", "forgetting"]
)
def test_kernels_go_on_from_their_own_states(layout):
    """The fused kernels in Triton's interpreter: a prompt, single tokens in place, and a padded piece."""
    pytest.importorskip("triton")
    model, tokens = make(layout, dtype=torch.float32, num_hidden_layers=1), text(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :3] = 0
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        # "auto" would not interpret; maps that the causal kernels cannot serve take their step in a kernel all the same
        with nalaformer.use_backend("triton" if layout != "linear+polarity" else "auto"):
            cache = NaLaCache(model.config)
            parts = [model(tokens[:, :8], attention_mask=mask[:, :8], past_key_values=cache).logits]
        with nalaformer.use_backend("triton"):
            for n in range(8, 12):
                parts.append(model(tokens[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache).logits)
    found = torch.cat(parts, dim=1)
    torch.testing.assert_close(found[mask == 1], whole[mask == 1], rtol=1e-4, atol=1e-4)
