"""A budget for each key head: few heads keep every token to look up what is far away, the others need little memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .module import HybridAttention
from .settings import HybridSettings, salient_tokens
from .state import HybridState
from .stepping import stepping_state

BUDGETS: dict[str, dict[str, Any]] = {
    "full": {"exact": True, "linear": False, "gate": "none", "max_salient": 0},
    "salient": {},
    "window": {"salient_per_chunk": 0},
    "linear": {"exact": False},
}
"""Budgets of heads, as changes of HybridSettings: all tokens; window, salient tokens and linear state; window and linear
state; the linear state alone."""


def settings_for(settings: HybridSettings, budget: str) -> HybridSettings:
    """Return the settings of heads with this budget."""
    changes = BUDGETS[budget]
    if budget == "full":
        changes = changes | {"salient_per_chunk": settings.chunk_size}
    return replace(settings, **changes)


def check_budget(budget: Sequence[str], key_heads: int) -> None:
    """Raise ValueError unless there is one known budget for each head of the keys."""
    unknown = [name for name in budget if name not in BUDGETS]
    if unknown or len(budget) != key_heads:
        raise ValueError(
            f"a budget names one of {', '.join(BUDGETS)} for each of the {key_heads} key heads of a layer, got {list(budget)}"
        )


@dataclass(eq=False)
class GroupedState:
    """The states of heads with different budgets, with the interface of HybridState."""

    parts: tuple[HybridState, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.parts[0].lengths

    @lengths.setter
    def lengths(self, lengths: tuple[int, ...]) -> None:
        for part in self.parts:
            part.lengths = lengths

    @property
    def keys(self) -> Tensor:
        """The keys of the first group, for their dtype and device."""
        return self.parts[0].keys

    @property
    def values(self) -> Tensor:
        """The values of the first group, for their dtype."""
        return self.parts[0].values

    @property
    def count(self) -> Tensor:
        return self.parts[0].count

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{number}.{name}": x for number, part in enumerate(self.parts) for name, x in part.tensors().items()}

    def _each(self, change: Callable[[HybridState], HybridState]) -> "GroupedState":
        return GroupedState(tuple(map(change, self.parts)))

    def select(self, samples: Tensor | Sequence[int]) -> "GroupedState":
        return self._each(lambda part: part.select(samples))

    def select_(self, samples: Tensor | Sequence[int]) -> None:
        for part in self.parts:
            part.select_(samples)

    def detach(self) -> "GroupedState":
        return self._each(HybridState.detach)

    def clone(self) -> "GroupedState":
        return self._each(HybridState.clone)

    def to(self, device: torch.device | str) -> "GroupedState":
        return self._each(lambda part: part.to(device))

    def load_(self, state: "GroupedState") -> None:
        for own, other in zip(self.parts, state.parts, strict=True):
            own.load_(other)

    def advance(self) -> bool:
        """Count a step on the host after it has run; return True if a roll must follow."""
        # build the list first, so that every part counts
        is_full = [part.advance() for part in self.parts]
        return any(is_full)


class HeadGroups(nn.Module):
    """Hybrid attention with a budget for each key head; called like HybridAttention.

    budget: a name in BUDGETS for each key head; None: "salient" for all. Heads of one budget attend together.
    """

    def __init__(
        self,
        settings: HybridSettings,
        budget: Sequence[str] | None = None,
        *,
        dim: int,
        num_heads: int,
        num_key_heads: int,
        head_dim: int,
    ) -> None:
        super().__init__()
        budget = ("salient",) * num_key_heads if budget is None else tuple(budget)
        check_budget(budget, num_key_heads)
        self.settings, self.budget, self.group = settings, budget, num_heads // num_key_heads
        # slices instead of indices need no tensor on the device, and no copy if the heads of a group are adjacent
        runs = [(name, len(list(same))) for name, same in groupby(budget)]
        self._runs: dict[str, list[slice]] = {name: [] for name in BUDGETS if name in budget}
        self._order: list[tuple[int, slice]] = []
        names, start, taken = list(self._runs), 0, dict.fromkeys(self._runs, 0)
        for name, size in runs:
            self._runs[name].append(slice(start, start + size))
            self._order.append((names.index(name), slice(taken[name], taken[name] + size)))
            start, taken[name] = start + size, taken[name] + size
        self.groups = nn.ModuleList(
            HybridAttention(
                settings_for(settings, name),
                dim=dim,
                num_heads=taken[name] * self.group,
                num_key_heads=taken[name],
                head_dim=head_dim,
            )
            for name in names
        )

    @property
    def parts(self) -> tuple[HybridAttention, ...]:
        """The attentions of the groups."""
        return tuple(self.groups)  # type: ignore[arg-type]

    @property
    def has_steps(self) -> bool:
        """True if single tokens can be decoded in place."""
        return all(part.has_steps for part in self.parts)

    @property
    def is_bounded(self) -> bool:
        """True if no head needs more memory for a longer text."""
        return all(part.settings.is_bounded for part in self.parts)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        state: GroupedState | None = None,
    ) -> tuple[Tensor, GroupedState]:
        """Return outputs and states of all groups; see HybridAttention.forward."""
        befores = state.parts if state is not None else (None,) * len(self.groups)
        given = {"key_mask": key_mask, "scale": scale}
        found = [
            part(*heads, x, state=before, **given)
            for part, heads, before in zip(self.parts, self._split(q, k, v), befores, strict=True)
        ]
        return self._join([out for out, _ in found]), GroupedState(tuple(after for _, after in found))

    def step_(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        *,
        state: GroupedState,
        scale: float | None = None,
        query_matrix: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Return the outputs of one token; see HybridAttention.step_."""
        matrices = query_matrix or (None,) * len(self.groups)
        heads = self._split(q, k, v)
        return self._join(
            [
                part.step_(*some, x, state=own, scale=scale, query_matrix=matrix)
                for part, some, own, matrix in zip(self.parts, heads, state.parts, matrices, strict=True)
            ]
        )

    def roll_(self, state: GroupedState) -> None:
        for part, own in zip(self.parts, state.parts, strict=True):
            part.roll_(own)

    def make_room_(self, state: GroupedState) -> None:
        for part, own in zip(self.parts, state.parts, strict=True):
            part.make_room_(own)

    def stepping_state(self, state: GroupedState, capacity: int | None) -> GroupedState:
        """Return a copy at fixed addresses, with room for texts of `capacity` tokens; None if memory is bounded."""
        if capacity is None and not self.is_bounded:
            raise ValueError("capacity must be set, since some heads grow with the text, got None; pass capacity=...")
        if capacity is not None and max(state.lengths) > capacity:
            raise ValueError(f"capacity must hold the {max(state.lengths)} tokens of the state, got {capacity}")
        return GroupedState(
            tuple(
                stepping_state(
                    own,
                    settings=part.settings,
                    capacity=None if capacity is None or part.settings.is_bounded else salient_tokens(capacity, part.settings),
                )
                for part, own in zip(self.parts, state.parts, strict=True)
            )
        )

    def query_matrix(self) -> tuple[Tensor | None, ...]:
        """Return the matrix of each group's feature map that captured steps use."""
        return tuple(part.query_matrix() for part in self.parts)

    def scorer_loss(self, q: Tensor, k: Tensor, x: Tensor, *, scale: float | None = None) -> Tensor | None:
        """Return the mean loss of the groups that have a scorer; None without one."""
        losses = [
            loss
            for part, (some, keys, _) in zip(self.parts, self._split(q, k, k), strict=True)
            if (loss := part.scorer_loss(some, keys, x, scale=scale)) is not None
        ]
        return torch.stack(losses).mean() if losses else None

    def _split(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return queries, keys and values of each group, [B, N, heads, *]."""
        size = self.group
        found = []
        for runs in self._runs.values():
            of_queries = [slice(run.start * size, run.stop * size) for run in runs]
            found.append((_heads(q, of_queries), _heads(k, runs), _heads(v, runs)))
        return found

    def _join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return [B, N, H, D] with the heads in their places."""
        size = self.group
        parts = [outputs[number][:, :, run.start * size : run.stop * size] for number, run in self._order]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def extra_repr(self) -> str:
        return ", ".join(self.budget)


def _heads(x: Tensor, runs: Sequence[slice]) -> Tensor:
    parts = [x[:, :, run] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
