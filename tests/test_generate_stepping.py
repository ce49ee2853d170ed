"""Steps of `generate` that a decoder takes over: the tokens and the cache are those of the model by itself.

Uncaptured or recorded, so that they run anywhere; tests/test_stepping_gpu.py has the same on CUDA graphs.
"""

import copy
import gc
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from torch import nn

from nalaformer.attention.hybrid import SteppingState, hybrid_settings
from nalaformer.models.hybrid import decoder as decoder_module
from nalaformer.models.hybrid import stepping as stepping_module
from nalaformer.models.hybrid.attention import attention_mode, converted_attentions
from nalaformer.models.hybrid.cache import HybridCache
from nalaformer.models.hybrid.decoder import SteppingDecoder
from nalaformer.models.hybrid.stepping import Stepping, capacity_for
from recorded_graphs import recorded
from test_linearize import SMALL, converted

pytestmark = pytest.mark.usefixtures("one_thread")

UNCAPPED = replace(SMALL, max_salient=0)
GREEDY = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture
def steps(monkeypatch):
    """Counts what decoders do: the steps that they take, and how often they are made."""
    counts = {"taken": 0, "made": 0}
    take, make = SteppingDecoder.step, SteppingDecoder.__init__

    def counted_step(self, *args, **kwargs):
        counts["taken"] += 1
        return take(self, *args, **kwargs)

    def counted_init(self, *args, **kwargs):
        counts["made"] += 1
        make(self, *args, **kwargs)

    monkeypatch.setattr(SteppingDecoder, "step", counted_step)
    monkeypatch.setattr(SteppingDecoder, "__init__", counted_init)
    return counts


@pytest.fixture
def loads(monkeypatch):
    """One entry for each time that a decoder passes on to another cache."""
    found, load = [], stepping_module._Place.load

    def counted(self, cache):
        found.append(1)
        load(self, cache)

    monkeypatch.setattr(stepping_module._Place, "load", counted)
    return found


@pytest.fixture(params=[False, True], ids=["called", "recorded"])
def each_way(request, monkeypatch):
    """Steps as they are called without a GPU, and recorded once and replayed as with one."""
    if not request.param:
        return
    make = SteppingDecoder.__init__
    monkeypatch.setattr(SteppingDecoder, "__init__", lambda self, *a, **given: make(self, *a, **given | {"capture": True}))
    monkeypatch.setattr(decoder_module, "captured", recorded)


def with_steps(model, *, after=3):
    model.stepping = Stepping(after=after, capture=False)
    return model


def prompts():
    """Two samples, the second one padded on its left."""
    tokens = torch.randint(3, 50, (2, 21))
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    return {"input_ids": torch.where(mask.bool(), tokens, 0), "attention_mask": mask}


def both(model, *, after=3, **options):
    """What generate gives with the model's own steps, and with a decoder's."""
    found = []
    for stepping in (None, Stepping(after=after, capture=False)):
        model.stepping = stepping
        torch.manual_seed(5)
        found.append(model.generate(**options))
    return found


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
    # the prompt gives the first token, and three steps are the model's
    assert steps == {"taken": 40 - 1 - 3, "made": 1}


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
    expected, found = both(converted(settings=settings), **prompts(), max_new_tokens=40, do_sample=True, top_k=8)
    assert torch.equal(found, expected)
    assert steps["taken"]


@pytest.mark.usefixtures("each_way")
def test_beams_are_the_models_own_and_reordered_in_place(steps):
    expected, found = both(converted(), **prompts(), **GREEDY, num_beams=3, num_return_sequences=2)
    assert torch.equal(found, expected)
    # were they given back at every step, one decoder would be loaded again and again, or steps be the model's
    assert steps == {"taken": 40 - 1 - 3, "made": 1}


def test_rows_are_chosen_repeated_and_copied_while_lent(steps):
    model = with_steps(converted())
    out = model.generate(**prompts(), **GREEDY, return_dict_in_generate=True)
    cache, more = out.past_key_values, torch.randint(3, 50, (1, 5))
    assert cache.layers[0].loan is not None
    kept = copy.deepcopy(cache)
    assert kept.layers[0].loan is None
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
    assert first.past_key_values.layers[0].loan is None
    assert all(other.past_key_values.layers[0].loan is not None for other in others)
    found = model.generate(more, attention_mask=mask, past_key_values=copy.deepcopy(first.past_key_values), **GREEDY)
    cache, pieces = first.past_key_values, []
    with torch.no_grad():
        # the last token that was generated is not in the cache; one of the pieces is a step
        for piece in more[:, 60:].split((3, 1, 4), 1):
            given = mask[:, : cache.get_seq_length() + piece.shape[1]]
            pieces.append(model(piece, attention_mask=given, past_key_values=cache).logits)
        model.stepping = None
        whole = model(more, attention_mask=mask, use_cache=False).logits[:, 60:]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-4)
    assert torch.equal(found, model.generate(more, attention_mask=mask, **GREEDY))
    assert steps["made"] == 2


def test_texts_that_follow_share_one_decoder_from_their_first_step(steps):
    model = converted()
    expected = [model.generate(torch.full((2, n), 7), **GREEDY) for n in (11, 30)]
    with_steps(model)
    found = [model.generate(torch.full((2, n), 7), **GREEDY) for n in (11, 30)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert steps == {"taken": 36 + 39, "made": 1}


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("texts", [2, 3])
def test_texts_that_alternate_do_not_mix(texts, steps, loads):
    model, tokens = converted(), torch.randint(3, 50, (texts, 2, 40))
    with torch.no_grad():
        expected = model(tokens.flatten(0, 1), use_cache=False).logits[:, 12:].unflatten(0, (texts, 2))
        with_steps(model, after=0)
        caches = [model(x[:, :12], use_cache=True).past_key_values for x in tokens]
        for n in range(12, 40):
            for text in range(texts):
                out = model(tokens[text, :, n : n + 1], past_key_values=caches[text]).logits[:, 0]
                torch.testing.assert_close(out, expected[text, :, n - 12], rtol=0, atol=1e-4)
    assert steps == {"taken": 28 * texts, "made": 2}
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
    assert steps == {"taken": 2 * 36, "made": 1 if failing else 2}
    assert bool(loads) == failing


@torch.no_grad()
def test_a_decoder_that_nobody_uses_makes_room_for_one_of_a_live_text(steps, loads):
    model = with_steps(converted(), after=0)
    for batch in (3, 2):
        model.generate(torch.full((batch, 9), 7), **GREEDY)
    caches = [model(torch.full((2, 9), 7), use_cache=True).past_key_values for _ in range(2)]
    for _ in range(3):
        for cache in caches:
            model(torch.full((2, 1), 7), past_key_values=cache)
    assert [len(decoder.tokens) for decoder in model.stepping.decoders] == [2, 2]
    # the one of the last text, once
    assert steps["made"] == 3
    assert len(loads) == 1


def test_threads_that_generate_at_once_do_not_mix():
    model = converted()
    texts = [torch.randint(3, 50, (1, n)) for n in (9, 14, 20)]
    expected = [model.generate(text, **GREEDY) for text in texts]
    with_steps(model, after=1)
    found = {}

    def run(number):
        torch.set_num_threads(1)
        found[number] = model.generate(texts[number], **GREEDY)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], expected[number]) for number in range(3))


def test_without_a_cap_a_larger_decoder_follows_a_full_one(steps, monkeypatch):
    monkeypatch.setattr(stepping_module, "SMALLEST_CAPACITY", 4)
    options = {"input_ids": torch.randint(3, 50, (2, 10)), "max_new_tokens": 90, "do_sample": False}
    expected, found = both(converted(settings=UNCAPPED), **options)
    assert torch.equal(found, expected)
    # 22 salient tokens at the end: room for 4 and for 16 was too little
    assert steps == {"taken": 90 - 1 - 3, "made": 3}


def test_rooms_are_powers_of_two_with_something_to_spare():
    assert [capacity_for(n) for n in (0, 40, 64, 600, 4096)] == [64, 64, 128, 1024, 8192]


def test_memory_is_bounded_and_given_back():
    model = with_steps(converted(), after=0)
    sizes = set()
    for batch in (1, 2, 3):
        out = model.generate(torch.full((batch, 9), 7), **GREEDY, return_dict_in_generate=True)
        decoder = model.stepping.decoders[-1]
        assert out.past_key_values.nbytes == decoder.cache.nbytes
        sizes.add(decoder.cache.nbytes / batch)
    assert len(sizes) == 1
    assert len(model.stepping.decoders) == 2
    state = out.past_key_values.layers[0].state
    model.stepping = None
    after = out.past_key_values.layers[0].state
    assert all(torch.equal(x, y) for x, y in zip(state.tensors().values(), after.tensors().values(), strict=True))


def test_the_model_is_freed_with_its_last_user():
    model = with_steps(converted(), after=0)
    model.generate(torch.full((1, 9), 7), **GREEDY)
    host = weakref.ref(model.host.lm_head)
    gc.collect()
    gc.disable()
    try:
        del model
        assert host() is None
    finally:
        gc.enable()


def test_copied_models_have_decoders_of_their_own():
    model = with_steps(converted(), after=2)
    model.generate(torch.full((1, 9), 7), **GREEDY)
    twin = copy.deepcopy(model)
    assert (twin.stepping.after, twin.stepping.capture, twin.stepping.decoders) == (2, False, [])
    expected = model.generate(torch.full((1, 9), 7), **GREEDY)
    assert torch.equal(twin.generate(torch.full((1, 9), 7), **GREEDY), expected)


@torch.no_grad()
def test_decoders_serve_no_other_model(steps):
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.3)
    other.stepping = model.stepping
    caches = [each(tokens, use_cache=True).past_key_values for each in (model, other)]
    for _ in range(2):
        found = [each(tokens[:, :1], past_key_values=cache).logits for each, cache in zip((model, other), caches, strict=True)]
    model.stepping = other.stepping = None
    again = torch.cat((tokens, tokens[:, :1], tokens[:, :1]), 1)
    for each, logits in zip((model, other), found, strict=True):
        torch.testing.assert_close(logits[:, 0], each(again, use_cache=False).logits[:, -1], rtol=0, atol=1e-4)


def change_in_place(model):
    for parameter in model.parameters():
        parameter.mul_(1.3)


def change_the_maps(model):
    for attention in converted_attentions(model):
        for parameter in attention.hybrid.map.parameters():
            parameter.add_(torch.randn_like(parameter))


def replace_a_parameter(model):
    model.host.lm_head.weight = nn.Parameter(model.host.lm_head.weight.flip(0).clone())


def replace_the_data(model):
    model.host.model.layers[0].mlp.up_proj.weight.data = -model.host.model.layers[0].mlp.up_proj.weight.data


def replace_a_module(model):
    wider = nn.Linear(32, 50, bias=True)
    model.host.lm_head = wider.eval()


def hook_a_module(model):
    model.host.model.layers[1].register_forward_hook(lambda module, args, output: 0.5 * output)


def set_a_bias(model):
    projection = model.host.model.layers[0].self_attn.original.o_proj
    assert projection.bias is None
    projection.bias = nn.Parameter(torch.randn(projection.out_features))


def replace_a_forward(model):
    # as hooks of accelerate do
    mlp = model.host.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 1


def change_a_class(model):
    class Other(type(model.host.model.norm)):
        def forward(self, x):
            return super().forward(x) + 1

    model.host.model.norm.__class__ = Other


def train_a_part(model):
    model.host.model.layers[1].mlp.train()


def other_settings(model):
    for attention in converted_attentions(model):
        attention.hybrid.settings = replace(attention.hybrid.settings, merge="released")


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    ("change", "decoders", "taken"),
    [
        # 17 steps before the change; after it 20 in the same text and 20 in another
        (change_in_place, 1, 17 + 20 + 20),
        (change_the_maps, 1, 17 + 20 + 20),
        (replace_a_parameter, 2, 17 + 17 + 20),
        (replace_the_data, 2, 17 + 17 + 20),
        (replace_a_module, 2, 17 + 17 + 20),
        (other_settings, 2, 17 + 17 + 20),
        (set_a_bias, 2, 17 + 17 + 20),
        (change_a_class, 2, 17 + 17 + 20),
        (hook_a_module, 1, 17),
        (replace_a_forward, 1, 17),
        (train_a_part, 1, 17),
    ],
)
@torch.no_grad()
def test_changes_of_the_model_are_followed_between_and_within_texts(change, decoders, taken, steps):
    tokens = torch.randint(3, 50, (2, 60))
    logits = []
    for stepping in (None, Stepping(after=3, capture=False)):
        model = converted()
        torch.manual_seed(0)
        model.stepping = stepping
        cache = model(tokens[:, :20], use_cache=True).past_key_values
        before = [model(token, past_key_values=cache).logits for token in tokens[:, 20:40].split(1, 1)]
        change(model)
        after = [model(token, past_key_values=cache).logits for token in tokens[:, 40:].split(1, 1)]
        # nobody has the cache before any more, so its decoder is free
        cache = model(tokens[:, :20], use_cache=True).past_key_values
        after += [model(token, past_key_values=cache).logits for token in tokens[:, 20:40].split(1, 1)]
        logits.append(torch.cat(before + after, 1))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    assert steps == {"made": decoders, "taken": taken}


@pytest.mark.usefixtures("each_way")
@torch.no_grad()
def test_hooks_of_all_modules_are_called_in_every_step(steps):
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    cache, mlp = model(tokens, use_cache=True).past_key_values, model.host.model.layers[0].mlp
    model(tokens[:, :1], past_key_values=cache)
    calls = []
    for register in (nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook):
        hook = register(lambda module, *_: calls.append(1) if module is mlp else None)
        try:
            for _ in range(3):
                model(tokens[:, :1], past_key_values=cache)
            assert "hooks" in model.stepping.refusal
        finally:
            hook.remove()
    assert len(calls) == 6
    model(tokens[:, :1], past_key_values=cache)
    assert steps == {"made": 2, "taken": 2}


@torch.no_grad()
def test_a_refusal_ends_with_its_reason(steps):
    model, text = with_steps(converted()), torch.full((2, 9), 7)
    train_a_part(model)
    model.generate(text, **GREEDY)
    assert "training mode" in model.stepping.refusal
    model.eval()
    model.generate(text, **GREEDY)
    assert model.stepping.refusal is None
    assert steps == {"made": 1, "taken": 36}


@torch.no_grad()
def test_another_precision_of_products_is_captured_anew(steps):
    model, text = with_steps(converted()), torch.full((2, 9), 7)
    model.generate(text, **GREEDY)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        model.generate(text, **GREEDY)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert steps == {"made": 2, "taken": 36 + 36}


def test_what_is_replaced_is_freed_at_once():
    model = with_steps(converted(), after=0)
    model.generate(torch.full((1, 9), 7), **GREEDY)
    layer = model.host.model.layers[0]
    replaced = [weakref.ref(part) for part in (layer.mlp, layer.mlp.up_proj.weight, model.host.lm_head.weight)]
    gc.collect()
    gc.disable()
    try:
        layer.mlp = nn.Identity()
        model.host.lm_head.weight = nn.Parameter(torch.zeros_like(model.host.lm_head.weight))
        assert [part() for part in replaced] == [None, None, None]
    finally:
        gc.enable()


@torch.no_grad()
def test_what_the_kernel_keeps_of_the_maps_follows_them():
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    maps = [attention.hybrid.map for attention in converted_attentions(model)]

    def is_right():
        states = model.stepping.decoders[0].cache.states
        return all(torch.equal(state.query_matrix, phi.query_matrix()) for state, phi in zip(states, maps, strict=True))

    cache = model(tokens, use_cache=True).past_key_values
    model(tokens[:, :1], past_key_values=cache)
    assert is_right()
    change_the_maps(model)
    model(tokens[:, :1], past_key_values=cache)
    assert is_right()
    # of what leaves no trace at least the next text knows
    for phi in maps:
        phi.query_weight.data.mul_(2)
    assert not is_right()
    cache = model(tokens, use_cache=True).past_key_values
    model(tokens[:, :1], past_key_values=cache)
    assert is_right()


@torch.no_grad()
def test_a_model_that_changes_all_the_time_is_not_captured_all_the_time(steps):
    model, tokens = with_steps(converted(), after=3), torch.randint(3, 50, (2, 40))
    cache = model(tokens[:, :12], use_cache=True).past_key_values
    for token in tokens[:, 12:].split(1, 1):
        replace_a_parameter(model)
        model(token, past_key_values=cache)
    assert steps == {"made": 7, "taken": 7}


def test_adapters_are_left_to_the_model(steps):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = with_steps(converted())
    wrapped = peft.get_peft_model(model, adapter).eval()
    text = torch.full((1, 9), 7)
    first = wrapped.generate(input_ids=text, **GREEDY)
    with wrapped.disable_adapter():
        assert not torch.equal(wrapped.generate(input_ids=text, **GREEDY), first)
    assert steps["made"] == 0
    assert "merge them first" in model.stepping.refusal
    merged = wrapped.merge_and_unload()
    merged.generate(input_ids=text, **GREEDY)
    assert steps["made"] == 1


@torch.no_grad()
def test_unusual_steps_are_the_models_own(steps):
    model, tokens = with_steps(converted(), after=0), torch.randint(3, 50, (2, 12))
    cache = model(tokens, use_cache=True).past_key_values
    one, padded = tokens[:, :1], torch.ones(2, 14, dtype=torch.int64)
    padded[1, -1] = 0

    def step(**options):
        return model(**({"input_ids": one, "past_key_values": copy.deepcopy(cache)} | options))

    step(attention_mask=padded[:, :13])
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


@pytest.mark.parametrize("kind", [RuntimeError, Exception], ids=["of torch", "of Triton"])
def test_a_failed_capture_is_said_once_and_costs_no_token(kind, monkeypatch):
    def fail(self, *args, **kwargs):
        raise kind("operation not permitted when stream is capturing")

    monkeypatch.setattr(SteppingDecoder, "__init__", fail)
    model, text = converted(), torch.full((2, 9), 7)
    expected = model.generate(text, **GREEDY)
    with_steps(model)
    with pytest.warns(UserWarning, match="cannot be captured") as said:
        found = [model.generate(text, **GREEDY) for _ in range(2)]
    assert len(said) == 1
    assert "not permitted" in model.stepping.refusal
    assert all(torch.equal(tokens, expected) for tokens in found)


def test_a_batch_that_is_too_large_leaves_others_their_decoders(steps, monkeypatch):
    make = SteppingDecoder.__init__

    def small_ones(self, model, cache, **kwargs):
        if len(cache.layers[0].held.lengths) == 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        make(self, model, cache, **kwargs)

    monkeypatch.setattr(SteppingDecoder, "__init__", small_ones)
    model, texts = with_steps(converted()), [torch.full((batch, 9), 7) for batch in (2, 3, 2, 3, 1)]
    with pytest.warns(UserWarning, match="steps of 3 samples cannot be captured") as said:
        _ = [model.generate(text, **GREEDY) for text in texts]
    assert len(said) == 1
    assert "steps of 3 samples" in model.stepping.refusal
    assert steps == {"made": 2, "taken": 36 + 39 + 36}


@torch.no_grad()
def test_less_room_is_tried_after_more_has_failed(steps, monkeypatch):
    monkeypatch.setattr(stepping_module, "SMALLEST_CAPACITY", 4)
    make = SteppingDecoder.__init__

    def small_ones(self, model, cache, *, capacity, **kwargs):
        if capacity > 16:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        make(self, model, cache, capacity=capacity, **kwargs)

    monkeypatch.setattr(SteppingDecoder, "__init__", small_ones)
    model = with_steps(converted(settings=UNCAPPED), after=0)
    caches = [model(torch.full((2, tokens), 7), use_cache=True).past_key_values for tokens in (90, 90, 10)]
    with pytest.warns(UserWarning, match="cannot be captured") as said:
        _ = [model(torch.full((2, 1), 7), past_key_values=cache) for cache in caches]
    assert len(said) == 1
    assert steps == {"made": 1, "taken": 1}


def test_a_failed_decoder_is_freed_at_once(monkeypatch):
    states, make = [], decoder_module.SteppingCache.__init__

    def watched(self, *args, **kwargs):
        make(self, *args, **kwargs)
        states.append(weakref.ref(self.states[0].keys))

    def fail(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decoder_module.SteppingCache, "__init__", watched)
    monkeypatch.setattr(decoder_module, "captured", fail)
    model = with_steps(converted(), after=0)
    model.stepping.capture = True
    monkeypatch.setattr(model.stepping, "_may_step", lambda tokens, *_: tokens.shape[1] == 1)
    gc.collect()
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="cannot be captured"):
            model.generate(torch.full((1, 9), 7), **GREEDY)
        assert [state() for state in states] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("move", [lambda model: model.to("cpu"), lambda model: model.double()], ids=["to", "double"])
def test_a_model_that_moves_leaves_no_decoder_behind(move):
    model = with_steps(converted(), after=0)
    out = model.generate(torch.full((1, 9), 7), **GREEDY, return_dict_in_generate=True)
    before, memory = out.past_key_values.layers[0].state, weakref.ref(model.stepping.decoders[0].cache.states[0].keys)
    gc.collect()
    gc.disable()
    try:
        move(model)
        assert memory() is None
    finally:
        gc.enable()
    after = out.past_key_values.layers[0].state
    assert all(torch.equal(x, y) for x, y in zip(before.tensors().values(), after.tensors().values(), strict=True))


@pytest.mark.parametrize("reason", ["forgotten", "on another stream"])
@torch.no_grad()
def test_states_are_given_back_on_the_stream_that_wrote_them(reason, monkeypatch):
    class Stream:
        device = torch.device("cpu")

        def wait_stream(self, other):
            events.append(("waits", self, other))

    own, other, events, entered = Stream(), Stream(), [], []

    @contextmanager
    def within(stream):
        entered.append(stream)
        yield
        entered.pop()

    copy_out = SteppingState.to_state
    monkeypatch.setattr(SteppingState, "to_state", lambda self: events.append(("copies", *entered)) or copy_out(self))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: other)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: events.append(("records", stream)), raising=False)
    model = with_steps(converted(), after=0)
    cache = model(torch.full((1, 9), 7), use_cache=True).past_key_values
    model(torch.full((1, 1), 7), past_key_values=cache)
    model.stepping._places[0]._stream = own
    tensors = len(cache.layers[0].state.tensors())
    events.clear()
    if reason == "forgotten":
        model.stepping.forget()
    else:
        kind = stepping_module._kind
        monkeypatch.setattr(stepping_module, "_kind", lambda state: (*kind(state)[:2], 1, 1))
        model(torch.full((1, 1), 7), past_key_values=cache)
        assert len(model.stepping.decoders) == 2
    layers = len(cache.layers)
    assert events == layers * [("copies", own)] + [("waits", other, own)] + layers * tensors * [("records", other)]


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
    assert steps["taken"] == 36
