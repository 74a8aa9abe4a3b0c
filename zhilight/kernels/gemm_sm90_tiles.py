"""Which tile a dense GEMM takes on Hopper: host arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

ROWS = 128
"""Rows of a tile."""


@dataclass(frozen=True)
class Tile:
    """columns: of a tile. share: blocks of a cluster that share a weight tile. split: blocks of a cluster that split K.
    group: row tiles (of share x 128) in a band of the raster. lag: stages that the second warpgroup keeps behind the first, so
    that the epilogue of one falls under the multiplications of the other."""

    columns: int
    share: int = 1
    split: int = 1
    group: int = 8
    lag: int = 0

    def count(self, m: int, n: int) -> int:
        """Clusters' worth of work: tiles of share x 128 rows."""
        return -(-m // (ROWS * self.share)) * -(-n // self.columns)

    def grid(self, m: int, n: int, multiprocessors: int) -> int:
        """Blocks to launch: one a multiprocessor, or all blocks at once where K is split."""
        if self.split > 1:
            return self.count(m, n) * self.split
        return min(self.count(m, n), multiprocessors // self.share) * self.share


@lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, multiprocessors: int) -> Tile:
    return Tile(256, 2 if m > ROWS else 1)
