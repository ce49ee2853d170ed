"""Random numbers of many samples at once, each sample's own: number j of sample i does not depend on its batch mates.

SplitMix64 (Steele et al., 2014): the j-th number is a mix of key + j * GOLDEN, so any of them is had without the ones before.
"""

import numpy as np
from numpy.typing import NDArray

RandomKeys = NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix_bits(x: RandomKeys) -> RandomKeys:
    """A bijection of 64-bit words in which every bit depends on every other."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, stream: int, indices: NDArray[np.int64]) -> RandomKeys:
    """A key for each sample: [B]."""
    start = np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)
    return mix_bits(start + GOLDEN * (indices.astype(np.uint64) + np.uint64(1)))


def child_keys(keys: RandomKeys, place: int | NDArray[np.int64]) -> RandomKeys:
    """Keys of independent streams below each key, one for each place (an attempt, a level, a time)."""
    return mix_bits(keys ^ mix_bits(np.atleast_1d(np.asarray(place, dtype=np.uint64)) * GOLDEN + GOLDEN))


def uniform_at(keys: RandomKeys, number: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """The number-th uniform in [0, 1) of each key; keys and numbers broadcast."""
    # at least one dimension: numpy warns when a single number wraps around, and arrays may
    words = mix_bits(keys + GOLDEN * (np.atleast_1d(np.asarray(number, dtype=np.uint64)) + np.uint64(1)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniforms(keys: RandomKeys, count: int) -> NDArray[np.float64]:
    """The first `count` uniforms of each key: [B, count]."""
    return uniform_at(keys[:, None], np.arange(count)[None])


def integers(u: NDArray[np.float64], below: int) -> NDArray[np.int64]:
    """Uniforms as integers 0..below - 1."""
    return (u * below).astype(np.int64)


def normals(keys: RandomKeys, count: int) -> NDArray[np.float64]:
    """Standard normal numbers by Box and Muller: [B, count]."""
    u = uniforms(keys, 2 * count)
    # 1 - u is never zero
    return np.sqrt(-2 * np.log1p(-u[:, :count])) * np.cos(2 * np.pi * u[:, count:])
