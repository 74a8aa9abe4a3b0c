"""Dense GEMM on Hopper: out[M, N] = x[M, K] @ weight[N, K]^T (+ bias[N]), for more than a few tokens.

x [M, K] and weight [N, K] bf16 or fp16, rows contiguous, rows of x may be strided; sums in float32. out [M, N] in x's type, or
float32 times `scale` (logits). With silu_mul, out [M, N / 2] = silu(y[:, 0::2]) * y[:, 1::2]: gate and up rows lie
interleaved in weight. With add, out += y: y and the sum are each rounded to out's type, as by an addition of its own. With
heads, q leaves rotated, and k and v go to the paged cache (gemm_sm90_rotary). N and K are multiples of 8 (N of 16 with
silu_mul), M is any number up to 2^20.

A block computes tiles of 128 x tile_n: one producer thread feeds a ring of shared-memory stages (64 of K each) through the
bulk tensor copy engine, two consumer warpgroups of 64 rows each issue wgmma, mbarriers hand the stages over. The grid is
persistent, tiles in bands that share rows and columns in L2. Work is spread over blocks in these ways (gemm_sm90_tiles):
  share_weight 2: two blocks of a cluster take neighbouring row tiles; each loads half of the weight tile and multicasts it
    to both. share_x: the same with neighbouring column tiles and the tile of x.
  split 2: two blocks of a cluster split K; each then finishes half of the columns, with the other's part of the sums.
  tile_n: any multiple of 16 up to 256, so that tiles fill whole waves of multiprocessors.
Results are the same bits from run to run.

Rows are cut so that the LAST row tile ends at row M, and the first ones start at row 0 where they would start before it:
they then overlap, and both write the same bits (with add, one of them adds zeros). So from 128 rows on nothing sticks out, no
tensor map depends on M, and a step of any size finds its maps made. (The copy engine could clip rows before 0 on loads, but
not on stores.)

overlap (programmatic dependent launch): the first stages' weights are fetched before griddepcontrol.wait, x after it.

Floor: 2 M N K operations at 989 TFLOP/s (798 is what cuBLAS reaches on a cool H200 at 8192^3), or the weights' bytes.
Reached on one H200, 2026-12-01: M >= 512: 1.00 of cuBLAS's speed (geometric mean over 65 shapes of Llama-3 and Qwen2, 0.93 to
1.14), both bound by the card's power at 615 to 767 TFLOP/s; M = 128: 1.01 (0.94 to 1.08), M = 256: 0.97 (0.91 to 1.06).
The layers of Llama-3-8B at M = 8192 for seconds on end: 666 TFLOP/s, cuBLAS 672 to 677 (0.98 to 0.99).
Bench: bench/kernels/gemm.py, gemm_sustained.py; all figures and what was tried: docs/kernels/gemm_sm90.md.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, TensorMap, kernel, kernel_factory
from zhilight.driver.dtype import DType, bfloat16, float16, float32, int32, int64
from zhilight.driver.launcher import BoundLaunch
from zhilight.driver.tensor import Layout
from zhilight.errors import ShapeError
from zhilight.kernels import gemm_sm90_epilogue as epilogue
from zhilight.kernels import gemm_sm90_rotary as rotary
from zhilight.kernels.gemm_sm90_rotary import Heads
from zhilight.kernels.gemm_sm90_tiles import ROWS, Tile, choose_tile
from zhilight.kernels.ptx import (
    address,
    bulk_load_2d,
    bulk_load_2d_multicast,
    bulk_wait_read,
    cluster_address,
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    f32,
    fence_mbarrier_init,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    set_max_registers,
    shared_address,
    shared_tensor_descriptor,
    u32,
    u64,
    wgmma_commit,
    wgmma_fence,
    wgmma_shared,
    wgmma_wait,
    zeros,
)
from zhilight.kernels.runtime import PLANS, map_form

STEP = 64
"""K of a stage: 128 bytes a row, the widest swizzle."""
X_BYTES = ROWS * STEP * 2
STAGING = 8 * epilogue.SLABS * epilogue.SLAB_BYTES
"""Shared memory of the epilogue, of all warps."""
BARRIERS = 256
SHARED_LIMIT = 227 << 10
"""Dynamic shared memory of a block."""
THREADS = 384
"""Two consumer warpgroups, and for the producer a warpgroup, so that setmaxnreg can take its registers."""
MAX_REGISTERS = 168
MAX_ROWS = 1 << 20

Queue = Callable[..., None]
"""Queues a GEMM of known layouts: a function of (runtime, x, weight, out, bias); with heads, also of the addresses of
positions, slot mapping, cosines and sines, and the layer's cache."""


def stages_that_fit(tile: Tile) -> int:
    """Stages of the ring beside the epilogue's staging, at most 8."""
    return min(8, (SHARED_LIMIT - STAGING - BARRIERS) // (X_BYTES + tile.columns * STEP * 2))


@cuda.jit(device=True)
def place(t, rows, columns, band):
    """Tile number -> (row tile, column tile): bands of `band` row tiles, column by column within a band."""
    first = t // (band * columns) * band
    height = min(rows - first, band)
    inside = t - first * columns
    return first + inside % height, inside // height


@kernel_factory
def gemm_sm90_kernel(tile: Tile, dtype: DType, out_dtype: DType, bias: bool, silu_mul: bool, overlap: bool,
                     add: bool = False, heads: Heads | None = None) -> Kernel:
    """The arguments are those of gemm_sm90. Rank in a cluster: ((part of K) * share_x + column) * share_weight + row.

    heads: rotate and write to the cache, see gemm_sm90_rotary; positions, slots, cos_sin and kv_cache are for this alone.
    """
    tile_n, share_w, share_x, split = tile.columns, tile.share_weight, tile.share_x, tile.split
    band = tile.band
    share = share_w * share_x
    cluster = share * split
    peers = share_w + share_x - 1
    stages = stages_that_fit(tile)
    x_rows, w_rows = ROWS // share_x, tile_n // share_w
    stage_bytes = X_BYTES + tile_n * STEP * 2
    x_part, w_part = x_rows * STEP * 2, w_rows * STEP * 2
    out_columns = (tile_n // 2 if silu_mul else tile_n) // split
    w_mask = (1 << share_w) - 1
    if split > 2 or (split == 2 and 8 * epilogue.exchange_bytes(tile_n) > STAGING):
        raise ShapeError(f"tile {tile.label}: K is split in 2 at most, in tiles of at most {STAGING // 256} columns")
    x_mask = sum(1 << (c * share_w) for c in range(share_x))
    descriptor = shared_tensor_descriptor(1024)
    multiply = wgmma_shared(tile_n, dtype)
    zero = zeros(tile_n)
    to_heads = heads is not None
    store = epilogue.store_tile(tile_n // split, dtype, out_dtype, bias, silu_mul, add)
    if to_heads:
        Q, QK, D, P = heads.num_heads, heads.num_heads + heads.num_kv_heads, heads.head_dim, heads.block_size
        store_heads = rotary.store_heads(tile_n, D, 2 * P * D, out_dtype)
        rotate, add_bias = rotary.rotate(tile_n, D), rotary.add_bias(tile_n, dtype, out_dtype)
    BLOCK_BYTES = 4 * heads.num_kv_heads * heads.block_size * heads.head_dim if to_heads else 0
    send, add_received = epilogue.send_half(tile_n), epilogue.add_half(tile_n)
    received_bytes = 8 * epilogue.exchange_bytes(tile_n)
    wait_one, wait_all, wait_stored = wgmma_wait(1), wgmma_wait(0), bulk_wait_read(0)
    # 56 + 2 x 224 is what a block of 3 x 168 was launched with; asking for more would hang the GPU
    give_registers, take_registers = set_max_registers(56, False), set_max_registers(224, True)

    @cuda.jit(device=True)
    def free(barrier, peer):
        if peer >= i32(0):
            if share > 1:
                mbarrier_arrive_cluster(barrier, u32(peer))
            else:
                mbarrier_arrive(barrier)

    @cuda.jit(device=True)
    def load_weight(ring, weight, barrier, kk, column, w_place, w_blocks):
        if share_w > 1:
            bulk_load_2d_multicast(ring + u32(X_BYTES) + u32(w_place) * u32(w_part), weight, barrier, kk,
                                   column + w_place * i32(w_rows), w_blocks)
        else:
            bulk_load_2d(ring + u32(X_BYTES), weight, barrier, kk, column)

    @kernel(threads=THREADS, shared=stages * stage_bytes + STAGING + BARRIERS, cluster=cluster,
            min_capability=(9, 0, "a"), max_registers=MAX_REGISTERS)
    def gemm(x: TensorMap, weight: TensorMap, out: TensorMap, bias_values: Pointer(dtype), positions: Pointer(int32),
             slots: Pointer(int64), cos_sin: Pointer(float32), kv_cache: Pointer(dtype), scale: f32, m: i32, n: i32, k: i32):
        base = shared_address(cuda.shared.array(0, types.uint8, 1024))
        staging = base + u32(stages * stage_bytes)
        full = staging + u32(STAGING)
        empty = full + u32(8 * stages)
        received = empty + u32(8 * stages)
        tid = i32(cuda.threadIdx.x)
        warpgroup = tid // i32(128)
        rank = i32(0)
        if cluster > 1:
            rank = i32(cluster_rank())
        if tid == i32(0):
            for s in range(stages):
                mbarrier_init(full + u32(8 * s), u32(1))
                mbarrier_init(empty + u32(8 * s), u32(2 * peers))
            if split > 1:
                mbarrier_init(received, u32(1))
            fence_mbarrier_init()
            prefetch_tensor_map(x)
            prefetch_tensor_map(weight)
            prefetch_tensor_map(out)
            if split > 1:
                mbarrier_expect(received, u32(received_bytes))
        cuda.syncthreads()
        if cluster > 1:
            cluster_arrive()
            cluster_wait()
        if overlap:
            # the next kernel may take what room is left and fetch its weights; it waits for this one's end by itself
            grid_dependency_launch()

        part = rank // i32(share)
        x_place = rank // i32(share_w) % i32(share_x)
        w_place = rank % i32(share_w)
        row_tiles = (m + i32(share_w * ROWS - 1)) // i32(share_w * ROWS)
        column_tiles = (n + i32(share_x * tile_n - 1)) // i32(share_x * tile_n)
        tiles = row_tiles * column_tiles
        top = m - row_tiles * i32(share_w * ROWS) + w_place * i32(ROWS)
        left = x_place * i32(tile_n)
        first_tile = i32(cuda.blockIdx.x) // i32(cluster)
        tile_step = i32(cuda.gridDim.x) // i32(cluster)
        steps = (k + i32(STEP - 1)) // i32(STEP)
        first_step = i32(0)
        last_step = steps
        if split > 1:
            first_step = steps * part // i32(split)
            last_step = steps * (part + i32(1)) // i32(split)

        if warpgroup == i32(2):
            give_registers()
            if tid == i32(256):
                w_blocks = u32(w_mask) << u32(rank - w_place)
                x_blocks = u32(x_mask) << u32(part * i32(share) + w_place)
                stage = i32(0)
                phase = u32(1)
                ahead = i32(0)
                if overlap:
                    ahead = min(last_step - first_step, i32(stages))
                    _, column_tile = place(first_tile, row_tiles, column_tiles, i32(band))
                    for i in range(ahead):
                        barrier = full + u32(i) * u32(8)
                        mbarrier_expect(barrier, u32(stage_bytes))
                        load_weight(base + u32(i) * u32(stage_bytes), weight, barrier, (first_step + i32(i)) * i32(STEP),
                                    left + column_tile * i32(share_x * tile_n), w_place, w_blocks)
                    grid_dependency_wait()
                t = first_tile
                while t < tiles:
                    row_tile, column_tile = place(t, row_tiles, column_tiles, i32(band))
                    row = max(top + row_tile * i32(share_w * ROWS), i32(0))
                    column = left + column_tile * i32(share_x * tile_n)
                    step = first_step
                    while step < last_step:
                        ring = base + u32(stage) * u32(stage_bytes)
                        barrier = full + u32(stage) * u32(8)
                        if ahead > i32(0):
                            ahead -= i32(1)
                        else:
                            mbarrier_wait(empty + u32(stage) * u32(8), phase)
                            mbarrier_expect(barrier, u32(stage_bytes))
                            load_weight(ring, weight, barrier, step * i32(STEP), column, w_place, w_blocks)
                        if share_x > 1:
                            bulk_load_2d_multicast(ring + u32(x_place) * u32(x_part), x, barrier, step * i32(STEP),
                                                   row + x_place * i32(x_rows), x_blocks)
                        else:
                            bulk_load_2d(ring, x, barrier, step * i32(STEP), row)
                        stage += i32(1)
                        if stage == i32(stages):
                            stage = i32(0)
                            phase ^= u32(1)
                        step += i32(1)
                    t += tile_step
            cuda.syncwarp()
        else:
            take_registers()
            if overlap:
                grid_dependency_wait()
            lane = u32(tid) % u32(32)
            warp = tid // i32(32)
            thread = tid % i32(128)
            slabs = staging + u32(warp) * u32(STAGING // 8)
            stage = i32(0)
            phase = u32(0)
            # which block of the cluster this thread tells of a stage that is free: those that copy into it
            peer = i32(-1)
            if thread % i32(8) == i32(0) and thread < i32(8 * peers):
                peer = thread // i32(8)
                if peer < i32(share_w):
                    peer += rank - w_place
                else:
                    peer = (part * i32(share_x) + (x_place + peer - i32(share_w - 1)) % i32(share_x)) * i32(share_w) + w_place
            t = first_tile
            while t < tiles:
                row_tile, column_tile = place(t, row_tiles, column_tiles, i32(band))
                acc = zero()
                previous = i32(0)
                step = first_step
                while step < last_step:
                    mbarrier_wait(full + u32(stage) * u32(8), phase)
                    ring = base + u32(stage) * u32(stage_bytes)
                    a = descriptor(ring + u32(warpgroup) * u32(64 * STEP * 2))
                    b = descriptor(ring + u32(X_BYTES))
                    wgmma_fence()
                    acc = multiply(acc, a, b, i32(1))
                    acc = multiply(acc, a + u64(2), b + u64(2), i32(1))
                    acc = multiply(acc, a + u64(4), b + u64(4), i32(1))
                    acc = multiply(acc, a + u64(6), b + u64(6), i32(1))
                    wgmma_commit()
                    wait_one()
                    if step > first_step:
                        free(empty + u32(previous) * u32(8), peer)
                    previous = stage
                    stage += i32(1)
                    if stage == i32(stages):
                        stage = i32(0)
                        phase ^= u32(1)
                    step += i32(1)
                wait_all()
                free(empty + u32(previous) * u32(8), peer)
                first_row = top + row_tile * i32(share_w * ROWS)
                row = max(first_row, i32(0)) + warp * i32(epilogue.ROWS)
                limit = first_row + i32(ROWS)
                column = (column_tile * i32(share_x) + x_place) * i32(out_columns * split)
                if split > 1:
                    # into the other's staging, which it writes to only after it has read this; once, since K is only split
                    # where a block has one tile
                    other = u32((rank + i32(share)) % i32(cluster))
                    mine = slabs + lane * u32(16)
                    send(acc, part, cluster_address(mine, other), cluster_address(received, other))
                    mbarrier_wait(received, u32(0))
                    store(add_received(acc, part, mine), slabs, lane, out, column + part * i32(out_columns), row, limit,
                          address(bias_values), n, scale)
                elif to_heads:
                    if bias:
                        acc = add_bias(acc, column, lane, address(bias_values), n)
                    head = column // i32(D)
                    if head < i32(QK):
                        at = address(cos_sin) + u64(lane % u32(4)) * u64(8)
                        first = row + i32(lane // u32(4))
                        acc = rotate(acc, i32(QK) - head, at + u64(positions[first]) * u64(4 * D),
                                     at + u64(positions[first + i32(8)]) * u64(4 * D))
                    stored = max(i32(0), i32(Q) - head)
                    rows = cuda.local.array(4, types.uint64)
                    for i in range(4):
                        rows[i] = u64(0)
                        if stored < i32(tile_n // D):
                            slot = slots[row + i32(4 * i) + i32(lane // u32(8))]
                            if slot >= i64(0):
                                block = slot // i64(P)
                                rows[i] = (address(kv_cache) + u64(block) * u64(BLOCK_BYTES)
                                           + u64(slot - block * i64(P)) * u64(2 * D) + u64(lane % u32(8)) * u64(16))
                    store_heads(acc, slabs, lane, out, column, row, stored, (head + stored - i32(Q)) * i32(2 * P * D),
                                rows[0], rows[1], rows[2], rows[3])
                else:
                    store(acc, slabs, lane, out, column, row, limit, address(bias_values), n, scale)
                t += tile_step
            wait_stored()
        if share > 1:
            # a block's barriers and stages must outlive the arrivals and copies of its neighbour
            cluster_arrive()
            cluster_wait()

    return gemm


def gemm_sm90(runtime: Any, x: Any, weight: Any, out: Any, bias: Any = None, silu_mul: bool = False, overlap: bool = False,
              scale: float = 1.0, tile: Tile | None = None, add: bool = False) -> None:
    """Queue out = x @ weight.T (+ bias), or out += that with add, see the module.

    x [M, K], weight [N, K], bias [N], out [M, N] or [M, N / 2] with silu_mul. scale multiplies a float32 out.
    overlap: launch as a programmatic dependent of the kernel before. tile: instead of choose_tile's.
    Raises ShapeError for shapes, strides or types that the kernel does not take.
    """
    queue = plan(x.layout, weight.layout, out.layout, None if bias is None else bias.layout, silu_mul, overlap, scale, tile,
                 add, runtime.multiprocessors)
    queue(runtime, x, weight, out, bias)


@lru_cache(maxsize=PLANS)
def plan(x: Layout, weight: Layout, out: Layout, bias: Layout | None, silu_mul: bool, overlap: bool, scale: float,
         tile: Tile | None, add: bool, multiprocessors: int, heads: Heads | None = None) -> Queue:
    """What gemm_sm90 does for arrays of these layouts. heads: see gemm_sm90_rotary; only for whole tiles."""
    _check(x, weight, out, bias, silu_mul, scale, add)
    (m, k), n, size = x.shape, weight.shape[0], x.dtype.itemsize
    if not m:
        return lambda *_: None
    tile = tile or choose_tile(m, n, k, multiprocessors, silu_mul)
    if heads and (m < ROWS or n % tile.columns or tile.split > 1 or not rotary.rotates(heads, heads.head_dim, tile.columns)):
        raise ShapeError(f"gemm_sm90: tile {tile.label} cuts {m} x {n} into no whole tiles of heads of {heads.head_dim}")
    pitch = epilogue.slab_bytes((tile.columns // 2 if silu_mul else tile.columns) // tile.split, out.dtype)
    rows = MAX_ROWS if m >= ROWS else m
    found = gemm_sm90_kernel(tile, x.dtype, out.dtype, bias is not None, silu_mul, overlap, add, heads)
    numbers = (scale, m, n, k) if heads else (0, 0, 0, 0, scale, m, n, k)
    launch = BoundLaunch(found, tile.grid(m, n, multiprocessors), numbers, overlap)
    x_form = map_form(x.dtype, (rows, k), (x.strides[0] * size,), (ROWS // tile.share_x, STEP))
    weight_form = map_form(x.dtype, (n, k), (weight.strides[0] * size,), (tile.columns // tile.share_weight, STEP))
    out_form = map_form(out.dtype, (rows, out.shape[1]), (out.strides[0] * out.dtype.itemsize,),
                        (epilogue.ROWS, pitch // out.dtype.itemsize), pitch)

    def queue(runtime: Any, x: Any, weight: Any, out: Any, bias: Any, *for_heads: int) -> None:
        maps = runtime.tensor_maps
        launch(runtime.stream, maps[x.address, x_form], maps[weight.address, weight_form], maps[out.address, out_form],
               0 if bias is None else bias.address, *for_heads)

    return queue


def _check(x: Layout, weight: Layout, out: Layout, bias: Layout | None, silu_mul: bool, scale: float, add: bool) -> None:
    if len(x.shape) != 2 or len(weight.shape) != 2:
        raise ShapeError(f"gemm_sm90: x is {x.shape} and weight {weight.shape}; they must be [M, K] and [N, K]")
    (m, k), (n, weight_k) = x.shape, weight.shape
    columns = n // 2 if silu_mul else n
    problem = None
    if x.dtype not in (bfloat16, float16) or weight.dtype != x.dtype:
        problem = f"x and weight are {x.dtype} and {weight.dtype}; both must be bfloat16 or both float16"
    elif out.dtype != x.dtype and (out.dtype != float32 or silu_mul):
        problem = f"out is {out.dtype}; it must be {x.dtype}" + ("" if silu_mul else " or float32")
    elif scale != 1.0 and out.dtype != float32:
        problem = f"scale is not 1; only a float32 out is scaled, out is {out.dtype}"
    elif add and (silu_mul or out.dtype == float32):
        problem = f"add is for plain outputs in x's type; out is {out.dtype}, silu_mul {silu_mul}"
    elif weight_k != k:
        problem = f"weight is {list(weight.shape)}; x {list(x.shape)} needs K = {k}"
    elif k % 8 or k < 8 or n % (16 if silu_mul else 8):
        problem = f"N is {n} and K is {k}; N must be a multiple of {16 if silu_mul else 8} and K of 8: pad the weight"
    elif out.shape != (m, columns):
        problem = f"out is {list(out.shape)}; it must be {[m, columns]}"
    elif m > MAX_ROWS:
        problem = f"x has {m} rows; the limit is {MAX_ROWS}"
    elif x.strides[1] != 1 or weight.strides[1] != 1 or out.strides[1] != 1:
        problem = "x, weight and out need contiguous rows (stride 1 in the last dimension)"
    elif bias is not None and (bias.shape, bias.dtype) != ((n,), x.dtype):
        problem = f"bias is {list(bias.shape)} {bias.dtype}; it must be [{n}] {x.dtype}"
    if problem:
        raise ShapeError(f"gemm_sm90: {problem}")


def catalogue() -> Iterator[Kernel]:
    """Each code path once, at tiles that the shapes of models take."""
    wide, shared, split = Tile(256), Tile(224, share_weight=2), Tile(80, split=2)
    for tile in (wide, shared, split, Tile(160), Tile(128, share_x=2, split=2)):
        yield gemm_sm90_kernel(tile, bfloat16, bfloat16, False, False, True)
    yield gemm_sm90_kernel(wide, float16, float16, False, False, True)
    for tile in (wide, Tile(176), split):
        yield gemm_sm90_kernel(tile, bfloat16, bfloat16, False, False, True, True)
    for tile in (wide, shared):
        yield gemm_sm90_kernel(tile, bfloat16, bfloat16, False, True, True)
    yield gemm_sm90_kernel(wide, bfloat16, bfloat16, True, True, False)
    for tile in (wide, split):
        yield gemm_sm90_kernel(tile, bfloat16, bfloat16, True, False, True)
    for tile in (wide, Tile(256, share_x=2)):
        yield gemm_sm90_kernel(tile, bfloat16, float32, False, False, True)
    for tile, bias, heads in ((Tile(256, share_weight=2), False, Heads(32, 8, 128, 64)),
                              (Tile(128), True, Heads(28, 4, 128, 64)), (Tile(192), False, Heads(36, 36, 64, 16))):
        yield gemm_sm90_kernel(tile, bfloat16, bfloat16, bias, False, True, False, heads)
