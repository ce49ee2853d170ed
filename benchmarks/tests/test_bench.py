"""The measuring itself: clocks, memory, correctness before speed, verdicts, files."""

import csv
import re
from dataclasses import replace

import pytest
import torch

import nalaformer as nf
from benchmarks import IMPLEMENTATIONS, Case, OpMeasurement, cases_for, describe_machine, measure
from benchmarks import ops as bench_ops
from benchmarks.cases import GROWTH
from benchmarks.implementations import OURS, PUBLISHED, published_formula
from benchmarks.ops import BOTH, DIRECTIONS, FORWARD, plan
from benchmarks.ops_report import COLUMNS, bars, crossover, growth, results_table, slope, summary_lines
from benchmarks.runner import make_row
from benchmarks.tests.bench_results import TINY, counts_memory, result
from nalaformer.atomic_files import write_csv

pytestmark = pytest.mark.usefixtures("one_thread")

ON_CPU = [name for name in IMPLEMENTATIONS.names() if "cpu" in IMPLEMENTATIONS[name].devices]


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 3, 50, 10)])
def test_the_published_formula_is_the_reference(shape):
    q, k, v = torch.randn(3, *shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    phi = nf.feature_map("norm_aware", num_heads=shape[1], head_dim=shape[3])
    with nf.use_backend("reference"):
        expected = nf.linear_attention(*(x.transpose(1, 2).double() for x in (q, k, v)), feature_map=phi)
    torch.testing.assert_close(published_formula(q, k, v).transpose(1, 2).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ON_CPU)
def test_every_implementation_is_right_and_gets_timed(name, direction):
    found = measure(OpMeasurement(case=TINY, implementation=name, direction=direction, device="cpu"), seconds=0, memory=False)
    assert found.is_right
    assert found.median_ms > 0
    assert found.peak_extra_mib is None


@pytest.mark.parametrize("name", ON_CPU)
def test_rows_between_the_compared_ones_do_not_matter_to_the_check(name, monkeypatch):
    monkeypatch.setattr(bench_ops, "COMPARED_ROWS", 5)
    assert bench_ops.relative_error(OpMeasurement(case=TINY, implementation=name, direction=BOTH, device="cpu")) < 2e-6


def with_wrong(monkeypatch, change):
    """Register an implementation whose output was changed."""
    ours = IMPLEMENTATIONS[OURS]

    def make(case):
        attend = ours.make(case)
        return lambda q, k, v: change(attend(q, k, v), q, k, v)

    monkeypatch.setitem(IMPLEMENTATIONS._entries, "wrong", replace(ours, make=make))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.001 * gradient


@pytest.mark.parametrize(
    ("change", "direction"),
    [
        (lambda out, q, k, v: out * 1.001, FORWARD),
        (lambda out, q, k, v: out.index_fill(1, torch.tensor([36]), 0.0), FORWARD),
        (lambda out, q, k, v: out * float("nan"), FORWARD),
        (lambda out, q, k, v: WrongGradient.apply(out), BOTH),
    ],
    ids=["scaled", "last token lost", "nan", "gradient scaled"],
)
def test_a_wrong_implementation_is_not_timed(monkeypatch, change, direction):
    with_wrong(monkeypatch, change)
    found = measure(OpMeasurement(case=TINY, implementation="wrong", direction=direction, device="cpu"), seconds=0)
    assert not found.is_right
    assert found.median_ms is None
    assert found.peak_extra_mib is None
    assert any("WRONG" in line for line in summary_lines([found]))


@counts_memory
def test_the_output_counts_as_extra_memory_and_the_inputs_do_not():
    # q, k, v and the output are 16 MiB each
    case = Case(batch=1, heads=1, tokens=65536)
    found = measure(OpMeasurement(case=case, implementation=OURS, direction=FORWARD, device="cpu"), seconds=0)
    assert 16 <= found.peak_extra_mib < 16 * 12


def test_the_plan_leaves_out_what_takes_too_long():
    planned = plan(cases_for("cpu"), "cpu")
    longest = {m.implementation: 0 for m in planned}
    for m in planned:
        longest[m.implementation] = max(longest[m.implementation], m.case.tokens)
    assert longest["torch SDPA"] == 16384
    assert longest[OURS] == 262144


def test_errors_for_unknown_and_missing_devices_name_a_fix(monkeypatch):
    with pytest.raises(ValueError, match="cpu, cuda, got 'tpu'"):
        cases_for("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="use --device cpu"):
        cases_for("cuda")


@pytest.mark.parametrize("exponent", [1.0, 2.0, 0.5])
def test_a_power_law_has_its_exponent_as_slope(exponent):
    x = [4096, 16384, 65536]
    assert slope(x, [3 * value**exponent for value in x]) == pytest.approx(exponent)


def test_the_slope_is_the_least_squares_slope():
    # log y = 0, 1, 0, 1 over log x = 0, 1, 2, 3: slope 1/5
    e = 2.718281828459045
    assert slope([1, e, e**2, e**3], [1, e, 1, e]) == pytest.approx(0.2)


@pytest.mark.parametrize("points", [([5.0], [1.0]), ([5.0, 5.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_a_slope_through_too_few_points_raises(points):
    with pytest.raises(ValueError, match="slope"):
        slope(*points)


def test_growth_is_fitted_to_the_cases_that_differ_in_tokens_alone():
    results = [result(case, ms=case.tokens / 1e3, mib=case.tokens**2.0) for case in GROWTH]
    # neither another shape nor another implementation may bend the line
    results += [result(TINY, ms=1e9), result(GROWTH[0], PUBLISHED, ms=1e9)]
    fits = {(fit.quantity, fit.direction): fit for fit in growth(results)}
    assert fits["time", FORWARD].exponent == pytest.approx(1)
    assert fits["memory", FORWARD].exponent == pytest.approx(2)
    assert fits["time", FORWARD].tokens == (4096, 16384, 65536, 262144)
    assert len(fits) == 2


@pytest.mark.parametrize(
    ("ours", "published", "met"),
    [((10, 10), (20, 30), [True, True]), ((10, 10), (19, 29), [False, False]), ((10, 11), (20, 30), [True, False])],
)
def test_bars_are_met_from_their_limit_on(ours, published, met):
    case = Case(batch=1, heads=4, tokens=65536)
    assert case in GROWTH
    # the target does not cover the backward pass or other shapes
    results = [result(case, OURS, BOTH, ms=1e9, mib=1e9), result(replace(case, batch=2), OURS, ms=1e9, mib=1e9)]
    results += [result(case, OURS, ms=ours[0], mib=ours[1]), result(case, PUBLISHED, ms=published[0], mib=published[1])]
    assert [bar.is_met for bar in bars(results)] == met


def test_a_run_without_the_bars_case_claims_nothing():
    assert bars([result()]) == []
    assert any("did not measure" in line for line in summary_lines([result()]))


def test_a_busy_machine_is_called_so():
    assert any("BUSY machine: in 1 of 2" in line for line in summary_lines([result(others=0.11), result(others=0.02)]))
    assert not any("BUSY" in line for line in summary_lines([result(others=0.09), result(others=None)]))


def test_the_csv_has_the_promised_columns_and_a_row_per_result(tmp_path):
    machine = describe_machine()
    path = tmp_path / "new" / "a.csv"
    results = [result(ms=12.345), result(implementation=PUBLISHED, ms=None, mib=None)]
    write_csv(path, COLUMNS, [make_row(each, machine) for each in results])
    with path.open() as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == list(COLUMNS)
    promised = "op implementation device dtype shape direction median_ms peak_extra_mib torch triton nalaformer commit date"
    assert set(promised.split()) <= set(COLUMNS)
    assert written[0]["shape"] == "B2 H2 N37 D16"
    assert written[0]["median_ms"] == "12.35"
    assert written[0]["device"] == machine.cpu
    assert written[0]["threads"] == str(torch.get_num_threads())
    assert "output and gradients of q k v count" in written[0]["peak_extra_means"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", written[0]["date"])
    assert (written[1]["median_ms"], written[1]["peak_extra_mib"]) == ("", "")
    assert len(written) == 2


def test_a_failed_write_keeps_the_old_file_and_leaves_no_rubbish(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with pytest.raises(AttributeError):
        write_csv(path, COLUMNS, (make_row(each, describe_machine()) for each in [None]))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_shows_skipped_peers_as_a_dash():
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table([result(ms=1234.5, mib=2.345), result(implementation=PUBLISHED, error=1.0)]))
    lines = console.export_text().splitlines()
    (ours,) = [line.split() for line in lines if OURS in line]
    assert ours[-4:] == ["1,234", "-", "2.35", "-"]
    (wrong,) = [line.split() for line in lines if PUBLISHED in line]
    assert wrong[-4:] == ["wrong", "-", "wrong", "-"]
    assert any("torch SDPA" in line for line in lines)
    # an implementation for another device would be a column of dashes
    assert not any("compiled" in line for line in lines)


@pytest.mark.parametrize(
    ("ours", "softmax", "said"),
    [
        ((1, 1, 1), (2, 8, 32), "fewer than 256"),
        ((4, 4, 4), (1, 2, 8), "about 2,000"),
        ((9, 9, 9), (1, 2, 3), "more than 4,096"),
    ],
)
def test_crossover_is_where_the_lines_meet(ours, softmax, said):
    results = [
        result(Case(batch=1, heads=4, tokens=tokens), name, ms=ms)
        for name, times in ((OURS, ours), ("torch SDPA", softmax))
        for tokens, ms in zip((256, 1024, 4096), times, strict=True)
    ]
    assert crossover(results, FORWARD) == said


def test_floor_counts_every_tensor_once():
    case = Case(batch=64, heads=1, tokens=3136)
    tensor = 64 * 3136 * 64 * 2
    assert case.least_bytes(torch.bfloat16, backward=False) == 4 * tensor
    assert case.least_bytes(torch.bfloat16, backward=True) == 11 * tensor


def test_the_compiled_formula_is_compiled_for_every_shape(monkeypatch):
    compiled_graphs = []

    def backend(graph, inputs):
        compiled_graphs.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: real(function, dynamic=dynamic, backend=backend))
    implementation = IMPLEMENTATIONS["published formula, compiled"]
    # more shapes than torch.compile tries of one function before it gives up
    with torch._dynamo.config.patch(recompile_limit=2):
        for tokens in range(2, 6):
            case = Case(batch=1, heads=1, tokens=tokens, head_dim=8)
            q, k, v, _ = case.inputs(device="cpu", dtype=torch.float32)
            implementation.make(case)(*(x.transpose(1, 2) for x in (q, k, v)))
    assert len(compiled_graphs) == 4
