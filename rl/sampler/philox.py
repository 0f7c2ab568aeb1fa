"""Generate counter-based uniforms: a token's random number depends on its indices, not on earlier
samples.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"),
vectorised over rows in numpy. Key: the seed. Counter: the position in the response, the index in
the group and the problem. So a sample's stream depends neither on the rest of the batch, nor on the
number of ranks, nor on the order of requests.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_MASK64 = (1 << 64) - 1


def as_uint64(value: int) -> np.uint64:
    """Return a Python integer of any sign and size modulo 2^64."""
    return np.uint64(value & _MASK64)


def philox4x32(
    counter: tuple[np.ndarray, ...], key: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    """Run ten Philox rounds on four counter words and two key words; return four words.

    Each word is an uint64 array holding 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0  # 32 x 32 bits fit in 64
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def philox_uniforms(
    seed: np.ndarray, problem: np.ndarray, index: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Return uniforms in [0, 1) with 53 bits, float64, for each row of the (broadcast) uint64
    arguments.

    `index` (of the sample in its group) and `position` (of the token in its response) count modulo
    2^32.
    """
    seed, problem, index, position = np.broadcast_arrays(seed, problem, index, position)
    counter = (position & _LOW, index & _LOW, problem & _LOW, problem >> _HALF)
    word0, word1, _, _ = philox4x32(counter, (seed & _LOW, seed >> _HALF))
    bits = ((word0 << _HALF) | word1) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
