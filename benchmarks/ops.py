"""Attention in several implementations: what is measured, and how each is checked against float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from .cases import Case
from .implementations import IMPLEMENTATIONS, Attend, Implementation
from .measurement import CallMeasurement, Result
from .timing import copy_bandwidth, host_ms

FORWARD, BOTH = "forward", "forward+backward"
DIRECTIONS = (FORWARD, BOTH)
# |ours - float64| / |float64| over a whole tensor; gradients, longer chains of roundings, may have twice as much
LARGEST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# so many queries, evenly spaced, are compared: the truth of all would take longer than the measurement
COMPARED_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class OpMeasurement(CallMeasurement):
    """Attention of one case by one implementation."""

    case: Case
    implementation: str
    """A name of IMPLEMENTATIONS."""
    direction: str
    is_captured = True
    largest_errors = LARGEST_ERROR
    what_counts = "q k v and the output's gradient are held before and do not count; output and gradients of q k v count"

    @property
    def label(self) -> str:
        return f"{self.implementation}, {self.case.shape}, {self.direction}"

    @property
    def is_ours(self) -> bool:
        return IMPLEMENTATIONS[self.implementation].package is None

    def stops_the_run(self, error: Exception) -> bool:
        """Stop the run at an error of ours; a peer that fails is a result without metrics."""
        return self.is_ours

    @property
    def largest_error(self) -> float:
        return super().largest_error * IMPLEMENTATIONS[self.implementation].slack

    def check(self, built: None) -> float:
        return relative_error(self)

    def make_call(self, built: None) -> Callable[[], object]:
        return make_call(self)

    def small(self) -> Self:
        return replace(self, case=replace(self.case, tokens=min(64, self.case.tokens)))

    def measure_call(self, built: None, *, seconds: float, memory: bool) -> dict[str, Any]:
        if self.case.eager:
            return {"median_ms": host_ms(self.make_call(built), seconds=seconds)}
        # a step prepares a state from inputs that its call no longer holds: beside those its memory says nothing
        found = super().measure_call(built, seconds=seconds, memory=memory and not self.case.step)
        return found | {"floor_ms": floor_ms(self) if self.device == "cuda" and not self.case.step else None}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Self:
        return cls(**(values | {"case": Case(**values["case"])}))

    def row(self, result: Result[Any]) -> dict[str, object]:
        case = self.case
        return {"op": case.op, "implementation": self.implementation, "shape": case.shape, "direction": self.direction}

    def describe(self, result: Result[Any]) -> str:
        return f"{result.median_ms:.4g} ms"


def plan(cases: Sequence[Case], device: str) -> list[OpMeasurement]:
    """Return the plan in order; skip peers that cannot be imported (see `skipped_peers`)."""
    # only what could run here is asked for: importing a peer may take seconds
    here = [name for name in IMPLEMENTATIONS.names() if IMPLEMENTATIONS[name].why_not_on(device) is None]
    return [
        OpMeasurement(case=case, implementation=name, direction=direction, device=device)
        for case in cases
        for name in here
        for direction in ((FORWARD,) if case.step else DIRECTIONS)
        if IMPLEMENTATIONS[name].runs(case, device)
    ]


def floor_ms(measurement: OpMeasurement) -> float:
    needed = measurement.case.least_bytes(measurement.dtype, backward=measurement.direction == BOTH)
    return 1e3 * needed / copy_bandwidth()


def make_call(measurement: OpMeasurement) -> Callable[[], object]:
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


def make_step_call(measurement: OpMeasurement) -> Callable[[], Tensor]:
    make_step = IMPLEMENTATIONS[measurement.implementation].make_step
    assert make_step is not None
    q, k, v, _ = measurement.case.inputs(device=measurement.device, dtype=measurement.dtype)
    return make_step(q, k, v)


def laid_out(implementation: Implementation, measurement: OpMeasurement) -> list[Tensor]:
    """q, k, v and the output's gradient in the implementation's own order, contiguous."""
    q, k, v, out_gradient = measurement.case.inputs(device=measurement.device, dtype=measurement.dtype)
    inputs = (*implementation.select_inputs(q, k), v, out_gradient)
    return [x.transpose(1, 2).contiguous() if implementation.heads_first else x for x in inputs]


def relative_error(measurement: OpMeasurement) -> float:
    """The largest relative error of the output (and of each gradient, halved) against the oracle in float64."""
    implementation = IMPLEMENTATIONS[measurement.implementation]
    case = measurement.case
    q, k, v, out_gradient = measurement.case.inputs(device=measurement.device, dtype=measurement.dtype)
    q, k = implementation.select_inputs(q, k)
    queries = q.shape[1]
    # the first token of a causal call sees itself alone: its gradient is zero, and what rounding leaves of it is compared with
    # the small gradients of late tokens
    first = 1 if case.causal and queries > 1 else 0
    compared = queries if implementation.needs_all_queries else COMPARED_ROWS
    rows = torch.linspace(first, queries - 1, min(queries - first, compared), device=measurement.device).long()
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
