"""Compute the delta rule as an operator: kernels for each chunk of tokens by itself, and one that scans with the state.

Inside a chunk, with G the running sum of log_decay, D_ij = exp(G_i - G_j) for i >= j, s_i = exp(G_i), e_j = exp(G_last - G_j):

    A_ij = beta_i (k_i . k_j) D_ij below the diagonal,  T = (I + A)^-1,  u0 = T (beta v),  w = T (beta s k)
    from chunk to chunk:  u = u0 - w S,  S' = s_last S + (e k)^T u
    out = scale (s (q S) + M u),  M_ij = (q_i . k_j) D_ij up to the diagonal

With S the state before a chunk, X the gradient of that after it and r = T^T du that of the right-hand side beta (v - s k S):

    du = scale M^T dout + e k X,  dA = -r u^T below the diagonal,  dv = beta r
    of w: -du S^T, so of beta s k: -r S^T;  of e k: u X^T;  of s q: scale dout S^T;  of M: scale dout u^T up to the diagonal

The backward pass computes T and w again; the states before the chunks and u are saved.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..common.launch import PRECISION, Description, Launches, kind, processors, reads_ahead, start
from ..common.op import operator
from .compiled.delta_rule import delta_output_kernel, scan_kernel, solve_kernel
from .compiled.delta_rule_gradient import delta_gradient_kernel, scan_gradient_kernel

LEVELS = 6
SIZE = 2**LEVELS  # tokens of a chunk
BLOCK = 64  # features or values of a block
LARGEST_STATE = 8192  # elements of the state that a program holds
LARGEST_READ_AHEAD = 128  # features; two tiles of more do not fit on chip
# warps, and tiles that are read ahead
FORMS = {"solve": (4, 1), "scan": (4, 2), "output": (4, 1), "scan gradient": (4, 2), "gradient": (4, 1)}
_launches = Launches()


class Packing(NamedTuple):
    """Locate packed sequences; both fields are None where each row of the batch is one sequence."""

    owners: Tensor | None
    """[chunks] int32: the sequence of each chunk."""
    sequences: Tensor | None
    """[sequences, 3] int32: its first token, its tokens, its first chunk."""


UNPACKED = Packing(None, None)


def make_packing(lengths: Sequence[int], device: torch.device) -> Packing:
    owners: list[int] = []
    sequences, row = [], 0
    for number, length in enumerate(lengths):
        sequences.append((row, length, len(owners)))
        owners += [number] * -(-length // SIZE)
        row += length
    return Packing(*(torch.tensor(x, dtype=torch.int32).to(device, non_blocking=True) for x in (owners, sequences)))


class DeltaCall(NamedTuple):
    """Hold the sizes of a call."""

    rows: int
    tokens: int
    heads: int
    features: int
    width: int
    chunks: int
    sequences: int
    packing: Packing
    has_decay: bool
    dtype: torch.dtype
    device: torch.device

    def start(self, name: str, kernel: Any, tensors: Sequence[Tensor | None], numbers: Sequence[float], **flags: bool) -> None:
        """Launch a kernel. It does not read tensors that are None, but Triton still needs a pointer for them."""
        given = [tensors[0] if x is None else x for x in tensors]
        key = (name, *numbers, *flags.values(), *(x is None for x in tensors), kind(*given))
        start(_launches, key, kernel, given, lambda: self.describe(name, numbers, flags))  # type: ignore[arg-type]

    def describe(self, name: str, numbers: Sequence[float], flags: dict[str, bool]) -> Description:
        warps, stages = FORMS[name]
        is_scan = name in ("scan", "scan gradient")
        # three products make one of float32, which takes more registers
        is_wide = self.dtype == torch.float32
        features, values = (max(16, triton.next_power_of_2(x)) for x in (self.features, self.width))
        constants = {
            "F": self.features,
            "V": self.width,
            "SIZE": SIZE,
            "LEVELS": LEVELS,
            "BF": features if is_scan else min(BLOCK, features),
            "BV": self.columns(features, values) if is_scan else min(BLOCK, values),
            "HAS_DECAY": self.has_decay,
            "PACKED": self.packing.owners is not None,
            "PRECISION": PRECISION[self.dtype],
            "num_warps": 8 if is_wide else warps,
            "num_stages": stages if not is_wide and features <= LARGEST_READ_AHEAD and reads_ahead(self.device) else 1,
            **flags,
        }
        grid = (
            (self.sequences * self.heads, triton.cdiv(self.width, constants["BV"])) if is_scan else (self.chunks * self.heads,)
        )
        return grid, (self.tokens, self.heads, *numbers), constants

    def columns(self, features: int, values: int) -> int:
        """Return the columns of the state that a program holds: they fit its registers, and two programs a multiprocessor."""
        columns = min(BLOCK, values, LARGEST_STATE // features)
        fewest = 2 * processors(self.device) * 0.9
        while columns > 16 and self.sequences * self.heads * triton.cdiv(self.width, columns) < fewest:
            columns //= 2
        return columns

    def empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(sizes, dtype=dtype or self.dtype, device=self.device)

    def per_head(self, size: int) -> Tensor:
        """Return an empty tensor [rows, heads, size]."""
        return self.empty(self.rows, self.heads, size)


def make_call(q: Tensor, v: Tensor, log_decay: Tensor | None, packing: Packing) -> DeltaCall:
    batch, tokens, heads, features = q.shape
    chunks, sequences = count_chunks(q, packing)
    return DeltaCall(
        *(batch * tokens, tokens, heads, features, v.shape[3], chunks, sequences, packing),
        has_decay=log_decay is not None,
        dtype=v.dtype,
        device=v.device,
    )


def count_chunks(q: Tensor, packing: Packing) -> tuple[int, int]:
    """Return the numbers of chunks and of sequences."""
    if packing.owners is None or packing.sequences is None:
        return q.shape[0] * ((q.shape[1] + SIZE - 1) // SIZE), q.shape[0]
    return packing.owners.shape[0], packing.sequences.shape[0]


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    scale: float,
    packing: Packing,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output [B, N, H, V], the last states [sequences, H, F, V] in float32, and for gradients the states and u."""
    call = make_call(q, v, log_decay, packing)
    q, k, v, beta = (x.contiguous() for x in (q, k, v, beta))
    log_decay = None if log_decay is None else log_decay.contiguous()
    u = call.per_head(call.width)
    w, since, to_end, _ = solve(call, (q, k, v, beta, log_decay), u, scale, is_gradient=False)
    initial = None if state is None else state.float().contiguous()
    states = call.empty(call.chunks, call.heads, call.features, call.width)
    final = call.empty(call.sequences, call.heads, call.features, call.width, dtype=torch.float32)
    call.start(
        "scan",
        scan_kernel,
        (u, w, k, since, to_end, initial, packing.sequences, states, final),
        (),
        HAS_INITIAL=initial is not None,
    )
    out = torch.empty_like(v)
    call.start("output", delta_output_kernel, (q, k, u, log_decay, states, *packing, out), (scale,))
    return out, final, states, u


def solve(
    call: DeltaCall, tensors: Sequence[Tensor | None], u: Tensor, scale: float, *, is_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute w, s, e and, for gradients, T; the kernel also writes u."""
    w = call.per_head(call.features)
    since, to_end = (call.empty(call.rows, call.heads, dtype=torch.float32) if call.has_decay else None for _ in range(2))
    inverse = call.per_head(SIZE) if is_gradient else None
    given = (*tensors, *call.packing, u, w, since, to_end, inverse)
    call.start("solve", solve_kernel, given, (scale,), GRADIENT=is_gradient)
    return w, since, to_end, inverse


def shapes(q: Any, k: Any, v: Any, beta: Any, log_decay: Any, state: Any, scale: Any, packing: Any) -> Any:
    batch, tokens, heads, features = q.shape
    chunks, sequences = count_chunks(q, packing)
    final = q.new_empty(sequences, heads, features, v.shape[3], dtype=torch.float32)
    states = v.new_empty(chunks, heads, features, v.shape[3])
    return v.new_empty(v.shape), final, states, v.new_empty(batch * tokens, heads, v.shape[3])


def run_backward(
    dout: Tensor | None,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    states: Tensor,
    u: Tensor,
    scale: float,
    packing: Packing,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log_decay (empty without one) and the state."""
    call = make_call(q, v, log_decay, packing)
    q, k, v, beta = (x.contiguous() for x in (q, k, v, beta))
    log_decay = None if log_decay is None else log_decay.contiguous()
    dout = torch.zeros_like(v) if dout is None else dout.contiguous()
    du = call.per_head(call.width)
    w, since, to_end, inverse = solve(call, (q, k, dout, beta, log_decay), du, scale, is_gradient=True)
    last = None if dfinal is None else dfinal.float().contiguous()
    dstates = torch.empty_like(states)
    dinitial = call.empty(call.sequences, call.heads, call.features, call.width, dtype=torch.float32)
    call.start(
        "scan gradient",
        scan_gradient_kernel,
        (du, w, k, q, dout, since, to_end, last, packing.sequences, dstates, dinitial),
        (scale,),
        HAS_FINAL=last is not None,
    )
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    ddecay = None if log_decay is None else torch.empty_like(log_decay)
    given = (q, k, v, beta, log_decay, dout, inverse, u, du, states, dstates, *packing)
    call.start("gradient", delta_gradient_kernel, (*given, dq, dk, dv, dbeta, ddecay), (scale,))
    return dq, dk, dv, dbeta, q.new_empty(0) if ddecay is None else ddecay, dinitial


def gradient_shapes(
    dout: Any, dfinal: Any, q: Any, k: Any, v: Any, beta: Any, log_decay: Any, states: Any, u: Any, scale: Any, packing: Any
) -> Any:
    ddecay = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dinitial = q.new_empty(count_chunks(q, packing)[1], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v, beta)), ddecay, dinitial


def save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, state, ctx.scale, packing = inputs
    ctx.state_dtype = None if state is None else state.dtype
    # the state stays in the graph, so that gradients of gradients raise their error
    ctx.save_for_backward(*tensors, *output[2:], *packing, state)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, run: Any, dout: Any, dfinal: Any) -> Any:
    *saved, owners, sequences, _ = ctx.saved_tensors
    *of_tensors, ddecay, dinitial = run(dout, dfinal, *saved, ctx.scale, Packing(owners, sequences))
    has_decay, has_state = saved[4] is not None, ctx.state_dtype is not None
    return *of_tensors, ddecay if has_decay else None, dinitial.to(ctx.state_dtype) if has_state else None


attend, forward, backward = operator(
    "delta_rule", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients, outputs=2
)
