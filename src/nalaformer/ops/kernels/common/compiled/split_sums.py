"""Add the sums [splits, rows, PARTS, D, V + 2] of single splits: to their total, or to the sum before each split."""

import triton
import triton.language as tl

from .fastmath import exp2


@triton.jit
def merge_kernel(
    sums_ptr,  # [splits, rows * group, E]
    scale_ptr,  # [splits, rows]: log2 of the factor that was divided out of the sums (GUARD)
    total_ptr,  # [rows, E]
    total_scale_ptr,  # [rows]
    splits,
    group,
    elements,  # E
    V: tl.constexpr,
    GUARD: tl.constexpr,
    COUNTS_WEIGHTS: tl.constexpr,  # the count is the sum of the weights of keys, scaled as the sums are
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    rows = tl.num_programs(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    largest = 0.0
    if GUARD:
        for split in range(0, splits):
            largest = tl.maximum(largest, tl.load(scale_ptr + split * rows + row))
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, splits * group, AT_ONCE):
        # unrolled: a loop would wait for each load
        for step in tl.static_range(AT_ONCE):
            split = (first + step) // group
            place = (tl.cast(split, tl.int64) * rows + row) * group + (first + step) % group
            own = tl.load(
                sums_ptr + place * elements + offsets, mask=offsets < tl.where(split < splits, elements, 0), other=0.0
            )
            if GUARD:
                keep = exp2(tl.load(scale_ptr + tl.minimum(split, splits - 1) * rows + row) - largest)
                # the number of keys is not scaled
                own *= keep if COUNTS_WEIGHTS else tl.where(offsets % (V + 2) == V + 1, 1.0, keep)
            total += own
    tl.store(total_ptr + tl.cast(row, tl.int64) * elements + offsets, total, mask=offsets < elements)
    if GUARD and tl.program_id(0) == 0:
        tl.store(total_scale_ptr + row, largest)


@triton.jit
def prefix_kernel(
    sums_ptr,  # [splits, rows, E] -> the sums before (REVERSE: after) each split, in place
    initial_ptr,  # [rows, E]: the sums before all splits
    total_ptr,  # [rows, E]: the total
    keep_ptr,  # [splits, rows]: decay of the earlier sums over each split, which spares the last of V + 2 columns (HAS_DECAY)
    splits,
    elements,  # rows * E
    per_row,  # E
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_DECAY: tl.constexpr,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = offsets < elements
    running = tl.zeros([BLOCK], tl.float32)
    if HAS_INITIAL:
        running += tl.load(initial_ptr + offsets, mask=ok, other=0.0)
    for step in range(0, splits):
        split = splits - 1 - step if REVERSE else step
        place = sums_ptr + tl.cast(split, tl.int64) * elements + offsets
        own = tl.load(place, mask=ok, other=0.0)
        tl.store(place, running, mask=ok)
        if HAS_DECAY:
            keep = tl.load(keep_ptr + split * (elements // per_row) + offsets // per_row, mask=ok, other=0.0)
            # the number of keys does not decay
            running *= tl.where(offsets % (V + 2) == V + 1, 1.0, keep)
        running += own
    tl.store(total_ptr + offsets, running, mask=ok)
