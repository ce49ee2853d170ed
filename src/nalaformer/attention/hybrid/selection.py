"""Which tokens of a chunk stay exact when it leaves the window: rules by name.

A rule gives each token a score by the time its chunk leaves the window, from nothing later. Scores are compared after rounding
to bfloat16, and of equals the older wins: tokens that are copies of each other have equal scores but for the last bits, which
differ between one pass over a prompt and many steps.
"""

import torch
from torch import Tensor

from ...registry import Registry

SELECTIONS: Registry[type["Selection"]] = Registry("selection")


class Selection:
    """A rule. Scores are [B, tokens, heads], for the heads of the queries or of the keys."""

    of_query_heads = False
    """Whether scores differ between the heads of the queries that share keys."""
    needs_window = False
    """Whether `in_window` has something to say."""
    needs_scores = False
    """Whether the scores come from outside."""
    rounds = True
    """Whether scores are rounded before they are compared; not where neighbours differ in the last bits by design."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        """What is known of each token by itself. keys: [B, A, K, D]; positions: [B or 1, A]; -> [B, A, K]."""
        raise NotImplementedError

    def in_window(
        self, logits: Tensor, visible: Tensor, is_self: Tensor, is_near: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """What queries add to their own scores, and to those of the keys that they see.

        logits: [B, H, R, T, W]; visible, is_self, is_near (within the last chunk_size keys): [B or 1, R, T, W].
        -> [B, H, R, T] and [B, H, R, W].
        """
        return None, None

    def finish(self, scores: Tensor) -> Tensor:
        """Scores of whole chunks that leave the window, [B, chunks, chunk_size, heads]."""
        return scores

    def comparable(self, scores: Tensor) -> Tensor:
        """Scores as they are compared: rounded, and finite, since infinities mean "always" and "never"."""
        scores = scores.detach().bfloat16().float() if self.rounds else scores.detach().float()
        largest = torch.finfo(torch.bfloat16).max
        return scores.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)


@SELECTIONS.register("key_norm")
class KeyNorm(Selection):
    """|k|: a long key can win the softmax of many queries."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        return keys.float().norm(dim=-1)


@SELECTIONS.register("small_key_norm")
class SmallKeyNorm(Selection):
    """-|k|: in some pretrained models the tokens that are attended to have short keys."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        return -keys.float().norm(dim=-1)


@SELECTIONS.register("self_saliency")
class SelfSaliency(Selection):
    """As published: how much a token's window attention changes without the token itself.

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
        # a row of padding sees nothing, and its softmax is no number
        return None, weights.masked_fill(hidden | is_self[:, None], 0).sum(-2)

    def finish(self, scores: Tensor) -> Tensor:
        size = scores.shape[2]
        # a token is seen by those after it in its chunk and by all of the next chunk
        later = 2 * size - 1 - torch.arange(size, device=scores.device)
        return scores / later[:, None]


class EveryToken(Selection):
    """Equal scores, for heads that keep all tokens: these stay in the order of their coming."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        return keys.new_zeros(keys.shape[:3], dtype=torch.float32)


class Given(Selection):
    """Scores that the caller has computed."""

    needs_scores = True


@SELECTIONS.register("learned")
class Learned(Given):
    """A small network looks at the token; it learns, beside the maps, which tokens distant queries will want."""


@SELECTIONS.register("oracle")
class Oracle(Given):
    """What distant queries will want, read from the future: a control for studies, whole sequences only."""


@SELECTIONS.register("recent")
class Recent(Selection):
    """The latest tokens: a control that knows nothing but time."""

    rounds = False

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        return positions.float()[..., None].expand(*keys.shape[:3]).clone()


@SELECTIONS.register("random")
class Random(Selection):
    """A fixed pseudo-random number for each position and head: a control."""

    def of_tokens(self, keys: Tensor, positions: Tensor) -> Tensor:
        heads = torch.arange(keys.shape[2], device=keys.device)
        # a classic hash for shaders: fraction of a large multiple of a sine
        mixed = torch.sin(positions[..., None].double() * 12.9898 + heads * 78.233) * 43758.5453
        return mixed.frac().abs().float().expand(keys.shape[:3]).clone()


def rank_descending(scores: Tensor) -> Tensor:
    """Indices along the last axis from the highest score to the lowest; of equals the first comes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def for_heads(scores: Tensor, heads: int) -> Tensor:
    """[..., heads of the rule] -> [..., heads]: what any of the heads that share keys wants; or one score for all of them."""
    given = scores.shape[-1]
    if given > heads:
        return scores.unflatten(-1, (heads, given // heads)).amax(-1)
    return scores.repeat_interleave(heads // given, dim=-1) if given < heads else scores
