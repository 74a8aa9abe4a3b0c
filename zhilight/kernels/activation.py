"""out[:, j] = silu(x[:, 2j]) * x[:, 2j + 1], silu(a) = a / (1 + exp(-a)), where a GEMM's epilogue has not done it.

x   : [tokens, 2 I] bf16 or fp16, rows may be strided: gate and up interleaved
out : [tokens, I], same dtype, contiguous; I is a multiple of 4

Grid     (tokens, I / 1024): a thread reads 16 bytes (four pairs) and writes 8
Traffic  3 * tokens * I * 2 bytes
"""

from collections.abc import Iterator
from typing import Any

from numba import cuda

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, bfloat16, float16
from zhilight.errors import ShapeError
from zhilight.kernels.ptx import (
    address,
    exp2_approx,
    f32,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    load_once_v4,
    pack,
    reciprocal_approx,
    store_global_v2,
    u64,
)
from zhilight.kernels.runtime import Runtime
from zhilight.kernels.vector import unpack8

THREADS = 256
MINUS_LOG2_E = -1.4426950408889634


@cuda.jit(device=True, forceinline=True, fastmath=True)
def silu(value):
    """value / (1 + exp(-value)), to about 2 ulp of float32."""
    return value * reciprocal_approx(f32(1) + exp2_approx(value * f32(MINUS_LOG2_E)))


@kernel_factory
def silu_mul_kernel(dtype: DType, overlap: bool = False) -> Kernel:
    expand, pair = unpack8(dtype), pack(dtype)

    @kernel(threads=THREADS, max_registers=40, min_capability=(9, 0, "") if overlap else (8, 0, ""))
    def silu_mul(x: Pointer(dtype), out: Pointer(dtype), vectors: i32, row_stride: i64):
        row = i64(cuda.blockIdx.x)
        vector = i32(cuda.blockIdx.y) * i32(THREADS) + i32(cuda.threadIdx.x)
        if overlap:
            grid_dependency_launch()
            grid_dependency_wait()
        if vector < vectors:
            v = expand(load_once_v4(address(x) + u64(row * row_stride) * u64(2) + u64(vector) * u64(16)))
            store_global_v2(address(out) + u64(row * i64(vectors) + i64(vector)) * u64(8),
                            pair(silu(v[0]) * v[1], silu(v[2]) * v[3]), pair(silu(v[4]) * v[5], silu(v[6]) * v[7]))

    return silu_mul


def silu_mul(runtime: Runtime, x: Any, out: Any, overlap: bool = False) -> None:
    """See the module. Raises ShapeError when shapes or dtypes disagree."""
    tokens, width = x.shape
    if width % 8 or x.strides[1] != 1 or x.strides[0] % 8:
        raise ShapeError(f"x is {x.shape}, strides {x.strides}; width and row stride must be multiples of 8")
    if out.shape != (tokens, width // 2) or out.dtype != x.dtype or out.strides != (width // 2, 1):
        raise ShapeError(f"out is {out.dtype} {out.shape}; it must be {x.dtype} [{tokens}, {width // 2}], contiguous")
    if tokens:
        vectors = width // 8
        silu_mul_kernel(x.dtype, overlap).launch((tokens, -(-vectors // THREADS), 1), x, out, vectors, x.strides[0],
                                                 stream=runtime.stream, overlap=overlap)


def catalogue() -> Iterator[Kernel]:
    yield silu_mul_kernel(bfloat16)
    yield silu_mul_kernel(float16)
    yield silu_mul_kernel(bfloat16, True)
