"""Compute the linear branch of hybrid attention as an operator; compiled/linear.py explains it.

Shapes: queries [B, R * T, H, D]; keys [B, m * i, H, D] of m <= R chunks that leave one after another, i tokens of each. Both
are float32 inputs of a map to features of size F: `name` is "softmax" (of both signs, F = 2 D) or "identity". Features are
multiplied in the type of the values; their gradients are float32, since maps take differences of them.
values [B, m * i, K, V]; counts [B, m * i, S] bool, which tokens count; sums [B * H, F, V + 1].
"""

from typing import Any

import torch
from torch import Tensor

from ..common.launch import Description, kind, processors, start, strides
from ..common.op import operator
from ..common.split_sums_launch import prefix
from .compiled.features import signed_softmax_gradient_kernel, signed_softmax_kernel
from .compiled.linear import linear_scan_kernel, split_sums_kernel
from .launch import LAUNCHES, HybridTile, operand, operand_constants, pad_size, tile_for, with_dense_rows

# the target of programs per multiprocessor, and the steps below which a program costs more than its sums
PROGRAMS, FEWEST_STEPS = 2, 4
# columns of the running sums in one program, and of the sums of a split on both sides
COLUMNS, SUMS_SIDE = 64, 128
# elements of a tile for the feature kernels
BLOCK = 4096


def split_groups(owners: int, tiles: int, groups: int, device: torch.device) -> tuple[int, int]:
    """Return how many programs share the groups, and how many groups each takes."""
    wanted = PROGRAMS * processors(device) // max(1, owners * tiles)
    split_size = -(-groups // max(1, min(wanted, groups // FEWEST_STEPS)))
    return -(-groups // split_size), split_size


def run_forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: Tensor,
    initial: Tensor | None,
    groups: int,
    per_chunk: int,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return phi(q) . S [B, R * T, H, V], phi(q) . z [B, R * T, H], the sums after all, and before each split; float32."""
    batch, rows, heads, _ = queries.shape
    dtype, values, counts = operand(values), with_dense_rows(values), counts.contiguous()
    query_features, key_features = (_features(x, name, dtype) for x in (queries, keys))
    weighted = torch.empty(batch, rows, heads, values.shape[-1], dtype=torch.float32, device=values.device)
    total = torch.empty(batch, rows, heads, dtype=torch.float32, device=values.device)
    count, split_size = split_groups(batch * heads, -(-values.shape[-1] // COLUMNS), groups, values.device)
    chunks = key_features.shape[1] // per_chunk
    before = _split_sums(dtype, key_features, values, counts, count, split_size, chunks, per_chunk, are_counts=True)
    after = prefix(LAUNCHES, before, None if initial is None else initial.contiguous(), reverse=False)
    _scan(
        *("forward", dtype),
        *(query_features, key_features, values, counts, total, before, weighted, total),
        steps=(groups, split_size, groups, chunks),
        rows=(rows // groups, per_chunk),
        total=True,
    )
    return weighted, total, after, before


def run_backward(
    dweighted: Tensor,
    dtotal: Tensor,
    dafter: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: Tensor,
    before: Tensor,
    groups: int,
    per_chunk: int,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and initial sums."""
    dtype, values = operand(values), with_dense_rows(values)
    # recomputing the features is cheaper than saving them
    query_features, key_features = (_features(x, name, dtype) for x in (queries, keys))
    # the gradient is read several times, and is converted to the type of an operand anyway
    counts, dweighted, dtotal = counts.contiguous(), dweighted.to(dtype).contiguous(), dtotal.contiguous()
    rows, heads = query_features.shape[1] // groups, query_features.shape[2]
    chunks = key_features.shape[1] // per_chunk
    count = before.shape[0]
    split_size = -(-groups // count)
    dquery, dkey = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (query_features, key_features))
    _scan(
        *("dquery", dtype),
        *(dweighted, values, key_features, counts, dtotal, before, dquery, dtotal),
        steps=(groups, split_size, groups, chunks),
        rows=(rows, per_chunk),
        inner_is_value=True,
        rank_one=True,
    )
    later = _split_sums(dtype, query_features, dweighted, dtotal, count, split_size, groups, rows, are_counts=False)
    dinitial = prefix(LAUNCHES, later, None if dafter is None else dafter.contiguous(), reverse=True)
    group = heads // values.shape[2]
    # by query head: the heads that share values are added up, in float32
    shape, kept_in = (*key_features.shape[:3], values.shape[-1]), values.dtype if group == 1 else torch.float32
    dvalues = torch.empty(shape, dtype=kept_in, device=values.device)
    if chunks:
        back: dict[str, Any] = {"steps": (groups, split_size, chunks, groups), "rows": (per_chunk, rows), "back": True}
        _scan("dvalues", dtype, key_features, query_features, dweighted, counts, dtotal, later, dvalues, dtotal, **back)
        _scan(
            *("dkey", dtype),
            *(values, dweighted, query_features, counts, dtotal, later, dkey, dtotal),
            inner_is_value=True,
            rank_one=True,
            **back,
        )
    if group > 1:
        dvalues = dvalues.unflatten(2, (-1, group)).sum(3).to(values.dtype)
    return _gradient(queries, dquery, name), _gradient(keys, dkey, name), dvalues, dinitial


def _features(x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return the features [B, N, H, F] in the type in which they are multiplied."""
    if name == "identity":
        return with_dense_rows(x.to(dtype))
    out = torch.empty(*x.shape[:3], 2 * x.shape[3], dtype=dtype, device=x.device)
    _map(signed_softmax_kernel, with_dense_rows(x), out)
    return out


def _gradient(x: Tensor, dfeatures: Tensor, name: str) -> Tensor:
    if name == "identity":
        return dfeatures.to(x.dtype)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _map(signed_softmax_gradient_kernel, with_dense_rows(x), dfeatures, dx)
    return dx


def _map(kernel: Any, x: Tensor, *tensors: Tensor) -> None:
    batch, tokens, heads, head_dim = x.shape
    if not tokens:
        return

    def describe() -> Description:
        width = pad_size(head_dim)
        rows = BLOCK // width
        constants = {"D": head_dim, "BD": width, "BN": rows, "num_warps": 4, "num_stages": 1}
        return (-(-tokens // rows), batch * heads), (tokens, heads, *strides(x)), constants

    start(LAUNCHES, ("features", kernel, kind(x, *tensors)), kernel, (x, *tensors), describe)


def _split_sums(
    dtype: torch.dtype,
    inner: Tensor,
    outer: Tensor,
    numbers: Tensor,
    count: int,
    split_size: int,
    steps: int,
    rows: int,
    *,
    are_counts: bool,
) -> Tensor:
    """Return [splits, B * H, I, O + 1]: the products of each split, and the sums of inner."""
    (batch, _, heads, width), columns = inner.shape, outer.shape[-1]
    sums = torch.empty(count, batch * heads, width, columns + 1, dtype=torch.float32, device=inner.device)

    def describe() -> Description:
        side, other = min(SUMS_SIDE, pad_size(width)), min(SUMS_SIDE, pad_size(columns))
        tile = tile_for("linear", 128, dtype)
        constants = {"ROWS": rows, "I": width, "O": columns, "BI": side, "BO": other, "BN": tile.keys, "COUNTS": are_counts}
        sizes = (steps, split_size, heads, heads // outer.shape[2], heads // numbers.shape[2])
        grid = (count, batch * heads, -(-width // side) * -(-columns // other))
        return grid, (*sizes, *strides(inner), *strides(outer)), _options(constants, tile, dtype)

    key = ("split sums", count, split_size, steps, rows, are_counts, dtype, kind(inner, outer, numbers))
    start(LAUNCHES, key, split_sums_kernel, (inner, outer, numbers, sums), describe)
    return sums


def _scan(
    name: str,
    dtype: torch.dtype,
    read: Tensor,
    inner: Tensor,
    outer: Tensor,
    counts: Tensor,
    dtotal: Tensor,
    sums: Tensor,
    out: Tensor,
    total_out: Tensor,
    *,
    steps: tuple[int, int, int, int],
    rows: tuple[int, int],
    inner_is_value: bool = False,
    total: bool = False,
    rank_one: bool = False,
    back: bool = False,
) -> None:
    """Scan the steps once. steps: all, of a split, that read, that add; rows of one that reads and of one that adds."""
    batch, _, heads, columns = out.shape

    def describe() -> Description:
        tile = tile_for("linear", 128, dtype)
        constants: dict[str, Any] = {
            "READ_ROWS": rows[0],
            "ADD_ROWS": rows[1],
            "I": read.shape[-1],
            "O": columns,
            "BI": pad_size(read.shape[-1]),
            "BO": min(_columns(dtype), pad_size(columns)),
            "BR": min(tile.queries, pad_size(rows[0])),
            "BA": min(tile.queries, pad_size(rows[1])),
            "INNER_IS_VALUE": inner_is_value,
            "TOTAL": total,
            "RANK_ONE": rank_one,
            "BACK": back,
        }
        grid = (sums.shape[0], batch * heads, -(-columns // constants["BO"]))
        per_head = (heads, *(heads // x.shape[2] for x in (read, inner, outer, counts)))
        numbers = (*steps, *per_head, *strides(read), *strides(inner), *strides(outer))
        return grid, numbers, _options(constants, tile, dtype)

    tensors = (read, inner, outer, counts, dtotal, sums, out, total_out)
    key = (name, steps, rows, dtype, kind(*tensors))
    start(LAUNCHES, key, linear_scan_kernel, tensors, describe)


def _columns(dtype: torch.dtype) -> int:
    return COLUMNS if dtype == torch.bfloat16 else COLUMNS // 2


def _options(constants: dict[str, Any], tile: HybridTile, dtype: torch.dtype) -> dict[str, Any]:
    return constants | {"num_warps": tile.warps, "num_stages": tile.stages} | operand_constants(dtype)


def shapes(queries: Any, keys: Any, values: Any, counts: Any, initial: Any, groups: Any, per_chunk: Any, name: Any) -> Any:
    batch, rows, heads, features = queries.shape
    features = features if name == "identity" else 2 * features
    count, _ = split_groups(batch * heads, -(-values.shape[-1] // COLUMNS), groups, values.device)
    total = queries.new_empty(batch, rows, heads, dtype=torch.float32)
    before = total.new_empty(count, batch * heads, features, values.shape[-1] + 1)
    return total.new_empty(batch, rows, heads, values.shape[-1]), total, torch.empty_like(before[0]), before


def gradient_shapes(
    dweighted: Any, dtotal: Any, dafter: Any, queries: Any, keys: Any, values: Any, counts: Any, before: Any, *rest: Any
) -> Any:
    return *(x.new_empty(x.shape) for x in (queries, keys, values)), torch.empty_like(before[0])


def save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, initial, groups, per_chunk, name = inputs
    # the sums have no graph outside of the operator, so the initial sums stand for them
    ctx.save_for_backward(*tensors, output[3], initial)
    ctx.settings = groups, per_chunk, name


def gradients(ctx: Any, run: Any, dweighted: Any, dtotal: Any, dafter: Any) -> Any:
    *kept, _ = ctx.saved_tensors
    *of_tokens, dinitial = run(dweighted, dtotal, dafter, *kept, *ctx.settings)
    return *of_tokens, None, dinitial


attend, forward, backward = operator(
    "hybrid_linear", (run_forward, shapes), (run_backward, gradient_shapes), save=save, gradients=gradients, outputs=3
)
