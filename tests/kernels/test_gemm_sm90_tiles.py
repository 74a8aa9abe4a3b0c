"""choose_tile: launchable for every shape, fills the machine on the shapes of models, and stays a short list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zhilight.kernels.gemm_sm90_tiles import ROWS, choose_tile, tiles_of

MULTIPROCESSORS = 132
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (10240, 8192), (8192, 8192), (57344, 8192),
          (8192, 28672), (4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)]


@given(m=st.integers(1, 20000), n=st.integers(1, 20000).map(lambda v: 8 * v), k=st.integers(1, 4000).map(lambda v: 8 * v),
       multiprocessors=st.sampled_from([132, 114, 78]), silu_mul=st.booleans())
def test_every_shape_can_be_launched(m, n, k, multiprocessors, silu_mul):
    tile = choose_tile(m, n, k, multiprocessors, silu_mul)
    cluster = tile.share_weight * tile.share_x * tile.split
    assert tile.columns % 16 == 0 and 64 <= tile.columns <= 256
    assert tile.columns % ((16 if silu_mul else 8) * tile.split) == 0
    assert cluster <= 8
    assert tile.split <= -(-k // 64), "a part of K would be empty"
    grid = tile.grid(m, n, multiprocessors)
    assert grid > 0 and grid % cluster == 0
    assert tile.split > 1 or grid <= multiprocessors
    assert tile.count(m, n) * tile.share_weight * ROWS * tile.share_x * tile.columns >= m * n


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("m", [512, 1024, 2048, 4096, 8192])
def test_waves_are_full(m, n, k):
    """Of the multiprocessors' time in all waves, little goes to idle blocks and to tiles that stick out."""
    tile = choose_tile(m, n, k, MULTIPROCESSORS)
    share = tile.share_weight * tile.share_x
    waves = -(-tile.count(m, n) * share * tile.split // MULTIPROCESSORS)
    useful = m * n / (waves * MULTIPROCESSORS * ROWS * tile.columns)
    assert useful > 0.84


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("silu_mul", [False, True])
def test_no_step_meets_a_kernel_that_warm_up_did_not(n, k, silu_mul):
    """Warm-up runs powers of two; steps of other sizes, up to the largest one run, must do with those kernels."""
    for limit in (2048, 8192):
        sizes = [m for m in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if m <= limit]
        met = {choose_tile(m, n, k, MULTIPROCESSORS, silu_mul) for m in sizes}
        for m in range(1, limit + 1, 37):
            assert choose_tile(m, n, k, MULTIPROCESSORS, silu_mul) in met, m
    assert len(tiles_of(n, k, MULTIPROCESSORS, silu_mul)) <= 7


@pytest.mark.parametrize("rows, columns, band", [(1, 1, 8), (7, 5, 8), (8, 13, 8), (21, 4, 8), (16, 3, 4), (5, 9, 1)])
def test_raster_visits_every_tile_once(rows, columns, band):
    from zhilight.kernels.gemm_sm90 import place

    visited = [place.py_func(t, rows, columns, band) for t in range(rows * columns)]
    assert sorted(visited) == [(row, column) for row in range(rows) for column in range(columns)]
