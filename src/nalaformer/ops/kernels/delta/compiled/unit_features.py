"""Compute features of length one, as the delta rules need them: the map of common/compiled/maps.py, divided by its length."""

import triton
import triton.language as tl

from ...common.compiled.fastmath import rsqrt
from ...common.compiled.map_gradients import phi_key_gradient, phi_query_gradient
from ...common.compiled.maps import phi_key, phi_query


@triton.jit
def unit_parts(
    x,
    ok,
    param_ptr,
    channels,
    norm_scale,
    alpha,
    D: tl.constexpr,
    MAP: tl.constexpr,
    CUBE: tl.constexpr,
    IS_QUERY: tl.constexpr,
    PARTS: tl.constexpr,
    smallest,
):
    """Return the halves of the features, and 1 / their length."""
    if IS_QUERY:
        a, b, log_scale = phi_query(x, param_ptr, channels, norm_scale, alpha, D, MAP, 0)
    else:
        a, b = phi_key(x, ok, param_ptr, channels, 0.0, alpha, D, MAP, CUBE)
    size = tl.sum(a * a, axis=1)
    if PARTS == 2:
        size += tl.sum(b * b, axis=1)
    return a, b, rsqrt(size + smallest * smallest)[:, None]


@triton.jit
def unit_features_kernel(
    x_ptr,  # [R, D] rows of the given stride
    param_ptr,  # one row
    out_ptr,  # [R, PARTS * D] side by side
    rows,
    x_row,
    norm_scale,
    alpha,
    smallest,  # length below which features go to zero
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    MAP: tl.constexpr,
    CUBE: tl.constexpr,
    IS_QUERY: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    channels = tl.arange(0, BD)
    ok = row < rows
    inside = ok[:, None] & (channels < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    a, b, inverse = unit_parts(x, ok, param_ptr, channels, norm_scale, alpha, D, MAP, CUBE, IS_QUERY, PARTS, smallest)
    at = out_ptr + row[:, None] * (PARTS * D) + channels[None, :]
    tl.store(at, (a * inverse).to(out_ptr.dtype.element_ty), mask=inside)
    if PARTS == 2:
        tl.store(at + D, (b * inverse).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def unit_features_gradient_kernel(
    x_ptr,  # [R, D] rows of the given stride
    dout_ptr,  # [R, PARTS * D] side by side
    param_ptr,  # one row
    dx_ptr,  # [R, D] side by side
    rows,
    x_row,
    norm_scale,
    alpha,
    smallest,
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    MAP: tl.constexpr,
    CUBE: tl.constexpr,
    IS_QUERY: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    channels = tl.arange(0, BD)
    ok = row < rows
    inside = ok[:, None] & (channels < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    a, b, inverse = unit_parts(x, ok, param_ptr, channels, norm_scale, alpha, D, MAP, CUBE, IS_QUERY, PARTS, smallest)
    at = dout_ptr + row[:, None] * (PARTS * D) + channels[None, :]
    da = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    # only the part of the gradient across the direction of the features remains
    a *= inverse
    along = tl.sum(da * a, axis=1)
    db = da
    if PARTS == 2:
        db = tl.load(at + D, mask=inside, other=0.0).to(tl.float32)
        b *= inverse
        along += tl.sum(db * b, axis=1)
    da = (da - a * along[:, None]) * inverse
    if PARTS == 2:
        db = (db - b * along[:, None]) * inverse
    if IS_QUERY:
        dx, g0, g1 = phi_query_gradient(x, da, db, param_ptr, channels, norm_scale, alpha, D, MAP, 0)
    else:
        dx, g0, g1 = phi_key_gradient(x, da, db, param_ptr, channels, 0.0, alpha, D, MAP, CUBE)
    tl.store(dx_ptr + row[:, None] * D + channels[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
