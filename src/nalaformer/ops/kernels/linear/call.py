"""Share code between the launches of one kind of call: sizes come from small tables, never from a search at run time.

A launch through Triton's front end takes tens of microseconds of Python, longer than a kernel on a small image. A `Call`
therefore remembers, per kernel, the compiled code and its numbers; the next call with tensors of the same shapes, strides,
types and alignment only hands over the pointers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backend import INTERPRETING
from ...kernel_spec import MapSettings
from ..common.launch import PRECISION, Bounded, Description, Launches, processors, reads_ahead, start, strides

# Up to this many tokens a single program owns a sample and head: one launch instead of two or three. For heads beyond 64, and
# for other types than bfloat16, only up to this many samples times heads, which leave most of the GPU idle anyway (one H200).
WHOLE_TOKENS, WHOLE_PROGRAMS = 256, 128
# up to this many tokens, for these types, the program computes the weights themselves (compiled/short.py)
SHORT_TOKENS, SHORT_TYPES = 64, (torch.bfloat16,)


class TokenLayout(NamedTuple):
    """Describe the tokens and which count: rotary tables of queries and keys, mask, bounds and longest of packed sequences."""

    cos_q: Tensor | None
    sin_q: Tensor | None
    cos_k: Tensor | None
    sin_k: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    longest: int

    def pointers(self, q: Tensor) -> list[Tensor]:
        """Return the tensors; Triton checks at launch that even unused pointers have a valid tensor."""
        return [q if x is None else x for x in self[:6]]


@dataclass(frozen=True)
class Tile:
    """Describe how a kernel splits its work: tokens per step, warps, pipeline stages."""

    tokens: int
    warps: int
    stages: int


# By kernel, then by the padded head size; measured on one H200 with bfloat16 in heads of 64 and, but for `whole`, of 128. ptxas
# 12.8 (Triton 3.6 and 3.7) breaks other tiles of the causal kernel: 64 tokens in one stage, in eight warps, or in heads of 128.
# machine_code.py explains the fault, and tests/compile_kernels.py finds it without a GPU.
TILES = {
    "state": {64: Tile(64, 4, 4), 128: Tile(32, 8, 4)},
    # "state" where the mean query weighs the keys; heads of 128 take one that ptxas 12.8 does not break, not timed
    "state_by_mean": {64: Tile(64, 4, 3), 128: Tile(64, 8, 2)},
    "output": {64: Tile(64, 4, 3), 128: Tile(64, 4, 1)},
    "whole": {64: Tile(128, 8, 2), 128: Tile(64, 8, 1)},
    # "whole" for many programs
    "whole_many": {64: Tile(64, 4, 3), 128: Tile(64, 8, 1)},
    # all gradients of a sample and head by one program
    "whole_gradient": {64: Tile(64, 4, 2), 128: Tile(32, 8, 1)},
    # all tokens in one tile
    "short": {64: Tile(64, 4, 1)},
    "short_gradient": {64: Tile(64, 4, 1)},
    "dq": {64: Tile(64, 4, 3), 128: Tile(32, 4, 2)},
    "dsums": {64: Tile(64, 4, 3), 128: Tile(32, 8, 1)},
    # "dsums" over the few long splits of causal attention
    "causal_dsums": {64: Tile(64, 4, 3), 128: Tile(64, 8, 3)},
    "dk": {64: Tile(64, 4, 3), 128: Tile(128, 8, 1)},
    "causal": {64: Tile(64, 4, 2), 128: Tile(16, 8, 3)},
    "causal_dq": {64: Tile(32, 4, 3), 128: Tile(32, 8, 2)},
    "causal_dk": {64: Tile(32, 4, 3), 128: Tile(32, 8, 2)},
    "causal_dv": {64: Tile(64, 4, 3), 128: Tile(16, 8, 3)},
    # the last three in one launch, if a single short scan suffices
    "causal_whole_gradient": {64: Tile(32, 4, 3)},
    # causal attention in chunks (CHUNKS)
    "scan": {128: Tile(128, 8, 2)},
    "chunk": {128: Tile(64, 4, 2)},
    "chunk_dq": {128: Tile(64, 4, 1)},
    "scan_back": {128: Tile(64, 8, 3)},
    "chunk_dk": {128: Tile(64, 4, 2)},
    "chunk_dv": {128: Tile(64, 4, 2)},
}
# Tokens of a chunk by padded head size, a multiple of those of every tile. Other sizes scan with the state in registers
# (compiled/causal.py), as do other types than bfloat16 and rotary.
CHUNKS: dict[int, int] = {128: 128}
# With rotary, where it differs: rotated features beside plain ones need registers, and tables the memory for reading ahead.
# The entries for heads of 128 were not timed; they are what fits on chip.
ROTARY_TILES = {
    **{kernel: {64: Tile(64, 4, 2), 128: Tile(64, 8, 1)} for kernel in ("output", "dq")},
    **{kernel: {64: Tile(32, 4, 2)} for kernel in ("causal_dq", "causal_dk", "causal_dv", "causal_whole_gradient")},
    **{kernel: {64: Tile(64, 4, 2)} for kernel in ("dsums", "whole_gradient")},
    **{kernel: {64: Tile(64, 4, 2), 128: Tile(64, 8, 2)} for kernel in ("state", "state_by_mean")},
    "dk": {64: Tile(64, 4, 2), 128: Tile(64, 8, 1)},
    "causal": {64: Tile(32, 4, 2), 128: Tile(16, 8, 2)},
    "causal_dsums": {128: Tile(64, 8, 1)},
}
# Tokens of a split with decay. The gradient of a decay adds up rounded gradients of the tokens after it; for whole splits the
# sums of the splits give that total without such rounding.
DECAY_SPLIT = 256
# with decay, features are weighted once more and take the registers of half a tile
DECAY_TILES = {"causal": {64: Tile(32, 4, 2)}, "causal_dv": {64: Tile(32, 4, 2)}}
# the mean query weighs the keys: gradients of its products lie beside the rest; not timed
BY_MEAN_TILES = {"dk": {128: Tile(64, 8, 1)}}
# By kernel: programs per multiprocessor that run there at once, each of which reads ahead, and the steps below which a program
# costs more than its sums.
SPREAD = {
    "state": (2, 8),
    "state_by_mean": (2, 8),
    "output": (3, 2),
    "dq": (2, 2),
    "dsums": (2, 8),
    "dk": (2, 2),
    "causal": (2, 8),
    "scan": (2, 8),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """Hold the facts that all launches for one kind of input share."""

    settings: MapSettings
    samples: int
    """Batch size, or number of packed sequences."""
    num_queries: int
    """Queries of a sample; of the longest one if packed."""
    num_keys: int
    num_rows: int
    """Queries in a row of values: those of a sample, or all of them if packed."""
    num_key_rows: int
    """Keys in a row of values, likewise."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    pairs: int
    """Channel pairs in a row of the rotary tables; 0 without rotary."""
    operand: torch.dtype
    output: torch.dtype
    is_packed: bool
    has_mask: bool
    device: torch.device
    launches: Launches = field(default_factory=Launches)
    """Compiled kernels with their arguments, and the splits of the tokens."""

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def scalars(self) -> tuple[float, float, float]:
        """norm_scale, alpha, and eps scaled as the kernels' key features are."""
        return self.settings.norm_scale, self.settings.alpha, self.settings.eps * 2.0**-self.settings.log2_key_shift

    @property
    def block_d(self) -> int:
        return max(16, triton.next_power_of_2(self.head_dim))

    @property
    def block_v(self) -> int:
        return max(16, triton.next_power_of_2(self.value_dim))

    @cached_property
    def is_whole(self) -> bool:
        """True if one program per sample and head does everything."""
        is_small = max(self.block_d, self.block_v) <= 64 and self.operand == torch.bfloat16
        is_short = max(self.num_queries, self.num_keys) <= WHOLE_TOKENS
        is_worth_it = is_small or self.samples * self.heads <= WHOLE_PROGRAMS
        is_plain = self.heads == self.kv_heads and not self.is_packed and not self.settings.by_mean_query
        return is_short and is_worth_it and is_plain

    @cached_property
    def is_short(self) -> bool:
        """True if that program holds all tokens in one tile, and compiled/short.py supports the map."""
        is_small = max(self.block_d, self.block_v) <= 64 and self.operand in SHORT_TYPES
        is_one_tile = max(self.num_queries, self.num_keys) <= SHORT_TOKENS
        settings = self.settings
        is_plain = settings.streams == 1 and not (settings.is_guarded or settings.contrast or settings.has_weight or self.pairs)
        return self.is_whole and is_small and is_one_tile and is_plain

    @cached_property
    def is_single_scan(self) -> bool:
        """True if one program can scan a whole (sample, head) of causal attention, so that launch latency dominates."""
        is_small = max(self.block_d, self.block_v) <= 64 and self.num_queries <= WHOLE_TOKENS
        is_plain = self.heads == self.kv_heads and not self.is_packed and not self.chunk and not self.settings.has_decay
        return is_small and is_plain and self.samples * self.heads <= WHOLE_PROGRAMS and self.causal_splits()[0] == 1

    @cached_property
    def chunk(self) -> int:
        """Tokens of a chunk in causal attention; 0 if the scan holds its state in registers."""
        has_kernels = (self.operand == torch.bfloat16 or INTERPRETING) and reads_ahead(self.device)
        is_plain = not self.pairs and not self.settings.has_decay
        return CHUNKS.get(max(self.block_d, self.block_v), 0) if has_kernels and is_plain else 0

    @cached_property
    def per_row(self) -> torch.Size:
        """Shape of the saved values per query: [streams, B, H, N], or [streams, H, T] if packed; tokens side by side."""
        batch = () if self.is_packed else (self.samples,)
        return torch.Size((self.settings.streams, *batch, self.heads, self.num_rows))

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output: [B, N, H, V], or [T, H, V] if packed."""
        return *(() if self.is_packed else (self.samples,)), self.num_rows, self.heads, self.value_dim

    @property
    def has_scale(self) -> bool:
        """True if sums have a scale of their own."""
        return self.settings.is_guarded or self.settings.by_mean_query

    def query_sizes(self, split_size: int) -> tuple[int, ...]:
        """Return the size of a row and of a stream, queries, heads, those per key head, queries of a program."""
        return self.num_rows, self.per_row[1:].numel(), self.num_queries, self.heads, self.group, split_size

    @property
    def state_kernel(self) -> str:
        """Name of the state kernel in the tables."""
        return "state_by_mean" if self.settings.by_mean_query else "state"

    def tile(self, kernel: str) -> Tile:
        """Return the entry of the tables."""
        largest = max(self.block_d, self.block_v)
        table = TILES[kernel] | (ROTARY_TILES.get(kernel, {}) if self.pairs else {})
        table |= DECAY_TILES.get(kernel, {}) if self.settings.has_decay else {}
        table |= BY_MEAN_TILES.get(kernel, {}) if self.settings.by_mean_query else {}
        chosen = next(entry for size, entry in table.items() if largest <= size)
        if self.operand != torch.bfloat16:
            # twice the bytes per element: half the tokens fit, and large heads need the registers of eight warps
            return Tile(max(16, min(32, chosen.tokens // 2)), chosen.warps if largest <= 64 else 8, 1)
        return chosen if reads_ahead(self.device) else Tile(chosen.tokens, chosen.warps, 1)

    def causal_splits(self) -> tuple[int, int]:
        """Like `splits`, over the programs that scan in causal attention."""
        if self.settings.has_decay:
            return -(-self.num_queries // DECAY_SPLIT), DECAY_SPLIT
        if not self.chunk:
            return self.splits("causal", self.num_queries, self.heads)
        return self.splits("scan", self.num_queries, self.kv_heads * self.settings.parts)

    def most_causal_splits(self) -> int:
        if self.settings.has_decay:
            return self.num_queries // DECAY_SPLIT + 2
        return self.most_splits("scan" if self.chunk else "causal", self.num_queries)

    def splits(self, kernel: str, tokens: int, heads: int) -> tuple[int, int]:
        """Return how many programs share the tokens of a sample and head, and how many tokens each takes."""
        known = self.launches.get(("splits", kernel))
        if known is None:
            known = self.launches["splits", kernel] = self.best_splits(kernel, tokens, heads)
        return known

    def best_splits(self, kernel: str, tokens: int, heads: int) -> tuple[int, int]:
        step = self.step(kernel)
        at_once = SPREAD[kernel][0] * processors(self.device)
        rows = max(1, self.samples * heads)
        tiles = -(-tokens // step)
        most = max(1, tokens // self.smallest_split(kernel))

        def time(count: int) -> int:
            """Return the time in tiles: programs run in rounds, and each takes its tiles and the time to begin and end."""
            return -(-count * rows // at_once) * (-(-tiles // count) + 2)

        # Programs fill 1, 2, .. rounds: one more program would take as long as another round. A list: the tokens may be a
        # symbol of torch.compile, which has no hash.
        count = min([min(most, max(1, rounds * at_once // rows)) for rounds in range(1, 5)], key=lambda n: (time(n), n))
        split_size = -(-tiles // count) * step
        return -(-tokens // split_size), split_size

    def step(self, kernel: str) -> int:
        """Return the tokens that stay together."""
        return self.chunk if kernel == "scan" else self.tile(kernel).tokens

    def most_splits(self, kernel: str, tokens: int) -> int:
        """Return an upper bound of `splits` without a search: the tokens may be a symbol of torch.compile."""
        # never one: torch.compile would specialize on it
        return tokens // self.smallest_split(kernel) + 2

    def smallest_split(self, kernel: str) -> int:
        # sums of large heads take as long as many tokens, however small the tiles that such heads leave room for
        return SPREAD[kernel][1] * max(self.step(kernel), self.block_v // 4)

    def constants(self, kernel: str) -> dict[str, object]:
        """Return every constant that some kernel has; each kernel takes its own."""
        chosen = self.tile(kernel)
        return {
            "D": self.head_dim,
            "V": self.value_dim,
            "BD": self.block_d,
            "BV": self.block_v,
            "BN": chosen.tokens,
            "MAP": self.settings.name,
            "PARTS": self.settings.parts,
            "STREAMS": self.settings.streams,
            "PAIRS": self.pairs,
            "CUBE": self.settings.is_cube,
            "HAS_MASK": self.has_mask,
            # decayed keys are weighted where a split of them is summed
            "HAS_WEIGHT": self.settings.has_weight or self.settings.has_decay,
            "HAS_DECAY": self.settings.has_decay,
            "BY_MEAN": self.settings.by_mean_query,
            "CONTRAST": self.settings.contrast > 0,
            "PACKED": self.is_packed,
            "GUARD": self.settings.is_guarded,
            "DOT": tl.bfloat16 if self.operand == torch.bfloat16 else tl.float32,
            "PRECISION": PRECISION[self.operand],
            "num_warps": chosen.warps,
            "num_stages": chosen.stages,
        }

    def sums(self, splits: int, heads: int) -> Tensor:
        return torch.empty((splits, self.samples * heads, *self.sums_shape), dtype=torch.float32, device=self.device)

    @cached_property
    def sums_shape(self) -> tuple[int, ...]:
        """Shape of the sums of a sample and head: [PARTS, D, V + 2], or with a contrast these values and V more in one row."""
        shape = self.settings.parts, self.head_dim, self.value_dim + 2
        return shape if not self.settings.contrast else (math.prod(shape) + self.value_dim,)

    @cached_property
    def all_sums_shape(self) -> tuple[int, ...]:
        """Shape of the sums of all samples and key heads."""
        return self.samples * self.kv_heads, *self.sums_shape

    def start(
        self,
        key: object,
        kernel: Any,
        tensors: Sequence[Tensor],
        describe: Callable[[], tuple[str, tuple[int, ...], tuple[float, ...], dict[str, object]]],
    ) -> None:
        """Launch a kernel; `describe` returns name, grid, numbers and further constants, and runs only the first time."""
        known = self.launches.get(key)
        if known is not None:
            known(tensors)
            return

        def description() -> Description:
            name, grid, numbers, more = describe()
            return grid, numbers, self.constants(name) | more

        start(self.launches, key, kernel, tensors, description)


def is_aligned(*tensors: Tensor) -> bool:
    """True if every row begins at a multiple of sixteen elements, which Triton needs to read rows ahead."""
    return all(x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides(x)) for x in tensors)


def angle_stride(table: Tensor | None) -> int:
    return table.stride(0) if table is not None and table.dim() == 3 else 0


def parameter_row(heads: int, parameters: Tensor) -> tuple[int, int]:
    """Return heads per row of parameters, and the length of a row."""
    return max(1, heads // max(1, parameters.shape[0])), parameters.shape[1]


# Calls by the facts that launches depend on; known_calls.py adds calls by their arguments.
CALLS: Bounded[Any] = Bounded()


def call_for(q: Tensor, k: Tensor, v: Tensor, parameters: Tensor, layout: TokenLayout, settings: MapSettings) -> Call:
    """Return the call for inputs of this kind; the key holds everything that its launches may depend on."""
    cos_q, _, cos_k, _, key_mask, cu_seqlens, longest = layout
    # written out, because a call must cost the host little; the tables are float32
    key = (
        *(settings, longest, parameters.shape, cos_q is None or cos_q.shape, cos_k is None or cos_k.shape),
        *(key_mask is None or key_mask.shape, cu_seqlens is None or (cu_seqlens.shape, cu_seqlens.dtype)),
        *(q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype),
        (q.data_ptr() | k.data_ptr() | v.data_ptr() | (0 if key_mask is None else key_mask.data_ptr())) % 16,
        q.device,
    )
    known: Call | None = CALLS.get(key)
    if known is None:
        known = CALLS[key] = new_call(q, k, v, layout, settings)
    return known


def call_dtypes(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the types of matrix operands and of the output. Operands have the type of the inputs, or float32 for mixed types.
    The softmax map's queries and keys are float32 products (KernelSpec.before), which do not show the type of the inputs."""
    if name == "softmax":
        return v.dtype, v.dtype
    dtypes = {q.dtype, k.dtype, v.dtype}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32, q.dtype


def new_call(q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, settings: MapSettings) -> Call:
    bounds, longest = layout.cu_seqlens, layout.longest
    operand, output = call_dtypes(settings.name, q, k, v)
    return Call(
        settings=settings,
        samples=q.shape[0] if bounds is None else bounds.shape[0] - 1,
        num_queries=q.shape[1] if bounds is None else longest,
        num_keys=k.shape[1] if bounds is None else longest,
        num_rows=q.shape[1] if bounds is None else q.shape[0],
        num_key_rows=k.shape[1] if bounds is None else k.shape[0],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        pairs=0 if layout.cos_q is None else layout.cos_q.shape[-1],
        operand=operand,
        output=output,
        is_packed=bounds is not None,
        has_mask=layout.key_mask is not None,
        device=q.device,
    )
