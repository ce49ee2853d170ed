"""Decoding with hybrid attention in memory of fixed size: states that steps write in place, fit for CUDA graphs.

`hybrid_step_` is one token of each sample, `roll_` what happens when chunks leave the window. Both ask nothing of the device
and change no shape, so each can be captured once and replayed. When a roll is due is known from the lengths, on the host:

    is_full = state.advance()
    out = hybrid_step_(q, k, v, state=state)  # or the replay of its graph
    if is_full:
        roll_(state)  # or the replay of its graph

Samples may have different lengths; a roll then serves those whose chunk is full and leaves the others alone. The outputs are
those of `recurrent_hybrid_attention` token by token.
"""

import torch
from torch import Tensor

from ...ops import compute_dtype
from ...ops.backend import LARGEST_HEAD, runs_kernels
from ...ops.features import outside_autocast
from .branches import EPS, Exact, Linear, linear_branch, merge
from .checks import check_inputs
from .function import keeps_scores
from .salient import entries
from .selection import SELECTIONS, for_heads, rank_descending
from .stepping_state import SteppingState


def hybrid_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: SteppingState,
    gate: Tensor | None = None,
    scores: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """One token of each sample: the window takes it in, and its output is returned. Arguments as in `hybrid_attention`, N = 1.

    `state.advance()` belongs before every step and, if it says so, `roll_` after it. There is no gradient.
    """
    settings = state.settings
    check_inputs(q, k, v, feature_map=state.feature_map, settings=settings, gate=gate, scores=scores, key_mask=None)
    if q.shape[1] != 1 or len(q) != len(state.lengths) or k.shape[2] != state.key_heads:
        raise ValueError(
            f"a step takes one token of each of {len(state.lengths)} samples with {state.key_heads} heads of keys, got q "
            f"{tuple(q.shape)} and k {tuple(k.shape)}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad(), outside_autocast(q):
        # the step counts its token, and scores are noted of a window that holds it
        before = _place(state) if keeps_scores(settings) else None
        step = _fused if runs_kernels(q) and _fits_kernel(state) else _plain
        out = step(q, k, v, state, gate, scale)
        if before is not None:
            _note_scores(state, q, scale, *before, scores)
        return out


def _fits_kernel(state: SteppingState) -> bool:
    return state.state.dtype == torch.float32 and max(state.keys.shape[-1], state.values.shape[-1]) <= LARGEST_HEAD


def _fused(q: Tensor, k: Tensor, v: Tensor, state: SteppingState, gate: Tensor | None, scale: float) -> Tensor:
    # imported where used: Triton may be missing
    from ...ops.kernels.hybrid.step_op import hybrid_step

    settings, features = state.settings, None
    if settings.linear and state.query_matrix is None:
        features = state.feature_map.query(q.float()).contiguous()
    return hybrid_step(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)),
        *(state.keys, state.values, state.count, state.ailing),
        *((state.state, state.key_sum) if settings.linear else (None, None)),
        *(features, state.query_matrix, gate),
        *(settings.chunk_size, settings.salient_per_chunk, scale, EPS, settings.merge == "exact"),
    )


def _plain(q: Tensor, k: Tensor, v: Tensor, state: SteppingState, gate: Tensor | None, scale: float) -> Tensor:
    """The definition of a step, in plain torch."""
    settings, dtype, heads = state.settings, compute_dtype(q, k, v), state.keys.shape[1]
    slot, visible = _place(state)
    for kept, new in ((state.keys, k), (state.values, v)):
        new = new.transpose(1, 2).repeat_interleave(heads // new.shape[2], dim=1).to(kept.dtype)  # [B, S, 1, D]
        kept.scatter_(2, slot[:, None, None, None].expand_as(new), new)
    rows = q.to(dtype) + state.ailing[:, None, None, None]
    queries = (rows * scale)[:, 0].unflatten(1, (heads, -1))  # [B, S, H / S, D]
    logits = (queries @ state.keys.to(dtype).mT).masked_fill_(~visible[:, None, None], -torch.inf)
    row_max = logits.amax(-1)
    weights = logits.sub_(row_max[..., None]).exp_()
    exact = Exact(row_max, weights.sum(-1), weights @ state.values.to(dtype))
    linear = None
    if settings.linear:
        features = state.feature_map.query(rows).transpose(1, 2)  # [B, H, 1, F]
        seen = linear_branch(features, state.state, state.key_sum)
        linear = Linear(*(x[:, :, 0].unflatten(1, (heads, -1)) for x in seen))
    gates = None if gate is None else gate[:, 0].to(dtype).unflatten(1, (heads, -1))
    out = merge(exact, linear, gates, kind=settings.merge, eps=EPS)
    state.count.add_(1)
    return out.flatten(1, 2)[:, None].to(q.dtype)


def _place(state: SteppingState) -> tuple[Tensor, Tensor]:
    """[B]: the slot of the token that comes; [B, 2l + E]: what it sees, the window from the sample's first and the store."""
    size = state.settings.chunk_size
    chunk, slot = (state.count // size)[:, None], size + state.count % size
    place = torch.arange(state.keys.shape[2], device=slot.device)
    window = (place <= slot[:, None]) & (place >= size - chunk * size)
    stored = place < 2 * size + (chunk - 1) * state.settings.salient_per_chunk
    return slot, torch.where(place < 2 * size, window, stored)


def _note_scores(state: SteppingState, q: Tensor, scale: float, slot: Tensor, visible: Tensor, given: Tensor | None) -> None:
    """What the rule learns of the window's tokens from this one."""
    rule, size = SELECTIONS[state.settings.selection](), state.settings.chunk_size
    if rule.needs_scores:
        assert given is not None
        state.scores.scatter_(1, slot[:, None, None].expand(-1, 1, given.shape[2]), given.float())
        return
    dtype = state.state.dtype
    keys = state.keys[:, :: state.keys.shape[1] // state.key_heads, : 2 * size].to(dtype)
    queries = (q.to(dtype) * scale)[:, 0].unflatten(1, (state.key_heads, -1))
    logits = (queries @ keys.mT).flatten(1, 2)[:, :, None, None]
    place, visible = torch.arange(2 * size, device=slot.device), visible[:, None, None, : 2 * size]
    is_self = (place == slot[:, None])[:, None, None]
    is_near = (place > slot[:, None] - size)[:, None, None]
    own, received = rule.in_window(logits, visible, is_self, is_near)
    if own is not None:
        own = own[:, :, 0].transpose(1, 2).float()  # [B, 1, H]
        state.scores.scatter_add_(1, slot[:, None, None].expand_as(own), own)
    if received is not None:
        state.scores.add_(received[:, :, 0].transpose(1, 2))


def roll_(state: SteppingState) -> None:
    """Chunks that leave the window: their salient tokens enter the store, all others the linear state, and the window moves on.

    Of samples whose last token has filled its chunk; after the others nothing has changed.
    """
    settings = state.settings
    size = settings.chunk_size
    with torch.no_grad(), outside_autocast(state.keys):
        is_full = state.count % size == 0
        leaves = is_full & (state.count >= 2 * size)
        heads = state.keys.shape[1]
        tokens, values = state.keys[:, :, :size], state.values[:, :, :size]
        is_left_out = leaves[:, None, None].expand(-1, heads, size)
        if settings.salient_per_chunk:
            compared = _compared(state)
            index = rank_descending(compared)[..., : settings.salient_per_chunk]
            entering = compared.gather(-1, index).masked_fill(~leaves[:, None, None], -torch.inf)
            is_left_out = is_left_out.scatter(-1, index, False)
            (gone, gone_values), is_gone = _enter_store(state, entries(tokens, index), entries(values, index), entering)
            tokens, values = torch.cat((tokens, gone), dim=2), torch.cat((values, gone_values), dim=2)
            is_left_out = torch.cat((is_left_out, is_gone), dim=2)
        if settings.linear:
            _add_to_sums(state, tokens, values, is_left_out)
        for kept in (state.keys, state.values):
            window = kept[:, :, : 2 * size]
            moved = torch.cat((window[:, :, size:], torch.zeros_like(window[:, :, size:])), dim=2)
            window.copy_(torch.where(is_full[:, None, None, None], moved, window))
        if keeps_scores(settings):
            moved = torch.cat((state.scores[:, size:], torch.zeros_like(state.scores[:, size:])), dim=1)
            state.scores.copy_(torch.where(is_full[:, None, None], moved, state.scores))


def _compared(state: SteppingState) -> Tensor:
    """[B, S, l]: by what the tokens of the window's first chunk are compared."""
    settings, rule = state.settings, SELECTIONS[state.settings.selection]()
    size, heads = settings.chunk_size, state.keys.shape[1]
    positions = (state.count - 2 * size)[:, None] + torch.arange(size, device=state.count.device)
    if keeps_scores(settings):
        scores = state.scores[:, :size]
    else:
        scores = rule.of_tokens(state.keys[:, :: heads // state.key_heads, :size].transpose(1, 2), positions)
    compared = rule.comparable(for_heads(rule.finish(scores[:, None]), heads))[:, 0]
    if settings.keep_first:
        compared = compared.masked_fill((positions == 0)[..., None], torch.inf)
    return compared.transpose(1, 2)


def _enter_store(state: SteppingState, keys: Tensor, values: Tensor, scores: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The best of old and new stay, in falling order; the others are returned, with whether each of them is a token."""
    room, window = state.capacity, 2 * state.settings.chunk_size
    together = torch.cat((state.salient_scores, scores), dim=-1)
    order = rank_descending(together)
    stays, goes = order[..., :room], order[..., room:]
    gone = []
    for kept, new in ((state.keys, keys), (state.values, values)):
        both = torch.cat((kept[:, :, window:], new), dim=2)
        gone.append(entries(both, goes))
        kept[:, :, window:] = entries(both, stays)
    state.salient_scores.copy_(together.gather(-1, stays))
    return (gone[0], gone[1]), together.gather(-1, goes) > -torch.inf


def _add_to_sums(state: SteppingState, keys: Tensor, values: Tensor, counts: Tensor) -> None:
    """Tokens [B, S, n, *] that count [B, S, n] join the linear state."""
    repeats = state.state.shape[1] // keys.shape[1]
    dtype = state.state.dtype
    keys, values, counts = (x.repeat_interleave(repeats, dim=1) for x in (keys.to(dtype), values.to(dtype), counts))
    features = state.feature_map.key(keys.transpose(1, 2)).transpose(1, 2).masked_fill(~counts[..., None], 0)
    state.state.add_(features.mT @ values)
    state.key_sum.add_(features.sum(2))
