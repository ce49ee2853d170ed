"""Positions, padding and packed sequences of a forward pass, computed once for all layers."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import Rotary, compute_dtype
from ...ops.exporting import is_recorded
from ...ops.kept_tensors import is_ordinary
from ..token_masks import begins_again, check_mask
from .config import RECURRENT_MIXERS, NaLaConfig
from .positions import RotaryPositions

Masks = dict[str, Tensor | None]
"""Precomputed masks by the kind of layer: "full_attention" as Tokens.pairs, "linear_attention" as Tokens.key_mask."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """N new tokens of B rows, after `past` earlier ones in a cache."""

    rotary: Rotary
    """Positions [B, N, 1]."""
    past: int
    """Earlier tokens of each row, padding included; a static cache counts them in a tensor."""
    key_mask: Tensor | None
    """[B, N] bool, False where a new token is padding; None: all are real."""
    sequence: Tensor | None
    """The index of each token's packed sequence, [B, N]; None: each row is one sequence."""
    cu_seqlens: Tensor | None
    """Offsets of the packed sequences in the B * N tokens, and their end, [S + 1] on the CPU; None: each row is one."""
    pairs: Tensor | None
    """The keys that a token of a `softmax` mixer sees, [B or 1, 1, N, past + N] bool; None: all up to itself. Or values that
    are added to the scores. With a static cache there is a column for each token that it has room for."""
    sharpness: Tensor | None = None
    """The factors of the query channels of `softmax` mixers, [D]: RotaryPositions.temperatures for queries and keys together;
    None: 1."""
    closed: Tensor | None = None
    """The place of each new token with real ones first and padding last, [B, N]; None: no padding between real tokens."""
    weights: list[Tensor] | None = None
    """A list to which `softmax` mixers append their weights [B, H, N, past + N]; None: the weights are not returned."""

    def slice_tokens(self, start: int, stop: int) -> "Tokens":
        """Return the tokens start .. stop - 1 for a recurrent mixer; packed sequences cannot be split."""
        mask = None if self.key_mask is None else self.key_mask[:, start:stop]
        past = self.past + start
        closed = None if mask is None else closed_up(mask, past)
        return replace(self, rotary=self.rotary.tokens(start, stop), past=past, key_mask=mask, pairs=None, closed=closed)


def describe_tokens(
    places: RotaryPositions,
    embeddings: Tensor,
    *,
    attention_mask: Tensor | Masks | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    past: int,
    capacity: int | None = None,
    wants_weights: bool = False,
) -> Tokens:
    """Return the Tokens of a call. embeddings [B, N, C]; attention_mask [B, past + N]; position_ids [B or 1, N], 0 at starts.

    attention_mask may also be [B or 1, 1, N, past + N] if all mixers are `softmax`, or Masks.
    capacity: tokens that a static cache has room for; None: the cache grows.
    """
    config = places.config
    batch, length = embeddings.shape[:2]
    device = embeddings.device
    visible = key_mask = pairs = None
    if isinstance(attention_mask, dict):
        key_mask, pairs = attention_mask["linear_attention"], attention_mask["full_attention"]
    elif attention_mask is not None and attention_mask.dim() == 4:
        pairs = _check_pair_mask(config, attention_mask)
    else:
        visible = _visible(attention_mask, batch, past + length)
        # only new tokens matter: rows padded long ago need no mask
        key_mask = None if visible is None else none_if_all(visible[:, visible.shape[1] - length :])
    if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids must have a position for each of the {length} new tokens of {batch} rows, "
            f"got shape {tuple(position_ids.shape)}"
        )
    starts = sequence = bounds = None
    # a cache with a tensor as its count has seen tokens
    is_first = not isinstance(past, Tensor) and past == 0
    if cu_seqlens is not None and not is_first:
        raise ValueError(
            f"packed sequences need an empty cache, got cu_seq_lens_q after {int(past)} tokens; pass use_cache=False and whole "
            "sequences, or one sequence in each row"
        )
    if is_first and (cu_seqlens is not None or (position_ids is not None and length > 1)):
        starts, bounds = _find_packing(position_ids, cu_seqlens, key_mask, batch, length, device)
    elif position_ids is not None and length > 1 and pairs is None:
        _reject_packing_after_cache(position_ids, key_mask, batch, length, past)
    if starts is not None:
        sequence = starts.flatten().cumsum(0).unflatten(0, (batch, length))
    if position_ids is None:
        position_ids = _positions(visible, starts, past, length, device)
    if pairs is None and "softmax" in config.layer_mixers:
        pairs = _pairs(visible, sequence, past, length, device, capacity)
    temperatures = places.temperatures(embeddings.new_empty((), dtype=compute_dtype(embeddings)))
    return Tokens(
        rotary=places.at(position_ids.expand(batch, length)),
        past=past,
        key_mask=key_mask,
        sequence=sequence,
        cu_seqlens=bounds,
        pairs=pairs,
        sharpness=None if temperatures is None else temperatures.square().repeat_interleave(2),
        closed=None if key_mask is None else closed_up(key_mask, past),
        weights=[] if wants_weights else None,
    )


def static_masks(config: NaLaConfig, embeddings: Tensor, attention_mask: Tensor | None, past: int, capacity: int) -> Masks:
    """Return masks of one size at every step of a static cache. attention_mask [B, past + N]; names as in describe_tokens."""
    batch, length = embeddings.shape[:2]
    visible = _visible(attention_mask, batch, past + length)
    key_mask = None if visible is None else none_if_all(visible[:, visible.shape[1] - length :])
    has_softmax = "softmax" in config.layer_mixers
    pairs = _pairs(visible, None, past, length, embeddings.device, capacity) if has_softmax else None
    return {"full_attention": pairs, "linear_attention": key_mask}


def _check_pair_mask(config: NaLaConfig, mask: Tensor) -> Tensor:
    recurrent = [mixer for mixer in config.layer_mixers if mixer in RECURRENT_MIXERS]
    if recurrent:
        raise ValueError(
            f"a mask for each pair of tokens needs `softmax` mixers alone, got attention_mask of shape {tuple(mask.shape)} and "
            f"{len(recurrent)} layers with {recurrent[0]!r} mixers, whose state holds all earlier tokens; give "
            "[batch, earlier and new tokens]"
        )
    return mask


def _visible(attention_mask: Tensor | None, batch: int, total: int) -> Tensor | None:
    """Return the mask [B, past + N] as bool, or None without padding."""
    if attention_mask is None:
        return None
    # if a cache counts in a tensor, the comparison would wait for the device
    if not isinstance(total, Tensor):
        check_mask(attention_mask, batch, total)
    return none_if_all(attention_mask.bool())


def none_if_all(mask: Tensor) -> Tensor | None:
    """Return the mask, or None if all are visible, which saves every layer the mask. Traced programs keep it."""
    return None if not is_traced(mask) and bool(mask.all()) else mask


def is_traced(x: Tensor) -> bool:
    """True if values cannot be read, or would be frozen into the traced program."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or not has_numbers(x)


def has_numbers(x: Tensor) -> bool:
    """True if the values can be read: tensors on the "meta" device and of FakeTensorMode have only a shape."""
    return is_ordinary(x) and not x.is_meta


# values are read on the host, so each packing would be traced as another program
@torch.compiler.disable
def _find_packing(
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    key_mask: Tensor | None,
    batch: int,
    length: int,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask of the beginnings of sequences, [B, N] bool, and the offsets of all on the host: read once for all layers.

    Return None, None if each row is one sequence.
    """
    if cu_seqlens is not None:
        if int(cu_seqlens[-1]) != batch * length:
            raise ValueError(
                f"cu_seq_lens_q must end with the number of tokens ({batch * length}), got {int(cu_seqlens[-1])}; "
                "it holds the running total of the lengths, beginning with 0"
            )
        starts = torch.zeros(batch * length + 1, dtype=torch.bool, device=device)
        starts[cu_seqlens.to(device, torch.int64)] = True
        starts = starts[:-1].unflatten(0, (batch, length))
    else:
        assert position_ids is not None
        if not has_numbers(position_ids):
            return None, None
        starts = (position_ids == 0).expand(batch, length)
    if key_mask is not None:
        if begins_again(key_mask, starts, position_ids if cu_seqlens is None else None):
            raise ValueError(
                "packed sequences and padding exclude each other, got sequences that begin inside a row (cu_seq_lens_q, or "
                "position_ids that begin again) with an attention_mask that hides tokens; pack without padding, or pad one "
                "sequence for each row"
            )
        return None, None
    first = torch.arange(length, device=device) == 0
    starts = starts | first
    if not bool((starts & ~first).any()):
        return None, None
    return starts, torch.tensor([*starts.flatten().nonzero()[:, 0].tolist(), starts.numel()])


def _reject_packing_after_cache(position_ids: Tensor, key_mask: Tensor | None, batch: int, length: int, past: int) -> None:
    if is_traced(position_ids):
        return
    starts = (position_ids == 0).expand(batch, length)
    if begins_again(torch.ones_like(starts) if key_mask is None else key_mask, starts, None):
        raise ValueError(
            f"packed sequences need an empty cache, got position_ids that begin again after {int(past)} tokens; pass "
            "use_cache=False and whole sequences, or one sequence in each row"
        )


def closed_up(key_mask: Tensor, past: int) -> Tensor | None:
    """Return Tokens.closed of a mask [B, N], False at padding, after `past` earlier tokens."""
    if key_mask.shape[1] == 1:
        return None
    if not is_traced(key_mask):
        has_earlier = key_mask.cumsum(1) > 0
        if isinstance(past, Tensor) or past > 0:
            has_earlier = torch.ones_like(has_earlier)
        has_later = key_mask.flip(1).cumsum(1).flip(1) > 0
        if not bool((~key_mask & has_earlier & has_later).any()):
            return None
    real, hidden = key_mask.long().cumsum(1), (~key_mask).long().cumsum(1)
    return torch.where(key_mask, real, real[:, -1:] + hidden) - 1


def _positions(visible: Tensor | None, starts: Tensor | None, past: int, length: int, device: torch.device) -> Tensor:
    """Return the number of real tokens before each in its sequence, [B or 1, N]."""
    if visible is not None:
        return (visible.cumsum(1) - 1).clamp(min=0)[:, visible.shape[1] - length :]
    places = (past + torch.arange(length, device=device))[None]
    return places if starts is None else places - (places * starts).cummax(1).values


def _pairs(
    visible: Tensor | None, sequence: Tensor | None, past: int, length: int, device: torch.device, capacity: int | None
) -> Tensor | None:
    """Return the mask of softmax attention, or None if the causal form or no mask is equivalent."""
    is_open = visible is None and sequence is None and capacity is None
    # one token sees all earlier ones; but a traced program would use that form of its example for every length
    if is_open and (past == 0 or (length == 1 and not is_recorded())):
        return None
    rows = (past + torch.arange(length, device=device))[:, None]
    columns = torch.arange(past + length if capacity is None else capacity, device=device)
    pairs = (columns <= rows)[None]
    if visible is not None:
        if capacity is not None:
            visible = F.pad(visible, (0, capacity - visible.shape[1]))
        # a row of padding sees itself, since softmax over no keys is NaN
        pairs = (pairs & visible[:, None]) | (columns == rows)
    if sequence is not None:
        pairs = pairs & (sequence[:, :, None] == sequence[:, None])
    return pairs[:, None]
