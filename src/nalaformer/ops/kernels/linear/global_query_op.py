"""Compute products of the mean query with all keys, as an operator; key_weight.py makes RALA's weights of them."""

from typing import Any

import torch
import triton
from torch import Tensor

from ..common.launch import Description, Launches, kind, processors, start, strides
from ..common.op import operator
from .compiled.global_query import feature_gradient_kernel, feature_products_kernel, feature_sums_kernel

# elements in a tile: 32 per thread
TILE_NUMBERS = 4096
PROGRAMS_PER_PROCESSOR = 4
_launches = Launches()


def launch(
    kernel: Any,
    x: Tensor,
    mask: Tensor | None,
    row: Tensor | None,
    numbers: Tensor | None,
    out: Tensor | None,
    name: str,
    *,
    parts: int,
    has_sums: bool,
) -> Tensor:
    """Start a kernel of compiled/global_query.py on x [B, N, H, D]; return the sums [B, H, PARTS, D] of all its programs."""
    batch, tokens, heads, head_dim = x.shape
    padded = max(16, triton.next_power_of_2(head_dim))
    tile = max(16, TILE_NUMBERS // padded)
    tiles = -(-tokens // tile)
    splits = max(1, min(tiles, PROGRAMS_PER_PROCESSOR * processors(x.device) // (batch * heads)))
    split_size = -(-tiles // splits) * tile
    splits = -(-tokens // split_size)
    sums = x.new_empty((splits if has_sums else 0, batch, heads, parts, head_dim), dtype=torch.float32)
    given: list[Any] = [x if mask is None else mask]
    if kernel is feature_sums_kernel:
        given += [sums]
    elif kernel is feature_products_kernel:
        given += [row, out]
    else:
        given += [row, sums if numbers is None else numbers, out, sums]

    def describe() -> Description:
        more = strides(out) if kernel is feature_gradient_kernel and out is not None else ()
        constants = {
            "D": head_dim,
            "BD": padded,
            "BN": tile,
            "MAP": name,
            "PARTS": parts,
            "HAS_MASK": mask is not None,
            "HAS_NUMBERS": numbers is not None,
            "num_warps": 4,
        }
        return (splits, batch * heads), (tokens, heads, split_size, *strides(x), *more), constants

    start(_launches, (name, kernel.__name__, kind(x, mask, row, numbers, out)), kernel, (x, *given), describe)
    return sums.sum(0)


def run_forward(
    q: Tensor, k: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, name: str, parts: int
) -> tuple[Tensor, Tensor]:
    """Return D^-1/2 mean_i phi(q_i) . phi(k_j), float32 [B, H, M], and that mean with its factor, [B, H, PARTS, D]."""
    total = launch(feature_sums_kernel, q, query_mask, None, None, None, name, parts=parts, has_sums=True)
    mean = total * query_share(q, query_mask)
    logits = k.new_empty((k.shape[0], k.shape[2], k.shape[1]), dtype=torch.float32)
    launch(feature_products_kernel, k, key_mask, mean, None, logits, name, parts=parts, has_sums=False)
    return logits, mean


def run_backward(
    dlogits: Tensor,
    q: Tensor,
    k: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    mean: Tensor,
    name: str,
    parts: int,
) -> tuple[Tensor, Tensor]:
    """Return dq and dk."""
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    numbers = dlogits.contiguous()
    dmean = launch(feature_gradient_kernel, k, key_mask, mean, numbers, dk, name, parts=parts, has_sums=True)
    row = dmean * query_share(q, query_mask)
    launch(feature_gradient_kernel, q, query_mask, row, None, dq, name, parts=parts, has_sums=False)
    return dq, dk


def query_share(q: Tensor, query_mask: Tensor | None) -> Tensor | float:
    """Return D^-1/2 / n for the n visible queries of each sample."""
    factor = q.shape[3] ** -0.5
    return factor / q.shape[1] if query_mask is None else factor / query_mask.sum(1).clamp(min=1)[:, None, None, None]


def shapes(q: Any, k: Any, query_mask: Any, key_mask: Any, name: Any, parts: Any) -> Any:
    batch, tokens, heads, head_dim = k.shape
    logits = k.new_empty((batch, heads, tokens), dtype=torch.float32)
    return logits, k.new_empty((batch, heads, parts, head_dim), dtype=torch.float32)


def gradient_shapes(dlogits: Any, q: Any, k: Any, *rest: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.name, ctx.parts = inputs
    ctx.save_for_backward(*tensors, output[1])


def gradients(ctx: Any, run: Any, dlogits: Any) -> Any:
    return run(dlogits, *ctx.saved_tensors, ctx.name, ctx.parts)


products_with_mean, forward, backward = operator(
    "global_query", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients
)


def key_logits(q: Tensor, k: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, name: str, parts: int) -> Tensor:
    """Return [B, M, H]; q and k with the same heads."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    query_mask, key_mask = (None if mask is None else mask.contiguous() for mask in (query_mask, key_mask))
    return products_with_mean(q, k, query_mask, key_mask, name, parts).transpose(1, 2)
