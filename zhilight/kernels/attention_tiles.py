"""Device code that the attention kernels share: which query tile a block works on, and the score cap.

A prefill launch numbers its tiles sequence after sequence; a block finds its own with one warp scan over query_start, so
the host sends no work list and the order is the same on every architecture: within a sequence the last tile, which sees
most keys, comes first.
"""

from numba import cuda

from zhilight.kernels.ptx import FULL_WARP, exp2_approx, f32, i32, reciprocal_approx

LOG2_E = 1.4426950408889634
TWICE_LOG2_E = 2 * LOG2_E
HIDDEN = -2e30
"""Score of a masked key: below LOWEST, so that its weight is exactly zero even while a row has seen no key."""
LOWEST = -1e30
"""Running maximum before any key. Finite: the kernels are compiled with fast arithmetic, which knows no infinities."""


@cuda.jit(device=True)
def find_tile(query_start, first, count, tile, rows, lane):
    """(sequence, tile of the sequence counted from its end, its tiles) of tile number `tile` of a launch.

    All 32 lanes call it. The sequence is -1 when there are fewer tiles. rows: queries of a tile.
    """
    sequence = i32(-1)
    within = i32(0)
    tiles = i32(0)
    base = i32(0)
    while sequence < i32(0) and base < count:
        index = base + lane
        mine = i32(0)
        if index < count:
            length = query_start[first + index + i32(1)] - query_start[first + index]
            mine = (length + rows - i32(1)) // rows
        sum_ = mine
        for step in (1, 2, 4, 8, 16):
            below = cuda.shfl_up_sync(FULL_WARP, sum_, step)
            if lane >= i32(step):
                sum_ += below
        votes = cuda.ballot_sync(FULL_WARP, tile < sum_)
        if votes != 0:
            source = i32(cuda.ffs(votes)) - i32(1)
            sequence = first + base + source
            tiles = cuda.shfl_sync(FULL_WARP, mine, source)
            within = tile - cuda.shfl_sync(FULL_WARP, sum_, source) + tiles
        else:
            tile -= cuda.shfl_sync(FULL_WARP, sum_, 31)
            base += i32(32)
    return sequence, within, tiles


@cuda.jit(device=True)
def cap_score(score, inner, outer):
    """outer * tanh(score * inner), by exp2 and a reciprocal: absolute error near 1e-6 * outer, where tanh.approx has 5e-4."""
    doubled = exp2_approx(score * (inner * f32(TWICE_LOG2_E)))
    return outer - f32(2) * outer * reciprocal_approx(doubled + f32(1))

