"""The fuzz of the kernels covers all sizes and sees what it is for; in Triton's interpreter, with few tokens."""

from itertools import islice

import pytest
import torch

import fuzz_gpu
import nalaformer

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")

SMALL = {
    "name": "norm_aware",
    "mode": "causal",
    "size": 5,
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
    "keys": None,
    "seed": 1,
}
FORMS = [
    {},
    {"mode": "recurrent", "masked": False, "rotary": True, "size": 6},
    {"mode": "bidirectional", "keys": 7, "name": "polarity", "value_size": 4, "rotary": True, "size": 6},
    {"mode": "bidirectional", "packed": True, "masked": False, "batch": 3, "layout": "one projection"},
]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_head_size_comes_before_any_comes_twice(seed):
    # reflections need even heads, so theirs are one less
    sizes = [
        form["size"] + (form["size"] % 2 == 0 and "reflection" in form["name"]) for form in islice(fuzz_gpu.forms(seed), 128)
    ]
    assert len(set(sizes)) > 110
    assert {form["size"] for form in islice(fuzz_gpu.forms(seed), 600)} >= set(range(1, 129))


@pytest.mark.parametrize("change", FORMS)
def test_right_results_pass(change):
    backend, misses = fuzz_gpu.run(SMALL | change)
    assert backend == "triton"
    assert not fuzz_gpu.is_failure({"misses": misses})


# each place once, and each form
@pytest.mark.parametrize(("change", "place"), list(zip(FORMS, range(4), strict=True)), ids=["out", "dq", "dk", "dv"])
def test_one_wrong_row_fails(change, place, monkeypatch):
    def spoilt(case, *arguments):
        found = results(case, *arguments)
        if nalaformer.get_backend() == "triton":
            found = [x.detach().clone() for x in found]
            found[place].flatten(0, -2)[4] *= 1.01
        return found

    results = fuzz_gpu.results
    monkeypatch.setattr(fuzz_gpu, "results", spoilt)
    assert fuzz_gpu.is_failure({"misses": fuzz_gpu.run(SMALL | change)[1]})


def test_nan_fails():
    assert fuzz_gpu.is_failure({"misses": {"out": float("nan"), "dq": 0.0}})


def test_rounding_is_known_to_the_bar():
    plain = nalaformer.feature_map("elu", num_heads=1, head_dim=4)
    rounded = fuzz_gpu.RoundedFeatures(plain, torch.bfloat16)
    k = torch.randn(1, 3, 1, 4)
    assert torch.equal(rounded.key(k), plain.key(k).bfloat16().float())
