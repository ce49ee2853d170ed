"""Which implementation runs. The choice depends on static facts only, so torch.compile can trace through it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..registry import unknown_name

BACKENDS = {
    "auto": "the fastest that supports the call",
    "reference": "the plain formula: the definition, in any float type",
    "chunked": "plain torch, piece by piece: memory linear in the number of tokens",
    "triton": "fused GPU kernels",
}

# one setting for the process, read where the op is called: no ContextVar, which torch.compile cannot trace
_setting = "auto"


def set_backend(name: str) -> None:
    """Choose for all later calls: "auto", "reference", "chunked" or "triton"."""
    global _setting
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    if name == "triton":
        raise ValueError(f"the triton backend cannot run here: {why_no_triton()}; use 'auto' or 'chunked'")
    _setting = name


def get_backend() -> str:
    return _setting


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose inside a with block."""
    before = _setting
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def choose(q: Tensor) -> str:
    """The backend for this call."""
    # while there are no fused kernels, pieces are the best on every device; a short input is a single piece
    return "chunked" if _setting == "auto" else _setting


def why_no_triton() -> str:
    """The reason in words."""
    if not torch.cuda.is_available():
        return "no CUDA device was found"
    return "this version of nalaformer has no fused kernels yet"


def report() -> dict[str, str]:
    """What would run here and why, for `nalaformer info`."""
    return {"backend": f"{_setting} -> chunked", "triton": f"not used: {why_no_triton()}"}
