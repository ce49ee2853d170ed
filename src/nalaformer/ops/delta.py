"""Compute the delta rule: a state that corrects the value under a key instead of adding to it (DeltaNet, Gated DeltaNet).

    S_t = a_t S_{t-1} + b_t k_t (v_t - k_t^T a_t S_{t-1})^T,   out_t = scale * q_t^T S_t,   a_t = exp(log_decay_t)

Keys must have length at most one, or the state grows without bound. Without log_decay nothing decays (a_t = 1); -inf resets the
state (a_t = 0).
"""

import math
import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import INTERPRETING, get_backend, runs_kernels
from .checks import check_cu_seqlens, check_key_mask
from .eager import run_eagerly
from .exporting import is_exporting, is_jit_tracing
from .features import compute_dtype, hide, outside_autocast
from .kept_tensors import is_transformed

# Tokens solved for at once: a larger chunk means more work inside it, and fewer sequential steps.
CHUNK = 64
LARGEST_KERNEL_FEATURES = 256
# Limits of this library's own kernels, verified on a GPU; float32 takes minutes to compile there and loses digits.
LARGEST_OWN_FEATURES, LARGEST_OWN_VALUES = 128, 64
# Kernels take differences of running sums, in which -inf would give NaN. exp of this bound is zero in the state's digits.
SMALLEST_LOG_DECAY = -100.0


class DeltaInputs(NamedTuple):
    """Hold the tensors of the tokens: q, k [B, N, H, F]; v [B, N, H, V]; beta, log_decay [B, N, H]. Packed, they have no B."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None

    def as_single_batch(self, tokens: slice | None = None) -> "DeltaInputs":
        """Return packed sequences, or some of their tokens, as a batch of one."""
        rows = [x if x is None or tokens is None else x[tokens] for x in self]
        return DeltaInputs(*(None if x is None else x[None] for x in rows))  # type: ignore[arg-type]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of all tokens and the state after the last one. Splitting a sequence into calls changes neither.

    q, k: [B, N, H, F]; v: [B, N, H, V]; beta, log_decay: [B, N, H]. Returns [B, N, H, V] in the type of v and the state
    [B, H, F, V] in float32 (float64 for float64 inputs).

    state: the state after the earlier tokens; it is not modified.
    key_mask: [B, N] bool; a masked token changes nothing.
    cu_seqlens: [S + 1] running total of lengths, beginning with 0. Then all tensors lack the batch dimension, and the states
        are [S, H, F, V].
    scale: factor of the outputs, 1/sqrt(F) by default.
    """
    scale = _checked_scale(scale, q)
    if cu_seqlens is not None:
        if key_mask is not None:
            raise ValueError("key_mask and cu_seqlens exclude each other, got both; packed sequences have no padding")
        return _run_packed(DeltaInputs(q, k, v, beta, log_decay), state, cu_seqlens, scale)
    _check(DeltaInputs(q, k, v, beta, log_decay), state, q.shape[0])
    check_key_mask(key_mask, k)
    if key_mask is not None:
        k, v = hide(k, key_mask), hide(v, key_mask)
        beta = torch.where(key_mask[..., None], beta, 0)
        log_decay = None if log_decay is None else torch.where(key_mask[..., None], log_decay, 0)
    inputs = DeltaInputs(q, k, v, beta, log_decay)
    with outside_autocast(q):
        if kernels := _kernels_for(q, v, log_decay, k, beta, state):
            return _run_fla(kernels, inputs, state, None, scale)
        if _runs_own_kernels(q, v):
            return _on_kernels(inputs, state, scale)
        return _run_plain(*inputs, state, scale)


# The lengths and the longest one are part of the launch: a traced program would be specific to one packing.
@run_eagerly
def _run_packed(inputs: DeltaInputs, state: Tensor | None, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute each sequence by itself; the tensors are split, never padded."""
    q, k, v, beta, log_decay = inputs
    lengths = check_cu_seqlens(cu_seqlens, q.shape[0])
    if min(lengths) == 0:
        raise ValueError(f"packed sequences must hold at least one token, got lengths {lengths[:8]}; skip empty ones")
    _check(inputs.as_single_batch(), state, len(lengths))
    with outside_autocast(q):
        if kernels := _kernels_for(q, v, log_decay, k, beta, state):
            out, states = _run_fla(kernels, inputs.as_single_batch(), state, cu_seqlens, scale)
            return out[0], states
        if _runs_own_kernels(q, v):
            out, states = _on_kernels(inputs.as_single_batch(), state, scale, lengths)
            return out[0], states
        done, start = [], 0
        for number, length in enumerate(lengths):
            before = None if state is None else state[number : number + 1]
            done.append(_run_plain(*inputs.as_single_batch(slice(start, start + length)), before, scale))
            start += length
        return torch.cat([out[0] for out, _ in done]), torch.cat([after for _, after in done])


@torch.no_grad()
def delta_step_(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute one token of `delta_rule` and update the state [B, H, F, V] in place: a step of decoding, without gradients."""
    scale = _checked_scale(scale, q)
    if not isinstance(state, Tensor):
        raise TypeError(
            f"a step changes a state, got {type(state).__name__}; start from torch.zeros(batch, heads, features, values)"
        )
    if q.shape[1] != 1:
        raise ValueError(f"a step takes one token, got {q.shape[1]}; use delta_rule for more")
    inputs = DeltaInputs(q, k, v, beta, log_decay)
    _check(inputs, state, q.shape[0])
    with outside_autocast(q):
        if kernels := _kernels_for(q, v, log_decay):
            out, after = _run_fla(kernels, inputs, state, None, scale)
            state.copy_(after)
            return out
        dtype = state.dtype
        key, value = k[:, 0, :, :, None].to(dtype), v[:, 0, :, None].to(dtype)  # [B, H, F, 1], [B, H, 1, V]
        if log_decay is not None:
            state.mul_(log_decay[:, 0, :, None, None].to(dtype).exp())
        error = value - (key * state).sum(2, keepdim=True)
        state.add_(key * (beta[:, 0, :, None, None].to(dtype) * error))
        out = scale * (q[:, 0, :, :, None].to(dtype) * state).sum(2)
        return out[:, None].to(v.dtype)


def _runs_own_kernels(q: Tensor, v: Tensor) -> bool:
    """True if this library's kernels support the call: bfloat16 on a GPU, features and values that fit on chip."""
    if q.numel() == 0 or q.dtype == torch.float64 or not runs_kernels(v):
        return False
    if INTERPRETING:
        return max(q.shape[-1], v.shape[-1]) <= LARGEST_KERNEL_FEATURES and v.dtype != torch.float64
    return v.dtype == torch.bfloat16 and q.shape[-1] <= LARGEST_OWN_FEATURES and v.shape[-1] <= LARGEST_OWN_VALUES


def _on_kernels(
    inputs: DeltaInputs, state: Tensor | None, scale: float, lengths: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernels. lengths: the lengths of the sequences that are packed in a batch of one."""
    from .kernels.delta import delta_op

    packing = delta_op.UNPACKED if lengths is None else delta_op.make_packing(lengths, inputs.q.device)
    out, after = delta_op.attend(*inputs, state, scale, packing)
    return out, after


def _run_plain(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q, k, v)
    if state is None:
        state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=dtype, device=q.device)
    run = _run_recurrent if get_backend() == "reference" else _run_chunked
    q, k, value, beta = (x.transpose(1, 2).to(dtype) for x in (q, k, v, beta))  # heads outside tokens: [B, H, N, *]
    decay = None if log_decay is None else log_decay.transpose(1, 2).to(dtype)
    out, state = run(q, k, value, beta, decay, state.to(dtype))
    return (scale * out).transpose(1, 2).to(v.dtype), state


def _run_recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the definition, token by token."""
    outputs = []
    for t in range(q.shape[2]):
        if log_decay is not None:
            state = log_decay[:, :, t, None, None].exp() * state
        error = v[:, :, t] - torch.einsum("bhf,bhfv->bhv", k[:, :, t], state)
        state = state + torch.einsum("bhf,bhv->bhfv", k[:, :, t], beta[:, :, t, None] * error)
        outputs.append(torch.einsum("bhf,bhfv->bhv", q[:, :, t], state))
    return torch.stack(outputs, dim=2), state


def _run_chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute chunk by chunk. Inside a chunk, with G the running sum of log_decay, the corrections u solve

        u_i + b_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) k_i^T S)

    which is linear in S, the state before the chunk: one triangular solve for all chunks gives u = u0 - w S (the WY form).
    """
    length = q.shape[2]
    # a recorded program must support every length, so it cannot count chunks
    is_whole = is_exporting() or is_jit_tracing()
    size = length if is_whole else min(CHUNK, length)
    missing = 0 if is_whole else -length % size
    count = 1 if is_whole else -1
    # zero tokens at the end change nothing
    q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (count, size)) for x in (q, k, v))  # [B, H, chunks, size, *]
    beta = F.pad(beta, (0, missing)).unflatten(2, (count, size))[..., None]
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    if log_decay is None:
        decay = lower.to(q.dtype)
        since_start = to_end = torch.ones_like(beta)
    else:
        steps = F.pad(log_decay, (0, missing)).unflatten(2, (count, size))
        # G_i - G_j is summed for each j from the token after it on: a difference of running sums would lose the digits of small
        # decays after a large one, and all digits after a full reset (-inf)
        between = torch.where(lower.tril(-1), steps[..., :, None], 0).cumsum(-2)  # [B, H, chunks, i, j]
        decay = torch.where(lower, between.exp(), 0)
        since_start = steps.cumsum(-1).exp()[..., None]
        to_end = decay[..., -1, :, None]
    among_keys = beta * (k @ k.mT) * decay  # the solve reads below its diagonal alone
    right = torch.cat((beta * v, beta * since_start * k), dim=-1)
    solved = torch.linalg.solve_triangular(among_keys, right, upper=False, unitriangular=True)
    corrections, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    weights = torch.where(lower, q @ k.mT * decay, 0)
    q, k = q * since_start, k * to_end
    outputs = []
    for chunk in range(q.shape[2]):
        u = corrections[:, :, chunk] - of_state[:, :, chunk] @ state
        outputs.append(q[:, :, chunk] @ state + weights[:, :, chunk] @ u)
        state = since_start[:, :, chunk, -1:] * state + k[:, :, chunk].mT @ u
    return torch.cat(outputs, dim=2)[:, :, :length], state


@cache
def _kernels() -> ModuleType | None:
    """Return flash-linear-attention's operators, or None where it is not installed."""
    if find_spec("fla") is None:
        return None
    try:
        import fla.ops
    except Exception as error:  # its import checks the GPU and Triton, and each fails in its own way
        warnings.warn(f"flash-linear-attention cannot be used, so the delta rule runs without it: {error}", stacklevel=2)
        return None
    return fla.ops


def _kernels_for(q: Tensor, v: Tensor, log_decay: Tensor | None, *others: Tensor | None) -> ModuleType | None:
    """Return the kernels if they support the call and the backend allows them. others: more tensors that may need gradients."""
    # these kernels round features and values to half precision, so they cannot take float32 inputs
    fits = v.dtype in (torch.bfloat16, torch.float16) and max(q.shape[-1], v.shape[-1]) <= LARGEST_KERNEL_FEATURES
    can = q.device.type == "cuda" and fits and q.dtype != torch.float64 and q.numel() > 0
    if not can or get_backend() not in ("auto", "triton") or is_transformed():
        return None
    kernels = _kernels()
    if kernels is None:
        return None
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, v, log_decay, *others))
    # this library's own kernels compute gradients: every supported Triton compiles them correctly
    return None if learns else kernels


def _run_fla(
    kernels: ModuleType, inputs: DeltaInputs, state: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run flash-linear-attention: chunks, or the recurrence for one token; packed sequences as a batch of one."""
    q, k, v, beta, log_decay = inputs
    options = {
        "beta": beta,
        "scale": scale,
        "initial_state": state,
        "output_final_state": True,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.to(q.device),
    }
    form = "fused_recurrent" if q.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled() else "chunk"
    if log_decay is not None:
        options["g"] = log_decay.float().clamp(min=SMALLEST_LOG_DECAY)
    name = f"{form}_{'' if log_decay is None else 'gated_'}delta_rule"
    out, after = getattr(kernels, name)(*(x.to(v.dtype).contiguous() for x in (q, k, v)), **options)
    return out, after


def _checked_scale(scale: float | None, q: Tensor) -> float:
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a torch tensor, got {type(q).__name__}; convert it with torch.as_tensor()")
    if scale is None:
        return q.shape[-1] ** -0.5
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}; the default is 1/sqrt(features)")
    return scale


def _check(inputs: DeltaInputs, state: Tensor | None, num_states: int) -> None:
    q, k, v, beta, log_decay = inputs
    for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta), ("log_decay", log_decay), ("state", state)):
        if x is None and name in ("log_decay", "state"):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}; convert it with torch.as_tensor()")
        if not x.is_floating_point():
            raise ValueError(f"{name} must hold floats, got {x.dtype}; convert it with .float()")
        if x.device != q.device:
            raise ValueError(
                f"all tensors must be on one device, got q on {q.device} and {name} on {x.device}; move it with .to()"
            )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[1] == 0 or x.shape[:3] != q.shape[:3]:
            raise ValueError(
                f"{name} must be [batch, tokens, heads, channels] with the batch, tokens (at least one) and heads of q, "
                f"got {tuple(x.shape)} and q {tuple(q.shape)}"
            )
    if k.shape != q.shape:
        raise ValueError(f"q and k must have the same features, got {q.shape[-1]} and {k.shape[-1]}")
    for name, gate in (("beta", beta), ("log_decay", log_decay)):
        if gate is not None and gate.shape != q.shape[:3]:
            raise ValueError(f"{name} must be [batch, tokens, heads] = {tuple(q.shape[:3])}, got {tuple(gate.shape)}")
    wanted = (num_states, q.shape[2], q.shape[3], v.shape[3])
    if state is not None and state.shape != wanted:
        raise ValueError(f"the state must be [batch, heads, features, values] = {wanted}, got {tuple(state.shape)}")
