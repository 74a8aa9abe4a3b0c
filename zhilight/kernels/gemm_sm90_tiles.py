"""Which tile a dense GEMM takes on Hopper: host arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

ROWS = 128
"""Rows of a tile."""


@dataclass(frozen=True)
class Tile:
    """How the work is cut.

    columns: of a tile (a multiple of 16, at most 256). share_weight: blocks of a cluster, at neighbouring row tiles, that share
    weight tiles. share_x: blocks at neighbouring column tiles that share tiles of x. split: blocks that split K. The product of
    the three is at most 8. band: row tiles (of share_weight x 128) of a band of the raster. lag: stages that the second
    warpgroup keeps behind the first, so that the epilogue of one falls under the multiplications of the other.
    """

    columns: int
    share_weight: int = 1
    share_x: int = 1
    split: int = 1
    band: int = 8
    lag: int = 0

    @property
    def label(self) -> str:
        """Such as 256/2.1.1: columns / share_weight . share_x . split."""
        return f"{self.columns}/{self.share_weight}.{self.share_x}.{self.split}"

    def count(self, m: int, n: int) -> int:
        """Clusters' worth of work."""
        return -(-m // (ROWS * self.share_weight)) * -(-n // (self.columns * self.share_x))

    def grid(self, m: int, n: int, multiprocessors: int) -> int:
        """Blocks to launch: one a multiprocessor, or all blocks at once where K is split."""
        share = self.share_weight * self.share_x
        if self.split > 1:
            return self.count(m, n) * self.split * share
        return min(self.count(m, n), multiprocessors // share) * share


@lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, multiprocessors: int) -> Tile:
    return Tile(256, 2 if m > ROWS else 1)
