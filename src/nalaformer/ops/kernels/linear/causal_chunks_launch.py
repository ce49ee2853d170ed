"""Launch the kernels of causal attention in chunks; call.py describes a Call, and compiled/causal_chunks.py has the plan."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.launch import strides
from ..common.split_sums_launch import prefix
from .bidirectional_launch import sum_gradients, sum_keys
from .call import Call, TokenLayout, parameter_row
from .compiled.causal_chunks import chunk_kernel, chunk_scan_kernel
from .compiled.causal_chunks_gradient import chunk_dq_kernel
from .compiled.causal_chunks_gradient_of_keys import chunk_dk_kernel, chunk_scan_back_kernel

# keys at once in tiles of queries, which may be larger, by kernel
KEYS_AT_ONCE = {"chunk": 32, "chunk_dq": 32}
# gradients of keys and of values are passes of one kernel, with their own tiles
TILES_OF_KEYS = {"keys": "chunk_dk", "values": "chunk_dv"}


class Chunks(NamedTuple):
    """Hold what a scan writes at each chunk: operands [chunks, K, PARTS, DIGITS, BV, BD], and float32 values
    [chunks, K, STEPS * PARTS * BD + 16]."""

    operands: Tensor
    numbers: Tensor


def empty_chunks(call: Call, num_digits: int, step: int) -> Chunks:
    # packed sequences leave at most one chunk unused
    count = call.num_rows // call.chunk + call.samples
    if not call.is_packed:
        count = call.samples * -(-call.num_queries // call.chunk)
    shape = (count, call.kv_heads, call.settings.parts)
    operands = torch.empty((*shape, num_digits, call.block_v, call.block_d), dtype=call.operand, device=call.device)
    num_numbers = call.chunk // step * call.settings.parts * call.block_d + 16
    return Chunks(operands, operands.new_empty((*shape[:2], num_numbers), dtype=torch.float32))


def keys_at_once(call: Call, kernel: str) -> int:
    return min(call.tile(kernel).tokens, KEYS_AT_ONCE[kernel])


def digit_count(call: Call) -> int:
    """Return how many operands represent a sum, in products whose result nearly cancels."""
    return 2 if call.operand == torch.bfloat16 else 1


def forward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    layout: TokenLayout,
    initial: Tensor | None,
    log_decay: None,
    out: Tensor,
    want_total: bool,
    needs_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward pass; arguments and results are those of causal_launch.forward."""
    _, _, _, _, mask, bounds = layout.pointers(q)
    inverse = torch.empty(call.per_row if needs_backward else 0, dtype=torch.float32, device=call.device)
    count, split_size = call.causal_splits()
    if count > 1:
        sums, _ = sum_keys(call, k, v, parameters, parameters, layout, count, split_size)
        total = prefix(call.launches, sums, initial, reverse=False)
    else:
        sums = call.sums(1, call.kv_heads).zero_() if initial is None else initial.reshape(1, *initial.shape).clone()
        total = torch.empty_like(sums[0]) if want_total else sums[0]
    chunks = scan(call, k, v, parameters, mask, bounds, sums, total, has_total=count == 1 and want_total)
    tile = call.tile("chunk")
    call.start(
        ("chunk", needs_backward),
        chunk_kernel,
        (q, k, v, mask, bounds, parameters, *chunks, out, inverse),
        lambda: (
            "chunk",
            (-(-call.num_queries // tile.tokens), call.samples * call.heads),
            (
                *(call.num_rows, call.num_queries, call.heads, call.group),
                *(*strides(q), *strides(k), *strides(v), *strides(out)),
                *parameter_layout(call, parameters),
                *call.scalars,
            ),
            {"KEEP": needs_backward, "CHUNK": call.chunk, "BK": keys_at_once(call, "chunk")},
        ),
    )
    return total, sums, inverse


def scan(
    call: Call,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    mask: Tensor,
    bounds: Tensor,
    before: Tensor,
    total: Tensor,
    *,
    is_forward: bool = True,
    has_total: bool = False,
) -> Chunks:
    """Return the sums before each chunk, for the outputs or for the gradients of queries; fills `total` if has_total."""
    count, split_size = call.causal_splits()
    num_digits, step = (1, call.chunk) if is_forward else (digit_count(call), call.tile("chunk_dq").tokens)
    chunks = empty_chunks(call, num_digits, step)
    call.start(
        ("scan", is_forward, has_total),
        chunk_scan_kernel,
        (k, v, mask, bounds, parameters, before, total, *chunks),
        lambda: (
            "scan",
            (count * call.settings.parts, call.samples * call.kv_heads),
            (
                *(call.num_queries, call.kv_heads, split_size),
                *(*strides(k), *strides(v)),
                *parameter_row(call.kv_heads, parameters),
                call.scalars[1],
            ),
            {
                **{"CHUNK": call.chunk, "STEP": step, "DIGITS": num_digits},
                **{"HAS_TOTAL": has_total, "HAS_CHECK": is_forward},
            },
        ),
    )
    return chunks


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    inverse: Tensor,
    dtotal: Tensor | None,
    parameters: Tensor,
    layout: TokenLayout,
    before: Tensor,
    log_decay: None,
    is_learned: bool,
    moves_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, None]:
    """Run the backward pass; arguments and results are those of causal_launch.backward."""
    _, _, _, _, mask, bounds = layout.pointers(q)
    group, digits = call.group, digit_count(call)
    count, split_size = call.causal_splits()
    kind_of_dout = (dout.stride(), dout.data_ptr() % 16, is_learned)
    constants: dict[str, object] = {"CHUNK": call.chunk, "DIGITS": digits, "GROUPED": group > 1, "LEARNED": is_learned}
    drop = torch.empty_like(inverse)
    tiles = {kernel: -(-call.num_queries // call.tile(kernel).tokens) for kernel in ("chunk_dq", "chunk_dk", "chunk_dv")}
    dquery = dkey = drop
    if is_learned:
        dquery, dkey = (
            torch.empty((tiles[kernel], call.samples, heads, 2, call.head_dim), dtype=torch.float32, device=call.device)
            for kernel, heads in (("chunk_dq", call.heads), ("chunk_dk", call.kv_heads))
        )
    chunks = scan(call, k, v, parameters, mask, bounds, before, before, is_forward=False)
    dq = torch.empty(q.shape, dtype=q.dtype, device=call.device)
    call.start(
        ("chunk dq", kind_of_dout),
        chunk_dq_kernel,
        (q, k, v, out, dout, inverse, mask, bounds, parameters, *chunks, dq, drop, dquery),
        lambda: (
            "chunk_dq",
            (tiles["chunk_dq"], call.samples * call.heads),
            (
                *(call.num_rows, call.num_queries, call.heads, group),
                *(*strides(q), *strides(k), *strides(v), *strides(out), *strides(dout), *strides(dq)),
                *parameter_layout(call, parameters),
                *call.scalars,
            ),
            constants | {"BK": keys_at_once(call, "chunk_dq")},
        ),
    )
    if count > 1:
        by_query = sum_gradients(
            *(call, q, dout, parameters, layout, before, before, inverse, drop, kind_of_dout, count, split_size),
            kernel="causal_dsums",
        )
        after = by_query if group == 1 else by_query.unflatten(1, (-1, group)).sum(2)
        dinitial = prefix(call.launches, after, dtotal, reverse=True)
    else:
        after = call.sums(1, call.kv_heads).zero_() if dtotal is None else dtotal.reshape(1, *dtotal.shape)
        dinitial = torch.empty_like(after[0]) if moves_initial else after[0]
    has_total = count == 1 and moves_initial
    # their gradients reuse the memory of the chunks: less at the peak
    call.start(
        ("scan back", kind_of_dout, has_total, after.data_ptr() % 16),
        chunk_scan_back_kernel,
        (q, dout, inverse, drop, bounds, parameters, after, dinitial, *chunks),
        lambda: (
            "scan_back",
            (count * call.settings.parts, call.samples * call.kv_heads),
            (
                *(call.num_rows, call.num_queries, call.kv_heads, group, split_size),
                *(*strides(q), *strides(dout)),
                *parameter_row(call.heads, parameters),
                *call.scalars[:2],
            ),
            constants | {"HAS_TOTAL": has_total},
        ),
    )
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=call.device) for x in (k, v))

    def describe(which: str) -> tuple[str, tuple[int, ...], tuple[float, ...], dict[str, object]]:
        return (
            TILES_OF_KEYS[which],
            (tiles[TILES_OF_KEYS[which]], call.samples * call.kv_heads),
            (
                *(call.num_rows, call.num_queries, call.kv_heads, group),
                *(*strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk), *strides(dv)),
                *parameter_layout(call, parameters),
                *call.scalars[:2],
            ),
            constants | {"WHICH": which},
        )

    for which in TILES_OF_KEYS:
        call.start(
            ("chunk dk", which, kind_of_dout),
            chunk_dk_kernel,
            (q, k, v, dout, inverse, drop, mask, bounds, parameters, *chunks, dk, dv, dkey),
            partial(describe, which),
        )
    if not is_learned:
        return dq, dk, dv, dinitial, None, None, None
    return dq, dk, dv, dinitial, dquery.sum((0, 1)), dkey.sum((0, 1)), None


def parameter_layout(call: Call, parameters: Tensor) -> tuple[int, ...]:
    """Return query and key heads per row of parameters, and the length of a row."""
    query_group, num_params = parameter_row(call.heads, parameters)
    return query_group, parameter_row(call.kv_heads, parameters)[0], num_params
