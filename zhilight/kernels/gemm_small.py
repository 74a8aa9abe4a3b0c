"""Dense GEMM for few tokens: out[M, N] = x[M, K] @ weight[N, K]^T, one pass over the weights at memory speed.

    y = x @ weight.T + bias;   out = y * scale,   or with silu_mul   out[:, j] = silu(y[:, 2j]) * y[:, 2j + 1]

x       [M, K] bf16 or fp16, rows may be strided       weight [N, K] same dtype, contiguous
bias    [N] same dtype or None                         out    [M, N] (silu_mul: [M, N / 2]) same dtype, or float32

Grid: one block an SM; block b owns the rows b * R .. of the weight, with all of K, so no sum crosses blocks and the result does
not depend on timing. Its warps split each stretch of K; a warp streams its own 16 rows x 128 k tiles through a private
ring in shared memory (cp.async: no block barrier in the loop) and feeds them to mma.m16n8k16 as the A operand. k is permuted
inside 32 values, the same way for weight and x, so that a lane's operands are 16 contiguous bytes of each; tokens are the n8
side, so one token costs no more weight traffic than eight. The warps' partial sums meet in shared memory once a row group.
With overlap the ring is filled before the grid dependency: weights depend on no earlier kernel.

Bytes: N * K * 2, once. Ceiling 4264 GB/s on an H200 (read only). Reached there with a ring of 3 (2026-12-01,
bench/kernels/gemm_small.py), one token, us: 6144x4096 14.9, 4096x4096 10.9, 28672x4096 56.6, 4096x14336 30.0, 128256x4096 251
(cuBLAS 16.5, 13.4, 56.9, 32.3, 246.8); what was tried: docs/kernels/gemm_small.md.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Capability, Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, bfloat16, float16, float32
from zhilight.driver.tensor import Layout
from zhilight.errors import ShapeError
from zhilight.kernels.ptx import (
    address,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    exp2_approx,
    f32,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    load_global_b16,
    load_global_v4,
    load_shared_f32,
    load_shared_v4,
    mma_m16n8k16,
    pack,
    reciprocal_approx,
    shared_address,
    store_global_b16,
    store_global_f32,
    store_shared_f32,
    u32,
    u64,
    unpack,
)
from zhilight.kernels.runtime import PLANS, Runtime

MAX_TOKENS = 32
_TOKEN_STRIDE = 20
"""Floats from one token to the next in the reduction buffer: 16 rows, padded so that a fragment's lanes hit 32 banks."""


@cuda.jit(device=True)
def silu(v):
    """silu(v) = v / (1 + exp(-v))."""
    return v * reciprocal_approx(f32(1.0) + exp2_approx(v * f32(-1.4426950408889634)))


@cuda.jit(device=True)
def _load_x(pointer, valid):
    """16 bytes of x, or zeros outside of it."""
    if valid:
        return load_global_v4(pointer)
    return u32(0), u32(0), u32(0), u32(0)


@kernel_factory
def gemm_small_kernel(dtype: DType, out_dtype: DType, token_tiles: int, row_tiles: int, bias: bool = False,
                      silu_mul: bool = False, overlap: bool = False, warps: int = 8, k_tile: int = 128,
                      stages: int = 6) -> Kernel:
    """token_tiles: tiles of 8 tokens; row_tiles: tiles of 16 rows whose sums a warp holds at a time.

    A stage of a warp's ring is 16 rows x k_tile; a step of the block is warps * k_tile of K. Half of the registers are left to
    the blocks of other kernels, except with four token tiles.
    """
    NT, TR, W, KT, S = token_tiles, row_tiles, warps, k_tile, stages
    STEP = W * KT
    HALVES, J = KT // 64, KT // 32
    STAGE = 16 * KT * 2
    RING = W * S * STAGE
    F = W // 4  # fragments that one round of the reduction takes: one output a thread
    ROUNDS = -(-NT * TR // F)
    FRAGMENT = 8 * _TOKEN_STRIDE * 4
    mma, to_bits, to_floats = mma_m16n8k16(dtype), pack(dtype), unpack(dtype)
    wait_tile = cp_async_wait(S - 2)
    wide = out_dtype is float32
    out_bytes = 4 if wide else 2

    @cuda.jit(device=True)
    def load_tile(slot, source, row, k0, last, k, row_bytes, lane):
        # rows 4 r + lane / 8, chunk lane % 8; odd rows swap their two 64-byte halves, which frees the reads of conflicts
        chunk = lane % i32(8)
        line = lane // i32(8)
        target = slot + u32(line * i32(128) + ((chunk ^ ((line & i32(1)) * i32(4))) * i32(16)))
        for r in range(4):
            for h in range(HALVES):
                valid = (row + i32(4 * r) < last) and (k0 + i32(64 * h) < k)
                cp_async_16_zfill(target + u32(r * 512 + h * 2048), source + u64(4 * r) * row_bytes + u64(128 * h),
                                  u32(16) if valid else u32(0))

    @cuda.jit(device=True)
    def advance(source, row, k0, i, tiles, first, last, k_first, k, row_bytes):
        """To the next tile: of the row group, else of the next step of K, else of the next row group."""
        i += i32(1)
        row += i32(16)
        source += u64(16) * row_bytes
        if i == tiles:
            row -= i32(16) * tiles
            source += u64(STEP * 2) - u64(i32(16) * tiles) * row_bytes
            k0 += i32(STEP)
            i = i32(0)
            if k0 - k_first >= k:
                source += u64(16 * TR) * row_bytes - u64(k0 - k_first) * u64(2)
                row += i32(16 * TR)
                k0 = k_first
                tiles = min(i32(TR), (last - row + first + i32(15)) // i32(16))
        return source, row, k0, i, tiles

    @kernel(threads=W * 32, min_blocks=16 // W if NT <= 2 else 1, shared=RING + W * F * FRAGMENT)
    def gemm_small(x: Pointer(dtype), weight: Pointer(dtype), bias_: Pointer(dtype), out: Pointer(out_dtype), m: i32, n: i32,
                   k: i32, x_stride: i32, out_stride: i32, rows: i32, scale: f32):
        memory = shared_address(cuda.shared.array(0, types.uint8))
        tid = i32(cuda.threadIdx.x)
        lane = tid % i32(32)
        warp = tid // i32(32)
        g = lane // i32(4)
        c = lane % i32(4)
        if overlap:
            grid_dependency_launch()

        first = i32(cuda.blockIdx.x) * rows
        last = min(first + rows, n)
        steps = (k + i32(STEP - 1)) // i32(STEP)
        total = (last - first + i32(15)) // i32(16) * steps
        row_bytes = u64(k) * u64(2)
        ring = memory + u32(warp) * u32(S * STAGE)

        # the loader's place: this lane's source, row and k; tile of the row group, tiles of the group
        line = lane // i32(8)
        k_lane = warp * i32(KT) + (lane % i32(8)) * i32(8)
        source = address(weight) + u64(first + line) * row_bytes + u64(k_lane) * u64(2)
        load_row = first + line
        load_k = k_lane
        load_i = i32(0)
        load_tiles = min(i32(TR), (last - first + i32(15)) // i32(16))
        issued = i32(0)
        write = u32(0)
        for _ in range(S - 1):
            if issued < total:
                load_tile(ring + write, source, load_row, load_k, last, k, row_bytes, lane)
                source, load_row, load_k, load_i, load_tiles = advance(
                    source, load_row, load_k, load_i, load_tiles, line, last, k_lane, k, row_bytes)
                issued += i32(1)
            cp_async_commit()
            write += u32(STAGE)
        if overlap:
            grid_dependency_wait()

        xs = cuda.local.array((NT, J, 4), types.uint32)
        acc = cuda.local.array((TR, NT, 4), types.float32)
        k_x = warp * i32(KT) + c * i32(8)
        x_base = address(x) + (u64(g) * u64(x_stride) + u64(k_x)) * u64(2)
        read = u32(0)
        write = u32((S - 1) * STAGE)
        a_offset = u32(g * i32(128) + (c ^ ((g & i32(1)) * i32(4))) * i32(16))
        row0 = first
        while row0 < last:
            tiles = min(i32(TR), (last - row0 + i32(15)) // i32(16))
            for i in range(TR):
                for t in range(NT):
                    for q in range(4):
                        acc[i, t, q] = f32(0.0)
            x_step = x_base
            k_step = k_x
            for _ in range(steps):
                # not a step ahead: the ring keeps the memory busy through these loads' latency, and registers are dearer
                for t in range(NT):
                    for j in range(J):
                        v = _load_x(x_step + (u64(8 * t) * u64(x_stride) + u64(32 * j)) * u64(2),
                                    (g + i32(8 * t) < m) and (k_step + i32(32 * j) < k))
                        for q in range(4):
                            xs[t, j, q] = v[q]
                for i in range(TR):
                    if i32(i) < tiles:
                        wait_tile()
                        cuda.syncwarp()
                        # refill the slot that all lanes have read in the turn before
                        if issued < total:
                            load_tile(ring + write, source, load_row, load_k, last, k, row_bytes, lane)
                            source, load_row, load_k, load_i, load_tiles = advance(
                                source, load_row, load_k, load_i, load_tiles, line, last, k_lane, k, row_bytes)
                            issued += i32(1)
                        cp_async_commit()
                        write += u32(STAGE)
                        if write == u32(S * STAGE):
                            write = u32(0)
                        for j in range(J):
                            slot = ring + read + (a_offset ^ u32(64 * (j % 2))) + u32(2048 * (j // 2))
                            a = load_shared_v4(slot)
                            b = load_shared_v4(slot + u32(1024))
                            for t in range(NT):
                                d = mma(a[0], b[0], a[1], b[1], xs[t, j, 0], xs[t, j, 1],
                                        acc[i, t, 0], acc[i, t, 1], acc[i, t, 2], acc[i, t, 3])
                                d = mma(a[2], b[2], a[3], b[3], xs[t, j, 2], xs[t, j, 3], d[0], d[1], d[2], d[3])
                                for q in range(4):
                                    acc[i, t, q] = d[q]
                        read += u32(STAGE)
                        if read == u32(S * STAGE):
                            read = u32(0)
                x_step += u64(STEP * 2)
                k_step += i32(STEP)

            # sums of the warps, F fragments (16 rows x 8 tokens) a round, one output a thread
            for turn in range(ROUNDS):
                if i32(turn * F // NT) < tiles:
                    cuda.syncthreads()
                    for f in range(F):
                        if turn * F + f < NT * TR:
                            target = memory + u32(RING) + u32(warp * i32(F) + i32(f)) * u32(FRAGMENT) + u32(
                                c * i32(8 * _TOKEN_STRIDE) + g * i32(4))
                            i, t = (turn * F + f) // NT, (turn * F + f) % NT
                            store_shared_f32(target, acc[i, t, 0])
                            store_shared_f32(target + u32(4 * _TOKEN_STRIDE), acc[i, t, 1])
                            store_shared_f32(target + u32(32), acc[i, t, 2])
                            store_shared_f32(target + u32(4 * _TOKEN_STRIDE + 32), acc[i, t, 3])
                    cuda.syncthreads()
                    fragment = tid // i32(128)
                    place = i32(turn * F) + fragment
                    token = (place % i32(NT)) * i32(8) + (tid // i32(16)) % i32(8)
                    row = row0 + place // i32(NT) * i32(16) + tid % i32(16)
                    target = memory + u32(RING) + u32(fragment) * u32(FRAGMENT) + u32(
                        ((tid // i32(16)) % i32(8)) * i32(4 * _TOKEN_STRIDE) + (tid % i32(16)) * i32(4))
                    y = f32(0.0)
                    for w in range(W):
                        y += load_shared_f32(target + u32(w * F * FRAGMENT))
                    inside = (row < last) and (token < m) and (place < i32(NT * TR))
                    if bias:
                        if inside:
                            y += to_floats(load_global_b16(address(bias_) + u64(row) * u64(2)))[0]
                    y *= scale
                    if silu_mul:
                        up = cuda.shfl_xor_sync(0xFFFFFFFF, y, 1)
                        y = silu(y) * up
                        inside = inside and (row % i32(2) == i32(0))
                        row = row // i32(2)
                    if inside:
                        p = address(out) + (u64(token) * u64(out_stride) + u64(row)) * u64(out_bytes)
                        if wide:
                            store_global_f32(p, y)
                        else:
                            store_global_b16(p, to_bits(y, f32(0.0)))
            row0 += i32(16 * TR)

    return gemm_small


@dataclass(frozen=True)
class Plan:
    """How a shape is run: the kernel's constants, rows of the weight a block owns, and the grid."""

    token_tiles: int
    row_tiles: int
    rows: int
    grid: int
    k_tile: int
    stages: int


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, silu_mul: bool, multiprocessors: int, capability: Capability) -> Plan:
    """One block a multiprocessor, the rows evenly over them (in pairs for silu_mul); few rows need few sums at a time.

    The ring takes so much shared memory that a multiprocessor has room for one block: that alone spreads the blocks
    evenly when the next kernel of the graph starts while this one's last blocks still run.
    """
    step = 2 if silu_mul else 1
    rows = -(-n // (multiprocessors * step)) * step
    tiles = -(-rows // 16)
    token_tiles = 1 if m <= 8 else 2 if m <= 16 else 4
    row_tiles = 2 if tiles <= 2 or token_tiles > 1 else 4 if tiles <= 4 else 8
    shared = {(8, 0): 163, (9, 0): 227}.get(capability[:2], 99)  # KB a block can have
    k_tile = 128 if shared > 99 and token_tiles <= 2 else 64
    return Plan(token_tiles, row_tiles, rows, -(-n // rows), k_tile, min(6, (shared - 10) // (k_tile // 4)))


def check_arguments(name: str, x: Any, weight: Any, out: Any, bias: Any, silu_mul: bool) -> tuple[int, int, int]:
    """(M, N, K) of a dense GEMM, or ShapeError naming the argument. Shared by the GEMM kernels."""
    sizes = _check_layouts(name, x.layout, weight.layout, out.layout, None if bias is None else bias.layout, silu_mul)
    if (x.address | weight.address) % 16:
        raise ShapeError(f"{name}: x is at {x.address:#x} and weight at {weight.address:#x}; both must be at multiples of 16 "
                         "bytes")
    return sizes


@functools.lru_cache(maxsize=PLANS)
def _check_layouts(name: str, x: Layout, weight: Layout, out: Layout, bias: Layout | None,
                   silu_mul: bool) -> tuple[int, int, int]:
    if x.dtype not in (bfloat16, float16) or weight.dtype != x.dtype:
        raise ShapeError(f"{name}: x is {x.dtype} and weight {weight.dtype}; both must be bfloat16, or both float16")
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"{name}: x is {x.shape} and weight {weight.shape}; they must be [M, K] and [N, K]")
    (m, k), n = x.shape, weight.shape[0]
    if n % 8 or k % 8 or not n or not k:
        raise ShapeError(f"{name}: weight is {weight.shape}; N and K must be multiples of 8: pad the weight at load")
    if weight.strides != (k, 1):
        raise ShapeError(f"{name}: weight has strides {weight.strides}; it must be contiguous, {(k, 1)}")
    if x.strides[1] != 1 or x.strides[0] % 8:
        raise ShapeError(f"{name}: x has strides {x.strides}; values must lie side by side and rows at multiples of 16 bytes")
    wanted = (m, n // 2 if silu_mul else n)
    if out.shape != wanted or (m and out.strides[1] != 1):
        raise ShapeError(f"{name}: out is {out.shape} with strides {out.strides}; it must be {wanted} with unit inner stride")
    if out.dtype != x.dtype and out.dtype != float32:
        raise ShapeError(f"{name}: out is {out.dtype}; it must be {x.dtype} or float32")
    if bias is not None and (bias.shape, bias.dtype) != ((n,), x.dtype):
        raise ShapeError(f"{name}: bias is {bias.dtype} {bias.shape}; it must be {x.dtype} {(n,)}")
    return m, n, k


def gemm_small(runtime: Runtime, x: Any, weight: Any, out: Any, bias: Any = None, silu_mul: bool = False, scale: float = 1.0,
               overlap: bool = False) -> None:
    """Queue out = x @ weight.T (see the module) for M up to MAX_TOKENS. Raises ShapeError.

    overlap: programmatic dependent launch (sm_90): x is read only when the kernel before has ended.
    """
    m, n, k = check_arguments("gemm_small", x, weight, out, bias, silu_mul)
    if m > MAX_TOKENS:
        raise ShapeError(f"gemm_small: x has {m} rows; it serves up to {MAX_TOKENS}")
    if m == 0:
        return
    overlap = overlap and runtime.capability[0] >= 9
    p = plan(m, n, silu_mul, runtime.multiprocessors, runtime.capability)
    gemm_small_kernel(x.dtype, out.dtype, p.token_tiles, p.row_tiles, bias is not None, silu_mul, overlap, k_tile=p.k_tile,
                      stages=p.stages).launch(
        p.grid, x.address, weight.address, (bias if bias is not None else weight).address, out.address, m, n, k, x.strides[0],
        out.strides[0], p.rows, scale, stream=runtime.stream, overlap=overlap)


def catalogue() -> Iterator[Kernel]:
    """The code paths: one to four token tiles, each epilogue, in the ring of sm_86 and sm_89 and in that of sm_80."""
    for token_tiles, row_tiles in ((1, 2), (1, 8), (2, 2), (4, 2)):
        yield gemm_small_kernel(bfloat16, bfloat16, token_tiles, row_tiles, k_tile=64, stages=5)
    for token_tiles, row_tiles in ((1, 2), (1, 8), (2, 2)):
        yield gemm_small_kernel(bfloat16, bfloat16, token_tiles, row_tiles, silu_mul=True, stages=4)
    yield gemm_small_kernel(float16, float16, 1, 4, bias=True, silu_mul=True, k_tile=64, stages=5)
    yield gemm_small_kernel(bfloat16, float32, 1, 8, k_tile=64, stages=5)
