"""Philox4x32-10 against the known answers that its authors publish with Random123 (kat_vectors)."""

from __future__ import annotations

import numpy as np
import pytest

from zhilight.ops.philox import philox4x32, uniform

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert words.tolist() == [list(expected)]


def test_draw_depends_on_seed_and_position_alone():
    seeds = np.array([1, 2, 1, 2**63 + 5], np.uint64)
    positions = np.array([7, 7, 8, 7], np.int64)
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i:i + 1], positions[i:i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_high_words_of_seed_and_position_count():
    low = uniform(np.array([5], np.uint64), np.array([3], np.int64))
    assert uniform(np.array([5 + 2**32], np.uint64), np.array([3], np.int64)) != low
    assert uniform(np.array([5], np.uint64), np.array([3 + 2**32], np.int64)) != low


def test_draws_are_uniform():
    draws = uniform(np.full(100_000, 42, np.uint64), np.arange(100_000))
    assert draws.min() > 0 and draws.max() < 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()   # 99 degrees of freedom: mean 99, standard deviation 14
    assert 50 < chi_square < 165
