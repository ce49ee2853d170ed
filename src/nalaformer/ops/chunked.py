"""Compute the same function in memory linear in N: the features of only one chunk of tokens exist at a time.

CPUs and GPUs without Triton use it. The backward pass recomputes the chunks, so nothing of size N x F is stored for it either.
Bidirectional attention sums the states of the chunks, then reads them. Causal attention scans the chunks with a running state,
as recurrent decoding does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .contrast import Contrast
from .exporting import is_jit_tracing
from .features import (
    FeatureMapLike,
    Keys,
    Queries,
    cheap_to_look_at,
    compute_dtype,
    key_features,
    key_log_scale,
    normalise,
    query_features,
    weighted_values,
    without_infinity,
)
from .kept_tensors import is_transformed
from .rotary import Rotary
from .state import LinearState

# A chunk's features should stay in the cache of a core: 2^19 floats, 2 MB. Fewer than 64 tokens waste the matrix unit.
CHUNK_ELEMENTS = 2**19
SMALLEST_CHUNK = 64
# A causal chunk costs chunk^2 products besides chunk x F, so about the head size is right.
CAUSAL_CHUNK = 128


def chunk_size(batch: int, heads: int, head_dim: int) -> int:
    """Return the tokens of a chunk in the bidirectional form."""
    return max(SMALLEST_CHUNK, CHUNK_ELEMENTS // max(1, 2 * batch * heads * head_dim))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    rotary: tuple[Rotary | None, Rotary | None],
    key_mask: Tensor | None,
    eps: float,
    recompute: bool,
    contrast: Contrast | None = None,
    key_weight: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute bidirectional attention; shapes as in the reference, output in the dtype of q."""
    batch, _, heads, head_dim = q.shape
    chunk = chunk or chunk_size(batch, heads, head_dim)
    dtype = compute_dtype(q, k, v)
    run = run_with_checkpoint if recompute and not is_transformed() else run_directly

    def chunk_state(k: Tensor, v: Tensor, mask: Tensor | None, rotary: Rotary | None, weight: Tensor | None) -> LinearState:
        scales = key_log_scale(feature_map, k, mask, dtype)
        scale = None if scales is None or all_zero(scales) else scales.amax(dim=1, keepdim=True)
        keys = key_features(feature_map, k, v, key_mask=mask, rotary=rotary, log_scale=scale, dtype=dtype, weight=weight)
        return make_state(keys, scale)

    def read_chunk(
        q: Tensor,
        rotary: Rotary | None,
        contrast_scale: Tensor | None,
        state: LinearState,
        mean: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        against = None if mean is None else Contrast(contrast_scale, mean, head_dim)
        return read(state, query_features(feature_map, q, rotary, dtype, like=state.key_sum), eps, out, against).to(q.dtype)

    contrast_scale, mean = (None, None) if contrast is None else contrast[:2]
    state = None
    for tokens in split_tokens(chunk, k, v, key_mask, rotary[1], key_weight):
        part = run(chunk_state, *tokens)
        state = part if state is None else LinearState.merge(state, part)
    assert state is not None
    tokens_of_queries = split_tokens(chunk, q, rotary[0], contrast_scale)
    if recompute or is_transformed() or len(tokens_of_queries) == 1:
        parts = [run(read_chunk, *tokens, state, mean, None) for tokens in tokens_of_queries]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    # Without gradients each chunk is written into the output directly, so that no second copy of the output exists.
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for (q_chunk, rotary_chunk, contrast_scale_chunk), place in zip(tokens_of_queries, out.split(chunk, dim=1), strict=True):
        read_chunk(q_chunk, rotary_chunk, contrast_scale_chunk, state, mean, place)
    return out


def causal_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    state: LinearState | None,
    rotary: tuple[Rotary | None, Rotary | None],
    key_mask: Tensor | None,
    eps: float,
    recompute: bool,
    contrast: Contrast | None = None,
    key_weight: Tensor | None = None,
    log_decay: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, LinearState]:
    """Compute causal attention from an earlier state (None: no earlier token) to the state after the last token."""
    dtype = compute_dtype(q, k, v)
    run = run_with_checkpoint if recompute and not is_transformed() else run_directly

    def step(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        rotary_q: Rotary | None,
        rotary_k: Rotary | None,
        contrast_scale: Tensor | None,
        mean: Tensor | None,
        weight: Tensor | None,
        log_decay: Tensor | None,
        state: LinearState | None,
    ) -> tuple[Tensor, LinearState]:
        scales = key_log_scale(feature_map, k, mask, dtype)
        keys = key_features(feature_map, k, v, key_mask=mask, rotary=rotary_k, log_scale=scales, dtype=dtype, weight=weight)
        queries = query_features(feature_map, q, rotary_q, dtype, like=keys.plain)
        if state is None:
            state = LinearState.empty(k.shape[0], k.shape[2], keys.rotated.shape[-1], v.shape[-1], dtype=dtype, device=k.device)
        if log_decay is not None:
            log_decay = log_decay.to(dtype)
        elif scales is not None and all_zero(scales, state.log_scale):
            scales = None
        against = None if mean is None else Contrast(contrast_scale, mean, q.shape[3])
        return causal_step(state, queries, keys, scales, mask, eps, q.dtype, against, log_decay)

    size = chunk or CAUSAL_CHUNK
    contrast_scale, mean = (None, None) if contrast is None else contrast[:2]
    all_chunks = split_tokens(size, q, k, v, key_mask, rotary[0], rotary[1], contrast_scale, mean, key_weight, log_decay)
    if recompute or is_transformed() or len(all_chunks) == 1:
        parts = []
        for tokens in all_chunks:
            out, state = run(step, *tokens, state)
            parts.append(out)
        assert state is not None
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), state
    # Without gradients each chunk is written into the output directly, so that no second copy of the output exists.
    whole = q.new_empty(*q.shape[:3], v.shape[3])
    for start, tokens in zip(range(0, q.shape[1], size), all_chunks, strict=True):
        whole[:, start : start + size], state = run(step, *tokens, state)
    assert state is not None
    return whole, state


def block_causal_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    block: int,
    rotary: tuple[Rotary | None, Rotary | None],
    key_mask: Tensor | None,
    eps: float,
    recompute: bool,
    contrast: Contrast | None = None,
    key_weight: Tensor | None = None,
) -> Tensor:
    """Compute attention in which tokens see their own and earlier blocks: the state adds a block, then its queries read it."""
    if torch.compiler.is_exporting() or is_jit_tracing():
        raise ValueError(
            f"an exported program cannot count blocks of tokens, got block={block}; export with block=1, or without causal"
        )
    dtype = compute_dtype(q, k, v)
    run = run_with_checkpoint if recompute and not is_transformed() else run_directly

    def step(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        rotary_q: Rotary | None,
        rotary_k: Rotary | None,
        contrast_scale: Tensor | None,
        mean: Tensor | None,
        weight: Tensor | None,
        state: LinearState | None,
    ) -> tuple[Tensor, LinearState]:
        scales = key_log_scale(feature_map, k, mask, dtype)
        scale = None if scales is None or all_zero(scales) else scales.amax(dim=1, keepdim=True)
        keys = key_features(feature_map, k, v, key_mask=mask, rotary=rotary_k, log_scale=scale, dtype=dtype, weight=weight)
        state = make_state(keys, scale) if state is None else LinearState.merge(state, make_state(keys, scale))
        # all queries of the block see the same tokens, so they share the running mean at its last token
        against = None if mean is None else Contrast(contrast_scale, mean[:, -1:], q.shape[3])
        queries = query_features(feature_map, q, rotary_q, dtype, like=state.key_sum)
        return read(state, queries, eps, contrast=against).to(q.dtype), state

    contrast_scale, mean = (None, None) if contrast is None else contrast[:2]
    state: LinearState | None = None
    parts = []
    for tokens in split_tokens(block, q, k, v, key_mask, rotary[0], rotary[1], contrast_scale, mean, key_weight):
        out, state = run(step, *tokens, state)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def make_state(keys: Keys, log_scale: Tensor | None) -> LinearState:
    """Return the state of these keys alone; log_scale [B, 1, K, 1]."""
    state = without_infinity(torch.einsum("bjkf,bjkv->bkfv", keys.rotated, keys.values))
    key_sum = keys.plain.sum(dim=1)
    scale = key_sum.new_zeros(key_sum.shape[:2]) if log_scale is None else log_scale[:, 0, :, 0]
    return LinearState(state, key_sum, keys.visible, scale)


def read(
    state: LinearState,
    streams: list[Queries],
    eps: float,
    out: Tensor | None = None,
    contrast: Contrast | None = None,
) -> Tensor:
    """Return the outputs [B, N, H, V] of queries that see every token of the state, written into `out` if there is one."""
    kv_heads = state.state.shape[1]
    places = [None] * len(streams) if out is None else out.chunk(len(streams), dim=-1)
    contrasts = [None] * len(streams) if contrast is None else contrast.split_streams(len(streams))
    outputs = []
    sums = state.state.chunk(len(streams), dim=-1)
    for queries, stream_state, place, against in zip(streams, sums, places, contrasts, strict=True):
        rotated = group_heads(queries.rotated, kv_heads)
        if queries.plain is queries.rotated:
            # the key sum becomes one more column of the state: a product of its own would read the features again
            with_sum = torch.cat((stream_state, state.key_sum[..., None]), dim=-1)
            both = torch.einsum("bikgf,bkfv->bikgv", rotated, with_sum)
            numerator, denominator = both[..., :-1], both[..., -1]
        else:
            numerator = torch.einsum("bikgf,bkfv->bikgv", rotated, stream_state)
            denominator = torch.einsum("bikgf,bkf->bikg", group_heads(queries.plain, kv_heads), state.key_sum)
        outputs.append(
            normalise(
                numerator.flatten(2, 3),
                denominator.flatten(2, 3),
                eps=eps,
                count=state.count[:, None, None],
                query_scale=None if queries.log_scale is None else queries.log_scale[..., 0],
                key_scale=state.log_scale.repeat_interleave(rotated.shape[3], dim=1)[:, None],
                is_rotated=queries.rotated is not queries.plain,
                out=place,
                contrast=against,
            )
        )
    if out is not None:
        return out
    return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]


def causal_step(
    state: LinearState,
    streams: list[Queries],
    keys: Keys,
    scales: Tensor | None,
    key_mask: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    contrast: Contrast | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """Compute one chunk of tokens: earlier tokens through the state, its own tokens through their matrix of weights.

    log_decay [B, n, K]: earlier tokens decay by exp of it. The scales do that: a key's scale is that of its features minus the
    sum of the decays up to it, and the state's scale changes in the same way.
    """
    kv_heads, num_tokens = state.state.shape[1], keys.values.shape[1]
    group = streams[0].plain.shape[2] // kv_heads
    device = keys.values.device
    lower = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    if key_mask is None:
        count = state.count[:, None] + torch.arange(1, num_tokens + 1, device=device)
    else:
        count = state.count[:, None] + key_mask.cumsum(1)
    if log_decay is not None:
        # decay may leave little of many keys, so eps is not multiplied by their number
        count = torch.ones_like(count)

    # a row is scaled by the largest key that it sees, never by a later one
    row_scale = keep_state = keep_keys = token_scale = decay_sum = None
    if scales is not None:
        token_scale = scales[..., 0]  # [B, n, K]
    if log_decay is not None:
        decay_sum = log_decay.cumsum(1)  # [B, n, K]
        token_scale = -decay_sum if token_scale is None else token_scale - decay_sum
    if token_scale is not None:
        # the scale is a factor of the whole row, so it has no gradient
        row_scale = torch.maximum(running_maximum(token_scale.detach(), lower), state.log_scale[:, None])
        keep_state = (state.log_scale[:, None] - row_scale).exp()  # [B, n, K]
        # exp may be infinite for later keys, and a clamp would cut the gradient of the others
        above = torch.where(lower[None, :, :, None], token_scale[:, None] - row_scale[:, :, None], 0.0)
        keep_keys = above.exp()  # [B, i, j, K]
        keep_keys = keep_keys.permute(0, 3, 1, 2)[:, :, None]  # [B, K, 1, i, j]
    # exp of this scale divides the features of a row
    true_scale = row_scale if row_scale is None or decay_sum is None else row_scale + decay_sum

    outputs = []
    zero = torch.zeros((), dtype=keys.values.dtype, device=device)
    contrasts = [None] * len(streams) if contrast is None else contrast.split_streams(len(streams))
    values = zip(state.state.chunk(len(streams), -1), keys.values.chunk(len(streams), -1), contrasts, strict=True)
    for queries, (stream_state, stream_values, against) in zip(streams, values, strict=True):
        rotated, plain = group_heads(queries.rotated, kv_heads), group_heads(queries.plain, kv_heads)
        within = [torch.einsum("bikgf,bjkf->bkgij", x, y) for x, y in ((rotated, keys.rotated), (plain, keys.plain))]
        if keep_keys is not None:
            within = [weights * keep_keys for weights in within]
        within = [torch.where(lower, weights, zero) for weights in within]
        before = torch.einsum("bikgf,bkfv->bikgv", rotated, stream_state)
        before_sum = torch.einsum("bikgf,bkf->bikg", plain, state.key_sum)
        if keep_state is not None:
            before, before_sum = before * keep_state[..., None, None], before_sum * keep_state[..., None]
        numerator = before + weighted_values(within[0], stream_values, lower)
        denominator = before_sum + within[1].sum(-1).permute(0, 3, 1, 2)
        out = normalise(
            numerator.flatten(2, 3),
            denominator.flatten(2, 3),
            eps=eps,
            count=count[..., None],
            query_scale=None if queries.log_scale is None else queries.log_scale[..., 0],
            key_scale=None if true_scale is None else true_scale.repeat_interleave(group, dim=2),
            is_rotated=queries.rotated is not queries.plain,
            contrast=against,
        )
        outputs.append(out.to(out_dtype))

    if token_scale is None:
        after = make_state(keys, None)
    else:
        assert row_scale is not None
        last = row_scale[:, -1:, :, None]  # [B, 1, K, 1]
        if decay_sum is not None:
            # seen from the last token, all decays of the chunk have reduced what came before it
            end = decay_sum[:, -1]
            token_scale, last = token_scale + end[:, None], last + end.detach()[:, None, :, None]
            seen_from_end = (end - end.detach()).exp()
            state = LinearState(
                state.state * seen_from_end[..., None, None],
                state.key_sum * seen_from_end[..., None],
                state.count,
                state.log_scale + end.detach(),
            )
        keep = (token_scale[..., None] - last).exp()
        after = make_state(keys._replace(rotated=keys.rotated * keep, plain=keys.plain * keep), last)
    return (torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]), LinearState.merge(state, after)


def running_maximum(scale: Tensor, lower: Tensor) -> Tensor:
    """Return the largest scale of the tokens up to each, [B, n, K]; lower: [n, n], the tokens that each one sees."""
    if torch.compiler.is_exporting():
        # ONNX has no running maximum
        return torch.where(lower[None, :, :, None], scale[:, None], -torch.inf).amax(dim=2)
    return scale.cummax(dim=1).values


def group_heads(features: Tensor, kv_heads: int) -> Tensor:
    """Reshape [B, N, H, F] to [B, N, K, H/K, F]: the query heads that share a key head side by side."""
    return features.unflatten(2, (kv_heads, features.shape[2] // kv_heads))


def split_tokens(size: int, *sequences: Tensor | Rotary | None) -> "list[tuple[Any, ...]]":
    """Split tensors [B, N, ...] and rotaries together into chunks of `size` tokens; None stays None."""
    first = next(x for x in sequences if isinstance(x, Tensor))
    num_tokens = first.shape[1]
    # an exported program must support every number of tokens, so it cannot count chunks
    if torch.compiler.is_exporting() or is_jit_tracing() or num_tokens <= size:
        return [sequences]
    starts = range(0, num_tokens, size)
    columns: list[Any] = []
    for x in sequences:
        if x is None:
            columns.append([None] * len(starts))
        elif isinstance(x, Rotary):
            columns.append([x.tokens(start, start + size) for start in starts])
        else:
            # split rather than slice: the gradients of n slices are n tensors of full size
            columns.append(x.split(size, dim=1))
    return list(zip(*columns, strict=True))


def all_zero(*scales: Tensor) -> bool:
    """True if the values are cheap to read and scaling by them would change nothing."""
    return all(cheap_to_look_at(scale) and bool((scale == 0).all()) for scale in scales)


def run_directly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def run_with_checkpoint(function: Callable[..., Any], *arguments: Any) -> Any:
    """Store only the arguments for the backward pass and compute the rest again there; transforms of torch.func cannot."""
    if is_jit_tracing():
        # A recorded program is the same with and without gradients; older releases of torch record a checkpoint.
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
