"""Check the arguments of the ops. Each error states the rule, what came instead, and what to do."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .contrast import MEAN_SCORE
from .features import FeatureMapLike, cheap_to_look_at, compute_dtype
from .rotary import Rotary
from .state import LinearState

RotaryArgument = Rotary | tuple[Rotary, Rotary] | None
RotaryPair = tuple[Rotary | None, Rotary | None]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMapLike,
    causal: bool,
    rotary: RotaryArgument,
    key_mask: Tensor | None,
    eps: float,
    has_values: bool = True,
) -> RotaryPair:
    """Check all rules of a call with [B, N, H, D] inputs and return the rotary of q and that of k. has_values=False: v is k."""
    check_options(causal, eps)
    check_tensors(q, k, v, feature_map, has_values=has_values)
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"causal attention needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}; "
            "to continue an earlier sequence use recurrent_linear_attention with its state"
        )
    check_key_mask(key_mask, k)
    return check_rotary_pair(rotary, q, k)


def check_options(causal: bool, eps: float) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number >= 0, got {eps!r}; the default is 1e-6")


def check_log_decay(
    log_decay: Tensor | None, q: Tensor, k: Tensor, *, causal: bool, contrast: Tensor | str | None = None, block: int = 1
) -> None:
    if log_decay is None:
        return
    if not isinstance(log_decay, Tensor):
        raise TypeError(f"log_decay must be a torch tensor, got {type(log_decay).__name__}; convert it with torch.as_tensor()")
    fits = [(*k.shape[:-2], heads) for heads in dict.fromkeys((k.shape[-2], q.shape[-2]))]
    if not log_decay.is_floating_point() or tuple(log_decay.shape) not in fits:
        raise ValueError(
            f"log_decay must be floats <= 0 for each token and head, {' or '.join(map(str, fits))}, "
            f"got {log_decay.dtype} {tuple(log_decay.shape)}"
        )
    if log_decay.device != q.device:
        raise ValueError(f"log_decay must be on the device of q ({q.device}), got {log_decay.device}; move it with .to()")
    if cheap_to_look_at(log_decay) and bool((log_decay > 0).any()):
        raise ValueError(
            f"log_decay must be <= 0 (decay factors are at most 1), got max {float(log_decay.detach().max()):.4g}; pass the "
            "logarithm of the factors, such as F.logsigmoid(x)"
        )
    if not causal or block > 1:
        raise ValueError(
            f"log_decay needs causal attention token by token, got causal={causal}, block={block}; use causal=True, block=1"
        )
    if isinstance(contrast, str):
        raise ValueError(f"with log_decay, contrast must be a tensor of scales [batch, tokens, heads], got {contrast!r}")


def check_block(block: int, *, causal: bool, is_packed: bool) -> None:
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be the number of tokens that see each other, at least 1, got {block!r}")
    if block > 1 and not causal:
        raise ValueError(f"block needs causal attention, got block={block} with causal=False; use causal=True or block=1")
    if block > 1 and is_packed:
        raise ValueError(f"packed sequences have no blocks, got block={block} with cu_seqlens; call once for each sequence")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMapLike, *, has_values: bool = True) -> None:
    """Raise for inputs that break a rule; one quick check passes nearly every valid call."""
    if not passes_quick_check(q, k, v, feature_map):
        explain_tensors(q, k, v, feature_map)
        if has_values:
            check_value_size(v, feature_map)


def passes_quick_check(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMapLike) -> bool:
    """True only if `explain_tensors` finds no error; it also handles grouped heads and rare types."""
    is_map = hasattr(feature_map, "query_streams") and not isinstance(feature_map, type)
    if not is_map or not (type(q) is type(k) is type(v) is Tensor) or q.dim() != 4:
        return False
    shape, device = q.shape, q.device
    _, tokens, heads, channels = shape
    is_one_kind = k.shape == shape and v.shape == shape and k.device == device and v.device == device
    is_one_type = q.is_floating_point() and k.dtype == q.dtype and v.dtype == q.dtype
    fits_map = heads == feature_map.num_heads and channels == feature_map.head_dim and channels % feature_map.streams == 0
    return is_one_kind and is_one_type and fits_map and tokens > 0


def explain_tensors(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMapLike) -> None:
    """Raise the error of the first rule that is broken, with what came instead."""
    if isinstance(feature_map, type) or not hasattr(feature_map, "query_streams"):
        got = f"the class {feature_map.__name__} itself" if isinstance(feature_map, type) else repr(feature_map)
        raise TypeError(
            f"feature_map must be a FeatureMap, got {got}; "
            'make one with nalaformer.feature_map("norm_aware", num_heads=..., head_dim=...)'
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}; convert it with torch.as_tensor()")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be [batch, tokens, heads, channels], got shape {tuple(x.shape)}; "
                "tokens of packed sequences ([tokens, heads, channels]) need cu_seqlens"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} must hold floats, got {x.dtype}; convert it with .float()")
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}; move it with .to()"
            )
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"q, k and v must have one batch size, got {q.shape[0]} for q and {x.shape[0]} for {name}")
        if x.shape[2] == 0 or x.shape[3] == 0:
            raise ValueError(f"the heads and channels of {name} must be at least 1, got shape {tuple(x.shape)}")
        if x.shape[1] == 0:
            raise ValueError(
                f"{name} must hold at least one token, got shape {tuple(x.shape)}; an empty batch is fine, no tokens is not"
            )
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have the same tokens, got {k.shape[1]} and {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v must have the same heads, got {k.shape[2]} and {v.shape[2]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"the query heads must be a multiple of the key heads, got {q.shape[2]} and {k.shape[2]}; "
            "each key head serves the same number of query heads"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head size, got {q.shape[3]} and {k.shape[3]}")
    if q.shape[3] != feature_map.head_dim:
        raise ValueError(
            f"the feature map was made for head_dim {feature_map.head_dim}, got q with {q.shape[3]} channels a head; "
            f"make the map with head_dim={q.shape[3]}"
        )
    if feature_map.num_heads not in (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the feature map was made for {feature_map.num_heads} heads, got {q.shape[2]} query and {k.shape[2]} key "
            f"heads; make the map with num_heads={q.shape[2]}"
            + (
                ", or transpose(1, 2) tensors that are [batch, heads, tokens, channels]"
                if q.shape[1] == feature_map.num_heads
                else ""
            )
        )


def check_value_size(v: Tensor, feature_map: FeatureMapLike) -> None:
    if v.shape[3] % feature_map.streams:
        raise ValueError(
            f"the value size must be divisible by the map's streams ({feature_map.streams}), got {v.shape[3]}; "
            "choose an even head_dim"
        )


def check_key_mask(key_mask: Tensor | None, k: Tensor) -> None:
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor):
        raise TypeError(f"key_mask must be a torch tensor, got {type(key_mask).__name__}; convert it with torch.as_tensor()")
    if key_mask.dtype != torch.bool or key_mask.shape != k.shape[:2]:
        raise ValueError(
            f"key_mask must be bool [batch, keys] = {tuple(k.shape[:2])}, True where a key is visible, "
            f"got {key_mask.dtype} {tuple(key_mask.shape)}; a float or inverted mask must be converted first"
        )
    if key_mask.device != k.device:
        raise ValueError(f"key_mask must be on the device of k ({k.device}), got {key_mask.device}; move it with .to()")


def check_query_mask(query_mask: Tensor | None, q: Tensor) -> None:
    if query_mask is not None and (query_mask.dtype != torch.bool or query_mask.shape != q.shape[:2]):
        raise ValueError(
            f"query_mask must be bool [batch, queries] = {tuple(q.shape[:2])}, True where a query is a token and not padding, "
            f"got {query_mask.dtype} {tuple(query_mask.shape)}"
        )


def check_contrast(contrast: Tensor | str | None, q: Tensor) -> None:
    if contrast is None or (isinstance(contrast, str) and contrast == MEAN_SCORE):
        return
    if not isinstance(contrast, Tensor):
        raise ValueError(f'contrast must be None, "{MEAN_SCORE}" or a tensor with a number for each query, got {contrast!r}')
    if contrast.shape != q.shape[:-1] or not contrast.is_floating_point():
        raise ValueError(
            f"contrast must hold a float for each token and head of q, {tuple(q.shape[:-1])}, "
            f"got {contrast.dtype} {tuple(contrast.shape)}"
        )


def check_key_weight(
    key_weight: Tensor | str | None,
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> None:
    if key_weight is None:
        return
    if isinstance(key_weight, str) and key_weight == "global_query":
        check_query_padding(q, k, key_mask, query_mask)
        if causal:
            raise ValueError(
                'key_weight="global_query" reads all queries, later ones too, but got causal=True; '
                "use causal=False, or pass your own weights"
            )
        return
    if not isinstance(key_weight, Tensor) or not key_weight.is_floating_point():
        raise ValueError(
            f"key_weight must be a float tensor, got {key_weight!r}; nalaformer.global_query_weight returns that of RALA, and "
            'key_weight="global_query" uses it'
        )
    allowed = [(*k.shape[:-2], heads) for heads in (k.shape[-2], q.shape[-2])]
    if tuple(key_weight.shape) not in allowed:
        raise ValueError(
            f"key_weight must hold a number for each key and head of k or of q, {allowed[0]} or {allowed[1]}, "
            f"got {tuple(key_weight.shape)}"
        )


def check_query_padding(q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> None:
    if key_mask is not None and query_mask is None and q.shape[1] == k.shape[1]:
        raise ValueError(
            "the weight of a key reads all queries, so it needs to know which of them are padding, got a key_mask for as many "
            f"keys as queries ({q.shape[1]}) and no query_mask; pass query_mask=key_mask in self-attention, and in "
            "cross-attention the mask of the queries (all True if there is no padding)"
        )


def check_rotary_pair(rotary: RotaryArgument, q: Tensor, k: Tensor) -> RotaryPair:
    """Return the rotary of q and that of k, which must rotate alike."""
    if isinstance(rotary, tuple) and len(rotary) != 2:
        raise ValueError(f"rotary must be one Rotary or a pair (of q, of k), got a tuple of {len(rotary)}")
    if rotary is None:
        return None, None
    rotary_q, rotary_k = rotary if isinstance(rotary, tuple) else (rotary, rotary)
    check_rotary(rotary_q, q, "q")
    check_rotary(rotary_k, k, "k")
    of_q, of_k = (x is not None and x.normalised for x in (rotary_q, rotary_k))
    if of_q != of_k:
        raise ValueError(
            f"a normalised rotary adds features and must rotate both q and k, got normalised={of_q} for q and {of_k} for k; "
            "make both with normalised=True, or neither"
        )
    if rotary_q is not None and rotary_k is not None and rotary_q.dim != rotary_k.dim:
        raise ValueError(
            f"the rotary of q and that of k must rotate as many channels, got {rotary_q.dim} and {rotary_k.dim}; make both "
            "with the same dim"
        )
    return rotary_q, rotary_k


def check_rotary(rotary: Rotary | None, x: Tensor, name: str) -> None:
    if rotary is None:
        return
    if not isinstance(rotary, Rotary):
        raise TypeError(
            f"rotary must be a nalaformer.Rotary, got {type(rotary).__name__}; make one with Rotary.sequence or Rotary.grid"
        )
    if rotary.num_tokens != x.shape[1]:
        raise ValueError(
            f"the rotary must have a position for each token of {name} ({x.shape[1]}), got {rotary.num_tokens}; "
            "for cross-attention pass a pair (rotary of q, rotary of k)"
        )
    if rotary.positions.dim() == 3 and rotary.positions.shape[0] != x.shape[0]:
        raise ValueError(
            f"rotary positions [B, N, axes] must have the batch size of {name} ({x.shape[0]}), got {rotary.positions.shape[0]}"
        )
    if rotary.positions.device != x.device:
        raise ValueError(
            f"the rotary must be on the device of {name} ({x.device}), got {rotary.positions.device}; "
            "pass device= when making it"
        )


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> list[int]:
    """Check the bounds and return the lengths of the packed sequences."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"cu_seqlens must be a torch tensor, got {type(cu_seqlens).__name__}; convert it with torch.tensor([0, 3, 8])"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must be a list of integers [sequences + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; "
            "for lengths 3 and 5 it is [0, 3, 8]"
        )
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != num_tokens or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens ({num_tokens}), "
            f"got {bounds[:8]}{'...' if len(bounds) > 8 else ''}; "
            "it holds the running total of the lengths, beginning with 0"
        )
    return lengths


def check_rows(rows: Tensor | Sequence[int], q: Tensor) -> Tensor:
    """Return the numbers of queries as an index tensor."""
    index = (
        torch.as_tensor(rows, device=q.device) if isinstance(rows, Tensor | Sequence) and not isinstance(rows, str) else None
    )
    # torch makes an empty list a tensor of floats
    if index is not None and index.numel() == 0:
        index = index.to(torch.int64)
    if (
        index is None
        or index.dtype not in INTEGERS
        or index.dim() != 1
        or (index.numel() and not 0 <= int(index.min()) <= int(index.max()) < q.shape[1])
    ):
        raise ValueError(f"rows must be a list of query numbers from 0 to {q.shape[1] - 1}, got {rows!r}")
    return index.to(torch.int64)


def check_state(
    state: LinearState | None, q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMapLike, rotary: Rotary | None
) -> None:
    if state is None:
        return
    if not isinstance(state, LinearState):
        raise TypeError(
            f"the state must be a LinearState, got {type(state).__name__}; use the one that recurrent_linear_attention "
            "returned, or LinearState.empty"
        )
    if state.state.device != k.device:
        raise ValueError(
            f"the state must be on the device of k ({k.device}), got {state.state.device}; move it with state.to()"
        )
    summed = compute_dtype(q, k, v)
    if state.state.dtype != summed:
        raise ValueError(
            f"the state must have the type in which these tokens are summed ({summed}), got {state.state.dtype}; convert the "
            f"tokens, or start from LinearState.empty(..., dtype={summed})"
        )
    # an empty sequence shows the size of the features without computing any
    no_token = k[:, :0]
    features = feature_map.key(no_token.to(summed)).shape[-1]
    if rotary is not None and rotary.normalised:
        features += features // 2
    found = tuple(state.state.shape)
    wanted = (k.shape[0], k.shape[2], features, v.shape[3])
    if found != wanted:
        raise ValueError(
            f"the state must have batch, key heads, features and value size {wanted}, got {found}; "
            "it must come from the same layer and batch (LinearState.select reorders the batch)"
        )
