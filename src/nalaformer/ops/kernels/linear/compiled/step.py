"""Compute one token of recurrent attention: one launch reads the state, updates it in place and reads it out.

A program owns a sample and key head. Shapes never change and nothing is read back, so a CUDA graph can hold the step.
"""

import triton
import triton.language as tl

from ...common.compiled.fastmath import exp2
from ...common.compiled.maps import LN_2, LOG2_E, key_excess, phi_key, phi_query
from ...common.compiled.tiles import rotate_features
from .bidirectional import LARGEST_ROTATED_OUTPUT, scaled_eps


@triton.jit
def update(
    state_ptr,  # [D, V] of one part
    sum_ptr,  # [D]
    feature,  # [1, BD] without rotary
    rotated,  # [1, BD] with rotary
    v,  # [BV]
    keep,  # the factor of the old sums
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    places = state_ptr + channels[:, None] * V + columns[None, :]
    inside = (channels < D)[:, None] & (columns < V)[None, :]
    s = tl.load(places, mask=inside, other=0.0) * keep + tl.trans(rotated) * v[None, :]
    z = tl.load(sum_ptr + channels, mask=channels < D, other=0.0) * keep + tl.reshape(feature, [BD])
    # several warps read a tile smaller than them: all must have read before one of them writes
    tl.debug_barrier()
    tl.store(places, s, mask=inside)
    tl.store(sum_ptr + channels, z, mask=channels < D)
    return s, z


@triton.jit
def step_kernel(
    q_ptr,  # [B, 1, H, D]
    k_ptr,  # [B, 1, K, D]
    v_ptr,  # [B, 1, K, V]
    param_ptr,
    cos_q_ptr,  # [B or 1, 1, PAIRS]
    sin_q_ptr,
    cos_k_ptr,
    sin_k_ptr,
    state_ptr,  # [B, K, PARTS * D, V], float32
    sum_ptr,  # [B, K, PARTS * D]
    count_ptr,  # [B] int64, this token included
    scale_ptr,  # [B, K]
    log_decay_ptr,  # [B, K]: log_decay
    out_ptr,  # [B, 1, H, V]
    kv_heads,
    group,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_angle_q,
    stride_angle_k,
    query_param_group,
    key_param_group,
    num_params,
    norm_scale,
    alpha,
    eps,  # for true features
    log2_key_shift,
    D: tl.constexpr,
    V: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    MAP: tl.constexpr,
    PARTS: tl.constexpr,
    STREAMS: tl.constexpr,
    PAIRS: tl.constexpr,
    CUBE: tl.constexpr,
    GUARD: tl.constexpr,
    HAS_DECAY: tl.constexpr,
):
    owner = tl.cast(tl.program_id(0), tl.int64)
    sample = owner // kv_heads
    head = owner % kv_heads
    channels = tl.arange(0, BD)
    columns = tl.arange(0, BV)
    in_head = (channels < D)[None, :]
    row = tl.arange(0, 1)
    here = row == 0
    cos_q_ptr += sample * stride_angle_q
    sin_q_ptr += sample * stride_angle_q
    cos_k_ptr += sample * stride_angle_k
    sin_k_ptr += sample * stride_angle_k

    key_params = param_ptr + (head // key_param_group) * num_params
    x = tl.load(k_ptr + sample * stride_kb + head * stride_kh + channels[None, :], mask=in_head, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + sample * stride_vb + head * stride_vh + columns, mask=columns < V, other=0.0).to(tl.float32)
    log_scale = tl.load(scale_ptr + owner) * LOG2_E
    keep = 1.0
    if GUARD:
        larger = tl.maximum(log_scale, key_excess(x, key_params, channels, D, MAP))
        keep = exp2(log_scale - larger)
        log_scale = larger
        tl.debug_barrier()
        tl.store(scale_ptr + owner, log_scale * LN_2)
        ak, bk = phi_key(x, here, key_params, channels, log_scale, alpha, D, MAP, CUBE)
    else:
        ak, bk = phi_key(x, here, key_params, channels, 0.0, alpha, D, MAP, CUBE)
        true_size = exp2(log2_key_shift - log_scale)
        ak *= true_size
        bk *= true_size
    if HAS_DECAY:
        keep *= tl.exp(tl.load(log_decay_ptr + owner))
    rotated = rotate_features(ak, cos_k_ptr, sin_k_ptr, 0, row, here, 0, D, BD, PAIRS, False)
    state_ptr += owner * (PARTS * D * V)
    sum_ptr += owner * (PARTS * D)
    s_a, z_a = update(state_ptr, sum_ptr, ak, rotated, v, keep, D, V, BD, BV)
    s_b, z_b = s_a, z_a
    if PARTS == 2:
        rotated = rotate_features(bk, cos_k_ptr, sin_k_ptr, 0, row, here, 1, D, BD, PAIRS, False)
        s_b, z_b = update(state_ptr + D * V, sum_ptr + D, bk, rotated, v, keep, D, V, BD, BV)

    eps_count = eps
    if not HAS_DECAY:
        eps_count *= tl.load(count_ptr + sample).to(tl.float32)
    for member in range(0, group):
        query_head = head * group + member
        query_params = param_ptr + (query_head // query_param_group) * num_params
        place = q_ptr + sample * stride_qb + query_head * stride_qh
        y = tl.load(place + channels[None, :], mask=in_head, other=0.0).to(tl.float32)
        out = tl.zeros([BV], tl.float32)
        for stream in tl.static_range(STREAMS):
            aq, bq, query_scale = phi_query(y, query_params, channels, norm_scale, alpha, D, MAP, stream)
            total = tl.sum(tl.reshape(aq, [BD]) * z_a, axis=0)
            rotated = rotate_features(aq, cos_q_ptr, sin_q_ptr, 0, row, here, 0, D, BD, PAIRS, False)
            above = tl.sum(tl.trans(rotated) * s_a, axis=0)
            if PARTS == 2:
                total += tl.sum(tl.reshape(bq, [BD]) * z_b, axis=0)
                rotated = rotate_features(bq, cos_q_ptr, sin_q_ptr, 0, row, here, 1, D, BD, PAIRS, False)
                above += tl.sum(tl.trans(rotated) * s_b, axis=0)
            total += scaled_eps(tl.sum(query_scale), log_scale, eps_count)
            if GUARD and PAIRS > 0:
                total = tl.maximum(total, tl.max(tl.abs(above)) / LARGEST_ROTATED_OUTPUT)
            above = above / tl.where(total == 0.0, 1.0, total)
            mine = (columns >= stream * (V // STREAMS)) & (columns < (stream + 1) * (V // STREAMS))
            out = tl.where(mine, above, out)
        place = out_ptr + (sample * kv_heads * group + query_head) * V
        tl.store(place + columns, out.to(out_ptr.dtype.element_ty), mask=columns < V)
