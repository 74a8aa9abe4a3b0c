"""Dense GEMM on Hopper for some dozens of tokens: out[M, N] = x[M, K] @ weight[N, K]^T with the weights as wgmma's M side.

Same operands, epilogues and result as gemm_small. A block takes up to 128 rows of the weight (wgmma's m64, one or two
warpgroups) and all tokens (wgmma's n8 to n128), so that tokens are not padded to 64 rows and the weights pass through the
tensor cores once. The blocks of a cluster split K, and their float32 tiles meet in distributed shared memory in a fixed order.

The tile height is any multiple of 8 (the box of the tensor map), chosen so that the blocks fill the multiprocessors evenly;
wgmma's rows beyond it read whatever lies behind the tile, and are dropped. The last row of the token box is token M - 1: what
the box has too many lies before row 0, where the copy engine reads zeros, so no tensor map depends on M.
With overlap the ring of weight tiles is filled before the grid dependency, x follows after it.

Bytes: N * K * 2 once, and M * K * 2 from L2 for each row tile; ceiling 4264 GB/s. Reached on an H200 (2026-12-01,
bench/kernels/gemm_small.py), all GEMMs of a Llama-3-8B decode step in one graph with overlap: 3.73 ms at 8 tokens (4025 GB/s),
3.83 at 16, 3.92 at 32, 4.53 at 64; what was tried: docs/kernels/gemm_small.md.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, TensorMap, kernel, kernel_factory
from zhilight.driver.dtype import DType, bfloat16, float16, float32
from zhilight.errors import ShapeError
from zhilight.kernels.gemm_small import check_arguments, silu
from zhilight.kernels.ptx import (
    accumulator,
    address,
    bulk_load_2d,
    cluster_address,
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    f32,
    fence_mbarrier_init,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    load_cluster_f32x4,
    load_global_v2,
    load_shared_f32x4,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier,
    pack,
    prefetch_tensor_map,
    ptx,
    shared_address,
    shared_tensor_descriptor,
    store_global_b32,
    store_global_f32x2,
    store_global_f32x4,
    store_global_v2,
    u32,
    u64,
    unpack,
    void,
    wgmma_commit,
    wgmma_fence,
    wgmma_shared,
    wgmma_wait,
    zeros,
)
from zhilight.kernels.runtime import Runtime, map_form

STEP = 64
"""K of a stage: 128 bytes a row, the widest swizzle."""
MAX_TOKENS = 128
MAX_ROWS = 1 << 20


def warpgroups_of(rows: int) -> int:
    return 1 if rows <= 64 else 2


@functools.cache
def _store_tile(tokens: int, stride: int):
    """(shared address of row g, token 2 c; accumulator): the m64 x tokens tile as floats, token t at t * stride bytes."""
    stores = []
    for j in range(tokens // 8):
        for h in range(2):
            for e in range(2):
                stores.append(f"st.shared.f32 [$0+{(8 * j + e) * stride + 32 * h}], ${1 + 4 * j + 2 * h + e};")
    return ptx(" ".join(stores), void, u32, accumulator(tokens))


@kernel_factory
def gemm_swapped_kernel(dtype: DType, out_dtype: DType, tokens: int, rows: int, split: int, stages: int, bias: bool = False,
                        silu_mul: bool = False, overlap: bool = False, steps_a_stage: int = 1) -> Kernel:
    """tokens: wgmma's n. rows: of the weight a block, a multiple of 8. split: blocks of a cluster, which share K.
    stages: of the ring, each of steps_a_stage * 64 of K."""
    warpgroups = warpgroups_of(rows)
    WEIGHT = rows * STEP * 2
    PAIR = WEIGHT + tokens * STEP * 2  # tiles of weight and x for 64 of K
    STAGE = steps_a_stage * PAIR
    STRIDE = (warpgroups * 64 + 4) * 4  # bytes from token to token of the float32 tile; the pad frees the stores of conflicts
    RING = max(stages * STAGE + max(0, warpgroups * 8192 - PAIR), tokens * STRIDE)
    WIDTH = steps_a_stage * STEP
    CONSUMERS = warpgroups * 128
    QUADS = warpgroups * 16
    multiply, zero, descriptor = wgmma_shared(tokens, dtype), zeros(tokens), shared_tensor_descriptor(1024)
    store_tile, to_bits, to_floats = _store_tile(tokens, STRIDE), pack(dtype), unpack(dtype)
    wait_one, wait_all = wgmma_wait(1), wgmma_wait(0)
    wide = out_dtype is float32

    @kernel(threads=CONSUMERS + 32, min_blocks=2, shared=RING + 1024 + 256, cluster=split,
            min_capability=(9, 0, "a"))
    def gemm_swapped(x: TensorMap, weight: TensorMap, bias_: Pointer(dtype), out: Pointer(out_dtype), m: i32, n: i32, k: i32,
                     out_stride: i32, scale: f32):
        base = (shared_address(cuda.shared.array(0, types.uint8)) + u32(1023)) & u32(0xFFFFFC00)
        full = base + u32(RING)
        empty = full + u32(8 * stages)
        tid = i32(cuda.threadIdx.x)
        part = i32(0)  # of K
        if split > 1:
            part = i32(cluster_rank())
        first_row = i32(cuda.blockIdx.x) // i32(split) * i32(rows)
        steps = (k + i32(WIDTH - 1)) // i32(WIDTH)
        first = steps * part // i32(split)
        count = steps * (part + i32(1)) // i32(split) - first
        if overlap:
            grid_dependency_launch()
        if tid == i32(CONSUMERS):
            prefetch_tensor_map(weight)
            prefetch_tensor_map(x)
            for s in range(stages):
                mbarrier_init(full + u32(8 * s), u32(1))
                mbarrier_init(empty + u32(8 * s), u32(warpgroups))
            fence_mbarrier_init()
        cuda.syncthreads()

        if tid >= i32(CONSUMERS):
            if tid == i32(CONSUMERS):
                for s in range(stages):
                    if i32(s) < count:
                        barrier = full + u32(8 * s)
                        mbarrier_expect(barrier, u32(STAGE))
                        for b in range(steps_a_stage):
                            bulk_load_2d(base + u32(s * STAGE + b * PAIR), weight, barrier,
                                         (first + i32(s)) * i32(WIDTH) + i32(b * STEP), first_row)
                if overlap:
                    grid_dependency_wait()
                for s in range(stages):
                    if i32(s) < count:
                        for b in range(steps_a_stage):
                            bulk_load_2d(base + u32(s * STAGE + b * PAIR + WEIGHT), x, full + u32(8 * s),
                                         (first + i32(s)) * i32(WIDTH) + i32(b * STEP), m - i32(tokens))
                stage = i32(0)
                phase = u32(0)
                i = i32(stages)
                while i < count:
                    barrier = full + u32(stage) * u32(8)
                    slot = base + u32(stage) * u32(STAGE)
                    kk = (first + i) * i32(WIDTH)
                    mbarrier_wait(empty + u32(stage) * u32(8), phase)
                    mbarrier_expect(barrier, u32(STAGE))
                    for b in range(steps_a_stage):
                        bulk_load_2d(slot + u32(b * PAIR), weight, barrier, kk + i32(b * STEP), first_row)
                        bulk_load_2d(slot + u32(b * PAIR + WEIGHT), x, barrier, kk + i32(b * STEP), m - i32(tokens))
                    stage += i32(1)
                    if stage == i32(stages):
                        stage = i32(0)
                        phase ^= u32(1)
                    i += i32(1)
            cuda.syncwarp()
            if split > 1:
                cluster_arrive()
                cluster_wait()
                cluster_arrive()
                cluster_wait()
        else:
            if overlap:
                grid_dependency_wait()
            warpgroup = tid // i32(128)
            acc = zero()
            stage = i32(0)
            phase = u32(0)
            previous = i32(0)
            for i in range(count):
                mbarrier_wait(full + u32(stage) * u32(8), phase)
                slot = base + u32(stage) * u32(STAGE)
                a = descriptor(slot + u32(warpgroup) * u32(64 * STEP * 2))
                b = descriptor(slot + u32(WEIGHT))
                wgmma_fence()
                for pair in range(steps_a_stage):
                    for q in range(4):
                        acc = multiply(acc, a + u64(pair * (PAIR // 16) + 2 * q), b + u64(pair * (PAIR // 16) + 2 * q), i32(1))
                wgmma_commit()
                wait_one()
                if i > 0 and tid % i32(128) == i32(0):
                    mbarrier_arrive(empty + u32(previous) * u32(8))
                previous = stage
                stage += i32(1)
                if stage == i32(stages):
                    stage = i32(0)
                    phase ^= u32(1)
            wait_all()
            # the ring has been read to its end by both warpgroups: it now takes the float32 tile
            named_barrier(u32(1), u32(CONSUMERS))
            lane = tid % i32(32)
            row = tid // i32(32) * i32(16) + lane // i32(4)
            store_tile(base + u32((lane % i32(4)) * i32(2 * STRIDE) + row * i32(4)), acc)
            if split > 1:
                cluster_arrive()
                cluster_wait()
            else:
                named_barrier(u32(1), u32(CONSUMERS))
            # four rows of one token a thread; the blocks that split K take a range of the tokens each
            span = (m + i32(split - 1)) // i32(split)
            token = span * part + tid // i32(QUADS)
            last_token = min(m, span * (part + i32(1)))
            row = first_row + tid % i32(QUADS) * i32(4)
            inside = row < n and tid % i32(QUADS) * i32(4) < i32(rows)
            b0, b1, b2, b3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
            if bias:
                if inside:
                    v = load_global_v2(address(bias_) + u64(row) * u64(2))
                    b0, b1 = to_floats(v[0])
                    b2, b3 = to_floats(v[1])
            while token < last_token:
                place = base + u32((token + i32(tokens) - m) * i32(STRIDE) + tid % i32(QUADS) * i32(16))
                if split > 1:
                    y0, y1, y2, y3 = b0, b1, b2, b3
                    for r in range(split):
                        v = load_cluster_f32x4(cluster_address(place, u32(r)))
                        y0 += v[0]
                        y1 += v[1]
                        y2 += v[2]
                        y3 += v[3]
                else:
                    v = load_shared_f32x4(place)
                    y0, y1, y2, y3 = v[0] + b0, v[1] + b1, v[2] + b2, v[3] + b3
                y0, y1, y2, y3 = y0 * scale, y1 * scale, y2 * scale, y3 * scale
                if inside:
                    if silu_mul:
                        y0 = silu(y0) * y1
                        y2 = silu(y2) * y3
                        p = address(out) + (u64(token) * u64(out_stride) + u64(row // i32(2))) * u64(4 if wide else 2)
                        if wide:
                            store_global_f32x2(p, y0, y2)
                        else:
                            store_global_b32(p, to_bits(y0, y2))
                    else:
                        p = address(out) + (u64(token) * u64(out_stride) + u64(row)) * u64(4 if wide else 2)
                        if wide:
                            store_global_f32x4(p, y0, y1, y2, y3)
                        else:
                            store_global_v2(p, to_bits(y0, y1), to_bits(y2, y3))
                token += i32(CONSUMERS // QUADS)
            if split > 1:
                # the tile must outlive the neighbours' reads
                cluster_arrive()
                cluster_wait()

    return gemm_swapped


@dataclass(frozen=True)
class Shape:
    """How a GEMM is cut: rows of the weight a block; blocks of a cluster, which split K; stages of the ring, each of
    steps_a_stage * 64 of K."""

    rows: int
    split: int
    stages: int
    steps_a_stage: int


def tokens_of(m: int) -> int:
    """wgmma's n for m tokens."""
    return next(n for n in (8, 16, 32, 64, 128) if m <= n)


def ring(rows: int, split: int, tokens: int, nbytes: int = 100 << 10) -> Shape:
    """The shape with a ring of about `nbytes`: two of them fit a multiprocessor of Hopper."""
    pair = (rows + tokens) * STEP * 2
    steps_a_stage = 2 if pair < 12 << 10 else 1
    return Shape(rows, split, max(2, min(16, nbytes // (pair * steps_a_stage))), steps_a_stage)


def rows_of(n: int, split: int, blocks: int) -> int:
    """Rows of a block so that all fit `blocks` that run at once, or 128."""
    return min(128, -(-n * split // blocks // 8) * 8)


@functools.lru_cache(maxsize=4096)
def choose_shape(m: int, n: int, k: int, multiprocessors: int) -> Shape:
    """Two blocks a multiprocessor, all that fit: so the next kernel's blocks start one for one as these end, evenly spread.
    K is split where a block would have so few rows that x is most of what it reads. Measured in docs/kernels/gemm_small.md."""
    tokens, blocks = tokens_of(m), 2 * multiprocessors
    split = 2 if rows_of(n, 1, blocks) < 88 and k >= 2048 else 1
    return ring(rows_of(n, split, blocks), split, tokens)


def gemm_swapped(runtime: Runtime, x: Any, weight: Any, out: Any, bias: Any = None, silu_mul: bool = False, scale: float = 1.0,
                 overlap: bool = False, shape: Shape | None = None) -> None:
    """Queue out = x @ weight.T (see the module) for M up to MAX_TOKENS. Raises ShapeError.

    overlap: programmatic dependent launch: x is read only when the kernel before has ended.
    """
    m, n, k = check_arguments("gemm_swapped", x, weight, out, bias, silu_mul)
    if m > MAX_TOKENS:
        raise ShapeError(f"gemm_swapped: x has {m} rows; it serves up to {MAX_TOKENS}")
    if out.address % 16 or out.strides[0] % 4:
        raise ShapeError(f"gemm_swapped: out is at {out.address:#x} with strides {out.strides}; it needs 16-byte alignment "
                         "and a row stride that is a multiple of 4")
    if m == 0:
        return
    shape = shape or choose_shape(m, n, k, runtime.multiprocessors)
    tokens = tokens_of(m)
    found = gemm_swapped_kernel(x.dtype, out.dtype, tokens, shape.rows, shape.split, shape.stages, bias is not None, silu_mul,
                                overlap, shape.steps_a_stage)
    x_map = runtime.tensor_maps[x.address, map_form(x.dtype, (MAX_ROWS, k), (x.strides[0] * 2,), (tokens, STEP))]
    weight_map = runtime.tensor_maps[weight.address, map_form(x.dtype, (n, k), (k * 2,), (shape.rows, STEP))]
    found.launch(-(-n // shape.rows) * shape.split, x_map, weight_map, (bias if bias is not None else weight).address,
                 out.address, m, n, k, out.strides[0], scale, stream=runtime.stream, overlap=overlap)


def catalogue() -> Iterator[Kernel]:
    """Each code path once."""
    for tokens in (8, 16, 32, 64, 128):
        yield gemm_swapped_kernel(bfloat16, bfloat16, tokens, 112, 1, ring(112, 1, tokens).stages, overlap=True)
    yield gemm_swapped_kernel(float16, float16, 64, 64, 2, 6, bias=True, silu_mul=True, overlap=True)
    yield gemm_swapped_kernel(bfloat16, float32, 64, 128, 4, 4, overlap=True)
    yield gemm_swapped_kernel(bfloat16, bfloat16, 8, 32, 1, 10, steps_a_stage=2)
