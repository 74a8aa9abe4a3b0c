"""The random draw of a sampled token: Philox4x32-10, a counter-based generator.

    draw = (word + 0.5) * 2^-32,   word = first output word of Philox4x32-10
    key     = (seed & 0xffffffff, seed >> 32)
    counter = (position & 0xffffffff, position >> 32, 0, 0)

The draw depends on (seed, position) alone, so neither the batch nor the device can change it: 32-bit multiplications
and exclusive ors give the same word on every machine, and the conversion is exact in float64. The draw is never 0 or 1.

Source  Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123)
"""

from __future__ import annotations

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What is added to the two key words after each round."""
ROUNDS = 10

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of many counters. counter [..., 4], key [..., 2] uint32 -> [..., 4] uint32."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(ROUNDS):
        p0 = np.uint64(MULTIPLIERS[0]) * c0
        p1 = np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + np.uint64(WEYL[0])) & _LOW
        k1 = (k1 + np.uint64(WEYL[1])) & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draws in (0, 1). seeds [R] uint64, positions [R] int64 (not negative) -> [R] float64."""
    seeds = np.asarray(seeds).astype(np.uint64)
    positions = np.asarray(positions).astype(np.uint64)
    zeros = np.zeros_like(positions)
    counter = np.stack((positions & _LOW, positions >> _32, zeros, zeros), axis=-1)
    key = np.stack((seeds & _LOW, seeds >> _32), axis=-1)
    return (philox4x32(counter, key)[..., 0].astype(np.float64) + 0.5) * 2.0**-32
