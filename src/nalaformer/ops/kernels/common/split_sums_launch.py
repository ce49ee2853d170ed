"""Launch the kernels that add up the sums of single splits."""

import torch
import triton
from torch import Tensor

from .compiled.split_sums import merge_kernel, prefix_kernel
from .launch import Launches, start

MERGE_AT_ONCE = 16  # splits whose values are loaded together, at most
MERGE_BLOCK = 128  # values of a program
PREFIX_BLOCK = 512


def merge(launches: Launches, sums: Tensor, *, group: int = 1) -> Tensor:
    """Add up all splits: [rows / group, PARTS, D, V + 2]; `group` rows side by side become one."""
    if len(sums) * group == 1:
        return sums[0]
    total = sums.new_empty((sums.shape[1] // group, *sums.shape[2:]))
    start_merge(launches, sums, sums, total, total, group=group, is_guarded=False)
    return total


def merge_scaled(launches: Launches, sums: Tensor, scale: Tensor, *, counts_weights: bool = False) -> tuple[Tensor, Tensor]:
    """Add up all splits and return the scale, the largest of the splits. counts_weights: the last column is scaled too."""
    if len(sums) == 1:
        return sums[0], scale[0]
    total, largest = torch.empty_like(sums[0]), torch.empty_like(scale[0])
    start_merge(launches, sums, scale, total, largest, group=1, is_guarded=True, counts_weights=counts_weights)
    return total, largest


def start_merge(
    launches: Launches,
    sums: Tensor,
    scale: Tensor,
    total: Tensor,
    largest: Tensor,
    *,
    group: int,
    is_guarded: bool,
    counts_weights: bool = False,
) -> None:
    elements = total[0].numel()
    at_once = min(MERGE_AT_ONCE, triton.next_power_of_2(len(sums) * group))
    start(
        launches,
        ("merge", sums.shape, group, is_guarded, counts_weights, sums.device),
        merge_kernel,
        (sums, scale, total, largest),
        lambda: (
            (triton.cdiv(elements, MERGE_BLOCK), len(total)),
            (len(sums), group, elements),
            {
                "V": sums.shape[-1] - 2,
                "GUARD": is_guarded,
                "COUNTS_WEIGHTS": counts_weights,
                "AT_ONCE": at_once,
                "BLOCK": MERGE_BLOCK,
            },
        ),
    )


def prefix(launches: Launches, sums: Tensor, initial: Tensor | None, *, reverse: bool, decay: Tensor | None = None) -> Tensor:
    """Replace sums [splits, rows, ...] by those before (or after) each split, in place; return the sum of all.

    decay: [splits, rows], the factor by which each split reduces the sums before it.
    """
    total = torch.empty_like(sums[0])
    start_of = sums if initial is None else initial
    start(
        launches,
        ("prefix", sums.shape, initial is None, decay is None, start_of.data_ptr() % 16, reverse, sums.device),
        prefix_kernel,
        (sums, start_of, total, sums if decay is None else decay),
        lambda: (
            (triton.cdiv(total.numel(), PREFIX_BLOCK),),
            (sums.shape[0], total.numel(), total[0].numel()),
            {
                **{"V": sums.shape[-1] - 2, "BLOCK": PREFIX_BLOCK},
                **{"REVERSE": reverse, "HAS_INITIAL": initial is not None, "HAS_DECAY": decay is not None},
            },
        ),
    )
    return total
