"""The fuzz of the kernels draws contrasts and weights of keys, and sees where they are wrong; in Triton's interpreter."""

from itertools import islice

import pytest

import fuzz_gpu
import nalaformer

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")

SMALL = {
    "name": "elu",
    "mode": "bidirectional",
    "size": 6,
    "value_size": 3,
    "heads": 2,
    "kv_heads": 1,
    "dtype": "float32",
    "layout": "wide rows",
    "packed": False,
    "masked": True,
    "rotary": False,
    "scale": 1.0,
    "batch": 2,
    "tokens": 9,
    "keys": 7,
    "seed": 1,
    "contrast": None,
    "key_weight": None,
}
FORMS = [
    {"contrast": "mean_score"},
    {"contrast": "given", "mode": "causal", "keys": None},
    {"contrast": "mean_score", "mode": "causal", "keys": None, "rotary": True},
    {"key_weight": "given", "rotary": True},
    {"key_weight": "global_query", "rotary": True},
    {"key_weight": "global_query", "packed": True, "masked": False, "batch": 3, "keys": None, "contrast": "given"},
]


def test_every_form_of_contrast_and_weight_is_drawn():
    drawn = list(islice(fuzz_gpu.forms(0), 200))
    assert {form["contrast"] for form in drawn} == {None, "mean_score", "given"}
    assert {form["key_weight"] for form in drawn} == {None, "given", "global_query"}
    assert not any(form["key_weight"] == "global_query" for form in drawn if form["mode"] != "bidirectional")


@pytest.mark.parametrize("change", FORMS)
def test_right_results_pass(change):
    backend, misses = fuzz_gpu.run(SMALL | change)
    assert backend == "triton"
    assert not fuzz_gpu.is_failure({"misses": misses})


@pytest.mark.parametrize("change", FORMS)
def test_a_call_that_loses_its_contrast_or_weights_fails(change, monkeypatch):
    def without(case, feature_map, inputs, arguments, upstream):
        if nalaformer.get_backend() == "triton":
            arguments = {name: value for name, value in arguments.items() if name not in ("contrast", "key_weight")}
        return results(case, feature_map, inputs, arguments, upstream)

    results = fuzz_gpu.results
    monkeypatch.setattr(fuzz_gpu, "results", without)
    assert fuzz_gpu.is_failure({"misses": fuzz_gpu.run(SMALL | change)[1]})
