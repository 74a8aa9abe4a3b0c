"""Dense GEMM with mma.sync for Ampere and Ada: out[M, N] = x[M, K] @ weight[N, K]^T, any M.

    y = x @ weight.T + bias;   out = y * scale,   or with silu_mul   out[:, j] = silu(y[:, 2j]) * y[:, 2j + 1]

x       [M, K] bf16 or fp16, rows may be strided       weight [N, K] same dtype, contiguous
bias    [N] same dtype or None                         out    [M, N] (silu_mul: [M, N / 2]) same dtype, or float32

A block of 8 warps computes one tile of rows x columns; tiles are numbered in bands of 8 row tiles, so that the tiles in flight
share rows and columns in L2. cp.async fills a ring of swizzled stages (rows of 64 or 128 bytes; a chunk of 16 bytes is
exclusive-ored with the row, so that ldmatrix meets no bank twice); the largest tile fetches its fragments one k16 step
ahead of the mma that takes them, across stages too. 16-bit results pass through shared memory into 16-byte stores. With few
tiles the blocks of a tile split K: each leaves its float32 sums in scratch memory, and the last to arrive adds them in a fixed
order: equal bits every time.

Operations: 2 M N K. Method: CUTLASS's multistage pipeline. Reached, forced on an H200 (2026-12-01, bench/kernels/gemm_sm80.py):
445 TFLOP/s at 8192^3, 456 at 2048x4096x14336; what was tried: docs/kernels/gemm_sm80.md.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, bfloat16, float16, float32
from zhilight.errors import ShapeError
from zhilight.kernels.gemm_small import check_arguments, silu
from zhilight.kernels.ptx import (
    address,
    atomic_inc_acq_rel_u32,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    f32,
    fence_gpu,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    load_global_b32,
    load_global_f32x4,
    load_matrix_x4,
    load_shared_b32,
    load_shared_v2,
    load_shared_v4,
    mma_m16n8k16,
    pack,
    shared_address,
    store_global_f32,
    store_global_f32x2,
    store_global_f32x4,
    store_global_v2,
    store_global_v4,
    store_shared_b16,
    store_shared_b32,
    u32,
    u64,
    unpack,
)
from zhilight.kernels.runtime import Runtime

THREADS = 256
BAND = 8


@dataclass(frozen=True)
class Tile:
    """rows (of x) x columns (rows of the weight) x step of K, warps along the columns (of 8), stages, blocks an SM.

    One block an SM fetches fragments a step ahead; with two the other block's warps hide that latency and registers are dear.
    """

    rows: int
    columns: int
    step: int
    column_warps: int
    stages: int
    min_blocks: int


@kernel_factory
def gemm_sm80_kernel(dtype: DType, out_dtype: DType, rows: int, columns: int, step: int, column_warps: int, stages: int,
                     min_blocks: int, bias: bool = False, silu_mul: bool = False, overlap: bool = False) -> Kernel:
    """The first arguments are those of Tile."""
    ROW_BYTES = step * 2
    CHUNKS = step // 8  # of 16 bytes in a row of a stage
    STAGE_X = rows * ROW_BYTES
    STAGE = (rows + columns) * ROW_BYTES
    WR, WC = rows // (8 // column_warps), columns // column_warps  # a warp's part
    MI, NI = WR // 16, WC // 16
    NJ = 2 * NI
    KS = step // 16
    LINES = THREADS // CHUNKS  # rows that one round of copies brings
    ahead = min_blocks == 1
    wide = out_dtype is float32
    half = 2 if silu_mul else 1
    PITCH = (columns // half + 8) * 2  # of the 16-bit result in shared memory, in bytes
    WIDTH = 8 // half  # values a store
    mma, to_bits, to_floats = mma_m16n8k16(dtype), pack(dtype), unpack(dtype)
    wait_stage, wait_none = cp_async_wait(stages - 2), cp_async_wait(0)

    @cuda.jit(device=True)
    def swizzle(row):
        # bytes to exclusive-or into the offset within a row
        if CHUNKS == 8:
            return (row & i32(7)) * i32(16)
        return ((row >> i32(1)) & i32(3)) * i32(16)

    @cuda.jit(device=True)
    def copy(slot, source, row_step, left, valid, tile_rows):
        for r in range(tile_rows // LINES):
            cp_async_16_zfill(slot + u32(r * LINES * ROW_BYTES), source + u64(r) * row_step,
                              u32(16) if (valid and i32(r * LINES) < left) else u32(0))

    @kernel(threads=THREADS, min_blocks=min_blocks,
            shared=max(stages * STAGE, 0 if wide else rows * PITCH))
    def gemm_sm80(x: Pointer(dtype), weight: Pointer(dtype), bias_: Pointer(dtype), out: Pointer(out_dtype), m: i32, n: i32,
                  k: i32, x_stride: i32, out_stride: i32, split: i32, partial: u64, counters: u64, scale: f32):
        memory = shared_address(cuda.shared.array(0, types.uint8))
        tid = i32(cuda.threadIdx.x)
        lane = tid % i32(32)
        warp = tid // i32(32)
        if overlap:
            grid_dependency_launch()

        # tile and part of K
        row_tiles = (m + i32(rows - 1)) // i32(rows)
        column_tiles = (n + i32(columns - 1)) // i32(columns)
        tile = i32(cuda.blockIdx.x) // split
        part = i32(cuda.blockIdx.x) - tile * split
        width = i32(BAND) * column_tiles
        band = tile // width
        height = min(row_tiles - band * i32(BAND), i32(BAND))
        inside = tile - band * width
        row0 = (band * i32(BAND) + inside % height) * i32(rows)
        column0 = inside // height * i32(columns)
        steps = (k + i32(step - 1)) // i32(step)
        first = steps * part // split
        count = steps * (part + i32(1)) // split - first

        # this thread's share of the copies: row tid / CHUNKS, chunk tid % CHUNKS
        line = tid // i32(CHUNKS)
        chunk = tid % i32(CHUNKS)
        target = memory + u32(line * i32(ROW_BYTES) + ((chunk * i32(16)) ^ swizzle(line)))
        kk = first * i32(step) + chunk * i32(8)
        x_source = address(x) + (u64(row0 + line) * u64(x_stride) + u64(kk)) * u64(2)
        w_source = address(weight) + (u64(column0 + line) * u64(k) + u64(kk)) * u64(2)
        x_step = u64(LINES * 2) * u64(x_stride)
        w_step = u64(LINES * 2) * u64(k)
        x_left = m - row0 - line
        w_left = n - column0 - line
        if overlap:
            grid_dependency_wait()
        for s in range(stages - 1):
            if i32(s) < count:
                copy(target + u32(s * STAGE), x_source, x_step, x_left, kk < k, rows)
                copy(target + u32(s * STAGE + STAGE_X), w_source, w_step, w_left, kk < k, columns)
            cp_async_commit()
            x_source += u64(ROW_BYTES)
            w_source += u64(ROW_BYTES)
            kk += i32(step)

        # this lane's rows for ldmatrix
        warp_row = warp // i32(column_warps) * i32(WR)
        warp_column = warp % i32(column_warps) * i32(WC)
        a_row = warp_row + lane % i32(16)
        b_row = warp_column + lane // i32(16) * i32(8) + lane % i32(8)
        a_line = memory + u32(a_row * i32(ROW_BYTES))
        b_line = memory + u32(STAGE_X) + u32(b_row * i32(ROW_BYTES))
        a_swizzle = u32((lane // i32(16) * i32(16)) ^ swizzle(a_row))
        b_swizzle = u32((lane // i32(8) % i32(2) * i32(16)) ^ swizzle(b_row))

        acc = cuda.local.array((MI, NJ, 4), types.float32)
        a = cuda.local.array((2, MI, 4), types.uint32)
        b = cuda.local.array((2, NI, 4), types.uint32)
        for i in range(MI):
            for j in range(NJ):
                for q in range(4):
                    acc[i, j, q] = f32(0.0)
        read = u32(0)
        write = u32((stages - 1) * STAGE)
        if ahead:
            wait_stage()
            cuda.syncthreads()
            for i in range(MI):
                v = load_matrix_x4(a_line + a_swizzle + u32(16 * i * ROW_BYTES))
                for q in range(4):
                    a[0, i, q] = v[q]
            for j in range(NI):
                v = load_matrix_x4(b_line + b_swizzle + u32(16 * j * ROW_BYTES))
                for q in range(4):
                    b[0, j, q] = v[q]
        for turn in range(count):
            for s in range(0, KS, 2):
                for t in range(2):
                    now, then = (t, 1 - t) if ahead else (0, 0)
                    fetch = s + t
                    if ahead:
                        fetch += 1
                    if fetch == (KS if ahead else 0):
                        # the stage that the next fragments are in has come; all warps are through with the one before
                        wait_stage()
                        cuda.syncthreads()
                        if ahead:
                            read += u32(STAGE)
                            if read == u32(stages * STAGE):
                                read = u32(0)
                    offset = u32(fetch % KS) * u32(32)
                    if ahead:
                        for i in range(MI):
                            v = load_matrix_x4(a_line + read + (a_swizzle ^ offset) + u32(16 * i * ROW_BYTES))
                            for q in range(4):
                                a[then, i, q] = v[q]
                    for j in range(NI):
                        v = load_matrix_x4(b_line + read + (b_swizzle ^ offset) + u32(16 * j * ROW_BYTES))
                        for q in range(4):
                            b[then, j, q] = v[q]
                    if s + t == 0:
                        if turn + i32(stages - 1) < count:
                            copy(target + write, x_source, x_step, x_left, kk < k, rows)
                            copy(target + write + u32(STAGE_X), w_source, w_step, w_left, kk < k, columns)
                        cp_async_commit()
                        x_source += u64(ROW_BYTES)
                        w_source += u64(ROW_BYTES)
                        kk += i32(step)
                        write += u32(STAGE)
                        if write == u32(stages * STAGE):
                            write = u32(0)
                    for i in range(MI):
                        if not ahead:
                            v = load_matrix_x4(a_line + read + (a_swizzle ^ offset) + u32(16 * i * ROW_BYTES))
                            for q in range(4):
                                a[now, i, q] = v[q]
                        for j in range(NI):
                            for h in range(2):
                                d = mma(a[now, i, 0], a[now, i, 1], a[now, i, 2], a[now, i, 3], b[now, j, 2 * h],
                                        b[now, j, 2 * h + 1], acc[i, 2 * j + h, 0], acc[i, 2 * j + h, 1], acc[i, 2 * j + h, 2],
                                        acc[i, 2 * j + h, 3])
                                for q in range(4):
                                    acc[i, 2 * j + h, q] = d[q]
            if not ahead:
                read += u32(STAGE)
                if read == u32(stages * STAGE):
                    read = u32(0)
        wait_none()
        cuda.syncthreads()

        finish = True
        if split > i32(1):
            mine = partial + (u64(tile) * u64(split) + u64(part)) * u64(rows * columns * 4) + u64(tid) * u64(16)
            for i in range(MI):
                for j in range(NJ):
                    store_global_f32x4(mine + u64((i * NJ + j) * THREADS * 16), acc[i, j, 0], acc[i, j, 1], acc[i, j, 2],
                                       acc[i, j, 3])
            fence_gpu()
            cuda.syncthreads()
            if tid == i32(0):
                before = atomic_inc_acq_rel_u32(counters + u64(tile) * u64(4), u32(split - i32(1)))
                fence_gpu()
                store_shared_b32(memory, before)
            cuda.syncthreads()
            finish = load_shared_b32(memory) == u32(split - i32(1))
            cuda.syncthreads()
            if finish:
                fence_gpu()
                for i in range(MI):
                    for j in range(NJ):
                        for q in range(4):
                            acc[i, j, q] = f32(0.0)
                theirs = partial + u64(tile) * u64(split) * u64(rows * columns * 4) + u64(tid) * u64(16)
                for _ in range(split):
                    for i in range(MI):
                        for j in range(NJ):
                            v = load_global_f32x4(theirs + u64((i * NJ + j) * THREADS * 16))
                            for q in range(4):
                                acc[i, j, q] += v[q]
                    theirs += u64(rows * columns * 4)

        if finish:
            g = lane // i32(4)
            c = lane % i32(4)
            for j in range(NJ):
                column = warp_column + i32(8 * j) + c * i32(2)
                b0, b1 = f32(0.0), f32(0.0)
                if bias:
                    if column0 + column < n:
                        b0, b1 = to_floats(load_global_b32(address(bias_) + u64(column0 + column) * u64(2)))
                for i in range(MI):
                    for h in range(2):
                        row = warp_row + i32(16 * i + 8 * h) + g
                        y0 = (acc[i, j, 2 * h] + b0) * scale
                        y1 = (acc[i, j, 2 * h + 1] + b1) * scale
                        if wide:
                            if (row0 + row < m) and (column0 + column < n):
                                place = u64(row0 + row) * u64(out_stride) + u64((column0 + column) // i32(half))
                                if silu_mul:
                                    store_global_f32(address(out) + place * u64(4), silu(y0) * y1)
                                else:
                                    store_global_f32x2(address(out) + place * u64(4), y0, y1)
                        elif silu_mul:
                            store_shared_b16(memory + u32(row * i32(PITCH) + column), to_bits(silu(y0) * y1, f32(0.0)))
                        else:
                            store_shared_b32(memory + u32(row * i32(PITCH) + column * i32(2)), to_bits(y0, y1))
            if not wide:
                cuda.syncthreads()
                vectors = i32(columns // half // WIDTH)
                i = tid
                while i < i32(rows * (columns // half // WIDTH)):
                    row = i // vectors
                    column = i % vectors * i32(WIDTH)
                    if (row0 + row < m) and (column0 // i32(half) + column < n // i32(half)):
                        result = memory + u32(row * i32(PITCH) + column * i32(2))
                        p = address(out) + (u64(row0 + row) * u64(out_stride) + u64(column0 // i32(half) + column)) * u64(2)
                        if silu_mul:
                            v = load_shared_v2(result)
                            store_global_v2(p, v[0], v[1])
                        else:
                            v = load_shared_v4(result)
                            store_global_v4(p, v[0], v[1], v[2], v[3])
                    i += i32(THREADS)

    return gemm_sm80


LARGE = Tile(128, 256, 32, 4, 4, 1)
SQUARE = Tile(128, 128, 32, 4, 3, 2)
FLAT = Tile(64, 128, 32, 4, 4, 2)
"""All fit the 99 KB of shared memory that a block of sm_86 and sm_89 has."""
_STEP_TIME = {LARGE: 0.60, SQUARE: 0.86, FLAT: 0.48}
"""Microseconds of a step of K for a full wave of blocks, and below for a split's way through memory; measured on an H200."""
_SPLIT_TIME = {LARGE: (4.0, 2.4), SQUARE: (4.0, 1.4), FLAT: (3.0, 0.8)}


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, multiprocessors: int) -> tuple[Tile, int]:
    """(tile, split of K) with the least time for whole waves of blocks."""
    best = None
    for tile, step_time in _STEP_TIME.items():
        tiles = -(-m // tile.rows) * -(-n // tile.columns)
        steps = -(-k // tile.step)
        for split in (1, 2, 3, 4, 6, 8):
            if split > 1 and (tiles * split > multiprocessors * tile.min_blocks or steps // split < 8):
                continue
            waves = max(1.0 / tile.min_blocks, -(-tiles * split // multiprocessors) / tile.min_blocks)
            cost = waves * -(-steps // split) * step_time
            if split > 1:
                fixed, each = _SPLIT_TIME[tile]
                cost += fixed + each * split
            if best is None or cost < best[0]:
                best = cost, tile, split
    return best[1], best[2]


def gemm_sm80(runtime: Runtime, x: Any, weight: Any, out: Any, bias: Any = None, silu_mul: bool = False, scale: float = 1.0,
              overlap: bool = False, tile: tuple[Tile, int] | None = None) -> None:
    """Queue out = x @ weight.T (see the module). Raises ShapeError.

    tile: a tile and the split of K, instead of choose_tile's. overlap: programmatic dependent launch, on sm_90.
    """
    m, n, k = check_arguments("gemm_sm80", x, weight, out, bias, silu_mul)
    if m == 0:
        return
    unit = {(False, 2): 8, (True, 2): 4, (False, 4): 2, (True, 4): 1}[silu_mul, out.dtype.itemsize]
    if out.address % (unit * out.dtype.itemsize) or out.strides[0] % unit:
        raise ShapeError(f"gemm_sm80: out is at {out.address:#x} with strides {out.strides}; it stores {unit} values a time, "
                         f"so the address must be a multiple of {unit * out.dtype.itemsize} bytes and the row stride of {unit}")
    overlap = overlap and runtime.capability[0] >= 9
    tile, split = tile or choose_tile(m, n, k, runtime.multiprocessors)
    tiles = -(-m // tile.rows) * -(-n // tile.columns)
    partial = counters = 0
    if split > 1:
        partial = runtime.scratch(tiles * split * tile.rows * tile.columns * 4)
        counters = runtime.counters(tiles)
    gemm_sm80_kernel(x.dtype, out.dtype, tile.rows, tile.columns, tile.step, tile.column_warps, tile.stages, tile.min_blocks,
                     bias is not None, silu_mul, overlap).launch(
        tiles * split, x.address, weight.address, (bias if bias is not None else weight).address, out.address, m, n, k,
        x.strides[0], out.strides[0], split, partial, counters, scale, stream=runtime.stream, overlap=overlap)


def catalogue() -> Iterator[Kernel]:
    """Each tile, and each epilogue."""
    for tile in (LARGE, SQUARE, FLAT):
        yield _kernel(tile, bfloat16, bfloat16)
    yield _kernel(LARGE, float16, float16, True, True)
    yield _kernel(SQUARE, bfloat16, float32)


def _kernel(tile: Tile, dtype: DType, out_dtype: DType, bias: bool = False, silu_mul: bool = False) -> Kernel:
    return gemm_sm80_kernel(dtype, out_dtype, tile.rows, tile.columns, tile.step, tile.column_warps, tile.stages,
                            tile.min_blocks, bias, silu_mul)
