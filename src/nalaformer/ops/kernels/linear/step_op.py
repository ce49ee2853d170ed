"""Compute one token of recurrent attention as an operator."""

from typing import Any

import torch
import triton
from torch import Tensor

from ...kernel_spec import MapSettings
from ..common.launch import use_device
from ..common.op import custom_op
from .compiled.step import step_kernel


def run_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    cos_q: Tensor | None,
    sin_q: Tensor | None,
    cos_k: Tensor | None,
    sin_k: Tensor | None,
    state: Tensor,
    key_sum: Tensor,
    count: Tensor,
    log_scale: Tensor,
    log_decay: Tensor | None,
    settings: MapSettings,
) -> Tensor:
    """Return the output [B, 1, H, V] of one token and update the four tensors of the state."""
    count.add_(1)
    (batch, _, heads, head_dim), kv_heads, value_dim = q.shape, k.shape[2], v.shape[-1]
    out = torch.empty(batch, 1, heads, value_dim, dtype=q.dtype, device=q.device)
    rows = max(1, parameters.shape[0])
    angles = [q if x is None else x for x in (cos_q, sin_q, cos_k, sin_k)]
    with use_device(q):
        step_kernel[(batch * kv_heads,)](
            *(q, k, v, parameters, *angles, state, key_sum, count, log_scale),
            *(log_scale if log_decay is None else log_decay, out),
            *(kv_heads, heads // kv_heads),
            *(q.stride(0), q.stride(2), k.stride(0), k.stride(2), v.stride(0), v.stride(2)),
            *(0 if x is None or x.dim() == 2 else x.stride(0) for x in (cos_q, cos_k)),
            *(max(1, heads // rows), max(1, kv_heads // rows), parameters.shape[1]),
            *(settings.norm_scale, settings.alpha, settings.eps, settings.log2_key_shift),
            D=head_dim,
            V=value_dim,
            BD=max(16, triton.next_power_of_2(head_dim)),
            BV=max(16, triton.next_power_of_2(value_dim)),
            MAP=settings.name,
            PARTS=settings.parts,
            STREAMS=settings.streams,
            PAIRS=0 if cos_q is None else cos_q.shape[-1],
            CUBE=settings.is_cube,
            GUARD=settings.is_guarded,
            HAS_DECAY=log_decay is not None,
            num_warps=4,
        )
    return out


def shapes(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


step = custom_op("step", run_step, shapes, mutates=("state", "key_sum", "count", "log_scale"))
