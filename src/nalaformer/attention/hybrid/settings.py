"""The settings of hybrid attention: what stays exact, what joins the linear state, and how the branches are merged."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...feature_maps import FEATURE_MAPS, map_option_names
from ...field_types import check_field_types
from ...registry import unknown_name
from .selection import SELECTIONS, EveryToken, Selection

MERGES = ("released", "exact")
GATES = ("channel", "head", "none")
SELECT_PER = ("key_head", "query_head")


@dataclass(frozen=True, kw_only=True)
class HybridSettings:
    """STILL's attention (arXiv 2602.02180), its baselines, and combinations of them."""

    chunk_size: int = 64
    """Tokens of a chunk; a query sees its own chunk and the one before exactly."""
    salient_per_chunk: int = 4
    """Tokens of each older chunk and head that stay exact; 0: a sliding window and linear attention (the LoLCATs form)."""
    max_salient: int = 0
    """Maximum number of salient tokens of a head over the whole sequence: the best so far stay, the others join the linear
    state, and the cost is truly linear; 0: no limit, the salient tokens grow with the sequence."""
    selection: str = "key_norm"
    """Which tokens are salient: a name in SELECTIONS. The paper's is "self_saliency"."""
    select_per: str = "key_head"
    """"query_head" as published, or "key_head": heads that share keys share salient tokens, for that much less memory."""
    keep_first: bool = True
    """Make token 0 salient whatever its score."""
    merge: str = "exact"
    """"exact": linear weights are scaled by exp(-row maximum) like the exact ones; "released": unscaled, as published. The
    default is the one that recovers more."""
    linear_mass: int | None = 128
    """The linear branch counts as this many tokens at most: both of its sums are multiplied by min(1, linear_mass / n), n the
    tokens in them. Without it the branch outgrows the exact one on texts longer than those of training. None: as published."""
    gate: str = "channel"
    """Factor of the linear branch, sigmoid of a projection of the token: one per "channel", one per "head", or "none"."""
    feature_map: str = "norm_preserving"
    """Name of the linear branch's feature map; a map with one stream."""
    map_options: dict[str, Any] = field(default_factory=dict)
    """Options of the feature map."""
    exact: bool = True
    """False: no exact branch at all, pure linear attention."""
    linear: bool = True
    """False: no linear branch; tokens that are neither salient nor in the window are dropped."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be positive, got {self.chunk_size}")
        if not 0 <= self.salient_per_chunk <= self.chunk_size:
            raise ValueError(
                f"salient_per_chunk must be between 0 and chunk_size ({self.chunk_size}), got {self.salient_per_chunk}"
            )
        if self.max_salient < 0:
            raise ValueError(f"max_salient must not be negative, got {self.max_salient}; 0 means no limit")
        if self.linear_mass is not None and self.linear_mass < 1:
            raise ValueError(f"linear_mass must be at least 1, got {self.linear_mass}; None means no limit")
        if not self.exact and not self.linear:
            raise ValueError("exact and linear must not both be off: nothing would be left to attend with")
        # an unknown name raises an error with the nearest ones
        SELECTIONS[self.selection]
        if FEATURE_MAPS[self.feature_map].streams != 1:
            raise ValueError(f"feature_map must have one stream, got {self.feature_map!r}; polarity maps are unsupported here")
        for option in self.map_options:
            if option not in map_option_names(self.feature_map):
                raise unknown_name(f"option of {self.feature_map}:", option, map_option_names(self.feature_map))
        for name, value, known in (
            ("merge", self.merge, MERGES),
            ("gate", self.gate, GATES),
            ("select_per", self.select_per, SELECT_PER),
        ):
            if value not in known:
                raise unknown_name(name, value, known)

    @property
    def largest_store(self) -> int | None:
        """The most salient tokens that a head may hold; None: no limit."""
        return self.max_salient or None

    @property
    def is_bounded(self) -> bool:
        """True if a head needs no more memory for a longer text."""
        return not self.exact or not self.salient_per_chunk or self.max_salient > 0

    @property
    def keeps_all(self) -> bool:
        """True if every token stays exact without a linear branch: softmax attention."""
        return self.exact and not self.linear and self.salient_per_chunk == self.chunk_size and not self.max_salient

    @property
    def rule(self) -> Selection:
        """The rule that `selection` names; if every token is salient, all scores are equal."""
        return EveryToken() if self.keeps_all else SELECTIONS[self.selection]()

    @property
    def stores_per_query_head(self) -> bool:
        """True if query heads that share keys have their own stores; if every token is kept these would be equal."""
        return self.select_per == "query_head" and not self.keeps_all

    @property
    def keeps_scores(self) -> bool:
        """True if the state holds scores of the window's tokens, since they depend on more than the token."""
        return self.exact and self.salient_per_chunk > 0 and (self.rule.needs_window or self.rule.needs_scores)


HYBRID_METHODS: dict[str, dict[str, Any]] = {
    "still": {},
    "window": {"salient_per_chunk": 0},
    "linear": {"exact": False},
    "softmax": {"salient_per_chunk": -1, "linear": False, "gate": "none"},
}
"""Whole methods as changes of HybridSettings; salient_per_chunk=-1 stands for all tokens of a chunk."""


def hybrid_settings(method: str = "still", **changes: Any) -> HybridSettings:
    """Return the settings of a method: "still", "window" (+ linear), "linear", "softmax"; any field may be changed."""
    if not isinstance(method, str) or method not in HYBRID_METHODS:
        raise unknown_name("method", method, HYBRID_METHODS)
    known = {each.name for each in fields(HybridSettings)}
    for name in changes:
        if name not in known:
            raise unknown_name("setting", name, known)
    chosen = HYBRID_METHODS[method] | changes
    if chosen.get("salient_per_chunk") == -1:
        chosen["salient_per_chunk"] = chosen.get("chunk_size", HybridSettings.chunk_size)
    return replace(HybridSettings(), **chosen)


def linear_share(chunks: Tensor, settings: HybridSettings, dtype: torch.dtype) -> Tensor | None:
    """Return the factor of the linear sums for queries with `chunks` chunks of their sample before their own; None: it is 1."""
    if settings.linear_mass is None or not (settings.linear and settings.exact):
        return None
    older = (chunks - 1).clamp(min=0)
    salient = older * settings.salient_per_chunk
    if settings.largest_store is not None:
        salient = salient.clamp(max=settings.largest_store)
    summed = older * settings.chunk_size - salient
    return (settings.linear_mass / summed.clamp(min=1).to(dtype)).clamp(max=1)


def salient_tokens(length: int, settings: HybridSettings) -> int:
    """Return the number of salient tokens of each head after `length` tokens; the two chunks of the window have none."""
    number = max(0, length // settings.chunk_size - 1) * settings.salient_per_chunk
    return number if settings.largest_store is None else min(number, settings.largest_store)


def most_salient(lengths: Sequence[int], settings: HybridSettings) -> int:
    """Return the number of salient tokens of a head in the longest of the samples."""
    return max((salient_tokens(length, settings) for length in lengths), default=0)
