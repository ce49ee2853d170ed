"""How far keys have faded, inside a tile of tokens; ops/fading.py has the formula.

Every factor is exp of a number <= 0, whatever the decays are: sums are seen from the end of what they sum over, and a query
reads them through what has faded since.
"""

import triton
import triton.language as tl


@triton.jit
def decay_of_tile(fade_ptr, first, rows, exists):
    """The running sum of the logarithms up to each row, [BN, 1], and that of the whole tile."""
    # a running sum of one column, [BN, 1], is what Triton 3.6 cannot compile
    faded = tl.cumsum(tl.load(fade_ptr + tl.cast(first, tl.int64) + rows, mask=exists, other=0.0), axis=0)
    # the last of the running sums, not another sum: rounded otherwise, it could lie above them
    return faded[:, None], tl.min(faded, axis=0)


@triton.jit
def pair_decay(faded, BN: tl.constexpr):
    """[BN, BN]: what is left of the column's key for the row's query; 1 for later keys, which nobody sees."""
    rows = tl.arange(0, BN)
    difference = faded - tl.trans(faded)
    return tl.exp(tl.where(rows[:, None] >= rows[None, :], difference, 0.0))
