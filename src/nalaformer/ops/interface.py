"""Define the public functions: check the arguments, pick a backend, run it outside autocast."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import chunked, reference
from .backend import Choice, choose, get_backend
from .checks import (
    RotaryArgument,
    check_block,
    check_call,
    check_contrast,
    check_cu_seqlens,
    check_key_weight,
    check_log_decay,
    check_options,
    check_query_mask,
    check_rotary_pair,
    check_state,
    check_tensors,
)
from .contrast import make_contrast, running_mean_score
from .decay import decayed_mean, usable_decay
from .eager import run_eagerly
from .features import FeatureMapLike, compute_dtype, heads_for, outside_autocast
from .kept_tensors import is_plain_eager
from .key_weight import MAPS_IN_KERNELS, per_key_for, weight_values
from .state import LinearState

# The module known_calls, once a call has run on the kernels: an import inside a function takes a microsecond at each call.
_known_calls: list[ModuleType] = []


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    causal: bool = False,
    rotary: RotaryArgument = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    contrast: Tensor | str | None = None,
    key_weight: Tensor | str | None = None,
    log_decay: Tensor | None = None,
    block: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Compute attention in time and memory linear in the number of tokens.

        out_i = rot(phi_q(q_i)) . sum_j rot(phi_k(k_j)) v_j^T  /  ( phi_q(q_i) . sum_j phi_k(k_j)  +  eps * n )

    q: [B, N, H, D]; k: [B, M, K, D]; v: [B, M, K, V] with K dividing H (grouped heads); any strides, any float types.
    Returns [B, N, H, V] in the type of q. Maps, sums and the state are computed in float32 (float64 for float64 inputs),
    also under autocast.

    causal: token i sees keys 0..i; needs N = M.
    rotary: positions of all tokens, or a pair (of q, of k) for cross-attention; rotates the numerator only, unless it was
        made with normalised=True.
    key_mask: [B, M] bool, True = visible. A row that sees nothing gives zeros; masked tokens may hold NaN.
    query_mask: [B, N] bool, True = a token, not padding. Only parts that read all queries need it, the variance-aware
        reflection and the global query: in self-attention it is the key_mask.
    cu_seqlens: [S + 1] running total of lengths, beginning with 0. Then q, k, v are [T, H, D]: S sequences back to back.
    contrast: moves each output away from the mean of the values that it sees, out_i + z_i (out_i - mean_j v_j). "mean_score":
        z_i = D^-1/2 phi_q(q_i) . mean_j phi_k(k_j) (MALA); or z itself, [B, N, H].
    key_weight: multiplies phi_k(k_j). "global_query": a softmax over the keys for the mean query (RALA), see
        `global_query_weight`; or numbers >= 0, [B, M, K] or [B, M, H].
    log_decay: for causal attention, [B, N, K] or [B, N, H], numbers <= 0: token i multiplies the weights of all earlier keys by
        exp(log_decay_i), so key j has the factor exp(sum of log_decay from j + 1 to i), also in the mean of a contrast. 0 means
        no decay, and a token that key_mask hides causes none. eps then stands alone, without n.
    block: for causal attention, the tokens that see each other: token i sees keys 0..b - 1, b the end of its block (frames of a
        video, rows of an image). More than 1 runs in plain torch, on a GPU too.
    eps: multiplied by the n visible keys; with 0 the weights sum to one however small the keys are.
    """
    check_block(block, causal=causal, is_packed=cu_seqlens is not None)
    if cu_seqlens is not None:
        return _attend_packed(
            q, k, v, feature_map, causal, rotary, key_mask, query_mask, cu_seqlens, contrast, key_weight, log_decay, eps
        )
    has_parts = rotary is not None or contrast is not None or key_weight is not None or log_decay is not None or block > 1
    is_plain = not has_parts and key_mask is None and query_mask is None
    is_usual = type(q) is type(k) is type(v) is Tensor and type(causal) is bool and type(eps) is float
    # in this order: a compiled program must not depend on the list of known calls
    if is_plain and is_usual and is_plain_eager() and _known_calls:
        again: Tensor | None = _known_calls[0].attend_again(q, k, v, feature_map, causal, eps)
        if again is not None:
            return again
    rotaries = check_call(q, k, v, feature_map=feature_map, causal=causal, rotary=rotary, key_mask=key_mask, eps=eps)
    check_query_mask(query_mask, q)
    check_contrast(contrast, q)
    check_key_weight(key_weight, q, k, causal=causal, key_mask=key_mask, query_mask=query_mask)
    check_log_decay(log_decay, q, k, causal=causal, contrast=contrast, block=block)
    needs_grad = _needs_grad(q, k, v, feature_map, contrast, key_weight, log_decay)
    given = q, k, v
    k, v = heads_for(feature_map, q, k, v)
    key_weight, k, v = per_key_for(q, k, v, key_weight)
    log_decay, k, v = per_key_for(q, k, v, usable_decay(log_decay, key_mask))
    # a decay for each query head may have expanded the key heads
    key_weight, k, v = per_key_for(q, k, v, key_weight)
    # low-precision matmuls under autocast would undo the float32 sums
    with outside_autocast(q):
        mapped = feature_map.given(q, k, key_mask=key_mask, query_mask=query_mask, causal=causal)
        has_score, has_weight = isinstance(contrast, str), key_weight is not None
        backend, spec = choose(
            *(q, k, v),
            feature_map=mapped,
            causal=causal,
            rotary=rotaries,
            has_contrast=has_score,
            has_weight=has_weight,
            has_blocks=block > 1,
        )
        if backend == "triton" and has_score and causal:
            contrast, has_score = running_mean_score(mapped, q, k, key_mask=key_mask), False
        # the kernels compute the weights as they read the keys, for the maps that they support and without a mean score
        by_mean_query = isinstance(key_weight, str) and not has_score and spec is not None and spec.name in MAPS_IN_KERNELS
        weight = None if by_mean_query else weight_values(key_weight, q, given[1], feature_map, key_mask, query_mask)
        against = None
        if contrast is not None and (backend != "triton" or not has_score):
            # the value and its mean may cancel in the gradient, so the two are added before they are rounded
            v = v if backend == "triton" else v.to(compute_dtype(q, k, v))
            dtype, mean_value = compute_dtype(q, k, v), None
            if log_decay is not None and backend == "triton":
                from . import kernels

                mean_value = kernels.decayed_mean(v, log_decay, key_mask=key_mask, needs_backward=needs_grad)
            elif log_decay is not None:
                mean_value = decayed_mean(v, log_decay, key_mask=key_mask, dtype=dtype)
            against = make_contrast(contrast, q, v, key_mask=key_mask, causal=causal, dtype=dtype, mean=mean_value)
        if backend == "triton":
            # imported where used: Triton may be missing
            from . import kernels

            prepared = kernels.prepare(
                *(q, k, v),
                feature_map=mapped,
                spec=spec,
                rotary=rotaries,
                key_mask=key_mask,
                eps=eps,
                has_contrast=has_score,
                key_weight=weight,
                by_mean_query=by_mean_query,
                query_mask=query_mask,
                log_decay=log_decay,
            )
            out = kernels.attend(prepared, causal=causal, needs_backward=needs_grad)
            if is_plain and is_plain_eager() and mapped is feature_map:
                from .kernels.linear import known_calls

                known_calls.remember(prepared, spec, *given, feature_map, causal, eps)
                _known_calls[:] = [known_calls]
            return (out if against is None else against.apply_scale(out)).to(q.dtype)
        options: dict[str, Any] = {"contrast": against, "key_weight": weight, "eps": eps, "recompute": needs_grad}
        if block > 1:
            return chunked.block_causal_linear_attention(
                q, k, v, feature_map=mapped, block=block, rotary=rotaries, key_mask=key_mask, **options
            )
        if backend == "reference":
            out = reference.linear_attention(
                *(q, k, v),
                feature_map=mapped,
                causal=causal,
                rotary=rotaries,
                key_mask=key_mask,
                eps=eps,
                contrast=against,
                key_weight=weight,
                log_decay=log_decay,
            )
            return out.to(q.dtype)
        if causal:
            return chunked.causal_linear_attention(
                q, k, v, feature_map=mapped, state=None, rotary=rotaries, key_mask=key_mask, log_decay=log_decay, **options
            )[0]
        return chunked.linear_attention(q, k, v, feature_map=mapped, rotary=rotaries, key_mask=key_mask, **options)


def recurrent_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    state: LinearState | None = None,
    rotary: RotaryArgument = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, LinearState]:
    """Compute causal attention that continues after `state`, for one token or many; splitting a sequence changes nothing.

    Shapes as in `linear_attention`, with as many queries as keys. Returns the output and the state after the last token;
    the state passed in is not changed. Rotary positions count on: Rotary.sequence(n, dim, start=tokens_before).
    """
    rotaries = check_call(q, k, v, feature_map=feature_map, causal=True, rotary=rotary, key_mask=key_mask, eps=eps)
    check_log_decay(log_decay, q, k, causal=True)
    k, v = heads_for(feature_map, q, k, v)
    log_decay, k, v = per_key_for(q, k, v, usable_decay(log_decay, key_mask))
    check_state(state, q, k, v, feature_map, rotaries[1])
    recompute = _needs_grad(q, k, v, feature_map, state, log_decay)
    with outside_autocast(q):
        mapped = feature_map.given(q, k, key_mask=key_mask, causal=True)
        backend, spec = choose(q, k, v, feature_map=mapped, causal=True, rotary=rotaries)
        if backend == "reference":
            return reference.recurrent_linear_attention(
                q, k, v, feature_map=mapped, state=state, rotary=rotaries, key_mask=key_mask, eps=eps, log_decay=log_decay
            )
        if backend == "triton":
            from . import kernels

            prepared = kernels.prepare(
                q, k, v, feature_map=mapped, spec=spec, rotary=rotaries, key_mask=key_mask, eps=eps, log_decay=log_decay
            )
            out, after = kernels.attend_after(prepared, state, needs_backward=recompute)
            return out.to(q.dtype), after
        return chunked.causal_linear_attention(
            q,
            k,
            v,
            feature_map=mapped,
            state=state,
            rotary=rotaries,
            key_mask=key_mask,
            eps=eps,
            recompute=recompute,
            log_decay=log_decay,
        )


@torch.no_grad()
def recurrent_step_(
    state: LinearState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    rotary: RotaryArgument = None,
    log_decay: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Compute one token of `recurrent_linear_attention` and update the state in place: a step of a decoding loop.

    q: [B, 1, H, D]; k: [B, 1, K, D]; v: [B, 1, K, V] -> [B, 1, H, V], without gradients. Start from the state of a prompt or
    from LinearState.empty. On a GPU it is one small kernel that never waits for the host, so a CUDA graph can hold it.
    """
    rotaries = check_call(q, k, v, feature_map=feature_map, causal=True, rotary=rotary, key_mask=None, eps=eps)
    if q.shape[1] != 1:
        raise ValueError(f"a step takes one token, got {q.shape[1]}; use recurrent_linear_attention for more")
    if state is None:
        raise TypeError("a step changes a state, got None; start from LinearState.empty or the state of a prompt")
    check_log_decay(log_decay, q, k, causal=True)
    k, v = heads_for(feature_map, q, k, v)
    log_decay, k, v = per_key_for(q, k, v, usable_decay(log_decay, None))
    check_state(state, q, k, v, feature_map, rotaries[1])
    with outside_autocast(q):
        mapped = feature_map.given(q, k, key_mask=None, causal=True)
        fits = all(tensor.is_contiguous() for tensor in state.tensors().values()) and state.state.dtype == torch.float32
        choice = Choice("chunked")
        if fits or get_backend() == "reference":
            choice = choose(q, k, v, feature_map=mapped, causal=True, rotary=rotaries, is_step=True)
        if choice.backend == "triton":
            from . import kernels

            prepared = kernels.prepare(
                q, k, v, feature_map=mapped, spec=choice.spec, rotary=rotaries, eps=eps, log_decay=log_decay
            )
            return kernels.step_(prepared, state).to(q.dtype)
        if choice.backend == "reference":
            out, after = reference.recurrent_linear_attention(
                q, k, v, feature_map=mapped, state=state, rotary=rotaries, key_mask=None, eps=eps, log_decay=log_decay
            )
        else:
            given: dict[str, Any] = {"key_mask": None, "eps": eps, "recompute": False, "log_decay": log_decay}
            out, after = chunked.causal_linear_attention(q, k, v, feature_map=mapped, state=state, rotary=rotaries, **given)
    for name, tensor in state.tensors().items():
        tensor.copy_(after.tensors()[name])
    return out


# The lengths and the longest one are part of the launch: a traced program would be specific to one packing.
@run_eagerly
def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMapLike,
    causal: bool,
    rotary: RotaryArgument,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    cu_seqlens: Tensor,
    contrast: Tensor | str | None,
    key_weight: Tensor | str | None,
    log_decay: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute each sequence by itself; the tensors are split, never padded."""
    for name, mask in (("key_mask", key_mask), ("query_mask", query_mask)):
        if mask is not None:
            raise ValueError(f"{name} and cu_seqlens exclude each other, got both; packed sequences have no padding")
    check_options(causal, eps)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}; convert it with torch.as_tensor()")
        if x.dim() != 3 or x.shape[0] != q.shape[0]:
            raise ValueError(
                f"with cu_seqlens, {name} must be [tokens, heads, channels] with the tokens of q ({q.shape[0]}), "
                f"got shape {tuple(x.shape)}; drop the batch dimension"
            )
    lengths = check_cu_seqlens(cu_seqlens, q.shape[0])
    check_contrast(contrast, q)
    check_key_weight(key_weight, q, k, causal=causal)
    check_log_decay(log_decay, q, k, causal=causal, contrast=contrast)
    pair = check_rotary_pair(rotary, q[None], k[None])
    if q.shape[0] == 0:
        return q.new_zeros(0, q.shape[1], v.shape[2]) + 0 * v.sum()
    with outside_autocast(q):
        check_tensors(q[None], k[None], v[None], feature_map)
        spread_k, spread_v = heads_for(feature_map, q[None], k[None], v[None])
        # a map that reads all tokens must see each sequence by itself
        is_same = feature_map.given(q[None], spread_k, key_mask=None, causal=causal) is feature_map
        weight = key_weight[None] if isinstance(key_weight, Tensor) else None
        weight, spread_k, spread_v = per_key_for(q[None], spread_k, spread_v, weight)
        decay = None if log_decay is None else usable_decay(log_decay[None], None)
        decay, spread_k, spread_v = per_key_for(q[None], spread_k, spread_v, decay)
        of_all = partial(choose, q[None], spread_k, spread_v, causal=causal, rotary=pair, samples=len(lengths))
        of_all = partial(of_all, has_contrast=isinstance(contrast, str), has_weight=weight is not None)
        # a contrast scale and the running mean score belong to each sequence alone
        has_contrast_scale = isinstance(contrast, Tensor) or (causal and contrast is not None)
        is_one_call = is_same and not has_contrast_scale and not isinstance(key_weight, str)
        backend, spec = of_all(feature_map=feature_map) if is_one_call else Choice("chunked")
        if backend == "triton":
            from . import kernels

            prepared = kernels.prepare(
                *(q, spread_k[0], spread_v[0]),
                feature_map=feature_map,
                spec=spec,
                rotary=pair,
                eps=eps,
                cu_seqlens=cu_seqlens.to(q.device),
                longest=max(lengths),
                has_contrast=contrast is not None,
                key_weight=None if weight is None else weight[0],
                log_decay=None if decay is None else decay[0],
            )
            needs_backward = _needs_grad(q, k, v, feature_map, key_weight, log_decay)
            return kernels.attend(prepared, causal=causal, needs_backward=needs_backward).to(q.dtype)

    def split_sequences(x: Tensor | str | None) -> Sequence[Tensor | str | None]:
        """Return each sequence as a batch of one; other values are repeated for each."""
        # split rather than slice: the gradients of n slices are n tensors of full size
        return [part[None] for part in x.split(lengths)] if isinstance(x, Tensor) else [x] * len(lengths)

    outputs = []
    start = 0
    parts = zip(lengths, *(split_sequences(x) for x in (q, k, v, contrast, key_weight, log_decay)), strict=True)
    for length, q_part, k_part, v_part, contrast_part, weight_part, decay_part in parts:
        rotaries = tuple(None if each_rotary is None else each_rotary.tokens(start, start + length) for each_rotary in pair)
        start += length
        if length:
            out = linear_attention(
                q_part,
                k_part,
                v_part,
                feature_map=feature_map,
                causal=causal,
                rotary=rotaries,  # type: ignore[arg-type]
                contrast=contrast_part,
                key_weight=weight_part,
                log_decay=decay_part,
                eps=eps,
            )
            outputs.append(out[0])
    return torch.cat(outputs)


def _needs_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMapLike,
    *others: Tensor | str | LinearState | None,
) -> bool:
    """True if a gradient is needed for a tensor, a parameter of the map, or the sums of a state."""
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    parameters = feature_map.parameters() if isinstance(feature_map, torch.nn.Module) else ()
    tensors = [*parameters, *(x for x in others if isinstance(x, Tensor))]
    for other in others:
        tensors += other.tensors().values() if isinstance(other, LinearState) else ()
    return any(x.requires_grad for x in tensors)
