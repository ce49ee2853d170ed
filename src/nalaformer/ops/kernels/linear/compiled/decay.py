"""Compute the decay of keys inside a tile of tokens; ops/decay.py has the formula.

Every factor is exp of a number <= 0, whatever the decays are: sums are decayed to the end of the tokens that they add up, and a
query reads them with the decay since then.
"""

import triton
import triton.language as tl


@triton.jit
def tile_decay(log_decay_ptr, first, rows, exists):
    """Return the running sum of log_decay up to each row, [BN, 1], and over the whole tile."""
    # a running sum of one column, [BN, 1], is what Triton 3.6 cannot compile
    decay_sum = tl.cumsum(tl.load(log_decay_ptr + tl.cast(first, tl.int64) + rows, mask=exists, other=0.0), axis=0)
    # the last of the running sums instead of another sum, whose rounding could place it above them
    return decay_sum[:, None], tl.min(decay_sum, axis=0)


@triton.jit
def pair_decay(decay_sum, BN: tl.constexpr):
    """Return [BN, BN]: the decay from the column's key to the row's query; 1 for later keys, which are masked."""
    rows = tl.arange(0, BN)
    difference = decay_sum - tl.trans(decay_sum)
    return tl.exp(tl.where(rows[:, None] >= rows[None, :], difference, 0.0))
