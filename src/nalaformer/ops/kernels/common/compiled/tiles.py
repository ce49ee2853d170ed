"""Read and write the rows of a tile, the values per row, the sums of a head, and rotary positions.

linear/compiled/bidirectional.py describes the layout of the sums.
"""

import triton
import triton.language as tl

from .row_maps import from_pairs, minus_and_plus, swap_pairs, to_pairs


@triton.jit
def row_strides(stride_batch, stride_row, stride_head, LENGTH: tl.constexpr):
    """Return the strides of rows of LENGTH elements as multiples of eight, where LENGTH is such a multiple but not of sixteen.

    Triton detects multiples of sixteen alone and would read such rows one element at a time; launch.readable ensures the rule.
    """
    if LENGTH % 16 == 8:
        stride_batch, stride_row, stride_head = stride_batch // 8 * 8, stride_row // 8 * 8, stride_head // 8 * 8
    return stride_batch, stride_row, stride_head


@triton.jit
def load_rows(
    ptr,  # first row of the sample and head
    first,  # index of the first row
    rows,  # [BN] offsets from it
    ok,  # [BN] True if the row exists and is visible
    columns,  # [BC]
    in_row,  # [BC]
    stride,
):
    # the part of the offset that can exceed 2^31 stays in a 64-bit scalar
    places = ptr + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    return tl.load(places, mask=ok[:, None] & in_row[None, :], other=0.0)


@triton.jit
def store_rows(ptr, value, first, rows, ok, columns, in_row, stride):
    base = ptr + tl.cast(first, tl.int64) * stride
    tl.store(
        base + rows[:, None] * stride + columns[None, :],
        value.to(ptr.dtype.element_ty),
        mask=ok[:, None] & in_row[None, :],
    )


@triton.jit
def store_per_row(ptr, value, first, rows, ok):
    """Store one value per row: value [BN, 1]."""
    tl.store(ptr + tl.cast(first, tl.int64) + rows, tl.reshape(value, [value.shape[0]]), mask=ok)


@triton.jit
def load_per_row(ptr, first, rows, ok):
    return tl.load(ptr + tl.cast(first, tl.int64) + rows, mask=ok, other=0.0)[:, None]


@triton.jit
def place_per_row(sample, head, heads, first_row, num_rows, PACKED: tl.constexpr):
    """Return the offset of the values of a sample and head in [B, H, N], or in [H, T] if packed; tokens lie side by side."""
    place = (tl.cast(sample, tl.int64) * heads + head) * num_rows
    if PACKED:
        place = tl.cast(head, tl.int64) * num_rows + first_row
    return place


@triton.jit
def sample_rows(cu_ptr, sample, num_tokens, PACKED: tl.constexpr):
    """Return the first row of a sample among packed ones, 0 if each has its own, and its number of tokens."""
    row = tl.cast(sample, tl.int64) * 0
    length = num_tokens
    if PACKED:
        row = tl.load(cu_ptr + sample).to(tl.int64)
        length = (tl.load(cu_ptr + sample + 1) - tl.load(cu_ptr + sample)).to(tl.int32)
    return row, length


@triton.jit
def sample_offset(sample, row, stride_batch, stride_row, PACKED: tl.constexpr):
    """Return the offset of the rows of a sample in [B, N, H, D], or in [T, H, D] if packed."""
    offset = tl.cast(sample, tl.int64) * stride_batch
    if PACKED:
        offset = row * stride_row
    return offset


@triton.jit
def head_rows(ptr, sample, head, row, stride_batch, stride_row, stride_head, PACKED: tl.constexpr):
    """Return the pointer to the rows of a sample and head."""
    return ptr + (sample_offset(sample, row, stride_batch, stride_row, PACKED) + head * stride_head)


@triton.jit
def angle_rows(cos_ptr, sin_ptr, sample, row, stride_batch, PAIRS: tl.constexpr):
    """Return the pointers to the rotary tables of a sample."""
    offset = row * PAIRS + tl.cast(sample, tl.int64) * stride_batch
    return cos_ptr + offset, sin_ptr + offset


@triton.jit
def visible_rows(mask_ptr, first, rows, exists, HAS_MASK: tl.constexpr):
    ok = exists
    if HAS_MASK:
        ok = exists & (tl.load(mask_ptr + first + rows, mask=exists, other=0) != 0)
    return ok


@triton.jit
def stream_columns(x, columns, STREAM: tl.constexpr, V: tl.constexpr, STREAMS: tl.constexpr):
    """Return x [BN, BV] in the columns of one of two streams, 0 in the others."""
    if STREAMS == 2:
        mine = (columns >= STREAM * (V // STREAMS)) & (columns < (STREAM + 1) * (V // STREAMS))
        x = tl.where(mine[None, :], x, 0.0)
    return x


@triton.jit
def load_angles(cos_ptr, sin_ptr, first, rows, ok, PART: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAIRS: tl.constexpr):
    """Load cos and sin [BN, BD/2] for the channel pairs of one part of the features; PAIRS in a row of the table."""
    pairs = tl.arange(0, BD // 2)
    columns = (PART * (D // 2) + pairs) % PAIRS
    in_row = pairs < D // 2
    cos = load_rows(cos_ptr, first, rows, ok, columns, in_row, PAIRS)
    sin = load_rows(sin_ptr, first, rows, ok, columns, in_row, PAIRS)
    return cos, sin


@triton.jit
def rotate_pairs(x, cos, sin):
    """Rotate the channel pairs (2i, 2i+1) of x [BN, BD]; -sin rotates back."""
    pairs = to_pairs(x)
    return from_pairs(pairs * cos[:, :, None] + swap_pairs(pairs) * (sin[:, :, None] * minus_and_plus()))


@triton.jit
def rotate_features(
    x,
    cos_ptr,
    sin_ptr,
    first,
    rows,
    ok,
    PART: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    PAIRS: tl.constexpr,
    BACK: tl.constexpr,
):
    if PAIRS > 0:
        cos, sin = load_angles(cos_ptr, sin_ptr, first, rows, ok, PART, D, BD, PAIRS)
        x = rotate_pairs(x, cos, -sin) if BACK else rotate_pairs(x, cos, sin)
    return x


@triton.jit
def load_sums(ptr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):
    """Load S [BD, BV] and z [BD] of one part."""
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    in_head = channels < D
    offsets = channels[:, None] * (V + 2) + columns[None, :]
    s = tl.load(ptr + offsets, mask=in_head[:, None] & (columns < V)[None, :], other=0.0)
    z = tl.load(ptr + channels * (V + 2) + V, mask=in_head, other=0.0)
    return s, z


@triton.jit
def load_both_sums(ptr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr):
    """Load S of both parts and z of both; a single part is returned twice."""
    s_a, z_a = load_sums(ptr, D, V, BD, BV)
    s_b, z_b = s_a, z_a
    if PARTS == 2:
        s_b, z_b = load_sums(ptr + D * (V + 2), D, V, BD, BV)
    return s_a, s_b, z_a, z_b


@triton.jit
def load_sums_or_zeros(
    ptr,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    EXISTS: tl.constexpr,
):
    """Load the sums of both parts and the count; without sums return zeros and read nothing."""
    if EXISTS:
        s_a, s_b, z_a, z_b = load_both_sums(ptr, D, V, BD, BV, PARTS)
        count = tl.load(ptr + V + 1)
    else:
        s_a = tl.zeros([BD, BV], tl.float32)
        z_a = tl.zeros([BD], tl.float32)
        s_b, z_b = s_a, z_a
        count = tl.cast(0.0, tl.float32)
    return s_a, s_b, z_a, z_b, count


@triton.jit
def store_sums(ptr, s, z, count, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    in_head = channels < D
    tl.store(ptr + channels[:, None] * (V + 2) + columns[None, :], s, mask=in_head[:, None] & (columns < V)[None, :])
    tl.store(ptr + channels * (V + 2) + V, z, mask=in_head)
    tl.store(ptr + channels * (V + 2) + V + 1, tl.zeros_like(z) + count, mask=in_head)


@triton.jit
def store_both_sums(
    ptr,
    s_a,
    s_b,
    z_a,
    z_b,
    count,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
):
    store_sums(ptr, s_a, z_a, count, D, V, BD, BV)
    if PARTS == 2:
        store_sums(ptr + D * (V + 2), s_b, z_b, count, D, V, BD, BV)


@triton.jit
def program_index():
    """Return the index of a program: along the first axis of the grid, then the second."""
    return tl.cast(tl.program_id(0), tl.int64) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def sum_over_rows(g, ok, in_head):
    """Sum the existing rows of a tile to the gradient of a parameter per channel, [BD]."""
    return tl.sum(tl.where(ok[:, None] & in_head[None, :], g, 0.0), axis=0)


@triton.jit
def store_two_parameters(ptr, p0, p1, D: tl.constexpr, BD: tl.constexpr):
    channels = tl.arange(0, BD)
    tl.store(ptr + channels, p0, mask=channels < D)
    tl.store(ptr + D + channels, p1, mask=channels < D)
