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
    weight tiles. share_x: blocks at neighbouring column tiles that share tiles of x. split: blocks that split K, 1 or 2 (2 for
    at most 128 columns). The product of the three is at most 8. band: row tiles (of share_weight x 128) of a band of the
    raster.
    """

    columns: int
    share_weight: int = 1
    share_x: int = 1
    split: int = 1
    band: int = 8

    @property
    def label(self) -> str:
        """Such as 128/2.1.1: columns / share_weight . share_x . split."""
        return f"{self.columns}/{self.share_weight}.{self.share_x}.{self.split}"

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
        return (multiprocessors if self.cluster <= 2 else multiprocessors * 10 // 11) // self.cluster


COLUMNS = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
"""Widths of tiles. Each one that a weight takes is compiled; see tiles_of."""
FEW_ROWS = 2 * ROWS
SHORT_LOAD_ROWS = 2048
"""Up to as many rows a step is over before the card is warm."""
MANY_ROWS = (512, 1024, 2048, 4096, 8192)
"""Rows that a weight's tiles are chosen for; engine/warmup.py compiles these."""

MEASURED = {
    (ROWS, 4096, 14336): Tile(64, split=2),
    (ROWS, 8192, 8192): Tile(64),
    (ROWS, 128256, 4096): Tile(256, share_x=2),
    (FEW_ROWS, 6144, 4096): Tile(96),
    (FEW_ROWS, 8192, 8192): Tile(128),
    (FEW_ROWS, 10240, 8192): Tile(160),
    (FEW_ROWS, 4608, 3584): Tile(80),
    (512, 37888, 3584): Tile(192),
    (1024, 10240, 8192): Tile(160),
}
"""(M, N, K): the fastest of a dozen tiles measured on an H200 with 132 multiprocessors, where the model misses it."""


def candidates(m: int, n: int, k: int, multiprocessors: int, silu_mul: bool = False) -> list[Tile]:
    """What is worth a look at this shape.

    With many rows a block alone is as fast as clusters on a cool card (measured: within 2 % at M >= 512), so only the width is
    left to choose; but from thousands of rows on the card's power decides, and pairs that share their weights' tiles take less.
    With few rows, tiles are too few for the machine or too narrow for wgmma unless blocks split K; sharing
    saves L2 reads and power, rarely time.
    """
    if m > FEW_ROWS:
        alone = [Tile(columns) for columns in COLUMNS if columns >= 112]
        return [*alone, Tile(256, share_weight=2)] if m > SHORT_LOAD_ROWS else alone
    found = []
    unit = 16 if silu_mul else 8
    for columns in COLUMNS:
        for share_weight in (1, 2) if m > ROWS else (1,):
            for share_x in (1, 2):
                for split in (1, 2):
                    tile = Tile(columns, share_weight, share_x, split)
                    if columns % (unit * split) or columns * split > 256 or k < 256 * split:
                        continue
                    if split == 1 or tile.count(m, n) <= tile.at_once(multiprocessors):
                        found.append(tile)
    return found or [Tile(64)]


def predicted(tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Microseconds, about: a model whose constants are fitted to timings on an H200, 160 of them at 128 and 256 rows (mean
    error 3 %) and 450 above.

    whole: waves of tiles; a stage costs its wgmma's cycles at 1.5 GHz, or 0.244 us where tiles are narrow. load: all stages
    through L2; sharing them between blocks saves power, not time. power: the operations themselves at the rate that the card's
    power allows (measured under a load of seconds: 664 TFLOP/s in pairs, 640 alone, bench/kernels/gemm_sustained.py). memory:
    the weights. These overlap, the first three almost fully. Split K adds its exchange at the end.
    """
    waves = -(-tile.count(m, n) // tile.at_once(multiprocessors))
    steps = -(-k // 64) / tile.split
    stage = max(4 * tile.columns * 0.665e-3, 0.244)
    whole = waves * (steps * stage + 3.5) * (1.015 if tile.cluster > 2 else 1.0)
    load = tile.count(m, n) * tile.cluster * steps * (ROWS + tile.columns) * 128 / 16.8e6
    power = m * n / (multiprocessors * ROWS) * -(-k // 64) * 4 * (0.715e-3 if tile.share_weight == 1 else 0.69e-3)
    memory = 2 * n * k / 4.14e6
    inside = (whole**6.8 + load**6.8 + power**6.8) ** (1 / 6.8)
    exchange = 1.35 + 0.0073 * tile.columns if tile.split > 1 else 0.0
    return (inside**3.6 + memory**3.6) ** (1 / 3.6) + exchange


@lru_cache(maxsize=1 << 16)
def choose_tile(m: int, n: int, k: int, multiprocessors: int, silu_mul: bool = False) -> Tile:
    """The tile for y[m, n] = x[m, k] @ weight[n, k]^T; with silu_mul each block must own whole groups of 8 outputs.

    A step may have any number of rows, and a tile it has not met is seconds of compiling. So up to 128 and up to 256 rows there
    is one tile each, and above them a weight has the few that are best at powers of two, up to 2048 or beyond.
    """
    if m > FEW_ROWS:
        among = {_best(size, n, k, multiprocessors, silu_mul) for size in MANY_ROWS
                 if size <= SHORT_LOAD_ROWS or m > SHORT_LOAD_ROWS}
        return min(sorted(among, key=lambda tile: -tile.columns), key=lambda tile: predicted(tile, m, n, k, multiprocessors))
    return _best(ROWS if m <= ROWS else FEW_ROWS, n, k, multiprocessors, silu_mul)


@lru_cache(maxsize=1 << 12)
def _best(m: int, n: int, k: int, multiprocessors: int, silu_mul: bool) -> Tile:
    known = MEASURED.get((m, n, k))
    if known and multiprocessors == 132 and known.columns % (16 * known.split if silu_mul else 8) == 0:
        return known

    def rank(tile: Tile) -> float:
        # 256 columns unless others gain more than the model can tell: one kernel less to compile
        narrow = m > FEW_ROWS and tile.columns < 256
        return predicted(tile, m, n, k, multiprocessors) * (1.015 if narrow else 1.0)

    return min(candidates(m, n, k, multiprocessors, silu_mul), key=rank)


def tiles_of(n: int, k: int, multiprocessors: int, silu_mul: bool = False) -> set[Tile]:
    """Every tile that choose_tile gives for a weight: what to compile before serving it."""
    return {choose_tile(m, n, k, multiprocessors, silu_mul) for m in (ROWS, FEW_ROWS, *MANY_ROWS)}
