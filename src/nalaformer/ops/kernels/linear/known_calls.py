"""Run plain attention of inputs like those of an earlier call, without its checks and its choice of backend.

Small inputs are launch-bound: checks, choice and preparation take the host longer than the launch. A plain call has no
positions, masks, contrast, weights or packing, and its tensors are in a form that the kernels read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...backend import get_backend
from ...features import FeatureMapLike
from ...kernel_spec import KernelSpec
from .. import Prepared
from . import bidirectional_op, causal_op
from . import call as calls
from .call import Call, TokenLayout

NO_LAYOUT = TokenLayout(None, None, None, None, None, None, 0)


class KnownCall(NamedTuple):
    """Hold the results of the checks of an earlier call."""

    call: Call
    spec: KernelSpec
    other_facts: tuple[object, ...]
    """Other facts about its feature map."""


def attend_again(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMapLike, causal: bool, eps: float) -> Tensor | None:
    """Return the output [B, N, H, V] of a plain call, or None without an earlier one like it; not in tracers or transforms."""
    known: KnownCall | None = calls.CALLS.get(call_key(q, k, v, feature_map, causal, eps))
    if known is None or feature_map.given(q, k, key_mask=None, query_mask=None, causal=causal) is not feature_map:
        return None
    spec = feature_map.kernel_spec(q.device)
    # the map may have changed since, and the values of its parameters may always differ
    if spec is None or not (spec is known.spec or is_same_except_parameters(spec, known.spec)):
        return None
    if other_facts(feature_map) != known.other_facts:
        return None
    parameters = spec.parameters
    if parameters is None:
        parameters = q.new_empty(1, 0, dtype=torch.float32)
    needs_backward = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or parameters.requires_grad
    )
    if causal:
        return causal_op.attend_as(known.call, q, k, v, parameters, None, None, NO_LAYOUT, False, needs_backward)[0]
    return bidirectional_op.attend_as(known.call, q, k, v, parameters, None, NO_LAYOUT, needs_backward)


def remember(
    ready: Prepared,
    spec: KernelSpec | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMapLike,
    causal: bool,
    eps: float,
) -> None:
    """Store a plain call that ran, with its preparation."""
    if spec is None or ready.q is not q or ready.k is not k or ready.v is not v:
        return
    made = calls.call_for(q, k, v, ready.parameters, ready.layout, ready.settings)
    if spec.parameters is not None and spec.parameters.requires_grad:
        # a cached spec must not hold the graph of a learned map
        spec = spec._replace(parameters=spec.parameters.detach())
    calls.CALLS[call_key(q, k, v, feature_map, causal, eps)] = KnownCall(made, spec, other_facts(feature_map))


def call_key(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMapLike, causal: bool, eps: float) -> tuple[object, ...]:
    """Return what the checks, the choice and the launches depend on; for the map, see `other_facts` and its KernelSpec."""
    return (
        *(id(feature_map), type(feature_map), causal, eps, get_backend()),
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16),
    )


def other_facts(feature_map: FeatureMapLike) -> tuple[object, ...]:
    return feature_map.num_heads, feature_map.head_dim, feature_map.streams, feature_map.heads_have_own_keys


def is_same_except_parameters(spec: KernelSpec, other: KernelSpec) -> bool:
    shapes = [None if x.parameters is None else x.parameters.shape for x in (spec, other)]
    return shapes[0] == shapes[1] and spec._replace(parameters=None) == other._replace(parameters=None)
