"""Sixteen bytes at a time: eight 16-bit floats to and from float32 registers, and block-wide reductions.

Each function is made once for a dtype or block size, is used inside kernels and is inlined.
"""

import functools

from numba import cuda

from zhilight.driver.dtype import DType
from zhilight.kernels.ptx import FULL_WARP, f32, i32, load_shared_f32, pack, store_shared_f32, u32, unpack

WARP = 32


@functools.cache
def unpack8(dtype: DType):
    """Four words of eight 16-bit floats -> eight float32."""
    pair = unpack(dtype)

    @cuda.jit(device=True, forceinline=True, fastmath=True)
    def convert(words):
        a = pair(words[0])
        b = pair(words[1])
        c = pair(words[2])
        d = pair(words[3])
        return a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]

    return convert


@functools.cache
def pack8(dtype: DType):
    """Eight float32 (a local array or tuple) -> four words of eight 16-bit floats."""
    pair = pack(dtype)

    @cuda.jit(device=True, forceinline=True, fastmath=True)
    def convert(v):
        return pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7])

    return convert


@cuda.jit(device=True, forceinline=True, fastmath=True)
def warp_sum(value):
    """The sum over the warp, in every lane."""
    for step in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(u32(FULL_WARP), value, step)
    return value


@functools.cache
def block_sum(threads: int):
    """(float32, shared address of threads / 32 float32) -> the sum over the block, in every thread. One barrier inside;
    the shared words may be used again after the next barrier."""
    warps = threads // WARP

    @cuda.jit(device=True, forceinline=True, fastmath=True)
    def total(value, shared):
        value = warp_sum(value)
        if warps > 1:
            thread = i32(cuda.threadIdx.x)
            if thread % i32(WARP) == 0:
                store_shared_f32(shared + u32(thread // i32(WARP)) * u32(4), value)
            cuda.syncthreads()
            lane = thread % i32(WARP)
            value = load_shared_f32(shared + u32(min(lane, i32(warps - 1))) * u32(4))
            if lane >= i32(warps):
                value = f32(0)
            value = warp_sum(value)
        return value

    return total
