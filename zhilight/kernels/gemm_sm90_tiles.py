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
    warpgroup keeps behind the first, so that the epilogue of one falls under the multiplications of the other. resident: blocks
    on a multiprocessor, 1 or 2 (2 for at most 128 columns): one's epilogue and start fall under the other's multiplications.
    """

    columns: int
    share_weight: int = 1
    share_x: int = 1
    split: int = 1
    band: int = 8
    lag: int = 0
    resident: int = 1

    @property
    def label(self) -> str:
        """Such as 128/2.1.1x2: columns / share_weight . share_x . split x resident."""
        return f"{self.columns}/{self.share_weight}.{self.share_x}.{self.split}x{self.resident}"

    def count(self, m: int, n: int) -> int:
        """Clusters' worth of work."""
        return -(-m // (ROWS * self.share_weight)) * -(-n // (self.columns * self.share_x))

    def grid(self, m: int, n: int, multiprocessors: int) -> int:
        """Blocks to launch: one a multiprocessor, or all blocks at once where K is split."""
        if self.split > 1:
            return self.count(m, n) * self.cluster
        return min(self.count(m, n), self.at_once(multiprocessors)) * self.cluster

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.share_weight * self.share_x * self.split

    def at_once(self, multiprocessors: int) -> int:
        """Clusters that run at once. Clusters of 4 and 8 do not fill every GPC: they reach 120 of an H200's 132."""
        return self.resident * (multiprocessors if self.cluster <= 2 else multiprocessors * 10 // 11) // self.cluster


COLUMNS = (64, 96, 112, 128, 144, 160, 192, 224, 240, 256)
"""Widths that are compiled: enough for tiles to fill whole waves, few enough to compile."""


def candidates(m: int, n: int, k: int) -> list[Tile]:
    """What is worth a look at this shape."""
    if m > 2 * ROWS:
        return [Tile(columns, share_weight=2) for columns in COLUMNS]
    rows = (1, 2) if m > ROWS else (1,)
    return [Tile(columns, share_weight, share_x, split)
            for columns in COLUMNS for share_weight in rows for share_x in (1, 2)
            for split in (1, 2, 4)
            if columns % (8 * split) == 0 and share_weight * share_x * split <= 8 and (split == 1 or k >= 256 * split)]


def predicted(tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Microseconds, about: waves of tiles, each bound by wgmma or by the copies into shared memory, or the weights' bytes."""
    waves = -(-tile.count(m, n) // tile.at_once(multiprocessors))
    step = max(4 * tile.columns, (ROWS / tile.share_x + tile.columns / tile.share_weight) * 128 / 45)
    compute = waves * (-(-k // 64) / tile.split * step / 1650 + (1.0 if tile.split == 1 else 2.5))
    return max(compute, 2 * n * k / 4.0e6) + 0.2 * compute


@lru_cache(maxsize=1 << 16)
def choose_tile(m: int, n: int, k: int, multiprocessors: int) -> Tile:
    """The tile for out[m, n] = x[m, k] @ weight[n, k]^T."""
    return min(candidates(m, n, k), key=lambda tile: predicted(tile, m, n, k, multiprocessors))


def tiles_of(n: int, k: int, multiprocessors: int, max_rows: int = 16384) -> set[Tile]:
    """Every tile that choose_tile gives for a weight: what to compile before serving it."""
    counts = {*range(1, 2 * ROWS + 1), *range(2 * ROWS + 1, max_rows + ROWS, ROWS)}
    return {choose_tile(m, n, k, multiprocessors) for m in counts}
