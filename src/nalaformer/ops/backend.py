"""Choose the implementation that runs, by static facts only, so that torch.compile can trace through the choice."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ..registry import unknown_name
from .exporting import is_exporting, is_jit_tracing
from .features import FeatureMapLike
from .kept_tensors import is_traced, is_transformed
from .kernel_spec import KernelSpec
from .rotary import Rotary

BACKENDS = {
    "auto": "the fastest that supports the call",
    "reference": "the plain formula: the definition, in any float type",
    "chunked": "plain torch, chunk by chunk: memory linear in the number of tokens",
    "triton": "fused GPU kernels",
}
LARGEST_HEAD = 128  # limit for maps computed in registers, whose features are twice as wide
LARGEST_FEATURES = 256  # limit for features computed outside of the kernels
# Limit of features and values: the gradient of the keys holds a float32 state in four forms (it and its transpose, each in
# two numbers for products of float32 quality), which take 288 KiB of the 227 that a multiprocessor has.
LARGEST_IN_FULL_PRECISION = 64
# Maps whose kernels were as exact on a GPU with more than 64 features as with fewer: these in any type, the next ones in
# bfloat16. elu is not among them, because its gradients came too near to the tolerance.
LARGE_MAPS = ("norm_aware_split", "focused")
LARGE_MAPS_IN_BFLOAT16 = (*LARGE_MAPS, "relu", "split", "channel_softmax", "polarity", "polarity_exp", "reflection_in_pairs")
MOST_ROWS = 65_535  # samples times heads that the second axis of a grid can hold
NO_DOUBLE = "float64 has no matrix units"
TRITON_FOUND = find_spec("triton") is not None
# Triton's interpreter runs the kernels on a CPU, slowly, for tests
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# A global holds the setting, which the op reads at each call: torch.compile cannot trace a ContextVar.
_setting = "auto"


def set_backend(name: str) -> None:
    """Choose for all later calls: "auto", "reference", "chunked" or "triton"."""
    global _setting
    if not isinstance(name, str) or name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    reason = why_no_triton_here()
    if name == "triton" and reason:
        raise ValueError(f"the triton backend cannot run here: {reason}; use 'auto' or 'chunked'")
    _setting = name


def get_backend() -> str:
    return _setting


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Set the backend inside a with block."""
    before = _setting
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


class Choice(NamedTuple):
    """Name the backend of a call, and what its kernels compute of the feature map; with None they read its features."""

    backend: str
    spec: KernelSpec | None = None


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    causal: bool,
    rotary: tuple[Rotary | None, Rotary | None],
    samples: int | None = None,
    is_step: bool = False,
    has_contrast: bool = False,
    has_weight: bool = False,
    has_blocks: bool = False,
) -> Choice:
    """Return the backend for this call; an explicit "triton" that does not support it raises with the reason.

    samples: packed sequences; q's by default. is_step: one token after a state, which has a kernel of its own.
    has_contrast: with the mean score, inside the kernels or, if causal, beside them. A scale that the caller gave is applied
    to the output of the kernels.
    """
    if _setting in ("reference", "chunked"):
        return Choice(_setting)
    reason = why_not_on(q)
    # k and v are on the device of q and have its batch size
    if reason is None and torch.float64 in (k.dtype, v.dtype):
        reason = NO_DOUBLE
    if reason is None:
        # kernels read features that they do not compute in registers; a normalised rotary changes the features of every map
        is_normalised = rotary[0] is not None and rotary[0].normalised
        spec = None if is_normalised else feature_map.kernel_spec(q.device)
        reason = why_not_triton(q, k, v, feature_map, spec, causal, rotary, samples or q.shape[0], is_step)
        if causal and has_weight:
            reason = "weights of keys have no causal kernel"
        if causal and has_contrast and spec is None:
            reason = "a causal contrast by the mean score needs a map that the kernels compute"
        if has_blocks:
            reason = "tokens that see all of their block have no kernel"
        is_own = spec is None and (not is_normalised or feature_map.kernel_spec(q.device) is None)
        if reason is None and is_own and feature_map.key_log_scale(k[:, :0].to(torch.float32)) is not None:
            reason = "a map that divides each key by a scale of its own needs plain torch"
        if has_contrast and spec is not None and spec.is_guarded:
            reason = "features without a bound have no mean score in the kernels"
        if reason is None:
            return Choice("triton", spec)
    if _setting == "triton":
        raise ValueError(f"the triton backend cannot serve this call: {reason}; use set_backend('auto')")
    return Choice("chunked")


def why_no_triton_here() -> str | None:
    """Return why no call can use the kernels on this machine, or None if some can."""
    if not TRITON_FOUND:
        return "the package triton is not installed"
    if not torch.cuda.is_available() and not INTERPRETING:
        return "no CUDA device was found"
    return None


def why_not_on(x: Tensor) -> str | None:
    """Return why the kernels cannot take this tensor, or None if they can."""
    if not TRITON_FOUND or (x.device.type != "cuda" and not (INTERPRETING and _setting == "triton")):
        # queried only here: looking for devices takes longer than a kernel's launch
        return why_no_triton_here() or f"the tensors are on {x.device.type}"
    if x.shape[0] == 0:
        return "the batch is empty"
    # Each check runs only where it can apply, because all of them come before every launch.
    is_compiling = torch.compiler.is_compiling()
    if is_exporting() if is_compiling else is_jit_tracing():
        return "an exported program must run without Triton"
    if not is_compiling and is_transformed():
        return "a transform of torch.func is at work, which needs plain torch"
    if not is_compiling and torch._C._len_torch_dispatch_stack() and (is_traced() or is_followed_by_make_fx()):
        return "FakeTensorMode and make_fx follow plain torch alone"
    if x.dtype == torch.float64:
        return NO_DOUBLE
    return None


def is_followed_by_make_fx() -> bool:
    """True if make_fx records operators: it would record the memory that a kernel writes to, and not the kernel."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def runs_kernels(x: Tensor) -> bool:
    """True if the modules around attention (convolution, norm) run on kernels too; elsewhere plain torch is as good."""
    return _setting in ("auto", "triton") and x.is_floating_point() and why_not_on(x) is None


def why_not_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMapLike,
    spec: KernelSpec | None,
    causal: bool,
    rotary: tuple[Rotary | None, Rotary | None],
    samples: int,
    is_step: bool,
) -> str | None:
    """Return why the kernels do not support this call on tensors that they can take, or None if they do."""
    if causal and not is_step and spec is not None and spec.is_guarded:
        return "features without a bound need a scale per row in causal attention, which the kernels lack"
    features = feature_map.head_dim
    if spec is None:
        if feature_map.streams > 1:
            return "a map with two streams needs a kernel of its own"
        # an empty sequence shows the size of the features without computing any
        features = feature_map.key(k[:, :0].to(torch.float32)).shape[-1]
        features += features // 2 if rotary[0] is not None and rotary[0].normalised else 0
        if features > LARGEST_FEATURES:
            return f"{features} features do not fit on chip, {LARGEST_FEATURES} do"
    if feature_map.head_dim > LARGEST_HEAD or v.shape[-1] > LARGEST_HEAD:
        return f"heads of more than {LARGEST_HEAD} channels do not fit on chip"
    if (rotary[0] is None) != (rotary[1] is None):
        return "only one of q and k has positions"
    if rotary[0] is not None and feature_map.head_dim % 2:
        return "the kernels rotate channel pairs of an even head"
    if is_step:
        return None
    is_bfloat16 = q.dtype == k.dtype == v.dtype == torch.bfloat16
    if not causal and not is_bfloat16 and max(features, v.shape[-1]) > LARGEST_IN_FULL_PRECISION:
        return f"more than {LARGEST_IN_FULL_PRECISION} channels do not fit on chip unless q, k and v are bfloat16"
    seen, types = (LARGE_MAPS_IN_BFLOAT16, "in") if is_bfloat16 else (LARGE_MAPS, "unless all are")
    if max(features, v.shape[-1]) > 64 and (spec is None or spec.name not in seen):
        return f"kernels of more than 64 channels, {types} bfloat16, were verified with these maps alone: {', '.join(seen)}"
    if samples * q.shape[2] > MOST_ROWS:
        return f"{samples} samples of {q.shape[2]} heads are more than a grid holds, {MOST_ROWS:,}"
    return None


def report() -> dict[str, str]:
    """Return what would run here and why, for `nalaformer info`."""
    reason = why_no_triton_here()
    best = "chunked" if reason else "triton where it can, else chunked"
    runs = best if _setting == "auto" else _setting
    return {"backend": f"{_setting} -> {runs}", "triton": f"not used: {reason}" if reason else "fused kernels"}
