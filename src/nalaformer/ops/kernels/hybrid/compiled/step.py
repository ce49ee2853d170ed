"""Compute one token of hybrid attention in two launches: softmax over splits of window and store, then the merge.

The first writes the token's key and value into the window as it passes by, and attends; programs share the places of a head,
since heads alone would leave most of a GPU idle. The second computes the query's features, reads the linear state, merges, and
counts the token. Shapes never change and nothing is read back, so a CUDA graph can hold the step.
"""

import triton
import triton.language as tl

SMALLEST_NORM = tl.constexpr(1e-5)  # as in nalaformer.feature_maps.norm_preserving


@triton.jit
def product(a, b, HALF: tl.constexpr):
    """Return a . b for float32 a, and b of 16 bits where HALF; a is split into digits so that nothing of it is lost."""
    if HALF:
        high = a.to(b.dtype)
        return tl.dot(high, b) + tl.dot((a - high.to(tl.float32)).to(b.dtype), b)
    return tl.dot(a, b.to(tl.float32), input_precision="ieee")


@triton.jit
def split_kernel(
    q_ptr,  # [B, 1, H, D]
    k_ptr,  # [B, 1, K, D]
    v_ptr,  # [B, 1, K, V]
    keys_ptr,  # [B, S, A, D], window and store
    values_ptr,  # [B, S, A, V]
    count_ptr,  # [B] int64, tokens before this one
    is_poisoned_ptr,  # [B] bool
    max_ptr,  # [B, H, P]
    total_ptr,  # [B, H, P]
    weighted_ptr,  # [B, H, P, V]
    share_ptr,  # [B, H] float32, the factor of the linear sums
    store_heads,
    repeats,  # S / K
    places,  # A
    splits,  # P
    tiles,  # tiles of a split
    chunk_size,
    salient_per_chunk,
    largest_store,
    linear_mass,
    scale,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    G: tl.constexpr,  # H / S
    D: tl.constexpr,
    V: tl.constexpr,
    BG: tl.constexpr,
    BA: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    HALF: tl.constexpr,  # q, keys and values have the same type of 16 bits
):
    owner = tl.cast(tl.program_id(0), tl.int64)
    split = tl.program_id(1)
    sample = owner // store_heads
    head = owner % store_heads
    member = tl.arange(0, BG)
    channel = tl.arange(0, BD)
    column = tl.arange(0, BV)

    count = tl.load(count_ptr + sample)
    chunk = count // chunk_size
    slot = chunk_size + count % chunk_size
    first = chunk_size - chunk * chunk_size
    end = 2 * chunk_size + (chunk - 1) * salient_per_chunk

    is_member = member < G
    in_head = channel < D
    in_value = column < V
    row = q_ptr + sample * stride_qb + (head * G + member)[:, None] * stride_qh + channel[None, :]
    q = tl.load(row, mask=is_member[:, None] & in_head[None, :], other=0.0)

    # the first program attends to the new token and stores it, and no program reads its place
    key_head = head // repeats
    new_key = tl.load(k_ptr + sample * stride_kb + key_head * stride_kh + channel, mask=in_head, other=0.0)
    new_value = tl.load(v_ptr + sample * stride_vb + key_head * stride_vh + column, mask=in_value, other=0.0)
    keys_ptr += owner * places * D
    values_ptr += owner * places * V
    if split == 0:
        tl.store(keys_ptr + slot * D + channel, new_key.to(keys_ptr.dtype.element_ty), mask=in_head)
        tl.store(values_ptr + slot * V + column, new_value.to(values_ptr.dtype.element_ty), mask=in_value)
        # written here: the other kernel changes the count, so none of its programs may read it
        older = tl.maximum(chunk - 1, 0)
        summed = older * chunk_size - tl.minimum(older * salient_per_chunk, largest_store)
        share = tl.minimum(linear_mass / tl.maximum(summed, 1).to(tl.float32), 1.0)
        tl.store(share_ptr + owner * G + member, share + tl.zeros([BG], tl.float32), mask=is_member)
    own = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
    # the whole row becomes NaN
    own = tl.where(tl.load(is_poisoned_ptr + sample) != 0, float("nan"), own)
    row_max = tl.where(split == 0, own, -float("inf"))
    total = tl.where(split == 0, 1.0, 0.0) + tl.zeros([BG], tl.float32)
    weighted = tl.where(split == 0, new_value.to(tl.float32)[None, :] + tl.zeros([BG, BV], tl.float32), 0.0)

    for tile in range(0, tiles):
        place = (split * tiles + tile) * BA + tl.arange(0, BA)
        near = (place < slot) & (place >= first)
        visible = near | ((place >= 2 * chunk_size) & (place < end) & (place < places))
        at = place.to(tl.int64)
        key = tl.load(keys_ptr + at[None, :] * D + channel[:, None], mask=in_head[:, None] & visible[None, :], other=0.0)
        value = tl.load(values_ptr + at[:, None] * V + column[None, :], mask=visible[:, None] & in_value[None, :], other=0.0)
        if HALF:
            logits = tl.dot(q, key)
        else:
            logits = tl.dot(q.to(tl.float32), key.to(tl.float32), input_precision="ieee")
        logits = tl.where(visible[None, :], logits * scale, -float("inf"))
        higher = tl.maximum(row_max, tl.max(logits, axis=1))
        top = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(logits - top[:, None])
        keep = tl.exp(row_max - top)
        total = total * keep + tl.sum(weights, axis=1)
        weighted = weighted * keep[:, None] + product(weights, value, HALF)
        row_max = higher

    part = (owner * G + member) * splits + split
    tl.store(max_ptr + part, row_max, mask=is_member)
    tl.store(total_ptr + part, total, mask=is_member)
    tl.store(weighted_ptr + part[:, None] * V + column[None, :], weighted, mask=is_member[:, None] & in_value[None, :])


@triton.jit
def read_out(
    features,  # [BF]
    state_ptr,  # [F, V] of these features
    sum_ptr,  # [F]
    size,  # F
    V: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
):
    feature = tl.arange(0, BF)
    column = tl.arange(0, BV)
    at = state_ptr + feature[:, None] * V + column[None, :]
    state = tl.load(at, mask=(feature < size)[:, None] & (column < V)[None, :], other=0.0)
    key_sum = tl.load(sum_ptr + feature, mask=feature < size, other=0.0)
    return tl.sum(features[:, None] * state, axis=0), tl.sum(features * key_sum, axis=0)


@triton.jit
def softmax(x, inside):
    x = tl.where(inside, x, -float("inf"))
    x = tl.exp(x - tl.max(x, axis=0))
    return x / tl.sum(x, axis=0)


@triton.jit
def join_kernel(
    max_ptr,  # [B, H, P]
    total_ptr,  # [B, H, P]
    weighted_ptr,  # [B, H, P, V]
    share_ptr,  # [B, H] float32
    q_ptr,  # [B, 1, H, D]
    matrix_ptr,  # [H, D, D]; read with HAS_MATRIX
    features_ptr,  # [B, 1, H, F]; read without HAS_MATRIX
    state_ptr,  # [B, H, F, V]
    sum_ptr,  # [B, H, F]
    gate_ptr,  # [B, 1, H, V or 1]
    count_ptr,  # [B] int64
    out_ptr,  # [B, 1, H, V]
    heads,
    splits,
    features,  # F
    eps,
    stride_qb,
    stride_qh,
    stride_gb,
    stride_gh,
    stride_gv,  # 0: one gate for a head
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
    LINEAR: tl.constexpr,
    HAS_MATRIX: tl.constexpr,
    GATED: tl.constexpr,
    EXACT: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64)
    sample = row // heads
    head = row % heads
    column = tl.arange(0, BV)
    split = tl.arange(0, BP)

    part = row * splits + split
    part_max = tl.load(max_ptr + part, mask=split < splits, other=-float("inf"))
    part_total = tl.load(total_ptr + part, mask=split < splits, other=0.0)
    at = weighted_ptr + part[:, None] * V + column[None, :]
    part_weighted = tl.load(at, mask=(split < splits)[:, None] & (column < V)[None, :], other=0.0)
    row_max = tl.max(part_max, axis=0)
    # every token sees itself; if its score is NaN, the totals are too
    row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
    share = tl.exp(part_max - row_max)
    total = tl.sum(share * part_total, axis=0)
    weighted = tl.sum(share[:, None] * part_weighted, axis=0)

    scale = 1.0
    if LINEAR:
        state_ptr += row * features * V
        sum_ptr += row * features
        linear_weighted = tl.zeros([BV], tl.float32)
        linear_total = 0.0
        if HAS_MATRIX:
            channel = tl.arange(0, BD)
            inside = channel < D
            q = tl.load(q_ptr + sample * stride_qb + head * stride_qh + channel, mask=inside, other=0.0).to(tl.float32)
            matrix_at = matrix_ptr + head * D * D + channel[:, None] * D + channel[None, :]
            matrix = tl.load(matrix_at, mask=inside[:, None] & inside[None, :], other=0.0)
            rotated = tl.sum(matrix * q[None, :], axis=1)
            length = tl.maximum(tl.sqrt(tl.sum(q * q, axis=0)), SMALLEST_NORM)
            rotated *= length / tl.maximum(tl.sqrt(tl.sum(rotated * rotated, axis=0)), SMALLEST_NORM)
            w_a, t_a = read_out(softmax(rotated, inside), state_ptr, sum_ptr, D, V, BD, BV)
            w_b, t_b = read_out(softmax(-rotated, inside), state_ptr + D * V, sum_ptr + D, D, V, BD, BV)
            linear_weighted = w_a + w_b
            linear_total = t_a + t_b
        else:
            feature = tl.arange(0, BF)
            for start in range(0, features, BF):
                some = tl.load(features_ptr + row * features + start + feature, mask=start + feature < features, other=0.0)
                w, t = read_out(some, state_ptr + start * V, sum_ptr + start, features - start, V, BF, BV)
                linear_weighted += w
                linear_total += t
        bound = tl.load(share_ptr + row)
        linear_weighted *= bound
        linear_total *= bound
        if GATED:
            gate_at = gate_ptr + sample * stride_gb + head * stride_gh + column * stride_gv
            linear_weighted *= tl.load(gate_at, mask=column < V, other=0.0).to(tl.float32)
        if EXACT:
            # relative to the larger of exp(row_max) and 1, so that neither factor overflows
            top = tl.maximum(row_max, 0.0)
            scale = tl.exp(row_max - top)
            linear_weighted *= tl.exp(-top)
            linear_total *= tl.exp(-top)
        total = total * scale + linear_total
        weighted = weighted * scale + linear_weighted
    out = weighted / (total + eps * scale)
    tl.store(out_ptr + row * V + column, out.to(out_ptr.dtype.element_ty), mask=column < V)
    # one program of each sample; no other program reads the count in this launch
    if head == 0:
        tl.store(count_ptr + sample, tl.load(count_ptr + sample) + 1)
