"""RMSNorm, alone or with the residual add before it, in one pass.

    residual += x * scale          (add_rms_norm; the sum is rounded to the dtype, and the norm is taken of what was stored)
    out = residual * rsqrt(mean(residual ** 2) + eps) * weight

x, out   : [tokens, hidden] bf16 or fp16, last dimension contiguous, rows may be strided
residual : [tokens, hidden], same dtype, contiguous, updated in place
weight   : [hidden], same dtype.  hidden is a multiple of 8.

Grid     one block a row; a thread owns 8 values (16 bytes) at a time, kept in registers between the two passes
Traffic  add: 4 * tokens * hidden * 2 bytes (two reads, two writes); alone: half of that. On one H200 (copies: 4276 GB/s)
         0.92 to 0.96 of copy bandwidth from 8192 x 4096 on, add or alone (bench/kernels/small.py)
Source   Zhang and Sennrich 2019, arXiv:1910.07467
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, bfloat16, float16
from zhilight.driver.launcher import BoundLaunch
from zhilight.driver.tensor import Layout
from zhilight.errors import ShapeError
from zhilight.kernels.ptx import (
    address,
    f32,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    load_global_v4,
    rsqrt_approx,
    shared_address,
    store_global_v4,
    u64,
)
from zhilight.kernels.runtime import PLANS, Runtime
from zhilight.kernels.vector import WARP, block_sum, pack8, unpack8

MANY_ROWS = 1024
"""From here on what counts is bytes under way on a multiprocessor, not a row's time."""
MANY_ROWS_SPREAD = 2
"""Vectors a thread then, where a row is read once and not twice."""


@kernel_factory
def rms_norm_kernel(hidden: int, dtype: DType, add: bool, overlap: bool = False, spread: int = 1) -> Kernel:
    """spread: vectors of 8 values a thread at least. With more of them fewer warps meet for the sum and more rows are under way
    on a multiprocessor; with one, a row is done soonest."""
    vectors = hidden // 8
    threads = min(1024, -(-vectors // (spread * WARP)) * WARP)
    per_thread = -(-vectors // threads)
    warps = threads // WARP
    inverse = 1.0 / hidden
    expand, compress, total = unpack8(dtype), pack8(dtype), block_sum(threads)

    @kernel(threads=threads, max_registers=64, min_capability=(9, 0, "") if overlap else (8, 0, ""))
    def rms_norm(x: Pointer(dtype), residual: Pointer(dtype), weight: Pointer(dtype), out: Pointer(dtype), x_stride: i64,
                 out_stride: i64, eps: f32, scale: f32):
        thread = i32(cuda.threadIdx.x)
        row = i64(cuda.blockIdx.x)
        sums = shared_address(cuda.shared.array(warps, types.float32))
        values = cuda.local.array((per_thread, 8), types.float32)
        gains = cuda.local.array((per_thread, 4), types.uint32)
        loaded = cuda.local.array((per_thread, 8), types.uint32)
        from_x = address(x) + u64(row * x_stride) * u64(2)
        from_residual = address(residual) + u64(row * i64(hidden)) * u64(2)
        for i in range(per_thread):  # the weight depends on no earlier kernel
            vector = thread + i32(i * threads)
            if vector < i32(vectors):
                g = load_global_v4(address(weight) + u64(vector) * u64(16))
                for j in range(4):
                    gains[i, j] = g[j]
        if overlap:
            grid_dependency_launch()
            grid_dependency_wait()
        for i in range(per_thread):  # all loads before the first store, which the compiler may not move them over
            vector = thread + i32(i * threads)
            if vector < i32(vectors):
                w = load_global_v4(from_x + u64(vector) * u64(16))
                for j in range(4):
                    loaded[i, j] = w[j]
                if add:
                    w = load_global_v4(from_residual + u64(vector) * u64(16))
                    for j in range(4):
                        loaded[i, 4 + j] = w[j]
        square = f32(0)
        for i in range(per_thread):
            vector = thread + i32(i * threads)
            if vector < i32(vectors):
                offset = u64(vector) * u64(16)
                v = expand((loaded[i, 0], loaded[i, 1], loaded[i, 2], loaded[i, 3]))
                if add:
                    r = expand((loaded[i, 4], loaded[i, 5], loaded[i, 6], loaded[i, 7]))
                    for j in range(8):
                        values[i, j] = r[j] + v[j] * scale
                    words = compress(values[i])
                    store_global_v4(from_residual + offset, words[0], words[1], words[2], words[3])
                    v = expand(words)
                for j in range(8):
                    values[i, j] = v[j]
                    square += v[j] * v[j]
        factor = rsqrt_approx(total(square, sums) * f32(inverse) + eps)
        to = address(out) + u64(row * out_stride) * u64(2)
        for i in range(per_thread):
            vector = thread + i32(i * threads)
            if vector < i32(vectors):
                g = expand((gains[i, 0], gains[i, 1], gains[i, 2], gains[i, 3]))
                for j in range(8):
                    values[i, j] = values[i, j] * factor * g[j]
                words = compress(values[i])
                store_global_v4(to + u64(vector) * u64(16), words[0], words[1], words[2], words[3])

    return rms_norm


def rms_norm(runtime: Runtime, x: Any, weight: Any, eps: float, out: Any, overlap: bool = False) -> None:
    """See the module. Raises ShapeError when shapes or dtypes disagree."""
    launch = _plan(x.layout, weight.layout, out.layout, None, eps, 1.0, overlap)
    if launch is not None:
        launch(runtime.stream, x.address, 0, weight.address, out.address)


def add_rms_norm(runtime: Runtime, x: Any, residual: Any, weight: Any, eps: float, scale: float, out: Any,
                 overlap: bool = False) -> None:
    """See the module. Raises ShapeError when shapes or dtypes disagree."""
    launch = _plan(x.layout, weight.layout, out.layout, residual.layout, eps, scale, overlap)
    if launch is not None:
        launch(runtime.stream, x.address, residual.address, weight.address, out.address)


@lru_cache(maxsize=PLANS)
def _plan(x: Layout, weight: Layout, out: Layout, residual: Layout | None, eps: float, scale: float,
          overlap: bool) -> BoundLaunch | None:
    """The launch for arrays of these layouts, of x, residual, weight and out; None where there are no rows."""
    tokens, hidden = x.shape
    if hidden % 8 or x.strides[1] != 1 or x.strides[0] % 8:
        raise ShapeError(f"x is {x.shape} with strides {x.strides}; hidden and row stride must be multiples of 8")
    if weight.shape != (hidden,) or weight.dtype != x.dtype:
        raise ShapeError(f"weight is {weight.dtype} {weight.shape}; it must be {x.dtype} [{hidden}]")
    if out.shape != x.shape or out.dtype != x.dtype or out.strides[1] != 1:
        raise ShapeError(f"out is {out.dtype} {out.shape}; it must be {x.dtype} {x.shape}")
    if residual is not None and (residual.shape, residual.strides, residual.dtype) != (x.shape, (hidden, 1), x.dtype):
        raise ShapeError(f"residual is {residual.dtype} {residual.shape}; it must be {x.dtype} {x.shape}, contiguous")
    if not tokens:
        return None
    spread = MANY_ROWS_SPREAD if tokens >= MANY_ROWS and residual is None else 1
    found = rms_norm_kernel(hidden, x.dtype, residual is not None, overlap, spread)
    return BoundLaunch(found, tokens, (x.strides[0], out.strides[0], eps, scale), overlap)


def catalogue() -> Iterator[Kernel]:
    for hidden in (576, 2304, 4096, 8192):
        yield rms_norm_kernel(hidden, bfloat16, True)
    yield rms_norm_kernel(3584, float16, False)
    yield rms_norm_kernel(4096, bfloat16, True, True)
    yield rms_norm_kernel(4096, bfloat16, False, True)
    yield rms_norm_kernel(4096, bfloat16, False, True, MANY_ROWS_SPREAD)
    yield rms_norm_kernel(2304, float16, False, True, MANY_ROWS_SPREAD)
