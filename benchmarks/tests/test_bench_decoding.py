"""The benchmark of decoding measures what it says: the right steps, after the right number of tokens."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache

from benchmarks import decoding
from benchmarks.decoding import DecodeMeasurement, checked_error, make_fixed, plan_decoding
from benchmarks.decoding_models import DecodeStudy, build_decoder
from benchmarks.measurement import WRONG, Result
from benchmarks.random_caches import random_cache
from benchmarks.runner import run_part
from benchmarks.softmax_decoding import ROWS, WAYS
from nalaformer.attention.hybrid import roll_, stepping
from nalaformer.models.hybrid.cache import HybridCache
from nalaformer.models.hybrid.decoder import SteppingDecoder
from nalaformer.models.hybrid.stepping import Stepping

pytestmark = pytest.mark.usefixtures("one_thread")

TOY = DecodeStudy(
    layers=2, width=32, heads=4, key_heads=2, chunk_size=8, salient_per_chunk=2, max_salient=6, contexts=(50, 64),
    batches=(1, 3), steps=10, eager_steps=2, generated=6,
)  # fmt: skip


def build(method, study=TOY):
    return build_decoder(study, study.methods[method], device="cpu", dtype=torch.float32)


def run_rows(study, **options):
    rows = []
    given = {"seconds": 0.0, "say": lambda line: None, "deadline": options.pop("deadline", 1e18)}
    run_part(plan_decoding(study, "cpu"), add=lambda **row: rows.append(row), **given)
    return rows


@pytest.mark.parametrize("name", WAYS)
@torch.no_grad()
def test_the_softmax_step_is_the_models_own_in_both_ways_to_attend(name):
    model = build("softmax")
    tokens = torch.randint(0, 4096, (3, 21))
    whole = model(tokens, use_cache=False).logits[:, -1]
    cache = model(tokens[:, :-1], past_key_values=DynamicCache(config=model.config)).past_key_values
    room = [torch.cat((x, torch.full_like(x[:, :, :1], torch.nan)), dim=2) for y in cache.layers for x in (y.keys, y.values)]
    model.set_attn_implementation(name)
    decoder = make_fixed(model, room[::2], room[1::2])
    # again and again: each step takes the same place
    for _ in range(2):
        torch.testing.assert_close(decoder.step(tokens[:, -1]), whole, rtol=0, atol=1e-5)
    assert decoder.nbytes == 2 * 2 * 3 * 2 * 21 * 8 * 4
    assert ROWS in WAYS


@pytest.mark.parametrize("method", TOY.methods)
def test_what_is_timed_agrees_with_the_eager_model(method):
    assert checked_error(build(method), TOY) < 1e-5


def test_a_wrong_step_is_not_timed(monkeypatch):
    def roll_too_often(state, **given):
        roll_(state, **given)
        roll_(state, **given)

    monkeypatch.setattr("nalaformer.attention.hybrid.module.roll_", roll_too_often)
    rows = run_rows(TOY)
    assert all(row["ms_per_step"] > 0 for row in rows if row["method"] == "softmax")
    ours = [row for row in rows if row["method"] != "softmax"]
    assert len({row["method"] for row in ours}) == 3
    assert all(row["note"] == WRONG and row["ms_per_step"] is None and row["error"] > 1e-4 for row in ours)


def test_the_cap_on_salient_tokens_belongs_to_what_is_compared(monkeypatch):
    def drop_evicted(state, keys, values, scores):
        *gone, is_gone = enter(state, keys, values, scores)
        return *gone, torch.zeros_like(is_gone)

    enter = stepping._enter_store
    monkeypatch.setattr(stepping, "_enter_store", drop_evicted)
    study = replace(TOY, max_salient=1000)
    errors = {method: checked_error(build(method, study), study) for method in study.methods}
    capped = errors.pop("still, at most 1000 salient")
    assert capped > 1e-3
    assert max(errors.values()) < 1e-5


def test_what_generate_does_belongs_to_what_is_compared(monkeypatch):
    take = Stepping.step

    def slightly_off(self, *args):
        logits = take(self, *args)
        return logits if logits is None else 1.01 * logits

    monkeypatch.setattr(Stepping, "step", slightly_off)
    assert checked_error(build("window"), TOY) == pytest.approx(0.01, abs=1e-4)


def test_generate_is_measured_as_a_decoder_takes_it(monkeypatch):
    taken = []
    step = SteppingDecoder.step
    monkeypatch.setattr(SteppingDecoder, "step", lambda self, *a, **k: (taken.append(1), step(self, *a, **k))[1])
    model = build("window")
    found = decoding.measure_generate(model, TOY, 50, 1)
    assert found["note"] == "6 tokens"
    assert len(taken) == decoding.WARM_UPS + 6
    assert model.stepping is None


@pytest.mark.parametrize("method", [name for name in TOY.methods if name != "softmax"])
@torch.no_grad()
def test_random_caches_have_the_shapes_that_prompts_leave(method):
    model = build(method)
    for context in (5, 50, 64):
        real = HybridCache(model.config)
        model(torch.randint(0, 4096, (3, context)), past_key_values=real)
        for made, found in zip(random_cache(model, TOY, context, 3).layers, real.layers, strict=True):
            assert made.state.lengths == found.state.lengths
            shapes, expected = ({name: tensor.shape for name, tensor in x.state.tensors().items()} for x in (made, found))
            assert shapes == expected
            # nothing where no token is: new ones are added there
            assert torch.equal(made.state.keys[:, 0, :, 0] == 0, found.state.keys[:, 0, :, 0] == 0)


def test_every_method_context_and_batch_has_its_row():
    rows = run_rows(TOY)
    found = [(row["method"], row["length"], row["batch"], row["timed"]) for row in rows]
    expected = [
        (method, context, batch, timed)
        for method in TOY.methods
        for timed, batches in ((decoding.PLAIN, (1, 3)), (decoding.EAGER, (1,)), (decoding.GENERATE, (1,)))
        for batch in batches
        for context in (50, 64)
    ]
    assert found == expected
    sizes = {(row["method"], row["length"]): row["cache_mib"] for row in rows if row["timed"] == decoding.PLAIN}
    # the softmax cache grows with the context, a bounded one does not
    assert sizes["softmax", 64] > 1.2 * sizes["softmax", 50]
    assert sizes["still, at most 6 salient", 64] == sizes["still, at most 6 salient", 50]


def test_methods_are_compared_with_softmax_at_the_same_context():
    def cost(method, context, timed, mib, ms):
        place = {"study": TOY, "method": method, "context": context, "batch": 1, "timed": timed, "device": "cpu"}
        return Result(measurement=DecodeMeasurement(**place), cache_mib=mib, median_ms=ms)

    captured, eager = decoding.CAPTURED, decoding.EAGER
    results = [cost("softmax", 64, captured, 10.0, 3.0), cost("window", 64, captured, 1.0, 2.0)]
    results += [
        cost("window", 128, captured, 1.0, 2.0),
        cost("window", 64, eager, 1.0, 9.0),
        cost("softmax", 64, eager, 1.0, 1.0),
    ]
    assert decoding.comparison(results) == ["window, 64 tokens, batch 1: 90% less cache than softmax, +50% tokens a second"]


def test_nothing_begins_after_the_deadline():
    assert run_rows(replace(TOY, contexts=(50,)), deadline=0.0) == []
