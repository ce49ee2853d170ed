"""Measure attention: first whether it is right, then how long it takes and what it holds."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .cases import DTYPES, Case
from .fresh_process import in_fresh_process
from .implementations import IMPLEMENTATIONS, Attend, Implementation
from .memory import can_measure, peak_extra_mib
from .timing import OtherProcesses, copy_bandwidth, median_ms

FORWARD, BOTH = "forward", "forward+backward"
DIRECTIONS = (FORWARD, BOTH)
# |ours - float64| / |float64| over a whole tensor; gradients, longer chains of roundings, may have twice as much
LARGEST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# so many queries, evenly spaced, are compared: the truth of all would take longer than the measurement
COMPARED_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One thing to measure."""

    case: Case
    implementation: str
    direction: str
    device: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.device]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured; no time and no memory where the outputs were wrong."""

    measurement: Measurement
    error: float
    """Relative to float64: the largest of the output's and, with backward, half of each gradient's."""
    median_ms: float | None
    others_cpu: float | None
    """Share of the machine's CPU time that other processes took meanwhile; None where the system cannot tell."""
    peak_extra_mib: float | None
    """Beyond q, k, v (and the output's gradient); output and gradients count. None also where the system cannot tell."""

    floor_ms: float | None = None
    """On a GPU: reading each input once and writing each output once, at the speed of a plain copy measured here."""
    failure: str | None = None
    """What a peer said when it stopped; whatever of ours stops, stops the run."""

    @property
    def is_right(self) -> bool:
        return self.error <= largest_error(self.measurement)

    @property
    def is_ours_to_mend(self) -> bool:
        return not self.is_right and IMPLEMENTATIONS[self.measurement.implementation].package is None


def largest_error(measurement: Measurement) -> float:
    return LARGEST_ERROR[measurement.dtype] * IMPLEMENTATIONS[measurement.implementation].slack


def plan(cases: Sequence[Case], device: str) -> list[Measurement]:
    """What will be measured, in order; peers that cannot be imported are left out (see `left_out`)."""
    # only what could run here is asked for: importing a peer may take seconds
    here = [name for name in IMPLEMENTATIONS.names() if IMPLEMENTATIONS[name].why_not_on(device) is None]
    return [
        Measurement(case=case, implementation=name, direction=direction, device=device)
        for case in cases
        for name in here
        for direction in ((FORWARD,) if case.step else DIRECTIONS)
        if IMPLEMENTATIONS[name].runs(case, device)
    ]


def measure(measurement: Measurement, *, seconds: float = 2.0, memory: bool = True) -> Result:
    """Correctness, then time and memory (on a CPU in a fresh process each). A peer that fails is a result without figures."""
    try:
        return measure_or_fail(measurement, seconds=seconds, memory=memory)
    except Exception as error:
        if IMPLEMENTATIONS[measurement.implementation].package is None:
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        nothing = {"median_ms": None, "others_cpu": None, "peak_extra_mib": None}
        return Result(measurement=measurement, error=float("inf"), failure=said, **nothing)


def measure_or_fail(measurement: Measurement, *, seconds: float, memory: bool) -> Result:
    error = relative_error(measurement)
    milliseconds = mebibytes = others_cpu = None
    if error <= largest_error(measurement):
        clocks = OtherProcesses()
        # a step prepares a state from inputs that its call no longer holds: beside those its memory says nothing
        memory = memory and not measurement.case.step
        if memory and measurement.device == "cpu" and can_measure("cpu"):
            target = "nalaformer.bench.ops:call_in_fresh_process"
            mebibytes, milliseconds = in_fresh_process(target, to_plain(measurement), seconds=seconds)
        else:
            call = make_call(measurement)
            milliseconds = median_ms(call, device=measurement.device, seconds=seconds)
            if memory and can_measure(measurement.device):
                mebibytes = peak_extra_mib(call, device=measurement.device)
        others_cpu = clocks.share()
    return Result(
        measurement=measurement,
        error=error,
        median_ms=milliseconds,
        others_cpu=others_cpu,
        peak_extra_mib=mebibytes,
        floor_ms=floor_ms(measurement) if measurement.device == "cuda" and not measurement.case.step else None,
    )


def floor_ms(measurement: Measurement) -> float:
    needed = measurement.case.least_bytes(measurement.dtype, backward=measurement.direction == BOTH)
    return 1e3 * needed / copy_bandwidth()


def make_call(measurement: Measurement) -> Callable[[], object]:
    """The call that is measured, with its inputs ready."""
    implementation = IMPLEMENTATIONS[measurement.implementation]
    if measurement.case.step:
        return make_step_call(measurement)
    attend = implementation.make(measurement.case)
    q, k, v, out_gradient = laid_out(implementation, measurement)
    if measurement.direction == FORWARD:
        return lambda: attend(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward_and_backward() -> object:
        out = attend(*leaves)
        # the output stays alive to the end, as it does where a network uses it
        return out, torch.autograd.grad(out, leaves, out_gradient)

    return forward_and_backward


def make_step_call(measurement: Measurement) -> Callable[[], Tensor]:
    make_step = IMPLEMENTATIONS[measurement.implementation].make_step
    assert make_step is not None
    q, k, v, _ = measurement.case.inputs(device=measurement.device, dtype=measurement.dtype)
    return make_step(q, k, v)


def laid_out(implementation: Implementation, measurement: Measurement) -> list[Tensor]:
    """q, k, v and the output's gradient in the implementation's own order, contiguous."""
    q, k, v, out_gradient = measurement.case.inputs(device=measurement.device, dtype=measurement.dtype)
    inputs = (*implementation.given(q, k), v, out_gradient)
    return [x.transpose(1, 2).contiguous() if implementation.heads_first else x for x in inputs]


def relative_error(measurement: Measurement) -> float:
    """The largest relative error of the output (and of each gradient, halved) against the oracle in float64."""
    implementation = IMPLEMENTATIONS[measurement.implementation]
    case = measurement.case
    q, k, v, out_gradient = measurement.case.inputs(device=measurement.device, dtype=measurement.dtype)
    q, k = implementation.given(q, k)
    queries = q.shape[1]
    # the first token of a causal call sees itself alone: its gradient is zero, and what rounding leaves of it is compared with
    # the small gradients of late tokens
    first = 1 if case.causal and queries > 1 else 0
    rows = torch.linspace(first, queries - 1, min(queries - first, COMPARED_ROWS), device=measurement.device).long()
    with_gradients = measurement.direction == BOTH
    # a gradient that is zero outside the compared rows makes the gradients of k and v depend on these rows alone
    only_rows = torch.zeros(queries, device=measurement.device, dtype=out_gradient.dtype).index_fill(0, rows, 1)
    out_gradient = out_gradient * only_rows[:, None, None]

    if case.step:
        found = [make_step_call(measurement)()]
    else:
        found = attend_and_differentiate(
            implementation.make(case), q, k, v, out_gradient, heads_first=implementation.heads_first, gradients=with_gradients
        )
    found[0] = found[0][:, rows]
    if with_gradients:
        found[1] = found[1][:, rows]
    expected: list[list[Tensor]] = [[] for _ in found]
    # one head at a time: float64 with its features is many times the size of the inputs
    for head in range(case.heads):
        of_head = (x[:, :, head : head + 1].double() for x in (q[:, rows], k, v, out_gradient[:, rows]))
        truth_of_rows = partial(implementation.oracle, places=rows if case.causal else None)
        parts = attend_and_differentiate(truth_of_rows, *of_head, heads_first=False, gradients=with_gradients)
        for column, part in zip(expected, parts, strict=True):
            column.append(part)
    errors = []
    for number, (ours, truth) in enumerate(zip(found, expected, strict=True)):
        joined = torch.cat(truth, dim=2)
        error = ((ours.double() - joined).norm() / joined.norm().clamp(min=1e-6)).item()
        errors.append(error if number == 0 else error / 2)
    # NaN compares false with everything: it must not slip through a maximum
    return float("inf") if any(error != error for error in errors) else max(errors)


def attend_and_differentiate(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, out_gradient: Tensor, *, heads_first: bool, gradients: bool
) -> list[Tensor]:
    """Output and, if asked for, the gradients of q, k, v; all [B, N, H, D] whatever the implementation's layout."""
    leaves = [x.transpose(1, 2).contiguous() if heads_first else x for x in (q, k, v)]
    leaves = [x.detach().requires_grad_(gradients) for x in leaves]
    out = attend(*leaves)
    results = [out.detach()]
    if gradients:
        results.extend(torch.autograd.grad(out, leaves, out_gradient.transpose(1, 2) if heads_first else out_gradient))
    return [x.transpose(1, 2) if heads_first else x for x in results]


def to_plain(measurement: Measurement) -> dict[str, object]:
    """The measurement as plain values, for another process."""
    case = measurement.case
    return {
        "case": asdict(case),
        "implementation": measurement.implementation,
        "direction": measurement.direction,
        "device": measurement.device,
    }


def call_in_fresh_process(*, case: dict[str, Any], implementation: str, direction: str, device: str) -> Callable[[], object]:
    """The call of `to_plain`'s measurement, after a small one that starts threads and libraries."""
    small = Case(**(case | {"tokens": min(64, case["tokens"])}))
    make_call(Measurement(case=small, implementation=implementation, direction=direction, device=device))()
    return make_call(Measurement(case=Case(**case), implementation=implementation, direction=direction, device=device))
