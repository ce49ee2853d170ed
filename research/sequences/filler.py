"""A language without meaning whose entropy is known: an order-2 Markov chain."""

import math

import numpy as np
from numpy.typing import NDArray

# probabilities of a context's four successors: 1.75 bits for every context, so the entropy rate is exact
SHARES = (0.5, 0.25, 0.125, 0.125)
ENTROPY = -sum(share * math.log(share) for share in SHARES)


class Filler:
    """Words 0..words - 1; the two words before decide which four may follow, with probabilities 1/2, 1/4, 1/8, 1/8.

    Entropy rate: ENTROPY nats per word (1.75 bits), of the best model that knows the two words before.
    """

    def __init__(self, *, words: int = 64, seed: int = 0) -> None:
        if words < 4:
            raise ValueError(f"words must be at least 4: that many may follow each context, got {words}")
        self.words = words
        order = np.random.default_rng((seed, words)).random((words * words, words)).argsort(axis=1)
        self.successors = order[:, : len(SHARES)].astype(np.int32)  # [words * words, 4]

    def write(self, u: NDArray[np.float64]) -> NDArray[np.int32]:
        """Texts [B, N] from uniforms [B, N]."""
        texts = np.empty(u.shape[::-1], np.int32)
        choices = np.searchsorted(np.cumsum(SHARES), u.T, side="right").astype(np.int32)
        starts = (u.T[:2] * self.words).astype(np.int32)
        flat = self.successors.ravel()
        for place in range(len(texts)):
            if place < 2:
                texts[place] = starts[place]
            else:
                context = texts[place - 2] * self.words + texts[place - 1]
                flat.take(context * len(SHARES) + choices[place], out=texts[place])
        return texts.T

    def log_probability(self, texts: NDArray[np.int32]) -> NDArray[np.float64]:
        """Each word from the third on, given the two before it, in nats: [B, N - 2]; -inf for a word that cannot follow."""
        context = texts[:, :-2] * self.words + texts[:, 1:-1]
        is_it = self.successors[context] == texts[:, 2:, None]
        with np.errstate(divide="ignore"):
            return np.log((is_it * np.asarray(SHARES)).sum(axis=2))
