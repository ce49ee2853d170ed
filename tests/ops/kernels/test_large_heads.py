"""Heads beyond 64 numbers and rows at multiples of eight: what the kernels do with them, against the float64 definition."""

import pytest
import torch

import nalaformer
from helpers.kernel_checks import check, check_half_precision, make
from nalaformer import Rotary
from nalaformer.ops.backend import INTERPRETING

pytestmark = pytest.mark.kernels

pytest.importorskip("triton", reason="the kernels need Triton, which this platform has no build of")


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory that nothing wrote is NaN: a missing store fails."""


@pytest.mark.parametrize("size", [8, 24])
@pytest.mark.parametrize("extra", [0, 1, 8])
def test_rows_of_eight_numbers_may_lie_anywhere(size, extra):
    """Strides of 8, 9 and 16: those that are multiples of eight are read as they are, others are copied."""
    q, k, v = (x[..., extra:] for x in make(*[(1, 20, 3, size + extra)] * 3))
    check("norm_aware", (q, k, v), heads=3, head_dim=size)


def test_only_rows_that_kernels_cannot_read_are_copied():
    from nalaformer.ops.kernels.common.launch import readable

    for x in (torch.zeros(2, 5, 3, 72), torch.zeros(2, 5, 3, 80)[..., :72], torch.zeros(2, 5, 216).unflatten(-1, (3, 72))):
        assert readable(x) is x
    # a stride that no second row follows does not matter
    assert readable(one := torch.zeros(2, 5, 72).as_strided((2, 5, 1, 72), (360, 72, 1, 1))) is one
    for x in (torch.zeros(2, 5, 3, 73)[..., 1:], torch.zeros(2, 5, 72, 3).transpose(2, 3)):
        assert readable(x) is not x
        assert readable(x).is_contiguous()
    # other lengths need no such strides
    assert readable(odd := torch.zeros(2, 5, 3, 65)[..., 1:]) is odd


@pytest.mark.parametrize(("head_dim", "programs", "is_whole"), [(64, 1000, True), (72, 1000, False), (72, 4, True)])
def test_short_sequences_take_one_launch_unless_many_heads_are_large(head_dim, programs, is_whole):
    from nalaformer.ops.kernels.linear.call import TokenLayout, new_call

    x = torch.empty(programs, 197, 1, head_dim, dtype=torch.bfloat16, device="meta")
    feature_map = nalaformer.feature_map("norm_aware", num_heads=1, head_dim=head_dim)
    settings = feature_map.kernel_spec(torch.device("cpu")).settings(streams=1, eps=1e-6)
    assert new_call(x, x, x, TokenLayout(None, None, None, None, None, None, 0), settings).is_whole == is_whole


if INTERPRETING:

    @pytest.mark.parametrize("case", ["plain", "rotary", "values with a mean"])
    def test_large_causal_bfloat16_stays_near_float64(case, monkeypatch):
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16
        from nalaformer.ops.kernels.linear import call

        teach_bfloat16(monkeypatch)
        monkeypatch.setattr(call, "CALLS", {})
        monkeypatch.setattr(call, "TILES", {name: {128: call.Tile(32, 8, 1)} for name in call.TILES})
        monkeypatch.setattr(call, "ROTARY_TILES", {})
        tensors = [x.bfloat16() for x in make((1, 90, 2, 72), (1, 90, 1, 72), (1, 90, 1, 66))]
        arguments = {"heads": 2, "head_dim": 72, "causal": True, "key_mask": torch.rand(1, 90) > 0.3}
        if case == "rotary":
            arguments["rotary"] = Rotary.sequence(90, 72)
        if case == "values with a mean":
            tensors[2] += 10
        check_half_precision("norm_aware", torch.bfloat16, tensors, torch.randn(1, 90, 2, 66).bfloat16(), **arguments)

    @pytest.mark.parametrize(("size", "keys"), [(80, 90), (72, 100)])
    def test_sums_of_large_bfloat16_heads_stay_near_float64(size, keys, monkeypatch):
        from helpers.bfloat16_in_the_interpreter import teach_bfloat16

        teach_bfloat16(monkeypatch)
        tensors = [x.bfloat16() for x in make((1, 90, 1, size), *[(1, keys, 1, size)] * 2)]
        arguments = {"heads": 1, "head_dim": size}
        if keys != 90:
            arguments["key_mask"] = torch.rand(1, keys) > 0.3
        check_half_precision("norm_aware", torch.bfloat16, tensors, torch.randn(1, 90, 1, size).bfloat16(), **arguments)
