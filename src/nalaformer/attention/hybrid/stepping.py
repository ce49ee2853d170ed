"""In-place decoding with hybrid attention: steps that write into the state and fit into CUDA graphs.

`hybrid_step_` decodes one token of each sample; `roll_` moves the window when a chunk is full. Neither synchronizes with the
device or changes a shape, so each can be captured once and replayed. The host knows from the lengths when a roll is due:

    state.make_room_(settings)  # or a state of fixed size, see `stepping_state`
    out = hybrid_step_(q, k, v, state=state, **given)  # or the replay of its graph
    if state.advance():
        roll_(state, **given)  # or the replay of its graph

Samples may have different lengths; a roll then changes only those whose chunk is full. The outputs are those of
`recurrent_hybrid_attention`.
"""

import torch
from torch import Tensor

from ...feature_maps import FeatureMap
from ...feature_maps.norm_preserving import NormPreserving
from ...ops import compute_dtype
from ...ops.backend import LARGEST_HEAD, runs_kernels
from ...ops.features import outside_autocast
from .branches import EPS, Exact, Linear, linear_branch, merge, scale_sums, sums_before
from .checks import check_inputs
from .salient import Leaving, best, choose_salient, entries
from .settings import HybridSettings, linear_share, most_salient
from .state import HybridState


def stepping_state(state: HybridState, *, settings: HybridSettings, capacity: int | None = None) -> HybridState:
    """Return a copy of the state at fixed addresses. capacity: the salient tokens that a head has room for.

    With `max_salient` set, that is the capacity, which may be omitted; without it, a longer text needs a larger capacity (see
    `salient_tokens`).
    """
    if not settings.exact:
        raise ValueError("stepping is for hybrid attention, got exact=False; pure linear attention has recurrent_step_")
    if not settings.salient_per_chunk:
        return state.with_room(0)
    if capacity is None:
        capacity = settings.largest_store
    if capacity is None:
        raise ValueError(
            "capacity must be set if max_salient is not, since the store grows with the text, got None; pass capacity=..."
        )
    if settings.largest_store not in (None, capacity):
        raise ValueError(f"max_salient ({settings.largest_store}) is the capacity, got {capacity}; omit capacity")
    held = most_salient(state.lengths, settings)
    if held > capacity:
        raise ValueError(f"capacity must hold the {held} salient tokens of the state, got {capacity}")
    return state.with_room(capacity)


def hybrid_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: HybridState,
    feature_map: FeatureMap,
    settings: HybridSettings,
    gate: Tensor | None = None,
    scores: Tensor | None = None,
    scale: float | None = None,
    query_matrix: Tensor | None = None,
) -> Tensor:
    """Decode one token of each sample into the window and return its output. Arguments as in `hybrid_attention`, N = 1.

    Call `state.advance()` after every step and, if it returns True, `roll_`. There is no gradient.
    query_matrix: the cached result of `kernel_query_matrix`; None: computed here if needed.
    """
    check_inputs(q, k, v, feature_map=feature_map, settings=settings, gate=gate, scores=scores, key_mask=None)
    if q.shape[1] != 1 or len(q) != len(state.lengths) or k.shape[2] != state.key_heads:
        raise ValueError(
            f"a step takes one token of each of {len(state.lengths)} samples with {state.key_heads} heads of keys, got q "
            f"{tuple(q.shape)} and k {tuple(k.shape)}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad(), outside_autocast(q):
        # take the slot first, since the step counts its token
        before = _place(state, settings) if settings.keeps_scores else None
        if runs_kernels(q) and _fits_kernel(state):
            # imported here, since Triton may be missing
            from ...ops.kernels.hybrid.step_op import hybrid_step

            sums: tuple[Tensor | None, ...] = (None, None, None, None)
            if settings.linear:
                matrix = kernel_query_matrix(feature_map, q.shape[2]) if query_matrix is None else query_matrix
                features = feature_map.query(q.float()).contiguous() if matrix is None else None
                sums = state.linear.state, state.linear.key_sum, features, matrix
            out = hybrid_step(
                *(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)),
                *(state.keys, state.values, state.linear.count, state.is_poisoned, *sums, gate),
                *(settings.chunk_size, settings.salient_per_chunk, settings.largest_store, settings.linear_mass),
                *(scale, EPS, settings.merge == "exact"),
            )
        else:
            out = _step_in_torch(q, k, v, state, feature_map, settings, gate, scale)
        if before is not None:
            _note_scores(state, settings, q, scale, *before, scores)
        return out


def kernel_query_matrix(feature_map: FeatureMap, heads: int) -> Tensor | None:
    """Return the matrix with which the kernel maps queries, [H, D, D]; None: the kernel does not support this map."""
    if not isinstance(feature_map, NormPreserving) or feature_map.num_heads != heads:
        return None
    return feature_map.query_matrix().detach().contiguous()


def _fits_kernel(state: HybridState) -> bool:
    return state.linear.state.dtype == torch.float32 and max(state.keys.shape[-1], state.values.shape[-1]) <= LARGEST_HEAD


def _step_in_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: HybridState,
    feature_map: FeatureMap,
    settings: HybridSettings,
    gate: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute a step in plain torch."""
    dtype, heads = compute_dtype(q, k, v), state.keys.shape[1]
    slot, visible = _place(state, settings)
    for kept, new in ((state.keys, k), (state.values, v)):
        new = new.transpose(1, 2).repeat_interleave(heads // new.shape[2], dim=1).to(kept.dtype)  # [B, S, 1, D]
        kept.scatter_(2, slot[:, None, None, None].expand_as(new), new)
    rows = q.to(dtype).masked_fill(state.is_poisoned[:, None, None, None], torch.nan)
    queries = (rows * scale)[:, 0].unflatten(1, (heads, -1))  # [B, S, H / S, D]
    logits = (queries @ state.keys.to(dtype).mT).masked_fill_(~visible[:, None, None], -torch.inf)
    row_max = logits.amax(-1)
    weights = logits.sub_(row_max[..., None]).exp_()
    exact = Exact(row_max, weights.sum(-1), weights @ state.values.to(dtype))
    linear = None
    if settings.linear:
        features = feature_map.query(rows).transpose(1, 2)  # [B, H, 1, F]
        sums = (x[:, :, None] for x in (state.linear.state, state.linear.key_sum))
        share = linear_share((state.linear.count // settings.chunk_size)[:, None], settings, dtype)
        seen = scale_sums(linear_branch(features[:, :, None], *sums), share)
        linear = Linear(*(x[:, :, 0, 0].unflatten(1, (heads, -1)) for x in seen))
    gates = None if gate is None else gate[:, 0].to(dtype).unflatten(1, (heads, -1))
    out = merge(exact, linear, gates, kind=settings.merge, eps=EPS)
    state.linear.count.add_(1)
    return out.flatten(1, 2)[:, None].to(q.dtype)


def _place(state: HybridState, settings: HybridSettings) -> tuple[Tensor, Tensor]:
    """Return the slot of the new token, [B], and the slots that it sees in window and store, [B, 2l + E] bool."""
    size, count = settings.chunk_size, state.linear.count
    chunk, slot = (count // size)[:, None], size + count % size
    place = torch.arange(state.keys.shape[2], device=slot.device)
    window = (place <= slot[:, None]) & (place >= size - chunk * size)
    stored = place < 2 * size + (chunk - 1) * settings.salient_per_chunk
    return slot, torch.where(place < 2 * size, window, stored)


def _note_scores(
    state: HybridState, settings: HybridSettings, q: Tensor, scale: float, slot: Tensor, visible: Tensor, given: Tensor | None
) -> None:
    """Add what this token contributes to the scores of the window's tokens."""
    rule, size = settings.rule, settings.chunk_size
    if rule.needs_scores:
        assert given is not None
        state.scores.scatter_(1, slot[:, None, None].expand(-1, 1, given.shape[2]), given.float())
        return
    dtype = state.linear.state.dtype
    queries = (q.to(dtype) * scale)[:, 0].unflatten(1, (state.key_heads, -1))
    logits = (queries @ state.window_keys.permute(0, 2, 3, 1).to(dtype)).flatten(1, 2)[:, :, None, None]
    place, visible = torch.arange(2 * size, device=slot.device), visible[:, None, None, : 2 * size]
    is_self = (place == slot[:, None])[:, None, None]
    is_near = (place > slot[:, None] - size)[:, None, None]
    own, received = rule.in_window(logits, visible, is_self, is_near)
    if own is not None:
        own = own[:, :, 0].transpose(1, 2).float()  # [B, 1, H]
        state.scores.scatter_add_(1, slot[:, None, None].expand_as(own), own)
    if received is not None:
        state.scores.add_(received[:, :, 0].transpose(1, 2))


def roll_(state: HybridState, *, feature_map: FeatureMap, settings: HybridSettings) -> None:
    """Move the window on: salient tokens of leaving chunks enter the store, all others the linear state.

    Only samples whose last token has filled its chunk change.
    """
    size, count = settings.chunk_size, state.linear.count
    with torch.no_grad(), outside_autocast(state.keys):
        is_full = count % size == 0
        leaves = (is_full & (count >= 2 * size))[:, None]
        keys, values = (x[:, :, :size] for x in (state.keys, state.values))
        is_skipped, gone = leaves[:, None].expand(*keys.shape[:2], size), None
        if settings.salient_per_chunk:
            positions = (count - 2 * size)[:, None] + torch.arange(size, device=count.device)
            if settings.keeps_scores:
                scores = state.scores[:, :size]
            else:
                scores = settings.rule.of_tokens(state.window_keys[:, :size], positions)
            chosen = choose_salient(scores[:, None], positions[:, None], leaves, heads=keys.shape[1], settings=settings)
            is_skipped, index = chosen.is_skipped[:, :, 0], chosen.places[:, :, 0]
            gone = _enter_store(state, entries(keys, index), entries(values, index), chosen.scores[:, :, 0])
        if settings.linear:
            leaving = [_to_leaving(keys, values, is_skipped)] + ([] if gone is None else [_to_leaving(*gone)])
            sums = sums_before(state.linear, leaving, feature_map, chunks=1, groups=1)
            state.linear.state.copy_(sums.state_after)
            state.linear.key_sum.copy_(sums.key_sum_after)
        for tokens in (state.keys.transpose(1, 2), state.values.transpose(1, 2), state.scores):
            first, second = tokens[:, :size], tokens[:, size : 2 * size]
            is_moved = is_full.view(-1, *(1,) * (tokens.dim() - 1))
            first.copy_(torch.where(is_moved, second, first))
            second.masked_fill_(is_moved, 0)


def _to_leaving(keys: Tensor, values: Tensor, counts: Tensor) -> Leaving:
    """Return tokens [B, S, n, *], of which those with counts [B, S, n] are real."""
    return Leaving(keys.transpose(1, 2), values.transpose(1, 2), counts.transpose(1, 2), keys.shape[2])


def _enter_store(state: HybridState, keys: Tensor, values: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the best of old and new entries, in descending order; return the others, and which of them are tokens."""
    together = torch.cat((state.salient_scores, scores), dim=-1)
    stays, goes = best(together, state.capacity)
    gone = []
    for kept, new in ((state.salient_keys, keys), (state.salient_values, values)):
        both = torch.cat((kept, new), dim=2)
        gone.append(entries(both, goes))
        kept.copy_(entries(both, stays))
    state.salient_scores.copy_(together.gather(-1, stays))
    return gone[0], gone[1], together.gather(-1, goes) > -torch.inf
