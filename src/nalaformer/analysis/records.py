"""Records of attention layers in one pass: exact rows of their weights, and products with them, never all pairs at once.

A record holds queries and keys by window: one per image, or several with window attention. Weights are computed from them for
some queries at a time.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention.cells import Grid
from ..attention.hybrid import HybridSettings, hybrid_attention
from ..attention.windows import Groups
from ..conversion.adapters import HIDDEN
from ..feature_maps import FeatureMap
from ..ops import Rotary, attention_weights, compute_dtype, linear_form
from ..ops.linear_form import LinearForm

if TYPE_CHECKING:
    from .statistics import HeadStatistics

# The number of queries whose weights exist at the same time.
CHUNK = 256


@dataclass(kw_only=True, eq=False)
class LayerRecord:
    """Queries and keys of a layer, after projection and position, from which its weights follow.

    q: [P, T, H, D], k: [P, S, H, D]: P windows of T queries and S keys. Without windows P = B and T = N.
    """

    name: str
    """The name of the layer in the model."""
    method: str
    """"softmax", "hybrid", or the name of the feature map."""
    q: Tensor = field(repr=False)
    k: Tensor = field(repr=False)
    grid: Grid | None = None
    """Height and width of the tokens behind the prefix; None if they are no image."""
    key_grid: Grid | None = None
    """Height and width of the keys, which are fewer if a layer reduces them."""
    prefix: int = 0
    """The number of tokens before the grid, such as a class token."""
    windows: Tensor | None = field(default=None, repr=False)
    """The token of the image at each place of each window, [count, T], -1 for padding; None: no windows."""
    key_mask: Tensor | None = field(default=None, repr=False)
    """False for padding, [P, S] bool, or of the new tokens alone after a cache; None: no padding."""
    values: Tensor | None = field(default=None, repr=False)
    """The values in the layer's layout; recorded only for explanations."""
    gathered: Tensor | None = field(default=None, repr=False)
    """The outputs in the same layout: gathered = weights @ values."""
    heads_first: bool = False
    """True if values and gathered are [P, H, T, V] instead of [P, T, H, V]."""

    kind = ""

    @abstractmethod
    def piece_weights(self, places: Tensor) -> Tensor:
        """Return the weights of the queries at these places of every window: [P, H, R, S]."""

    @abstractmethod
    def log_denominators(self) -> Tensor:
        """Return the log of the denominator of each query: [P, H, T], or more of them if a map has streams."""

    def seen_keys(self, places: Tensor) -> Tensor:
        """Return a mask that is True if a query at these places of every window sees a real key: [P or 1, H or 1, R, S]."""
        seen = torch.ones(1, 1, len(places), self.k.shape[1], dtype=torch.bool, device=self.k.device)
        if self.key_mask is not None and self.key_mask.shape[1] == self.k.shape[1]:
            seen = seen & self.key_mask[:, None, None]
        if self.windows is not None:
            seen = seen & (self.windows >= 0).repeat(self.batch, 1)[:, None, None]
        return seen

    @property
    def num_heads(self) -> int:
        return self.q.shape[2]

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.windows is None else self.q.shape[0] // len(self.windows)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of an image or a text, including the prefix."""
        if self.windows is not None:
            return int(self.windows.max()) + 1
        return self.q.shape[1]

    @property
    def num_keys(self) -> int:
        return self.num_tokens if self.windows is not None else self.k.shape[1]

    def rows(self, queries: Tensor) -> Tensor:
        """Return exact attention of some tokens: queries [R], token indices -> [B, H, R, M] in float32 or wider.

        Rows sum to one, except for eps of linear attention and the padding of windows. Keys that a query does not see have 0.
        With rotary positions in the numerator alone, as published, weights can be negative; `shares` cannot.
        """
        queries = torch.as_tensor(queries, device=self.q.device)
        if queries.dim() != 1 or queries.is_floating_point() or not bool(((queries >= 0) & (queries < self.num_tokens)).all()):
            raise ValueError(
                f"queries must be a list of token numbers from 0 to {self.num_tokens - 1}, got {queries.tolist()!r}; "
                "`token_at` gives the number of a place in the image"
            )
        if self.windows is None:
            return self.piece_weights(queries)
        flat = self.windows.flatten()
        where = torch.empty(self.num_tokens, dtype=torch.long, device=flat.device)
        where[flat[flat >= 0]] = torch.arange(len(flat), device=flat.device)[flat >= 0]
        window, place = where[queries] // self.windows.shape[1], where[queries] % self.windows.shape[1]
        number = torch.arange(len(queries), device=flat.device)
        per_window = self.piece_weights(place).unflatten(0, (self.batch, -1))  # [B, count, H, R, T]
        found = per_window.permute(1, 3, 0, 2, 4)[window, number].permute(1, 2, 0, 3)  # [B, H, R, T]
        # padding goes into an extra column, which is cut off
        index = torch.where(self.windows < 0, self.num_tokens, self.windows)[window].expand_as(found)
        out = found.new_zeros(*found.shape[:3], self.num_tokens + 1).scatter_(-1, index, found)
        return out[..., :-1]

    def shares(self, queries: Tensor) -> Tensor:
        """Return absolute weights that sum to one over the keys, [B, H, R, M]."""
        return as_shares(self.rows(queries))

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all queries of the windows, some at a time: places [R], weights [P, H, R, S]."""
        for places in torch.arange(self.q.shape[1], device=self.q.device).split(CHUNK):
            yield places, self.piece_weights(places)

    def pull(self, amounts: Tensor) -> Tensor:
        """Distribute amounts at the queries to the keys by their shares: [B, N] -> [B, H, M].

        pulled_j = sum_i amounts_i share_ij for each head: a product with the whole matrix, which is never materialized.
        """
        inside = self.to_windows(amounts)
        total = sum(torch.einsum("pr,phrs->phs", inside[:, places], as_shares(weights)) for places, weights in self.chunks())
        assert isinstance(total, Tensor)
        return self.from_windows(total)

    def to_windows(self, amounts: Tensor) -> Tensor:
        """Split amounts into windows, [B, N] -> [P, T]; padding of windows has 0."""
        if self.windows is None:
            return amounts
        padded = torch.cat((amounts, amounts.new_zeros(len(amounts), 1)), dim=1)
        return padded[:, self.windows].flatten(0, 1)

    def from_windows(self, amounts: Tensor) -> Tensor:
        """Join the windows, [P, ..., S] -> [B, ..., M]; values of padding are dropped."""
        if self.windows is None:
            return amounts
        split = amounts.unflatten(0, (self.batch, -1)).movedim(1, -2).flatten(-2)  # [B, ..., count * T]
        index = torch.where(self.windows < 0, self.num_tokens, self.windows).flatten()
        out = split.new_zeros(*split.shape[:-1], self.num_tokens + 1)
        return out.index_add_(-1, index, split)[..., :-1]

    def statistics(self) -> "list[HeadStatistics]":
        """Return the statistics of each head over all queries; see `HeadStatistics`."""
        from .statistics import head_statistics

        return head_statistics(self)

    def token_at(self, y: int, x: int) -> int:
        """Return the number of the token at a row and column of the grid."""
        if self.grid is None:
            raise ValueError(f"{self.name} has no grid: its tokens are no image; name a token by its number")
        if not (0 <= y < self.grid[0] and 0 <= x < self.grid[1]):
            raise ValueError(f"the token must lie in the grid of {self.grid[0]} x {self.grid[1]}, got ({y}, {x})")
        return self.prefix + y * self.grid[1] + x


@dataclass(kw_only=True, eq=False)
class SoftmaxRecord(LayerRecord):
    """A record with weights = softmax(scale q k^T + bias)."""

    scale: float
    bias: Tensor | None = field(default=None, repr=False)
    """A bias added to the logits, [P or 1, H or 1, T or 1, S]; -inf masks."""
    causal: bool = False
    block: int = 1
    """The size of blocks of tokens that see each other in causal attention."""
    kind = "softmax"

    def seen_keys(self, places: Tensor) -> Tensor:
        seen, bias = super().seen_keys(places), self.bias_at(places)
        if bias is not None:
            # some models mask by a finite number, which leaves a weight of e^-100
            seen = seen & (bias > HIDDEN)
        return seen & up_to_block(places, self.k, self.block) if self.causal else seen

    def bias_at(self, places: Tensor) -> Tensor | None:
        return self.bias.index_select(-2, places) if self.bias is not None and self.bias.shape[-2] > 1 else self.bias

    def logits(self, places: Tensor) -> Tensor:
        dtype = compute_dtype(self.q)
        q = self.q.index_select(1, places).to(dtype)
        logits = self.scale * torch.einsum("pihd,pjhd->phij", q, self.k.to(dtype))
        bias = self.bias_at(places)
        if bias is not None:
            logits = logits + bias.to(dtype)
        if self.causal:
            logits = logits.masked_fill(~up_to_block(places, self.k, self.block), -torch.inf)
        return logits

    @torch.no_grad()
    def piece_weights(self, places: Tensor) -> Tensor:
        logits = self.logits(places)
        # a query without visible keys has no weights, while NaN stays NaN
        sees_nothing = (logits == -torch.inf).all(-1, keepdim=True)
        return logits.softmax(-1).masked_fill(sees_nothing, 0.0)

    def log_denominators(self) -> Tensor:
        places = torch.arange(self.q.shape[1], device=self.q.device)
        return torch.cat([self.logits(part).logsumexp(-1) for part in places.split(CHUNK)], dim=-1)


@dataclass(kw_only=True, eq=False)
class LinearRecord(LayerRecord):
    """A record with weights = phi(q) phi(k)^T / (phi(q) sum phi(k) + eps n); those of maps with two streams are averaged.

    A contrast is included in the weights, which may then be negative, but not in ranks and denominators; key weights and decay
    are included in all of them.
    """

    feature_map: FeatureMap = field(repr=False)
    rotary: "Rotary | tuple[Rotary, Rotary] | None" = field(default=None, repr=False)
    causal: bool = False
    block: int = 1
    """The size of blocks of tokens that see each other in causal attention."""
    groups: Groups | None = field(default=None, repr=False)
    """Groups of tokens that see only each other: parts of a shifted window, or packed sequences."""
    contrast: Tensor | str | None = field(default=None, repr=False)
    """The contrast as linear_attention takes it."""
    weigh_keys: "Callable[[Tensor, Tensor, Tensor | None], Tensor | None] | None" = field(default=None, repr=False)
    """Computes the weights of the keys from q, k and the visible tokens."""
    mixing: Tensor | None = field(default=None, repr=False)
    """The factor of each key for each query, [T, S], if blocks of tokens have their own states."""
    log_decay: Tensor | None = field(default=None, repr=False)
    """The log decay at each key, [P, S, H]; None: no decay."""
    eps: float = 1e-6
    kind = "linear"

    def key_weight(self, visible: Tensor | None) -> Tensor | None:
        return None if self.weigh_keys is None else self.weigh_keys(self.q, self.k, visible)

    def seen_keys(self, places: Tensor) -> Tensor:
        seen = super().seen_keys(places)
        if self.groups is not None:
            of_tokens = self.groups.of_tokens
            seen = seen & (of_tokens[:, places, None] == of_tokens[:, None])[:, None]
        return seen & up_to_block(places, self.k, self.block) if self.causal else seen

    def visible(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return pairs of masks (queries [P, T], keys [P, S]) that see each other; None: all."""
        if self.groups is None:
            return [(None, self.key_mask)]
        pairs: list[tuple[Tensor | None, Tensor | None]] = []
        for number in self.groups.numbers:
            inside = self.groups.of_tokens == number
            pairs.append((inside, inside if self.key_mask is None else inside & self.key_mask))
        return pairs

    @torch.no_grad()
    def piece_weights(self, places: Tensor) -> Tensor:
        total: Tensor | None = None
        for queries, keys in self.visible():
            # long packed rows have many groups, and some places lie in few of them
            if total is not None and queries is not None and not bool(queries[:, places].any()):
                continue
            streams = [self._weights(places, keys, stream) for stream in range(self.feature_map.streams)]
            weights = sum(streams[1:], streams[0]) / len(streams)
            if queries is not None:
                # torch.where instead of a product, so that NaN stays in its group
                weights = torch.where(queries[:, None, places, None], weights, 0.0)
            total = weights if total is None else total + weights
        assert total is not None
        return total

    def _weights(self, places: Tensor, keys: Tensor | None, stream: int) -> Tensor:
        """Return the weights of one stream, [P, H, R, S]; keys: the mask of visible ones."""
        asked: dict[str, Any] = {
            **{"feature_map": self.feature_map, "rows": places, "stream": stream, "causal": self.causal, "block": self.block},
            **{"key_mask": keys, "query_mask": None if self.causal else keys, "contrast": self.contrast, "eps": self.eps},
            **{"key_weight": self.key_weight(keys), "log_decay": self.log_decay},
        }
        found = attention_weights(self.q, self.k, rotary=self.rotary, **asked)
        if self.mixing is None:
            return found
        plain = found if self.rotary is None else attention_weights(self.q, self.k, rotary=self.denominator_rotary, **asked)
        mixing = self.mixing[places].to(found.dtype)
        # the weights miss one by the share of eps in the denominators, which mixing does not change
        return found * mixing / ((plain * mixing).sum(-1, keepdim=True) + 1 - plain.sum(-1, keepdim=True))

    @property
    def denominator_rotary(self) -> "Rotary | tuple[Rotary, Rotary] | None":
        """The rotary positions of the denominators; None if only the numerator rotates."""
        first = self.rotary[0] if isinstance(self.rotary, tuple) else self.rotary
        return self.rotary if first is not None and first.normalised else None

    @torch.no_grad()
    def log_denominators(self) -> Tensor:
        total: Tensor | None = None
        for queries, keys in self.visible():
            found = torch.cat([form.log_denominators for form in linear_forms(self, keys)], dim=-1)
            if total is not None and queries is not None:
                found = torch.where(queries.repeat(1, self.feature_map.streams)[:, None], found, total)
            total = found
        assert total is not None
        return total


@dataclass(kw_only=True, eq=False)
class HybridRecord(LayerRecord):
    """A record of hybrid attention; its weights are the gradient of the output by the values.

    A gate per channel counts by its mean.
    """

    feature_map: FeatureMap = field(repr=False)
    settings: HybridSettings
    gate: Tensor | None = field(default=None, repr=False)
    scores: Tensor | None = field(default=None, repr=False)
    scale: float | None = None
    kind = "hybrid"

    def seen_keys(self, places: Tensor) -> Tensor:
        return super().seen_keys(places) & up_to_block(places, self.k, 1)

    def piece_weights(self, places: Tensor) -> Tensor:
        # gathered[i, r] = sum_j w_ij values[j, r], so the gradient of gathered[place r, r] by the values is row r
        rows = len(places)
        shape = (*self.k.shape[:3], rows)
        with torch.enable_grad():
            values = torch.zeros(shape, dtype=compute_dtype(self.q), device=self.q.device, requires_grad=True)
            gathered = hybrid_attention(
                self.q.to(values.dtype),
                self.k.to(values.dtype),
                values,
                feature_map=self.feature_map,
                settings=self.settings,
                gate=None if self.gate is None else self.gate.mean(-1, keepdim=True).to(values.dtype),
                scores=self.scores,
                key_mask=self.key_mask,
                scale=self.scale,
            )
            chosen = gathered[:, places, :, torch.arange(rows, device=places.device)]  # [R, P, H]
            found = torch.autograd.grad(chosen.sum(), values)[0]
        return found.permute(0, 2, 3, 1)

    def log_denominators(self) -> Tensor:
        """Return NaN, since only the exact branch of a hybrid layer has logits of known size."""
        return torch.full((self.q.shape[0], self.num_heads, self.q.shape[1]), torch.nan, device=self.q.device)


def up_to_block(places: Tensor, k: Tensor, block: int) -> Tensor:
    """Return a mask of the keys up to the end of the block of each place, which causal attention sees: [R, S]."""
    keys = torch.arange(k.shape[1], device=places.device)
    return keys // block <= places[:, None] // block


def as_shares(weights: Tensor) -> Tensor:
    """Return absolute weights scaled to sum to one over the keys; a row without weight stays zero."""
    size = weights.abs()
    total = size.sum(-1, keepdim=True)
    return size / torch.where(total == 0, 1.0, total)


def linear_forms(record: LinearRecord, keys: Tensor | None) -> list[LinearForm]:
    """Return the factors of the weights of each stream. keys: the mask of visible ones [P, S]; see `LinearRecord.visible`."""
    forms = _forms(record, record.rotary, keys)
    if record.mixing is None:
        return forms
    mixing = record.mixing.to(forms[0].queries.dtype)
    # one set of features for each distinct column, so for each block of keys
    columns, of_keys = mixing.unique(dim=1, return_inverse=True)
    own = torch.nn.functional.one_hot(of_keys, columns.shape[1]).to(mixing.dtype)
    mixed = []
    for form, plain in zip(forms, _forms(record, record.denominator_rotary, keys), strict=True):
        sums = torch.einsum("sc,phsf->phcf", own, plain.keys)
        total = 1 + torch.einsum("phtf,tc,phcf->pht", plain.queries, columns - 1, sums)
        pairs = ((form.queries / total[..., None], columns), (form.keys, own))
        first, second = ((x[..., None, :] * y[:, :, None]).flatten(-2) for x, y in pairs)
        mixed.append(LinearForm(first, second, form.log_denominators + total.log()))
    return mixed


def _forms(record: LinearRecord, rotary: "Rotary | tuple[Rotary, Rotary] | None", keys: Tensor | None) -> list[LinearForm]:
    """Return the factors without the mixing of blocks."""
    rotaries = rotary if isinstance(rotary, tuple) else (rotary, rotary)
    return linear_form.linear_forms(
        record.q,
        record.k,
        feature_map=record.feature_map,
        causal=record.causal,
        block=record.block,
        rotary=rotaries,
        key_mask=keys,
        key_weight=record.key_weight(keys),
        log_decay=record.log_decay,
        eps=record.eps,
    )
