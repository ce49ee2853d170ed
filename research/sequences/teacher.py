"""Outputs of exact attention as targets: a fixed random teacher, flat for short queries and sharp for long ones."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .base import SEQUENCES, Arrays, SequenceData, SequenceFacts
from .random_numbers import child_keys, normals, uniforms

PARTS, NORMS = range(2)
TEACHER_SEED = 20


@SEQUENCES.register("softmax_teacher")
@dataclass(kw_only=True, eq=False)
class SoftmaxTeacher(SequenceData):
    """Tokens x [C], C = 3 heads size; the target of each is softmax(q k^T / sqrt(size)) v, all heads one after the other.

    Queries, keys and values are parts of R x, R a random rotation that is the same for every sample, split and seed. Keys and
    values are standard normal, so are the directions of queries; the logarithm of their norm is uniform between those of
    `shortest` and `longest`, in each head by itself.
    """

    stream_name = "softmax_teacher"
    is_quick = True
    figure = "R^2"
    chance = 0.0

    tokens: int = 64
    heads: int = 2
    size: int = 16
    shortest: float = 0.5
    longest: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 2 or self.heads < 1 or self.size < 2:
            raise ValueError(f"needs tokens >= 2, heads >= 1, size >= 2, got {self.tokens}, {self.heads}, {self.size}")
        if not 0 < self.shortest <= self.longest:
            raise ValueError(f"norms of queries must be positive and in order, got {self.shortest} to {self.longest}")

    @property
    def facts(self) -> SequenceFacts:
        outputs = self.heads * self.size
        return SequenceFacts(answers="tokens", outputs=outputs, length=self.tokens, channels=3 * outputs)

    @cached_property
    def rotation(self) -> NDArray[np.float64]:
        channels = self.facts.channels
        q, r = np.linalg.qr(np.random.default_rng(TEACHER_SEED).standard_normal((channels, channels)))
        # one sign of two, the same with every library
        return q * np.sign(np.diag(r))

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        keys, shape = self.random_keys(indices), (len(indices), self.tokens, self.heads)
        drawn = normals(child_keys(keys, PARTS), self.tokens * self.facts.channels)
        parts = drawn.reshape(len(indices), self.tokens, 3, self.heads, self.size)
        norms = uniforms(child_keys(keys, NORMS), self.tokens * self.heads).reshape(*shape, 1)
        wanted = self.shortest * (self.longest / self.shortest) ** norms
        parts[:, :, 0] *= wanted / np.linalg.norm(parts[:, :, 0], axis=-1, keepdims=True)
        # the model and the teacher get the same inputs, to the last bit
        inputs = (parts.reshape(*shape[:2], -1) @ self.rotation).astype(np.float32)
        return {"inputs": inputs, "targets": self.taught(inputs).astype(np.float32)}

    def taught(self, inputs: NDArray[np.float32]) -> NDArray[np.float64]:
        """[B, N, C] -> [B, N, heads size]."""
        seen = inputs.astype(np.float64) @ self.rotation.T
        q, k, v = np.moveaxis(seen.reshape(*inputs.shape[:2], 3, self.heads, self.size), (2, 3), (0, 2))  # [B, H, N, D] each
        logits = q @ k.swapaxes(2, 3) / self.size**0.5
        weights = np.exp(logits - logits.max(axis=3, keepdims=True))
        gathered = weights / weights.sum(axis=3, keepdims=True) @ v
        return gathered.swapaxes(1, 2).reshape(*inputs.shape[:2], -1)
