"""The delta rule inside a piece of tokens and from piece to piece; delta_op.py has the formulas."""

import triton
import triton.language as tl


@triton.jit
def lower_inverse_kernel(
    a_ptr,  # [matrices, SIZE, SIZE] float32; read below the diagonal alone
    out_ptr,  # [matrices, SIZE, SIZE]
    SIZE: tl.constexpr,
):
    """(I + A)^-1 row by row: row i is that of I less the rows before it, weighted by A_i."""
    place = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    index = tl.arange(0, SIZE)
    inverse = (index[:, None] == index[None, :]).to(tl.float32)
    for row in range(1, SIZE):
        weights = tl.load(a_ptr + place + row * SIZE + index, mask=index < row, other=0.0)
        earlier = tl.sum(weights[:, None] * inverse, axis=0)
        inverse = tl.where(index[:, None] == row, inverse - earlier[None, :], inverse)
    at = place + index[:, None] * SIZE + index[None, :]
    tl.store(out_ptr + at, inverse.to(out_ptr.dtype.element_ty))


@triton.jit
def tile_of(x_ptr, rows, columns, width, is_column):
    """[rows, columns] of a matrix whose rows have `width` numbers."""
    return tl.load(x_ptr + rows[:, None] * width + columns[None, :], mask=is_column[None, :], other=0.0)


@triton.jit
def scan_kernel(
    u_ptr,  # [heads, pieces, SIZE, V]: the corrections without a state before; overwritten by those with it
    w_ptr,  # [heads, pieces, SIZE, F]
    k_ptr,  # [heads, pieces, SIZE, F]: keys, faded to the end of their piece
    fade_ptr,  # [heads, pieces] float32: of a whole piece; not read without FADES
    initial_ptr,  # [heads, F, V] float32; not read without HAS_INITIAL
    states_ptr,  # [heads, pieces, F, V]: before each piece
    final_ptr,  # [heads, F, V] float32
    pieces,
    F: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
    FADES: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """u = u - w S; S = fade S + k^T u, from piece to piece."""
    head = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, SIZE)
    feature = tl.arange(0, BF)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    is_feature = feature < F
    is_value = value < V
    inside = is_feature[:, None] & is_value[None, :]
    in_state = feature[:, None] * V + value[None, :]
    state = tl.zeros((BF, BV), tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial_ptr + head * F * V + in_state, mask=inside, other=0.0)
    for piece in range(0, pieces):
        at = head * pieces + piece
        operand = state.to(w_ptr.dtype.element_ty)
        tl.store(states_ptr + at * F * V + in_state, state.to(states_ptr.dtype.element_ty), mask=inside)
        w = tile_of(w_ptr + at * SIZE * F, token, feature, F, is_feature)
        k = tile_of(k_ptr + at * SIZE * F, token, feature, F, is_feature)
        in_piece = u_ptr + at * SIZE * V + (token[:, None] * V + value[None, :])
        u = tl.load(in_piece, mask=is_value[None, :], other=0.0).to(tl.float32)
        u -= tl.dot(w, operand, input_precision=PRECISION)
        u = u.to(u_ptr.dtype.element_ty)
        tl.store(in_piece, u, mask=is_value[None, :])
        if FADES:
            state *= tl.load(fade_ptr + at)
        state += tl.dot(tl.trans(k), u, input_precision=PRECISION)
    tl.store(final_ptr + head * F * V + in_state, state, mask=inside)


@triton.jit
def scan_gradient_kernel(
    du_ptr,  # [heads, pieces, SIZE, V]: by the outputs of the piece; overwritten by the whole gradient
    w_ptr,  # [heads, pieces, SIZE, F]
    k_ptr,  # [heads, pieces, SIZE, F]: keys, faded to the end of their piece
    q_ptr,  # [heads, pieces, SIZE, F]: queries, faded from the beginning of their piece
    dout_ptr,  # [heads, pieces, SIZE, V]
    fade_ptr,  # [heads, pieces] float32; not read without FADES
    dfinal_ptr,  # [heads, F, V] float32; not read without HAS_FINAL
    dstates_ptr,  # [heads, pieces, F, V]: of the state after each piece
    dinitial_ptr,  # [heads, F, V] float32
    pieces,
    F: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BF: tl.constexpr,
    BV: tl.constexpr,
    FADES: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """With D the gradient of the state after a piece: du = du + k D; D = fade D + q^T dout - w^T du, from the last piece on."""
    head = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, SIZE)
    feature = tl.arange(0, BF)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    is_feature = feature < F
    is_value = value < V
    inside = is_feature[:, None] & is_value[None, :]
    in_state = feature[:, None] * V + value[None, :]
    dstate = tl.zeros((BF, BV), tl.float32)
    if HAS_FINAL:
        dstate = tl.load(dfinal_ptr + head * F * V + in_state, mask=inside, other=0.0)
    for step in range(0, pieces):
        at = head * pieces + (pieces - 1 - step)
        operand = dstate.to(k_ptr.dtype.element_ty)
        tl.store(dstates_ptr + at * F * V + in_state, dstate.to(dstates_ptr.dtype.element_ty), mask=inside)
        w = tile_of(w_ptr + at * SIZE * F, token, feature, F, is_feature)
        k = tile_of(k_ptr + at * SIZE * F, token, feature, F, is_feature)
        q = tile_of(q_ptr + at * SIZE * F, token, feature, F, is_feature)
        in_piece = at * SIZE * V + (token[:, None] * V + value[None, :])
        dout = tl.load(dout_ptr + in_piece, mask=is_value[None, :], other=0.0)
        du = tl.load(du_ptr + in_piece, mask=is_value[None, :], other=0.0).to(tl.float32)
        du += tl.dot(k, operand, input_precision=PRECISION)
        du = du.to(du_ptr.dtype.element_ty)
        tl.store(du_ptr + in_piece, du, mask=is_value[None, :])
        if FADES:
            dstate *= tl.load(fade_ptr + at)
        dstate += tl.dot(tl.trans(q), dout, input_precision=PRECISION)
        dstate -= tl.dot(tl.trans(w), du, input_precision=PRECISION)
    tl.store(dinitial_ptr + head * F * V + in_state, dstate, mask=inside)
