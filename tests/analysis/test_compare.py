"""What the diagnostics say, on numbers worked out by hand and on what the theory promises."""

import math
import struct
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

from nalaformer.analysis import (
    ComparedMethod,
    Row,
    attention_entropy,
    channel_entropy,
    compare_methods,
    comparison_table,
    draw_entropy_against_norm,
    effective_rank,
    entropy_drop,
    methods,
    norm_sweep,
    spearman,
)
from nalaformer.analysis.compare import channels_sharpen, time_call, weights_of
from nalaformer.analysis.entropy import falls_monotonically, ranks
from nalaformer.analysis.pictures import line_styles, space_labels
from nalaformer.analysis.tables import cells
from nalaformer.cli import build_app
from nalaformer.feature_maps import FEATURE_MAPS


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    # matrices this small gain nothing from threads, and threads that wait for each other crawl on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows(one_thread):
    def short_time(phi):
        return time_call(phi, num_tokens=64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nalaformer.analysis.compare.time_call", short_time)
        patch.setattr("nalaformer.analysis.compare.SEEDS", 2)
        return {row.label: row for row in compare_methods(methods())}


@pytest.mark.parametrize("num_tokens", [1, 7, 256])
def test_equal_weights_have_the_entropy_log_n(num_tokens):
    weights = torch.full((2, num_tokens), 3.0, dtype=torch.float64)
    assert attention_entropy(weights).tolist() == pytest.approx([math.log(num_tokens)] * 2, abs=1e-12)


def test_all_weight_on_one_token_has_no_entropy():
    assert attention_entropy(torch.tensor([0.0, 0.0, 1.0])).item() == 0


def test_entropy_of_a_half_and_two_quarters_is_three_halves_of_log_two():
    assert attention_entropy(torch.tensor([2.0, 1.0, 1.0])).item() == pytest.approx(1.5 * math.log(2))


def test_a_row_without_weight_has_finite_entropy():
    assert attention_entropy(torch.zeros(3)).item() == 0


def test_signed_weights_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match="normalised=True"):
        attention_entropy(torch.tensor([1.0, -0.1]))


def test_rounding_below_zero_is_not_called_a_sign():
    assert attention_entropy(torch.tensor([1.0, -1e-9])).item() == 0


def test_channel_entropy_takes_signed_features_by_their_size():
    assert channel_entropy(torch.tensor([2.0, -1.0, -1.0])).item() == pytest.approx(1.5 * math.log(2))


def test_equal_entries_share_the_mean_of_their_ranks():
    assert ranks(torch.tensor([10.0, 30.0, 10.0, 20.0, 10.0])).tolist() == [2, 5, 2, 4, 2]


def test_spearman_with_ties_is_what_the_hand_computes():
    # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5
    found = spearman(torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 30.0, 2.0, 400.0]))
    assert found.item() == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_spearman_sees_order_and_not_shape():
    x = torch.linspace(0.1, 5, 50)
    assert spearman(x, x.exp()).item() == pytest.approx(1)
    assert spearman(x, 1 / x).item() == pytest.approx(-1)


def test_spearman_of_a_constant_is_zero():
    assert spearman(torch.arange(5.0), torch.ones(5)).item() == 0


def test_spearman_treats_each_row_by_itself():
    x = torch.arange(6.0).expand(2, 6)
    assert spearman(x, torch.stack((x[0], -x[0]))).tolist() == pytest.approx([1, -1])


def test_effective_rank_of_known_matrices():
    assert effective_rank(torch.eye(5)).item() == pytest.approx(5)
    assert effective_rank(torch.ones(6, 4)).item() == pytest.approx(1, abs=1e-4)
    # singular values 1/2, 1/4, 1/4
    assert effective_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))).item() == pytest.approx(2**1.5)


def test_the_drop_is_read_at_the_tenth_and_the_ninetieth_percentile():
    norms = torch.arange(1.0, 1001.0)
    assert entropy_drop(norms, -norms).item() == pytest.approx(800)


def test_each_end_of_the_drop_is_a_mean_over_a_tenth_of_the_tokens():
    # percentiles 10 and 90 of 100 tokens, five on either side of each
    entropy = torch.randn(100, dtype=torch.float64)
    expected = entropy[5:15].mean() - entropy[85:95].mean()
    assert entropy_drop(torch.arange(100.0), entropy).item() == pytest.approx(expected.item())
    wider = entropy[10:30].mean() - entropy[60:80].mean()
    found = entropy_drop(torch.arange(100.0), entropy, low=0.2, high=0.7, width=0.2)
    assert found.item() == pytest.approx(wider.item())


def test_the_drop_does_not_depend_on_the_order_of_tokens():
    norms = torch.arange(1.0, 201.0)
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    assert entropy_drop(norms[shuffled], norms[shuffled].sqrt()) == entropy_drop(norms, norms.sqrt())


@pytest.mark.parametrize(
    ("curve", "falls"),
    [([3.0, 2.0, 1.0], True), ([3.0, 1.0, 2.0], False), ([1.0, 1.0, 1.0], False), ([3.0, 1.0, 1.0], True)],
)
def test_falling_means_never_up_and_down_in_all(curve, falls):
    assert falls_monotonically(torch.tensor(curve), least_fall=0.02) is falls


def test_one_rising_curve_among_falling_ones_is_noticed():
    assert not falls_monotonically(torch.tensor([[3.0, 2.0], [2.0, 3.0]]), least_fall=0.02)


def test_the_sweep_has_the_norms_that_it_states():
    norms, q, k = norm_sweep(33, num_heads=3, head_dim=8, seeds=2)
    assert q.shape == k.shape == (2, 33, 3, 8)
    torch.testing.assert_close(q.norm(dim=-1), norms[:, None].expand(2, 33, 3))
    assert (norms[0].item(), norms[16].item(), norms[-1].item()) == pytest.approx((0.1, 1, 10))


def test_the_sweep_depends_on_its_seed_alone():
    state = torch.get_rng_state()
    first, again, other = (norm_sweep(16, seed=seed)[1] for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_a_sweep_of_too_few_tokens_is_refused():
    with pytest.raises(ValueError, match="at least 16 tokens, got 15"):
        norm_sweep(15)


@pytest.mark.parametrize("seed", range(5))
def test_softmax_entropy_never_rises_as_a_query_grows(seed):
    _, q, k = norm_sweep(32, seed=seed)
    steps = [attention_entropy(weights_of(None, q * scale, k)) for scale in (0.5, 1.0, 2.0, 4.0)]
    assert falls_monotonically(torch.stack(steps, dim=-1), least_fall=0)


@pytest.mark.parametrize("direction", ["split", "cosine"])
@pytest.mark.parametrize("seed", range(3))
def test_norm_aware_channel_entropy_falls_for_every_direction(direction, seed):
    phi = ComparedMethod(map_name="norm_aware", options={"direction": direction}).make(torch.float64)
    assert channels_sharpen(phi, seed=seed)


@pytest.mark.parametrize("name", ["relu", "split", "polarity"])
def test_the_norm_cancels_in_homogeneous_maps(name):
    assert not channels_sharpen(ComparedMethod(map_name=name).make(torch.float64))


def test_every_registered_map_has_a_row(rows):
    names = {label.split()[0] for label in rows}
    assert names == {"softmax", *FEATURE_MAPS.names()}
    assert len(rows) == len(methods())


def test_softmax_sharpens_with_the_query_norm(rows):
    assert rows["softmax"].spearman < -0.99
    assert rows["softmax"].entropy_drop > 0.3
    assert rows["softmax"].channel_entropy_falls is None


@pytest.mark.parametrize("label", ["norm_aware split", "norm_aware cosine"])
def test_norm_aware_maps_sharpen_with_the_query_norm(rows, label):
    assert rows[label].spearman <= -0.7
    assert rows[label].entropy_drop >= 0.2
    assert rows[label].channel_entropy_falls is True


def test_relu_does_not_sharpen_and_its_rounding_is_not_reported(rows):
    norms, q, k = norm_sweep(256)
    raw = spearman(norms, attention_entropy(weights_of(ComparedMethod(map_name="relu").make(torch.float64), q, k))[0, 0])
    assert raw != 0
    assert rows["relu"].spearman == 0
    assert abs(rows["relu"].entropy_drop) < 0.02
    assert rows["relu"].channel_entropy_falls is False


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.label)
def test_rows_are_plausible_for_every_method(rows, method):
    row = rows[method.label]
    assert row.smallest_weight >= -1e-12
    assert 1 <= row.effective_rank <= 256
    assert row.milliseconds > 0
    assert max(row.entropy) <= math.log(256) + 1e-9
    assert list(row.norms) == sorted(row.norms)
    assert len(row.norms) == len(row.entropy)


def test_the_curve_shows_the_entropy_at_its_norms(rows):
    softmax = rows["softmax"]
    # for standard normal keys the logits of a query have variance |q|^2 / D, and the entropy is log N - variance / 2
    expected = [math.log(256) - norm**2 / 64 / 2 for norm in softmax.norms]
    assert softmax.entropy == pytest.approx(expected, abs=0.06)


def test_a_comparison_without_times_takes_none(monkeypatch):
    monkeypatch.setattr("nalaformer.analysis.compare.time_call", lambda phi: pytest.fail("timed"))
    (row,) = compare_methods([ComparedMethod(map_name="relu")], num_tokens=16, timed=False)
    assert row.milliseconds is None
    assert cells(row)[-1] == "-"


def test_the_time_of_a_call_is_the_median_without_the_first(monkeypatch):
    seconds, tokens = [9.0, 0.007, 0.001, 0.003, 0.002, 0.006, 0.004, 0.005], []
    # a clock that stands still but for the calls
    ticks = iter([tick for second in seconds for tick in (0.0, second)])
    monkeypatch.setattr("nalaformer.analysis.compare.time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(
        "nalaformer.analysis.compare.linear_attention", lambda q, k, v, feature_map: tokens.append((q.shape[1], feature_map))
    )
    phi = ComparedMethod(map_name="relu").make(torch.float32)
    assert time_call(phi, num_tokens=64) == pytest.approx(4.0)
    assert tokens == [(64, phi)] * len(seconds)


def test_parameters_of_maps_leave_the_global_random_state_alone():
    state = torch.get_rng_state()
    first, second = (ComparedMethod(map_name="reflection").make(torch.float32).normal for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())


def test_the_picture_is_a_png_of_decent_size(rows, tmp_path):
    path = draw_entropy_against_norm(list(rows.values()), tmp_path / "new" / "picture.png", num_tokens=256)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1200
    assert height >= 700
    assert len(content) > 30_000


def test_another_curve_is_another_picture(rows, tmp_path):
    # the ends stay, and with them the labels and the axis
    softmax = rows["softmax"]
    bent = replace(softmax, entropy=(*softmax.entropy[:10], 5.0, *softmax.entropy[11:]))
    pictures = [
        draw_entropy_against_norm([row], tmp_path / "picture.png", num_tokens=256).read_bytes() for row in (softmax, bent)
    ]
    assert pictures[0] != pictures[1]


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one row"):
        draw_entropy_against_norm([], tmp_path / "none.png", num_tokens=256)


def test_no_two_methods_look_alike_in_the_picture():
    styles = line_styles([method.label for method in methods()])
    assert len({(style["color"], style["linestyle"]) for style in styles}) == len(styles)


def test_labels_keep_their_order_and_distance_and_stay_below_the_top():
    heights = [5.0, 5.01, 1.0, 5.02, 3.0]
    placed = space_labels(heights, gap=0.5, highest=5.1)
    by_height = [place for _, place in sorted(zip(heights, placed, strict=True))]
    assert all(b - a >= 0.5 - 1e-9 for a, b in pairwise(by_height))
    assert max(placed) <= 5.1
    assert placed[2] == 1.0
    assert placed[4] == 3.0


def test_the_table_fits_an_80_column_screen(rows):
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(list(rows.values()), num_tokens=256))
    text = console.export_text()
    assert "…" not in text
    for label in rows:
        assert f" {label} " in text


def test_small_figures_read_as_zero_and_missing_ones_as_a_dash():
    row = Row(
        label="x",
        spearman=0.0,
        entropy_drop=-0.0001,
        channel_entropy_falls=None,
        smallest_weight=0.0,
        effective_rank=2.0,
        milliseconds=1.0,
        norms=(),
        entropy=(),
    )
    assert cells(row) == ("x", "0", "0.000", "-", "0", "2.0", "1.0")


def test_the_command_compares_the_tokens_and_the_seed_that_are_asked_for(tmp_path, monkeypatch):
    import nalaformer.analysis

    softmax = [ComparedMethod(map_name=None)]
    monkeypatch.setattr(nalaformer.analysis, "methods", lambda: softmax)
    monkeypatch.setattr("nalaformer.analysis.compare.time_call", lambda phi: 1.0)
    for tokens, seed in ((32, 3), (48, 3), (32, 4)):
        out = tmp_path / f"{tokens}_{seed}"
        arguments = ["compare", "--out", str(out), "--tokens", str(tokens), "--seed", str(seed)]
        done = CliRunner().invoke(build_app(), arguments, catch_exceptions=False)
        (row,) = compare_methods(softmax, num_tokens=tokens, seed=seed)
        assert all(cell in done.output.split() for cell in cells(row)), done.output
        assert (out / "entropy_vs_norm.png").is_file()
