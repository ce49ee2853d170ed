"""Launches of the bidirectional kernels: sizes from small tables, never from a search at run time."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bidirectional import output_kernel, state_kernel, whole_kernel
from .bidirectional_gradient import dk_kernel, dq_kernel, dsums_kernel

# up to this many tokens a single program may own a sample and head: one launch instead of three
WHOLE_TOKENS = 2048
Strides = tuple[int, int, int]
Angles = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work: tokens per step, warps, pipeline stages."""

    tokens: int
    warps: int
    stages: int


# by kernel, then by the padded head size: measured on one H200 with bfloat16 (benchmarks/results)
TILES = {
    "state": {64: Tile(64, 4, 3), 128: Tile(64, 8, 2), 256: Tile(32, 8, 1)},
    "output": {64: Tile(64, 4, 2), 128: Tile(64, 8, 2), 256: Tile(32, 8, 1)},
    "whole": {64: Tile(128, 8, 2), 128: Tile(64, 8, 2), 256: Tile(32, 8, 1)},
    "dq": {64: Tile(64, 4, 2), 128: Tile(64, 8, 1), 256: Tile(64, 8, 1)},
    "dsums": {64: Tile(64, 4, 2), 128: Tile(64, 8, 1), 256: Tile(64, 8, 1)},
    "dk": {64: Tile(64, 4, 2), 128: Tile(64, 8, 1), 256: Tile(64, 8, 1)},
}


# by kernel: programs per multiprocessor that we want, and steps below which a program is not worth its sums
SPREAD = {"state": (3, 8), "output": (8, 4), "dq": (8, 4), "dsums": (3, 8), "dk": (8, 4)}


def tile(kernel: str, head: int, operand: torch.dtype) -> Tile:
    chosen = next(entry for size, entry in TILES[kernel].items() if head <= size)
    if operand == torch.float32:
        # twice the bytes per element: half the tokens fit
        return Tile(max(16, min(32, chosen.tokens // 2)), chosen.warps, 1)
    return chosen


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(frozen=True)
class Call:
    """What all launches of one call share."""

    name: str
    parts: int
    streams: int
    is_cube: bool
    """Norm-aware keys to the power 3, which is not learned."""
    norm_scale: float
    alpha: float
    eps: float
    is_guarded: bool
    samples: int
    """Batch size, or number of packed sequences."""
    num_queries: int
    """Of a sample; of the longest one if packed."""
    num_keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    pairs: int
    """Channel pairs in a row of the rotary tables; 0: no rotary."""
    operand: torch.dtype
    is_packed: bool
    has_mask: bool

    @property
    def block_d(self) -> int:
        return max(16, triton.next_power_of_2(self.head_dim))

    @property
    def block_v(self) -> int:
        return max(16, triton.next_power_of_2(self.value_dim))

    @property
    def is_whole(self) -> bool:
        """Whether one program per sample and head does it all."""
        short = max(self.num_queries, self.num_keys) <= WHOLE_TOKENS
        return short and self.heads == self.kv_heads and not self.is_packed

    def constants(self, chosen: Tile) -> dict[str, object]:
        return {
            "D": self.head_dim,
            "V": self.value_dim,
            "BD": self.block_d,
            "BV": self.block_v,
            "BN": chosen.tokens,
            "MAP": self.name,
            "PARTS": self.parts,
            "PAIRS": self.pairs,
            "DOT": tl.bfloat16 if self.operand == torch.bfloat16 else tl.float32,
            "PRECISION": PRECISION[self.operand],
            "num_warps": chosen.warps,
            "num_stages": chosen.stages,
        }

    def sums(self, splits: int, heads: int, device: torch.device) -> Tensor:
        shape = (splits, self.samples * heads, self.parts, self.head_dim, self.value_dim + 2)
        return torch.empty(shape, dtype=torch.float32, device=device)


# three tf32 products make one of float32 quality; a single one would cost float16 three of its eleven bits
PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "tf32x3"}


def splits(call: Call, kernel: str, tokens: int, heads: int, chosen: Tile, device: torch.device) -> tuple[int, int]:
    """Over how many programs the tokens of a sample and head are spread, and how many each takes."""
    per_processor, steps = SPREAD[kernel]
    # rounded down: one program more than fit at once would take as long as all of them again
    wanted = per_processor * processors(device) // max(1, call.samples * heads)
    count = max(1, min(wanted, tokens // (steps * chosen.tokens)))
    stretch = -(-tokens // (count * chosen.tokens)) * chosen.tokens
    return -(-tokens // stretch), stretch


def strides(x: Tensor) -> Strides:
    """Of batch, token and head; packed tensors have no batch."""
    return (0, x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(0), x.stride(1), x.stride(2))


def angle_stride(table: Tensor | None) -> int:
    return table.stride(0) if table is not None and table.dim() == 3 else 0


def parameter_group(heads: int, parameters: Tensor) -> int:
    """Heads per row of parameters."""
    return max(1, heads // max(1, parameters.shape[0]))


def forward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Tensor,
    angles_q: Angles,
    angles_k: Angles,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Fills `out`; returns the sums [B * K, PARTS, D, V + 2] and their log2 scale [B * K]."""
    device = q.device
    # a pointer that no constant of the call lets the kernel read still has to be one
    table_q, table_k = (tuple(q if x is None else x for x in angles) for angles in (angles_q, angles_k))
    mask, bounds = (q if x is None else x for x in (key_mask, cu_seqlens))
    if call.is_whole:
        chosen = tile("whole", call.block_d, call.operand)
        sums = call.sums(1, call.heads, device)[0]
        scale = sums.new_empty(sums.shape[0])
        whole_kernel[(call.samples * call.heads,)](
            q,
            k,
            v,
            mask,
            parameters,
            *table_q,
            *table_k,
            out,
            sums,
            scale,
            call.num_queries,
            call.num_keys,
            call.heads,
            *strides(q),
            *strides(k),
            *strides(v),
            *strides(out),
            angle_stride(angles_q[0]),
            angle_stride(angles_k[0]),
            parameter_group(call.heads, parameters),
            parameters.shape[1],
            call.norm_scale,
            call.alpha,
            call.eps,
            STREAMS=call.streams,
            CUBE=call.is_cube,
            HAS_MASK=call.has_mask,
            GUARD=call.is_guarded,
            KEEP=keep,
            **call.constants(chosen),
        )
        return sums, scale

    chosen = tile("state", call.block_d, call.operand)
    count, stretch = splits(call, "state", call.num_keys, call.kv_heads, chosen, device)
    partial = call.sums(count, call.kv_heads, device)
    partial_scale = partial.new_empty(partial.shape[:2])
    state_kernel[(count, call.samples * call.kv_heads)](
        k,
        v,
        mask,
        bounds,
        parameters,
        *table_k,
        partial,
        partial_scale,
        call.num_keys,
        call.kv_heads,
        stretch,
        *strides(k),
        *strides(v),
        angle_stride(angles_k[0]),
        parameter_group(call.kv_heads, parameters),
        parameters.shape[1],
        call.alpha,
        CUBE=call.is_cube,
        HAS_MASK=call.has_mask,
        PACKED=call.is_packed,
        GUARD=call.is_guarded,
        **call.constants(chosen),
    )
    sums, scale = merge(partial, partial_scale, call.is_guarded)

    chosen = tile("output", call.block_d, call.operand)
    count, stretch = splits(call, "output", call.num_queries, call.heads, chosen, device)
    output_kernel[(count, call.samples * call.heads)](
        q,
        bounds,
        parameters,
        *table_q,
        sums,
        scale,
        out,
        call.num_queries,
        call.heads,
        call.heads // call.kv_heads,
        stretch,
        *strides(q),
        *strides(out),
        angle_stride(angles_q[0]),
        parameter_group(call.heads, parameters),
        parameters.shape[1],
        call.norm_scale,
        call.alpha,
        call.eps,
        STREAMS=call.streams,
        PACKED=call.is_packed,
        GUARD=call.is_guarded,
        **call.constants(chosen),
    )
    return sums, scale


def merge(partial: Tensor, scale: Tensor, is_guarded: bool) -> tuple[Tensor, Tensor]:
    """Add the sums of the splits, in order; [splits, B * K, PARTS, D, V + 2] -> [B * K, PARTS, D, V + 2]."""
    if partial.shape[0] == 1:
        return partial[0], scale[0]
    if not is_guarded:
        return partial.sum(0), scale[0]
    largest = scale.amax(0)
    weight = torch.exp2(scale - largest)[:, :, None, None, None].expand_as(partial).clone()
    weight[..., -1] = 1  # the number of keys is not scaled
    return (partial * weight).sum(0), largest


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    parameters: Tensor,
    angles_q: Angles,
    angles_k: Angles,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sums: Tensor,
    scale: Tensor,
    is_learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv; and for learned maps the gradients of the query's [4, D] and the key's [2, D] parameters per head."""
    device = q.device
    table_q, table_k = (tuple(q if x is None else x for x in angles) for angles in (angles_q, angles_k))
    mask, bounds = (q if x is None else x for x in (key_mask, cu_seqlens))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    group = call.heads // call.kv_heads

    def parameter_buffer(splits: int, heads: int, rows: int) -> Tensor:
        shape = (splits, call.samples, heads, rows, call.head_dim) if is_learned else (1,)
        return torch.empty(shape, dtype=torch.float32, device=device)

    chosen = tile("dq", call.block_d, call.operand)
    count, stretch = splits(call, "dq", call.num_queries, call.heads, chosen, device)
    dquery = parameter_buffer(count, call.heads, 4)
    rows = torch.empty((*q.shape[:-1], call.streams, 2), dtype=torch.float32, device=device)
    dq_kernel[(count, call.samples * call.heads)](
        q,
        dout,
        bounds,
        parameters,
        *table_q,
        sums,
        scale,
        dq,
        rows,
        dquery,
        call.num_queries,
        call.heads,
        group,
        stretch,
        *strides(q),
        *strides(dout),
        *strides(dq),
        angle_stride(angles_q[0]),
        parameter_group(call.heads, parameters),
        parameters.shape[1],
        call.norm_scale,
        call.alpha,
        call.eps,
        STREAMS=call.streams,
        PACKED=call.is_packed,
        GUARD=call.is_guarded,
        LEARNED=is_learned,
        **call.constants(chosen),
    )

    chosen = tile("dsums", call.block_d, call.operand)
    count, stretch = splits(call, "dsums", call.num_queries, call.heads, chosen, device)
    partial = call.sums(count, call.heads, device)
    dsums_kernel[(count, call.samples * call.heads)](
        q,
        dout,
        bounds,
        parameters,
        *table_q,
        rows,
        partial,
        call.num_queries,
        call.heads,
        stretch,
        *strides(q),
        *strides(dout),
        angle_stride(angles_q[0]),
        parameter_group(call.heads, parameters),
        parameters.shape[1],
        call.norm_scale,
        call.alpha,
        STREAMS=call.streams,
        PACKED=call.is_packed,
        **call.constants(chosen),
    )
    dsums = partial.unflatten(1, (-1, group)).sum((0, 2)) if count * group > 1 else partial[0]

    chosen = tile("dk", call.block_d, call.operand)
    count, stretch = splits(call, "dk", call.num_keys, call.kv_heads, chosen, device)
    dkey = parameter_buffer(count, call.kv_heads, 2)
    dk_kernel[(count, call.samples * call.kv_heads)](
        k,
        v,
        mask,
        bounds,
        parameters,
        *table_k,
        dsums,
        scale,
        dk,
        dv,
        dkey,
        call.num_keys,
        call.kv_heads,
        stretch,
        *strides(k),
        *strides(v),
        *strides(dk),
        *strides(dv),
        angle_stride(angles_k[0]),
        parameter_group(call.kv_heads, parameters),
        parameters.shape[1],
        call.alpha,
        CUBE=call.is_cube,
        HAS_MASK=call.has_mask,
        PACKED=call.is_packed,
        GUARD=call.is_guarded,
        LEARNED=is_learned,
        **call.constants(chosen),
    )
    if not is_learned:
        return dq, dk, dv, None, None
    return dq, dk, dv, dquery.sum((0, 1)), dkey.sum((0, 1))
