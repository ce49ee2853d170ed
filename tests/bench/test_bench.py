"""The measuring itself: clocks, memory, correctness before speed, verdicts, files."""

import csv
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import nalaformer as nf
from nalaformer.bench import (
    IMPLEMENTATIONS,
    Case,
    OpMeasurement,
    Result,
    cases_for,
    describe_machine,
    extras,
    left_out,
    measure,
    median_ms,
    timing,
)
from nalaformer.bench import ops as bench_ops
from nalaformer.bench.cases import GROWTH
from nalaformer.bench.fresh_process import in_fresh_process
from nalaformer.bench.implementations import OURS, PUBLISHED, Implementation, published_formula
from nalaformer.bench.machine import commit_of
from nalaformer.bench.measurement import FAILED, MEASURED, WRONG
from nalaformer.bench.memory import can_measure, peak_extra_mib
from nalaformer.bench.ops import BOTH, DIRECTIONS, FORWARD, plan
from nalaformer.bench.ops_report import COLUMNS, bars, crossover, growth, results_table, slope, summary_lines
from nalaformer.bench.peers import features_oracle
from nalaformer.bench.runner import are_ours_right, row_of
from nalaformer.bench.timing import OtherProcesses, times_ms
from nalaformer.whole_files import write_csv

TINY = Case(batch=2, heads=2, tokens=37, head_dim=16)
ON_CPU = [name for name in IMPLEMENTATIONS.names() if "cpu" in IMPLEMENTATIONS[name].devices]
counts_memory = pytest.mark.skipif(not can_measure("cpu"), reason="this system does not count peak memory")


@pytest.fixture(autouse=True)
def one_thread():
    # threads that wait for each other crawl on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def result(case=TINY, implementation=OURS, direction=FORWARD, *, ms=1.0, mib=1.0, error=0.0, others=None):
    measurement = OpMeasurement(case=case, implementation=implementation, direction=direction, device="cpu")
    outcome = MEASURED if error <= measurement.largest_error else WRONG
    figures = {"median_ms": ms, "others_cpu": others, "peak_extra_mib": mib}
    return Result(measurement=measurement, outcome=outcome, error=error, **figures)


def plant(mebibytes, keep):
    """What the fresh process calls: a call that holds this much, up to its end or for a moment."""

    def call():
        block = torch.ones(mebibytes * 2**18)
        return block if keep else block.sum()

    return call


@pytest.mark.parametrize("slow", [1, 4])
def test_one_slow_call_does_not_count(slow, monkeypatch):
    # a clock of our own: on a busy machine every call may be slow
    clock, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call():
        calls.append(1)
        clock[0] += 0.5 if len(calls) == slow else 0.01

    assert median_ms(call, seconds=0.1) == pytest.approx(10)
    # one to warm up, then for a tenth of a second
    assert len(calls) == 1 + 10


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 4), (100.0, 21)])
def test_calls_are_repeated_within_the_limits(seconds, expected):
    calls = []
    times = times_ms(lambda: (calls.append(1), time.sleep(0.001)), seconds=seconds, least=3, most=20)
    assert len(calls) == expected
    assert len(times) == expected - 1


def test_limits_the_wrong_way_round_are_refused():
    with pytest.raises(ValueError, match="least <= most"):
        times_ms(lambda: None, least=5, most=3)


@counts_memory
@pytest.mark.parametrize("keep", [True, False])
def test_a_planted_allocation_is_seen(keep):
    assert 199 < peak_extra_mib(plant(200, keep)) < 260


@counts_memory
def test_a_call_that_holds_nothing_needs_nothing():
    assert peak_extra_mib(lambda: None) < 5


@counts_memory
def test_an_earlier_peak_does_not_count():
    plant(400, False)()
    assert 95 < peak_extra_mib(plant(100, True)) < 160


@counts_memory
def test_memory_that_was_freed_but_kept_does_not_hide_a_need():
    # small blocks come from the heap, and a block above them keeps it from shrinking
    blocks = [torch.ones(2**14) for _ in range(3200)]
    pin = torch.ones(2**14)
    del blocks
    found = peak_extra_mib(lambda: [torch.ones(2**14) for _ in range(3200)])
    assert found > 199
    del pin


@counts_memory
def test_a_planted_allocation_is_seen_in_a_fresh_process():
    found, milliseconds = in_fresh_process(f"{__name__}:plant", {"mebibytes": 200, "keep": False}, seconds=0.1)
    assert milliseconds > 0
    assert 199 < found < 260


def test_a_failing_measurement_says_what_failed():
    with pytest.raises(RuntimeError, match="no_such_function"):
        in_fresh_process(f"{__name__}:no_such_function", {}, seconds=0)


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


def test_unknown_and_missing_devices_are_refused_with_a_remedy(monkeypatch):
    with pytest.raises(ValueError, match="cpu, cuda, got 'tpu'"):
        cases_for("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="use --device cpu"):
        cases_for("cuda")


@pytest.mark.parametrize("exponent", [1.0, 2.0, 0.5])
def test_the_slope_of_a_power_is_its_exponent(exponent):
    x = [4096, 16384, 65536]
    assert slope(x, [3 * value**exponent for value in x]) == pytest.approx(exponent)


def test_the_slope_is_that_of_least_squares():
    # log y = 0, 1, 0, 1 over log x = 0, 1, 2, 3: slope 1/5
    e = 2.718281828459045
    assert slope([1, e, e**2, e**3], [1, e, 1, e]) == pytest.approx(0.2)


@pytest.mark.parametrize("points", [([5.0], [1.0]), ([5.0, 5.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_a_slope_through_too_little_is_refused(points):
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
    # what happens backward or at other shapes is no part of the promise
    results = [result(case, OURS, BOTH, ms=1e9, mib=1e9), result(replace(case, batch=2), OURS, ms=1e9, mib=1e9)]
    results += [result(case, OURS, ms=ours[0], mib=ours[1]), result(case, PUBLISHED, ms=published[0], mib=published[1])]
    assert [bar.is_met for bar in bars(results)] == met


def test_a_run_without_the_bars_case_claims_nothing():
    assert bars([result()]) == []
    assert any("did not measure" in line for line in summary_lines([result()]))


def test_a_busy_machine_is_called_so():
    assert any("BUSY machine: in 1 of 2" in line for line in summary_lines([result(others=0.11), result(others=0.02)]))
    assert not any("BUSY" in line for line in summary_lines([result(others=0.09), result(others=None)]))


def test_our_own_work_is_not_that_of_others(monkeypatch):
    clocks = iter([(100.0, 50.0, 7.0), (110.0, 56.0, 11.0)])
    monkeypatch.setattr(OtherProcesses, "_clocks", lambda self: next(clocks))
    assert OtherProcesses().share() == pytest.approx(0.2)


@pytest.mark.skipif(OtherProcesses._clocks() is None, reason="this system has no /proc/stat")
def test_a_working_neighbour_is_seen():
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        clocks = OtherProcesses()
        time.sleep(1.0)
        share = clocks.share()
    finally:
        neighbour.kill()
        neighbour.wait()
    # one CPU's worth, with room for clocks that tick a hundred times a second
    assert share > 0.5 / os.cpu_count()


def test_too_short_a_moment_says_nothing_about_others():
    assert OtherProcesses().share() is None


def test_the_csv_has_the_promised_columns_and_a_row_per_result(tmp_path):
    machine = describe_machine()
    path = tmp_path / "new" / "a.csv"
    results = [result(ms=12.345), result(implementation=PUBLISHED, ms=None, mib=None)]
    write_csv(path, COLUMNS, [row_of(each, machine) for each in results])
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
        write_csv(path, COLUMNS, (row_of(each, describe_machine()) for each in [None]))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_shows_what_was_left_out_as_a_dash():
    from rich.console import Console

    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table([result(ms=1234.5, mib=2.345), result(implementation=PUBLISHED, error=1.0)]))
    lines = console.export_text().splitlines()
    (ours,) = [line.split() for line in lines if OURS in line]
    assert ours[-4:] == ["1,234", "-", "2.35", "-"]
    (wrong,) = [line.split() for line in lines if PUBLISHED in line]
    assert wrong[-4:] == ["wrong", "-", "wrong", "-"]
    assert any("torch SDPA" in line for line in lines)
    # what runs on another device only would be a column of dashes
    assert not any("compiled" in line for line in lines)


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code.py").write_text("x = 1\n")
    git("init", "-q")
    git("add", "package")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_the_commit_of_clean_and_of_changed_source(checkout):
    clean = commit_of(checkout / "package")
    assert re.fullmatch(r"[0-9a-f]{12}", clean)
    (checkout / "results.csv").write_text("a result beside the package does not make it another package")
    assert commit_of(checkout / "package") == clean
    (checkout / "package" / "code.py").write_text("x = 2\n")
    assert commit_of(checkout / "package") == f"{clean}+dirty"


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout):
    installed = checkout / "site-packages"
    installed.mkdir()
    (installed / "code.py").write_text("x = 1\n")
    assert commit_of(installed) == "unknown"


def test_source_outside_git_has_no_commit(tmp_path):
    assert commit_of(tmp_path) == "unknown"


def test_the_machine_names_what_it_runs_on():
    machine = describe_machine()
    assert machine.cpu
    assert machine.torch == torch.__version__
    assert machine.nalaformer == nf.__version__
    assert machine.device_name("cpu") == machine.cpu


def test_a_missing_extra_says_how_to_get_it(monkeypatch):
    from importlib import metadata

    wanted = ["torch>=2", "rich>=1; extra == 'cli'", "no-such-package>=1; extra == 'rare'", "rich; extra == 'all'"]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    found = {extra.name: extra for extra in extras()}
    assert set(found) == {"cli", "rare"}
    assert found["cli"].missing == ()
    assert found["cli"].present[0].startswith("rich ")
    assert found["rare"].missing == ("no-such-package",)
    assert found["rare"].install == "pip install 'nalaformer[rare]'"


def test_causal_case_is_measured_against_the_causal_truth():
    case = Case(batch=1, heads=2, tokens=40, head_dim=8, causal=True)
    for name in (OURS, "torch SDPA"):
        found = measure(OpMeasurement(case=case, implementation=name, direction=BOTH, device="cpu"), seconds=0, memory=False)
        assert found.is_right
    assert not IMPLEMENTATIONS["published formula"].runs(case, "cpu")
    inputs = case.inputs(device="cpu", dtype=torch.float32)[:3]
    full = Case(batch=1, heads=2, tokens=40, head_dim=8)
    causal, not_causal = (IMPLEMENTATIONS[OURS].make(each)(*inputs) for each in (case, full))
    assert not torch.allclose(causal, not_causal, atol=1e-2)


def attend_to_features(q, k, v):
    """What a peer computes: features in, heads first, causal, without our eps."""
    weights = (q @ k.transpose(-2, -1)).tril()
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-10)


def with_peer(monkeypatch, attend, package="json", **options):
    peer = Implementation(
        make=lambda case: attend,
        oracle=features_oracle,
        causal=True,
        bidirectional=False,
        heads_first=True,
        features=True,
        package=package,
        **options,
    )
    monkeypatch.setitem(IMPLEMENTATIONS._entries, "peer", peer)


CAUSAL = Case(batch=2, heads=2, tokens=37, head_dim=8, causal=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_peer_is_measured_on_ready_made_features(direction, monkeypatch):
    shapes = []

    def attend(q, k, v):
        shapes.append((q.shape, k.shape, v.shape))
        return attend_to_features(q, k, v)

    with_peer(monkeypatch, attend)
    assert "peer" not in {m.implementation for m in plan([TINY], "cpu")}
    (planned,) = [m for m in plan([CAUSAL], "cpu") if (m.implementation, m.direction) == ("peer", direction)]
    found = measure(planned, seconds=0, memory=False)
    assert found.is_right
    assert found.error < 2e-6
    assert found.median_ms > 0
    assert set(shapes) == {((2, 2, 37, 16), (2, 2, 37, 16), (2, 2, 37, 8))}
    assert "peer" not in left_out("cpu")


def test_a_peer_without_its_package_is_left_out_with_the_reason(monkeypatch):
    with_peer(monkeypatch, attend_to_features, package="no_such_package.ops")
    assert "peer" not in {m.implementation for m in plan([CAUSAL], "cpu")}
    lines = summary_lines([result(CAUSAL)], left_out("cpu"))
    assert any("left out: peer" in line and "No module named 'no_such_package'" in line for line in lines)


def test_peers_for_a_gpu_are_neither_asked_for_nor_missed_on_a_cpu(monkeypatch):
    monkeypatch.setattr(Implementation, "why_missing", lambda self: pytest.fail("imported") if self.package else None)
    assert left_out("cpu") == {}
    assert not any(m.implementation.startswith(("fla", "flash-bla")) for m in plan(cases_for("cpu"), "cpu"))


def test_a_peer_that_breaks_does_not_stop_the_run(monkeypatch):
    def attend(q, k, v):
        raise RuntimeError("no such\nkernel image")

    with_peer(monkeypatch, attend)
    found = measure(OpMeasurement(case=CAUSAL, implementation="peer", direction=FORWARD, device="cpu"), seconds=0)
    assert (found.outcome, found.reason) == (FAILED, "no such kernel image")
    assert not found.is_right
    assert are_ours_right([found])
    assert any("FAILED and not timed: peer" in line for line in summary_lines([found]))


def test_a_wrong_peer_is_not_timed_and_a_rough_one_is(monkeypatch):
    measurement = OpMeasurement(case=CAUSAL, implementation="peer", direction=FORWARD, device="cpu")
    with_peer(monkeypatch, lambda q, k, v: attend_to_features(q, k, v) * (1 + 1e-5), slack=10.0)
    rough = measure(measurement, seconds=0, memory=False)
    assert 2e-6 < rough.error < 2e-5
    assert rough.median_ms > 0
    with_peer(monkeypatch, lambda q, k, v: attend_to_features(q, k, v) * (1 + 1e-4), slack=10.0)
    assert measure(measurement, seconds=0, memory=False).median_ms is None


def test_the_oracle_of_peers_is_normalised_attention_over_all_keys_too():
    q, k, v = (torch.rand(1, 5, 1, 4, dtype=torch.float64) for _ in range(3))
    weights = torch.einsum("bihf,bjhf->bhij", q, k)
    expected = torch.einsum("bhij,bjhd->bihd", weights / (weights.sum(-1, keepdim=True) + 5e-6), v)
    torch.testing.assert_close(features_oracle(q, k, v, None), expected)


@pytest.mark.parametrize("name", [OURS, "torch SDPA"])
def test_a_decoding_step_is_checked_against_all_tokens_and_timed(name):
    case = Case(batch=2, heads=2, tokens=19, head_dim=8, step=True)
    measured = [m for m in plan([case], "cpu") if m.implementation == name]
    assert [m.direction for m in measured] == [FORWARD]
    found = measure(measured[0], seconds=0)
    assert found.is_right
    assert found.median_ms > 0
    assert found.peak_extra_mib is None
    assert any(f"{name}, one step of decoding" in line and "microseconds" in line for line in summary_lines([found]))


def test_a_step_that_forgets_a_token_is_wrong(monkeypatch):
    ours = IMPLEMENTATIONS[OURS]
    forgetful = replace(ours, make_step=lambda q, k, v: ours.make_step(q, k[:, 1:], v[:, 1:]))
    monkeypatch.setitem(IMPLEMENTATIONS._entries, "forgetful", forgetful)
    case = Case(batch=1, heads=1, tokens=19, head_dim=8, step=True)
    assert not measure(
        OpMeasurement(case=case, implementation="forgetful", direction=FORWARD, device="cpu"), seconds=0
    ).is_right


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
