"""Compute the linear branch of hybrid attention: queries see the sums over what left before their chunk.

Step r of the sequence has a group of queries and a chunk of tokens that leaves, and the queries come first: they see chunks
0 .. r - 1. Everything is one scan, "read the running sums, then add", with the roles of the tensors exchanged:

    way        reads with      adds                               gives
    forward    phi(q)          phi(k) v^T                         phi(q) . S, phi(q) . z
    forward    d out           v phi(k)^T                         d phi(q)
    backward   phi(k)          phi(q) (d out)^T                   d v
    backward   v               (d out) phi(q)^T                   d phi(k)

A program owns a split of steps, a sample, a head and some columns of its output; two launches compute the sums before each
split: the sums of splits and their prefix. They are float32 [F, V + 1], the key sum z as the last column.
"""

import triton
import triton.language as tl

from ...common.compiled.tiles import load_rows, store_rows


@triton.jit
def load_numbers(ptr, first, rows, ok, stride):
    """Load one value per row and head."""
    return tl.load(ptr + (tl.cast(first, tl.int64) + rows) * stride, mask=ok, other=0).to(tl.float32)


@triton.jit(do_not_specialize=["last_step", "split_size"])
def split_sums_kernel(
    inner_ptr,  # [B, steps * rows, H, I]
    outer_ptr,  # [B, steps * rows, H or K, O]
    number_ptr,  # [B, steps * rows, heads]: True if a row counts (COUNTS), or the factor of its part in z
    sums_ptr,  # [splits, B * H, I, O + 1] float32
    last_step,  # number of steps that add something
    split_size,
    heads,
    outer_heads,  # heads per head of outer
    number_heads,
    stride_ib,
    stride_i,
    stride_ih,
    stride_ob,
    stride_o,
    stride_oh,
    ROWS: tl.constexpr,  # rows of a step
    I: tl.constexpr,  # noqa: E741
    O: tl.constexpr,  # noqa: E741
    BI: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    COUNTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    owner = tl.cast(tl.program_id(1), tl.int64)
    sample = owner // heads
    head = tl.program_id(1) % heads
    inner_tiles = tl.cdiv(I, BI)
    inner = (tl.program_id(2) % inner_tiles) * BI + tl.arange(0, BI)
    outer = (tl.program_id(2) // inner_tiles) * BO + tl.arange(0, BO)
    rows = tl.arange(0, BN)
    inner_ptr += sample * stride_ib + head * stride_ih
    outer_ptr += sample * stride_ob + (head // outer_heads) * stride_oh
    lines = heads // number_heads
    number_ptr += sample * last_step * ROWS * lines + head // number_heads
    s = tl.zeros([BI, BO], tl.float32)
    z = tl.zeros([BI], tl.float32)
    # the rows of all steps of a split lie side by side
    start = tl.program_id(0) * split_size * ROWS
    stop = tl.minimum((tl.program_id(0) + 1) * split_size, last_step) * ROWS
    for first in range(start, stop, BN):
        ok = rows < stop - first
        number = load_numbers(number_ptr, first, rows, ok, lines)
        if COUNTS:
            ok = ok & (number != 0.0)
        x = load_rows(inner_ptr, first, rows, ok, inner, inner < I, stride_i)
        y = load_rows(outer_ptr, first, rows, ok, outer, outer < O, stride_o).to(DOT)
        z += tl.sum(x.to(tl.float32) if COUNTS else x.to(tl.float32) * number[:, None], axis=0)
        s = tl.dot(tl.trans(x.to(DOT)), y, s, input_precision=PRECISION)
    sums_ptr += (tl.program_id(0) * tl.num_programs(1) + owner) * (I * (O + 1))
    place = inner[:, None] * (O + 1) + outer[None, :]
    tl.store(sums_ptr + place, s, mask=(inner < I)[:, None] & (outer < O)[None, :])
    if tl.program_id(2) // inner_tiles == 0:
        tl.store(sums_ptr + inner * (O + 1) + O, z, mask=inner < I)


@triton.jit(do_not_specialize=["steps", "split_size", "read_steps", "add_steps"])
def linear_scan_kernel(
    read_ptr,  # [B, read_steps * READ_ROWS, heads, I]
    inner_ptr,  # [B, add_steps * ADD_ROWS, heads, I]
    outer_ptr,  # [B, add_steps * ADD_ROWS, heads, O]
    counts_ptr,  # [B, steps of chunks * rows, heads] bool: mask of what is added, with BACK of what is read
    dtotal_ptr,  # [B, steps of groups * rows, H] float32; only with RANK_ONE
    sums_ptr,  # [splits, B * H, F, V + 1] float32: before the split, with BACK after it
    out_ptr,  # [B, read_steps * READ_ROWS, H, O]
    total_ptr,  # [B, read_steps * READ_ROWS, H] float32; only with TOTAL
    steps,
    split_size,
    read_steps,
    add_steps,
    heads,
    read_heads,  # heads per head of read, ...
    inner_heads,
    outer_heads,
    counts_heads,
    stride_rb,
    stride_r,
    stride_rh,
    stride_ib,
    stride_i,
    stride_ih,
    stride_ob,
    stride_o,
    stride_oh,
    READ_ROWS: tl.constexpr,
    ADD_ROWS: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    O: tl.constexpr,  # noqa: E741
    BI: tl.constexpr,
    BO: tl.constexpr,
    BR: tl.constexpr,
    BA: tl.constexpr,
    INNER_IS_VALUE: tl.constexpr,  # the sums are read transposed
    TOTAL: tl.constexpr,
    RANK_ONE: tl.constexpr,
    BACK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    owner = tl.cast(tl.program_id(1), tl.int64)
    sample = owner // heads
    head = tl.program_id(1) % heads
    inner = tl.arange(0, BI)
    outer = tl.program_id(2) * BO + tl.arange(0, BO)
    read_rows = tl.arange(0, BR)
    add_rows = tl.arange(0, BA)
    read_ptr += sample * stride_rb + (head // read_heads) * stride_rh
    inner_ptr += sample * stride_ib + (head // inner_heads) * stride_ih
    outer_ptr += sample * stride_ob + (head // outer_heads) * stride_oh
    lines = heads // counts_heads
    counts_ptr += head // counts_heads
    dtotal_ptr += head
    if BACK:
        counts_ptr += sample * read_steps * READ_ROWS * lines
        dtotal_ptr += sample * add_steps * ADD_ROWS * heads
    else:
        counts_ptr += sample * add_steps * ADD_ROWS * lines
        dtotal_ptr += sample * read_steps * READ_ROWS * heads
    line = sample * read_steps * READ_ROWS * heads + head
    out_ptr += line * O
    total_ptr += line

    sums_ptr += (tl.program_id(0) * tl.num_programs(1) + owner) * ((I + 1) * O if INNER_IS_VALUE else I * (O + 1))
    inside = (inner < I)[:, None] & (outer < O)[None, :]
    z = tl.zeros([BI], tl.float32)
    u = tl.zeros([BO], tl.float32)
    if INNER_IS_VALUE:
        s = tl.load(sums_ptr + outer[None, :] * (I + 1) + inner[:, None], mask=inside, other=0.0)
        u = tl.load(sums_ptr + outer * (I + 1) + I, mask=outer < O, other=0.0)
    else:
        s = tl.load(sums_ptr + inner[:, None] * (O + 1) + outer[None, :], mask=inside, other=0.0)
        z = tl.load(sums_ptr + inner * (O + 1) + O, mask=inner < I, other=0.0)

    start = tl.program_id(0) * split_size
    stop = tl.minimum(start + split_size, steps)
    for count in range(0, stop - start):
        step = stop - 1 - count if BACK else start + count
        for part in tl.static_range((READ_ROWS + BR - 1) // BR):
            first = step * READ_ROWS + part * BR
            ok = part * BR + read_rows < tl.minimum(read_steps - step, 1) * READ_ROWS
            x = load_rows(read_ptr, first, read_rows, ok, inner, inner < I, stride_r)
            y = tl.dot(x.to(DOT), s.to(DOT), input_precision=PRECISION)
            if TOTAL:
                total = tl.sum(x.to(tl.float32) * z[None, :], axis=1)
                place = total_ptr + (tl.cast(first, tl.int64) + read_rows) * heads
                tl.store(place, total, mask=ok & (tl.program_id(2) * BR + read_rows < BR))
            if RANK_ONE:
                if BACK:
                    y += u[None, :]
                else:
                    y += load_numbers(dtotal_ptr, first, read_rows, ok, heads)[:, None] * u[None, :]
            if BACK:
                y = tl.where((load_numbers(counts_ptr, first, read_rows, ok, lines) != 0.0)[:, None], y, 0.0)
            store_rows(out_ptr, y, first, read_rows, ok, outer, outer < O, heads * O)
        for part in tl.static_range((ADD_ROWS + BA - 1) // BA):
            first = step * ADD_ROWS + part * BA
            ok = part * BA + add_rows < tl.minimum(add_steps - step, 1) * ADD_ROWS
            if not BACK:
                ok = ok & (load_numbers(counts_ptr, first, add_rows, ok, lines) != 0.0)
            x = load_rows(inner_ptr, first, add_rows, ok, inner, inner < I, stride_i)
            y = load_rows(outer_ptr, first, add_rows, ok, outer, outer < O, stride_o)
            if TOTAL:
                z += tl.sum(x.to(tl.float32), axis=0)
            if RANK_ONE:
                if BACK:
                    u += tl.sum(y.to(tl.float32) * load_numbers(dtotal_ptr, first, add_rows, ok, heads)[:, None], axis=0)
                else:
                    u += tl.sum(y.to(tl.float32), axis=0)
            s = tl.dot(tl.trans(x.to(DOT)), y.to(DOT), s, input_precision=PRECISION)
