"""Compute the exact branch of hybrid attention as an operator; compiled/exact.py describes the arguments."""

from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, kind, processors, start, strides
from ..common.op import operator
from .compiled.exact import exact_dq_kernel, exact_kernel
from .compiled.exact_keys import exact_store_kernel, exact_window_kernel
from .launch import LAUNCHES, operand, operand_constants, pad_size, tile_for, with_dense_rows

LOG2_E = 1.4426950408889634
# programs per multiprocessor that share the gradients of a small store
STORE_PROGRAMS = 4


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    store_k: Tensor,
    store_v: Tensor,
    until: Tensor,
    first: Tensor,
    chunk: int,
    old: int,
    per_chunk: int,
    is_capped: bool,
    keep_best: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the row maximum (log2) and sum of weights, [B, N, H], and weighted values, [B, N, H, V], all float32. The last
    output is the key with the highest score of a row, int32 [B, N, H], empty without keep_best."""
    q, k, v, store_k, store_v = _as_read(q, k, v, store_k, store_v)
    row_max, total = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    weighted = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float32, device=q.device)
    best = torch.empty(q.shape[:3] if keep_best else 0, dtype=torch.int32, device=q.device)
    inputs = (q, k, v, store_k, store_v)

    def describe() -> Description:
        constants = _constants("exact", inputs, chunk, is_capped, keep_best)
        grid = (q.shape[1] // chunk * -(-chunk // constants["BM"]), q.shape[0] * q.shape[2])
        return grid, _numbers(q, k, v, store_k, chunk, old, per_chunk, scale), constants

    key = ("exact", chunk, old, per_chunk, is_capped, keep_best, scale, kind(*inputs))
    start(LAUNCHES, key, exact_kernel, (*inputs, until, first, row_max, total, weighted, best), describe)
    return row_max, total, weighted, best


def run_backward(
    dmax: Tensor,
    dtotal: Tensor,
    dweighted: Tensor,
    row_max: Tensor,
    best: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    store_k: Tensor,
    store_v: Tensor,
    until: Tensor,
    first: Tensor,
    chunk: int,
    old: int,
    per_chunk: int,
    is_capped: bool,
    keep_best: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the store's keys and values.

    dmax: the gradient of the highest score of a row, to which all weights are relative; only read with keep_best.
    """
    q, k, v, store_k, store_v = inputs = _as_read(q, k, v, store_k, store_v)
    # the gradient of the weighted values is read several times, and is converted to the type of an operand anyway
    rows = (row_max, dtotal.contiguous(), dweighted.to(operand(*inputs)).contiguous(), best, dmax.contiguous())
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    groups, heads = q.shape[1] // chunk, q.shape[2]
    key = (chunk, old, per_chunk, is_capped, keep_best, scale, kind(*inputs))

    def describe_dq() -> Description:
        constants = _constants("exact_dq", inputs, chunk, is_capped, keep_best)
        grid = (groups * -(-chunk // constants["BM"]), q.shape[0] * heads)
        return grid, _numbers(q, k, v, store_k, chunk, old, per_chunk, scale), constants

    start(LAUNCHES, ("exact dq", *key), exact_dq_kernel, (*inputs, until, first, *rows, dq), describe_dq)

    def describe_window() -> Description:
        constants = _constants("exact_window", inputs, chunk, is_capped, keep_best)
        constants["BN"] = min(constants["BN"], pad_size(chunk))
        grid = ((groups + 1) * -(-chunk // constants["BN"]), k.shape[0] * k.shape[2])
        numbers = (groups, chunk, heads, heads // k.shape[2], *strides(q), *strides(k), *strides(v), scale * LOG2_E)
        return grid, numbers, constants

    start(LAUNCHES, ("exact window", *key), exact_window_kernel, (q, k, v, first, *rows, dk, dv), describe_window)
    if not store_k.shape[2]:
        return dq, dk, dv, torch.zeros_like(store_k), torch.zeros_like(store_v)

    constants = _constants("exact_store", inputs, chunk, is_capped, keep_best)
    entries, owners = store_k.shape[2], store_k.shape[0] * store_k.shape[1]
    blocks = -(-entries // constants["BN"])
    wanted = max(1, min(groups, STORE_PROGRAMS * processors(q.device) // (blocks * owners)))
    split_size = -(-groups // wanted)
    splits = -(-groups // split_size)
    # partial sums are float32
    partial = [
        torch.empty(splits, *x.shape, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
        for x in (store_k, store_v)
    ]

    def describe_store() -> Description:
        numbers = (groups, split_size, chunk, entries, old, per_chunk, heads, heads // store_k.shape[1])
        return (blocks, owners, splits), (*numbers, *strides(q), scale * LOG2_E), constants

    start(LAUNCHES, ("exact store", *key), exact_store_kernel, (q, store_k, store_v, until, *rows, *partial), describe_store)
    dstore_k, dstore_v = (
        parts[0] if splits == 1 else parts.sum(0).to(x.dtype) for parts, x in zip(partial, (store_k, store_v), strict=True)
    )
    return dq, dk, dv, dstore_k, dstore_v


def _as_read(q: Tensor, k: Tensor, v: Tensor, store_k: Tensor, store_v: Tensor) -> tuple[Tensor, ...]:
    return *(with_dense_rows(x) for x in (q, k, v)), store_k.contiguous(), store_v.contiguous()


def _constants(kernel: str, inputs: tuple[Tensor, ...], chunk: int, is_capped: bool, keep_best: bool) -> dict[str, Any]:
    dtype, head, values = operand(*inputs), inputs[0].shape[-1], inputs[2].shape[-1]
    tile = tile_for(kernel, max(pad_size(head), pad_size(values)), dtype)
    return {
        "D": head,
        "V": values,
        "BD": pad_size(head),
        "BV": pad_size(values),
        "BM": min(tile.queries, pad_size(chunk)),
        "BN": tile.keys,
        "CAPPED": is_capped,
        "KEEP_BEST": keep_best,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **operand_constants(dtype),
    }


def _numbers(
    q: Tensor, k: Tensor, v: Tensor, store_k: Tensor, chunk: int, old: int, per_chunk: int, scale: float
) -> tuple[float, ...]:
    """Return the numbers of the kernels that scan keys."""
    heads = q.shape[2]
    sizes = (q.shape[1] // chunk, chunk, store_k.shape[2], old, per_chunk)
    groups = (heads, heads // k.shape[2], heads // store_k.shape[1])
    return (*sizes, *groups, *strides(q), *strides(k), *strides(v), scale * LOG2_E)


def shapes(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    row_max, total = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    best = q.new_empty(q.shape[:3] if rest[-2] else 0, dtype=torch.int32)
    return row_max, total, q.new_empty(*q.shape[:3], v.shape[-1], dtype=torch.float32), best


def gradient_shapes(dmax: Any, dtotal: Any, dweighted: Any, row_max: Any, best: Any, *rest: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in rest[:5])


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[0], output[3], *inputs[:7])
    ctx.settings = inputs[7:]


def gradients(ctx: Any, run: Any, dmax: Any, dtotal: Any, dweighted: Any) -> Any:
    return run(dmax, dtotal, dweighted, *ctx.saved_tensors, *ctx.settings)


attend, forward, backward = operator(
    "hybrid_exact", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients, outputs=3
)
