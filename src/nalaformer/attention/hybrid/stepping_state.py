"""What decoding in place remembers: a HybridState in memory of fixed size, with room for what comes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...feature_maps import FeatureMap
from ...feature_maps.norm_preserving import NormPreserving
from ...ops import LinearState
from .salient import entries, salient_tokens
from .selection import rank_descending
from .settings import HybridSettings
from .state import HybridState


@dataclass(kw_only=True)
class SteppingState:
    """A HybridState with room for what comes; l = chunk_size, S heads of the store, room for E salient tokens of each.

    keys, values: [B, S, 2l + E, D or V]   the window, then the store, so that a query meets both in one product; where the
                                           heads of a group choose for themselves, the window is repeated for each of them
    scores: [B, 2l, heads]                 of the window's tokens, where the rule cannot have them from the token alone
    salient_scores: [B, S, E]              falling, -inf where there is no token
    state, key_sum: [B, H, F, V], [B, H, F]
    count: [B] int64                       tokens so far; after a step and before its roll, those of the step included
    ailing: [B]                            0, or NaN where a token held NaN or infinity: added to queries, it spoils all outputs
    """

    settings: HybridSettings
    feature_map: FeatureMap
    """After a change of its parameters `refresh_` is due."""
    query_matrix: Tensor | None
    """[H, D, D]: what the kernel turns queries with; None: features are computed outside of it."""
    key_heads: int
    keys: Tensor
    values: Tensor
    scores: Tensor
    salient_scores: Tensor
    state: Tensor
    key_sum: Tensor
    count: Tensor
    ailing: Tensor
    lengths: tuple[int, ...]
    """What `count` holds, known to the host."""

    @classmethod
    def from_state(
        cls, state: HybridState, *, feature_map: FeatureMap, settings: HybridSettings, capacity: int | None = None
    ) -> "SteppingState":
        """A copy of a state, which goes on from there. capacity: salient tokens of a head that there is room for.

        With `max_salient` set that is the room, and capacity may be left out; without, a longer text needs a larger capacity
        (`salient_tokens` says which), and `advance` refuses to go on when it is full.
        """
        if not settings.exact:
            raise ValueError("stepping is for hybrid attention, got exact=False; pure linear attention has recurrent_step_")
        room = _room(state, settings, capacity)
        window, repeats = 2 * settings.chunk_size, state.salient_keys.shape[1] // state.keys.shape[2]
        # those that are there to the front, in their order: samples of different lengths have gaps
        order = rank_descending((state.salient_scores > -torch.inf).float())[..., :room]
        salient_scores = state.salient_scores.new_full((*state.salient_scores.shape[:2], room), -torch.inf)
        salient_scores[..., : order.shape[-1]] = state.salient_scores.gather(-1, order)

        def beside(near: Tensor, salient: Tensor) -> Tensor:
            both = salient.new_zeros(*salient.shape[:2], window + room, salient.shape[-1])
            both[:, :, :window] = near.transpose(1, 2).repeat_interleave(repeats, dim=1)
            both[:, :, window : window + order.shape[-1]] = entries(salient, order)
            return both

        ailing = torch.zeros_like(state.is_poisoned, dtype=state.linear.state.dtype)
        return cls(
            settings=settings,
            feature_map=feature_map,
            query_matrix=_query_matrix(feature_map, state),
            key_heads=state.keys.shape[2],
            keys=beside(state.keys, state.salient_keys),
            values=beside(state.values, state.salient_values),
            scores=state.scores.clone(),
            salient_scores=salient_scores,
            state=state.linear.state.clone(memory_format=torch.contiguous_format),
            key_sum=state.linear.key_sum.clone(memory_format=torch.contiguous_format),
            count=torch.tensor(state.lengths, dtype=torch.int64, device=state.keys.device),
            ailing=ailing.masked_fill(state.is_poisoned, torch.nan),
            lengths=state.lengths,
        )

    def to_state(self) -> HybridState:
        """A copy as a HybridState, for whatever else goes on from here: prompts, reordered beams, saving."""
        window = 2 * self.settings.chunk_size
        some = most_salient(self.lengths, self.settings)
        own = slice(None, None, self.keys.shape[1] // self.key_heads)
        return HybridState(
            keys=self.keys[:, own, :window].transpose(1, 2).clone(),
            values=self.values[:, own, :window].transpose(1, 2).clone(),
            scores=self.scores.clone(),
            salient_keys=self.keys[:, :, window : window + some].clone(),
            salient_values=self.values[:, :, window : window + some].clone(),
            salient_scores=self.salient_scores[:, :, :some].clone(),
            linear=LinearState(
                self.state.clone(), self.key_sum.clone(), self.count.clone(), self.key_sum.new_zeros(self.key_sum.shape[:2])
            ),
            is_poisoned=self.ailing.isnan(),
            lengths=self.lengths,
        )

    def load_(self, state: HybridState) -> None:
        """Go on from another state of as many samples, in the same memory: graphs that were captured stay right."""
        new = self.from_state(state, feature_map=self.feature_map, settings=self.settings, capacity=self.capacity)
        for kept, value in zip(self.tensors(), new.tensors(), strict=True):
            if kept.shape != value.shape or kept.dtype != value.dtype:
                raise ValueError(
                    f"memory of fixed size takes states of its own sizes, {tuple(kept.shape)} in {kept.dtype}, got "
                    f"{tuple(value.shape)} in {value.dtype}; make a new one with from_state"
                )
        for kept, value in zip(self.tensors(), new.tensors(), strict=True):
            kept.copy_(value)
        self.lengths = state.lengths
        self.refresh_()

    def refresh_(self) -> None:
        """Take over what the feature map's parameters are now."""
        if self.query_matrix is not None:
            assert isinstance(self.feature_map, NormPreserving)
            self.query_matrix.copy_(self.feature_map.query_matrix().detach())

    def select_(self, samples: Tensor) -> None:
        """Samples in another order, with repetitions, but as many as before: beam search."""
        index = torch.as_tensor(samples, dtype=torch.int64, device=self.keys.device)
        if len(index) != len(self.lengths):
            raise ValueError(f"memory of fixed size has {len(self.lengths)} samples, got {len(index)}; use to_state().select")
        for tensor in self.tensors():
            tensor.copy_(tensor.index_select(0, index))
        # where all are alike, which samples are taken is not asked of the device
        if len(set(self.lengths)) > 1:
            self.lengths = tuple(self.lengths[i] for i in index.tolist())

    def tensors(self) -> list[Tensor]:
        """All that steps and rolls change."""
        return [value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "query_matrix"]

    @property
    def nbytes(self) -> int:
        """Of all that is remembered, the room for what comes included."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def capacity(self) -> int:
        return self.salient_scores.shape[-1]

    def advance(self) -> bool:
        """Count the step that comes now; True: a roll must follow it. Refused, with nothing changed, if there is no room."""
        after = tuple(length + 1 for length in self.lengths)
        needed = most_salient(after, self.settings)
        if needed > self.capacity:
            raise ValueError(
                f"the state has room for {self.capacity} salient tokens of a head, and {max(after)} tokens have {needed}; "
                "make it with a larger capacity, or set max_salient, which bounds them"
            )
        self.lengths = after
        return any(length % self.settings.chunk_size == 0 for length in after)


def most_salient(lengths: Sequence[int], settings: HybridSettings) -> int:
    """Salient tokens of a head in the longest of the samples."""
    return max((salient_tokens(length, settings) for length in lengths), default=0)


def _room(state: HybridState, settings: HybridSettings, capacity: int | None) -> int:
    """Salient tokens of a head that a stepping state is made for."""
    if not settings.salient_per_chunk:
        return 0
    if capacity is None:
        capacity = settings.largest_store
    if capacity is None:
        raise ValueError("without max_salient the salient tokens grow with the text; say for how many of a head: capacity=...")
    if settings.largest_store is not None and capacity != settings.largest_store:
        raise ValueError(f"max_salient ({settings.largest_store}) is the capacity, got {capacity}; leave it out")
    held = most_salient(state.lengths, settings)
    if held > capacity:
        raise ValueError(f"capacity must hold the {held} salient tokens of the state, got {capacity}")
    return capacity


def _query_matrix(feature_map: FeatureMap, state: HybridState) -> Tensor | None:
    """What the kernel needs of the map that it computes itself."""
    if not isinstance(feature_map, NormPreserving) or feature_map.num_heads != state.linear.state.shape[1]:
        return None
    return feature_map.query_matrix().detach().contiguous()
