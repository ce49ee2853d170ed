"""What decoders of `generate` hold and give back: memory, rooms for salient tokens, streams, and threads that share a model."""

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("transformers")
from torch import nn

from helpers.converted_models import converted
from helpers.steps_of_generate import GREEDY, TAKEN, UNCAPPED, both, with_steps
from nalaformer.attention.hybrid import HybridState
from nalaformer.models.hybrid import decoder as decoder_module
from nalaformer.models.hybrid import stepping as stepping_module
from nalaformer.models.hybrid.decoder import SteppingDecoder
from nalaformer.models.hybrid.stepping import capacity_for

pytest_plugins = "helpers.steps_of_generate"
pytestmark = pytest.mark.usefixtures("one_thread")


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
    monkeypatch.setattr(stepping_module, "SMALLEST_CAPACITY", 32)
    options = {"input_ids": torch.randint(3, 50, (2, 10)), "max_new_tokens": 90, "do_sample": False}
    expected, found = both(converted(settings=UNCAPPED), **options)
    assert torch.equal(found, expected)
    # 99 tokens at the end: room for 32, 64 and 96 was too little
    assert steps == {"taken": 90 - 1 - 3, "made": 4}


def test_rooms_have_a_quarter_to_spare():
    assert [capacity_for(n) for n in (1, 800, 1024, 8192, 100_000)] == [1024, 1024, 2048, 10240, 125_952]


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
    assert steps == {"made": 2, "taken": 3 * TAKEN + 3}


@torch.no_grad()
def test_less_room_is_tried_after_more_has_failed(steps, monkeypatch):
    monkeypatch.setattr(stepping_module, "SMALLEST_CAPACITY", 32)
    make = SteppingDecoder.__init__

    def small_ones(self, model, cache, *, capacity, **kwargs):
        if capacity > 64:
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

    copy_out = HybridState.clone
    monkeypatch.setattr(HybridState, "clone", lambda self: events.append(("copies", *entered)) or copy_out(self))
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
