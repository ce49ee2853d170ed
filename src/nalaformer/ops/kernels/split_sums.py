"""What becomes of the sums [splits, rows, PARTS, D, V + 2] of single stretches: their total, or what comes before each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fastmath import exp2
from .start import Launches, start

MERGE_AT_ONCE = 16  # stretches whose numbers are on their way together, at most
MERGE_BLOCK = 128  # numbers of a program
PREFIX_BLOCK = 512


@triton.jit
def merge_kernel(
    sums_ptr,  # [splits, rows * group, E]
    scale_ptr,  # [splits, rows]: log2 of what was divided out of the sums (GUARD)
    total_ptr,  # [rows, E]
    total_scale_ptr,  # [rows]
    splits,
    group,
    elements,  # E
    V: tl.constexpr,
    GUARD: tl.constexpr,
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
        # unrolled: one load after the other would wait for each
        for step in tl.static_range(AT_ONCE):
            split = (first + step) // group
            place = (tl.cast(split, tl.int64) * rows + row) * group + (first + step) % group
            own = tl.load(
                sums_ptr + place * elements + offsets, mask=offsets < tl.where(split < splits, elements, 0), other=0.0
            )
            if GUARD:
                keep = exp2(tl.load(scale_ptr + tl.minimum(split, splits - 1) * rows + row) - largest)
                # the number of keys is not scaled
                own *= tl.where(offsets % (V + 2) == V + 1, 1.0, keep)
            total += own
    tl.store(total_ptr + tl.cast(row, tl.int64) * elements + offsets, total, mask=offsets < elements)
    if GUARD and tl.program_id(0) == 0:
        tl.store(total_scale_ptr + row, largest)


def merge(launches: Launches, sums: Tensor, *, group: int = 1) -> Tensor:
    """Everything together: [rows / group, PARTS, D, V + 2]; `group` rows side by side become one."""
    if len(sums) * group == 1:
        return sums[0]
    total = sums.new_empty((sums.shape[1] // group, *sums.shape[2:]))
    start_merge(launches, sums, sums, total, total, group=group, is_guarded=False)
    return total


def merge_scaled(launches: Launches, sums: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Everything together, and its scale: the largest of the splits."""
    if len(sums) == 1:
        return sums[0], scale[0]
    total, largest = torch.empty_like(sums[0]), torch.empty_like(scale[0])
    start_merge(launches, sums, scale, total, largest, group=1, is_guarded=True)
    return total, largest


def start_merge(
    launches: Launches, sums: Tensor, scale: Tensor, total: Tensor, largest: Tensor, *, group: int, is_guarded: bool
) -> None:
    elements = total[0].numel()
    at_once = min(MERGE_AT_ONCE, triton.next_power_of_2(len(sums) * group))
    start(
        launches,
        ("merge", sums.shape, group, is_guarded, sums.device),
        merge_kernel,
        (sums, scale, total, largest),
        lambda: (
            (triton.cdiv(elements, MERGE_BLOCK), len(total)),
            (len(sums), group, elements),
            {"V": sums.shape[-1] - 2, "GUARD": is_guarded, "AT_ONCE": at_once, "BLOCK": MERGE_BLOCK},
        ),
    )


@triton.jit
def prefix_kernel(
    sums_ptr,  # [splits, rows, E] -> the sums before (REVERSE: after) each split, in place
    initial_ptr,  # [rows, E] what comes before all of them
    total_ptr,  # [rows, E] everything together
    splits,
    elements,  # rows * E
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
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
        running += own
    tl.store(total_ptr + offsets, running, mask=ok)


def prefix(launches: Launches, sums: Tensor, initial: Tensor | None, *, reverse: bool) -> Tensor:
    """Turns sums [splits, rows, ...] into those before (or after) each split, in place; returns the sum of all."""
    total = torch.empty_like(sums[0])
    start_of = sums if initial is None else initial
    start(
        launches,
        ("prefix", sums.shape, initial is None, start_of.data_ptr() % 16, reverse, sums.device),
        prefix_kernel,
        (sums, start_of, total),
        lambda: (
            (triton.cdiv(total.numel(), PREFIX_BLOCK),),
            (sums.shape[0], total.numel()),
            {"BLOCK": PREFIX_BLOCK, "REVERSE": reverse, "HAS_INITIAL": initial is not None},
        ),
    )
    return total
