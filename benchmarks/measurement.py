"""A measurement, which a benchmark describes to the runner, and its result."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from nalaformer.timing import median_ms

from .cases import DTYPES
from .fresh_process import in_fresh_process
from .memory import can_measure, peak_extra_mib
from .timing import OtherProcesses

MEASURED, WRONG, OUT_OF_MEMORY, FAILED = "measured", "wrong", "out of memory", "failed"


@dataclass(frozen=True, kw_only=True)
class Measurement(ABC):
    """One thing to measure. A benchmark says how it is made, checked and named; the runner does the rest."""

    device: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.device]

    @property
    @abstractmethod
    def label(self) -> str:
        """Name in the printed line of results."""

    @property
    def units(self) -> int:
        """Images or tokens of one call."""
        return 1

    @property
    def is_ours(self) -> bool:
        """False: a peer, whose errors are not ours to mend."""
        return True

    def stops_the_run(self, error: Exception) -> bool:
        """Return True if an error ends the run; by default, if a package is missing."""
        return isinstance(error, ModuleNotFoundError)

    # ---- right before fast

    @property
    def subject(self) -> object:
        """Subject that is built and checked; consecutive measurements of one subject share it."""
        return self

    def build(self) -> Any:
        """Build what measurements of one subject share, such as the model."""
        return None

    largest_errors: ClassVar[Mapping[torch.dtype, float]] = {}

    @property
    def largest_error(self) -> float:
        """Beyond it, the measurement is wrong and not timed."""
        return self.largest_errors[self.dtype]

    @abstractmethod
    def check(self, built: Any) -> float | None:
        """The relative error of what is timed; None where there is nothing to compare it with."""

    what_counts = ""
    """What is held before the call, and what counts as extra memory. Every row has it: results of two files are comparable
    only if it is the same."""

    @abstractmethod
    def measure_call(self, built: Any, *, seconds: float, memory: bool) -> dict[str, Any]:
        """Fields of the result: time, and memory where it is asked for and the system counts it."""

    # ---- what is written and said

    @abstractmethod
    def row(self, result: "Result[Any]") -> dict[str, object]:
        """Columns of its own; the runner adds those of the result and of the machine."""

    @abstractmethod
    def describe(self, result: "Result[Any]") -> str:
        """Describe the metrics of a result in words."""


@dataclass(frozen=True, kw_only=True)
class CallMeasurement(Measurement):
    """A call that is timed again and again; on a CPU in a process of its own."""

    is_captured = False
    """On a GPU: whether a CUDA graph of the call is timed, and not eager calls."""

    @abstractmethod
    def make_call(self, built: Any) -> Callable[[], object]:
        """The call that is measured, with its inputs ready."""

    def small(self) -> Self | None:
        """One like it that starts threads and libraries of a fresh process. None: it is measured in this process."""
        return None

    def measure_call(self, built: Any, *, seconds: float, memory: bool) -> dict[str, Any]:
        clocks, small, mebibytes = OtherProcesses(), self.small(), None
        if small is not None and memory and self.device == "cpu" and can_measure("cpu"):
            given = {"kind": f"{type(self).__module__}:{type(self).__name__}", "small": asdict(small), "whole": asdict(self)}
            mebibytes, milliseconds = in_fresh_process(f"{__name__}:call_in_fresh_process", given, seconds=seconds)
        else:
            call = self.make_call(built)
            milliseconds = median_ms(call, device=self.device, seconds=seconds, capture=self.is_captured)
            if memory and can_measure(self.device):
                mebibytes = peak_extra_mib(call, device=self.device)
        return {"median_ms": milliseconds, "peak_extra_mib": mebibytes, "others_cpu": clocks.share()}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Self:
        """The measurement from its fields as JSON has them."""
        return cls(**values)


def call_in_fresh_process(*, kind: str, small: dict[str, Any], whole: dict[str, Any]) -> Callable[[], object]:
    """The call of a measurement, after a small one that starts threads and libraries."""
    module, name = kind.split(":")
    made: type[CallMeasurement] = getattr(import_module(module), name)
    for values in (small, whole):
        measurement = made.from_plain(values)
        call = measurement.make_call(measurement.build())
        if values is small:
            call()
    return call


M = TypeVar("M", bound=Measurement)


@dataclass(frozen=True, kw_only=True)
class Result(Generic[M]):
    """Result of a measurement; it has metrics only where the outcome is MEASURED."""

    measurement: M
    outcome: str = MEASURED
    """MEASURED, WRONG, OUT_OF_MEMORY or FAILED."""
    reason: str = ""
    """Why it failed."""
    error: float | None = None
    """The relative error of what is timed; None: there is nothing to compare it with, or it did not run."""
    median_ms: float | None = None
    timed: str = ""
    """What a time is of, where it can be several things."""
    floor_ms: float | None = None
    """On a GPU: reading each input once and writing each output once, at the speed of a plain copy measured here."""
    cache_mib: float | None = None
    """The size of all that is remembered of the earlier tokens."""
    peak_extra_mib: float | None = None
    """At the worst moment, beyond what is held before the call. None also where the system cannot tell."""
    peak_mib: float | None = None
    """At the worst moment, weights included."""
    others_cpu: float | None = None
    """Share of the machine's CPU time that other processes took meanwhile; None where the system cannot tell."""
    note: str = ""

    @property
    def is_right(self) -> bool:
        return self.outcome == MEASURED

    @property
    def per_second(self) -> float | None:
        """Images or tokens."""
        return 1e3 * self.measurement.units / self.median_ms if self.median_ms else None

    @property
    def verdict(self) -> str:
        """The outcome, and why it failed."""
        return f"{self.outcome}: {self.reason}" if self.outcome == FAILED else self.outcome

    @property
    def line(self) -> str:
        if self.outcome == MEASURED:
            return f"{self.measurement.label}: {self.measurement.describe(self)}"
        off = f", relative error {self.error:.2g}" if self.outcome == WRONG and self.error is not None else ""
        return f"{self.measurement.label}: {self.verdict}{off}"


def error_outcome(error: BaseException) -> dict[str, Any]:
    """The fields of a result that broke off."""
    return {"outcome": OUT_OF_MEMORY if is_memory_error(error) else FAILED, "reason": " ".join(str(error).split())[:300]}


def failure_note(error: BaseException) -> str:
    """Return the note of a row whose work failed."""
    found = error_outcome(error)
    return f"{FAILED}: {found['reason']}" if found["outcome"] == FAILED else OUT_OF_MEMORY


def is_memory_error(error: BaseException) -> bool:
    """On a GPU torch has a class for it, on a CPU only words, which also come back from a fresh process."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "MemoryError")
    is_named_so = any(word in str(error) for word in words)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and is_named_so)


def give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
