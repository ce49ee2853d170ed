"""Selection rules: which tokens of a chunk become salient when it leaves the window.

A rule scores each token when its chunk leaves the window, from nothing later. Scores are rounded to bfloat16 before they are
compared, and the older token wins a tie: identical tokens have equal scores except for the last bits, which differ between
one pass over a prompt and many steps.
"""

import torch
from torch import Tensor

from ...registry import Registry

SELECTIONS: Registry[type["Selection"]] = Registry("selection")


class Selection:
    """A selection rule. Scores are [B, tokens, heads], for the query heads or the key heads."""

    of_query_heads = False
    """True if scores differ between the query heads that share keys."""
    needs_window = False
    """True if the rule uses `in_window`."""
    needs_scores = False
    """True if the caller passes the scores."""
    rounds = True
    """True if scores are rounded before they are compared; False if they differ in the last bits by design."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return a score of each token from its key and position. keys: [B, A, K, D]; positions: [B or 1, A]; -> [B, A, K]."""
        raise NotImplementedError

    def in_window(
        self, logits: Tensor, visible: Tensor, is_self: Tensor, is_near: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the score that queries add to themselves, and to the keys that they see.

        logits: [B, H, R, T, W]; visible, is_self, is_near (within the last chunk_size keys): [B or 1, R, T, W].
        -> [B, H, R, T] and [B, H, R, W].
        """
        return None, None

    def finish(self, scores: Tensor) -> Tensor:
        """Return the final scores of chunks that leave the window, [B, chunks, chunk_size, heads]."""
        return scores

    def comparable(self, scores: Tensor) -> Tensor:
        """Return scores for comparison: rounded, and finite, since infinities mean "always" and "never"."""
        scores = scores.detach().bfloat16().float() if self.rounds else scores.detach().float()
        largest = torch.finfo(torch.bfloat16).max
        return scores.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)


@SELECTIONS.register("key_norm")
class KeyNorm(Selection):
    """|k|: a long key can dominate the softmax of many queries."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        return keys.float().norm(dim=-1)


@SELECTIONS.register("small_key_norm")
class SmallKeyNorm(Selection):
    """-|k|: in some pretrained models the most attended tokens have short keys."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        return -keys.float().norm(dim=-1)


@SELECTIONS.register("self_saliency")
class SelfSaliency(Selection):
    """The change of a token's window attention without the token itself, as published.

    KL = (1-a) log(1-a) + a log((a+e)/e) rises with the self-attention probability a, so the log-odds rank the same:
    s_tt - logsumexp of s_tj over the last chunk_size keys but t.
    """

    of_query_heads = True
    needs_window = True

    def in_window(
        self, logits: Tensor, visible: Tensor, is_self: Tensor, is_near: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        own = logits.masked_fill(~is_self[:, None], 0).sum(-1)
        others = logits.masked_fill(~(visible & is_near & ~is_self)[:, None], -torch.inf).logsumexp(-1)
        return own - others, None


@SELECTIONS.register("received")
class Received(Selection):
    """The mean attention that a token receives from the later queries that have it in their window."""

    of_query_heads = True
    needs_window = True

    def in_window(
        self, logits: Tensor, visible: Tensor, is_self: Tensor, is_near: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        hidden = ~visible[:, None]
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        # a row of padding sees no key, and its softmax is NaN
        return None, weights.masked_fill(hidden | is_self[:, None], 0).sum(-2)

    def finish(self, scores: Tensor) -> Tensor:
        size = scores.shape[2]
        # the later tokens of its chunk and all of the next chunk see a token
        later = 2 * size - 1 - torch.arange(size, device=scores.device)
        return scores / later[:, None]


class EveryToken(Selection):
    """Equal scores, for heads that keep all tokens, which then stay in order of arrival."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        return keys.new_zeros(keys.shape[:3], dtype=torch.float32)


class Given(Selection):
    """Scores computed by the caller."""

    needs_scores = True


@SELECTIONS.register("learned")
class Learned(Given):
    """Scores of a small network over the token; it learns which tokens distant queries will attend to."""


@SELECTIONS.register("oracle")
class Oracle(Given):
    """Attention from distant queries, read from the future: a control for studies, whole sequences only."""


@SELECTIONS.register("recent")
class Recent(Selection):
    """The latest tokens: a control that uses only the position."""

    rounds = False

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        return positions.float()[..., None].expand(*keys.shape[:3]).clone()


@SELECTIONS.register("random")
class Random(Selection):
    """A fixed pseudo-random number for each position and head: a control."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        heads = torch.arange(keys.shape[2], device=keys.device)
        # a classic shader hash: the fraction of a large multiple of a sine
        mixed = torch.sin(positions[..., None].double() * 12.9898 + heads * 78.233) * 43758.5453
        return mixed.frac().abs().float().expand(keys.shape[:3]).clone()


def rank_descending(scores: Tensor) -> Tensor:
    """Return the indices along the last axis by descending score; the first wins a tie."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def for_heads(scores: Tensor, heads: int) -> Tensor:
    """Return a score per store head, [..., heads of the rule] -> [..., heads]: the maximum of a group, or one repeated."""
    given = scores.shape[-1]
    if given > heads:
        return scores.unflatten(-1, (heads, given // heads)).amax(-1)
    return scores.repeat_interleave(heads // given, dim=-1) if given < heads else scores
