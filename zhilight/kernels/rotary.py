"""Rotary embedding of q and k, and the write of k and v to the paged cache, in one launch.

qkv          : [tokens, (Hq + 2 Hkv) * D] bf16 or fp16, rows may be strided: q heads, k heads, v heads. q is rotated in place;
               rotated k and v go to the cache alone (their parts of qkv are left as they were).
positions    : [tokens] int32
slot_mapping : [tokens] int64, block * P + offset; -1 writes nothing
cos_sin      : [positions, R] float32: R / 2 cosines, then R / 2 sines; R <= D values of a head rotate, value i with i + R / 2
kv_cache     : [blocks, 2, Hkv, P, D], same dtype

Grid     (tokens, items / 128): a thread owns 8 pairs of values (two 16-byte loads) of one q or k head, or of several with
         many tokens, for which it reads the cosines and sines once; or 8 values of v or of the part of k that does not rotate
Traffic  q read and written, k and v read and written once: 2 * (Hq + 2 Hkv) * D * 2 bytes a token, and R * 4 of cos_sin
Source   Su et al. 2021, arXiv:2104.09864; half-split pairs as in the Hugging Face checkpoints
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, bfloat16, float16, float32, int32, int64
from zhilight.driver.launcher import BoundLaunch
from zhilight.driver.tensor import Layout
from zhilight.errors import ShapeError
from zhilight.kernels.ptx import (
    address,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    load_global_f32x4,
    load_global_v4,
    store_global_v4,
    u64,
)
from zhilight.kernels.runtime import PLANS, Runtime
from zhilight.kernels.vector import pack8, unpack8

THREADS = 128
MANY_TOKENS = 512
"""From here on there are threads enough to give each several heads."""


@kernel_factory
def rotary_kernel(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, block_size: int, dtype: DType,
                  overlap: bool = False, heads_a_thread: int = 1) -> Kernel:
    """heads_a_thread: q heads that one item rotates; it divides num_heads."""
    pairs = rotary_dim // 16                      # items of a q or k head that rotate
    rest = (head_dim - rotary_dim) // 8           # items of a k head that are copied
    q_items = num_heads // heads_a_thread * pairs
    k_items = num_kv_heads * (pairs + rest)
    items = q_items + k_items + num_kv_heads * (head_dim // 8)
    half = rotary_dim // 2
    per_head = pairs + rest
    per_value = head_dim // 8
    block_values = 2 * num_kv_heads * block_size * head_dim
    v_offset = num_kv_heads * block_size * head_dim
    expand, compress = unpack8(dtype), pack8(dtype)

    @kernel(threads=THREADS, max_registers=96, min_capability=(9, 0, "") if overlap else (8, 0, ""))
    def rotary(qkv: Pointer(dtype), positions: Pointer(int32), slot_mapping: Pointer(int64), cos_sin: Pointer(float32),
               kv_cache: Pointer(dtype), row_stride: i64):
        token = i64(cuda.blockIdx.x)
        item = i32(cuda.blockIdx.y) * i32(THREADS) + i32(cuda.threadIdx.x)
        if overlap:
            grid_dependency_launch()
            grid_dependency_wait()
        if item >= i32(items):
            return
        slot = slot_mapping[token]
        row = address(qkv) + u64(token * row_stride) * u64(2)
        block = slot // i64(block_size)
        offset = slot - block * i64(block_size)
        # the cache row of kv head 0; head h is block_size * head_dim values further
        cache = address(kv_cache) + u64(block * i64(block_values) + offset * i64(head_dim)) * u64(2)
        if item < i32(q_items + k_items):
            is_q = item < i32(q_items)
            if is_q:
                group = item // i32(pairs)
                part = item - group * i32(pairs)
                source = row + u64(group * i32(heads_a_thread * head_dim)) * u64(2)
                target = source
            else:
                head = (item - i32(q_items)) // i32(per_head)
                part = item - i32(q_items) - head * i32(per_head)
                source = row + u64((i32(num_heads) + head) * i32(head_dim)) * u64(2)
                target = cache + u64(i64(head) * i64(block_size * head_dim)) * u64(2)
            if part < i32(pairs):
                table = address(cos_sin) + u64(i64(positions[token]) * i64(rotary_dim) + i64(part * i32(8))) * u64(4)
                c0 = load_global_f32x4(table)
                c1 = load_global_f32x4(table + u64(16))
                s0 = load_global_f32x4(table + u64(half * 4))
                s1 = load_global_f32x4(table + u64(half * 4 + 16))
                cos = (c0[0], c0[1], c0[2], c0[3], c1[0], c1[1], c1[2], c1[3])
                sin = (s0[0], s0[1], s0[2], s0[3], s1[0], s1[1], s1[2], s1[3])
                count = i32(heads_a_thread) if is_q else i32(1)
                loaded = cuda.local.array((heads_a_thread, 8), types.uint32)
                for h in range(heads_a_thread):  # all loads before the first store, which the compiler may not move them over
                    if i32(h) < count:
                        at = u64(part) * u64(16) + u64(h * head_dim * 2)
                        low = load_global_v4(source + at)
                        high = load_global_v4(source + at + u64(half * 2))
                        for j in range(4):
                            loaded[h, j] = low[j]
                            loaded[h, 4 + j] = high[j]
                for h in range(heads_a_thread):
                    if i32(h) < count:
                        at = u64(part) * u64(16) + u64(h * head_dim * 2)
                        low = expand((loaded[h, 0], loaded[h, 1], loaded[h, 2], loaded[h, 3]))
                        high = expand((loaded[h, 4], loaded[h, 5], loaded[h, 6], loaded[h, 7]))
                        a = compress((low[0] * cos[0] - high[0] * sin[0], low[1] * cos[1] - high[1] * sin[1],
                                      low[2] * cos[2] - high[2] * sin[2], low[3] * cos[3] - high[3] * sin[3],
                                      low[4] * cos[4] - high[4] * sin[4], low[5] * cos[5] - high[5] * sin[5],
                                      low[6] * cos[6] - high[6] * sin[6], low[7] * cos[7] - high[7] * sin[7]))
                        b = compress((high[0] * cos[0] + low[0] * sin[0], high[1] * cos[1] + low[1] * sin[1],
                                      high[2] * cos[2] + low[2] * sin[2], high[3] * cos[3] + low[3] * sin[3],
                                      high[4] * cos[4] + low[4] * sin[4], high[5] * cos[5] + low[5] * sin[5],
                                      high[6] * cos[6] + low[6] * sin[6], high[7] * cos[7] + low[7] * sin[7]))
                        if is_q or slot >= i64(0):
                            store_global_v4(target + at, a[0], a[1], a[2], a[3])
                            store_global_v4(target + at + u64(half * 2), b[0], b[1], b[2], b[3])
            elif slot >= i64(0):
                at = u64(rotary_dim * 2) + u64(part - i32(pairs)) * u64(16)
                w = load_global_v4(source + at)
                store_global_v4(target + at, w[0], w[1], w[2], w[3])
        elif slot >= i64(0):
            head = (item - i32(q_items + k_items)) // i32(per_value)
            part = item - i32(q_items + k_items) - head * i32(per_value)
            at = u64(part) * u64(16)
            w = load_global_v4(row + u64((i32(num_heads + num_kv_heads) + head) * i32(head_dim)) * u64(2) + at)
            store_global_v4(cache + u64(i64(v_offset) + i64(head) * i64(block_size * head_dim)) * u64(2) + at,
                            w[0], w[1], w[2], w[3])

    rotary.items = items
    return rotary


def rotary_and_cache(runtime: Runtime, qkv: Any, positions: Any, slot_mapping: Any, cos_sin: Any, kv_cache: Any, num_heads: int,
                     num_kv_heads: int, overlap: bool = False) -> None:
    """See the module. Raises ShapeError when shapes or dtypes disagree."""
    launch = _plan(qkv.layout, (positions.dtype, slot_mapping.dtype), cos_sin.layout, kv_cache.layout, num_heads, num_kv_heads,
                   overlap)
    if launch is not None:
        launch(runtime.stream, qkv.address, positions.address, slot_mapping.address, cos_sin.address, kv_cache.address)


@lru_cache(maxsize=PLANS)
def _plan(qkv: Layout, index_dtypes: tuple[DType, DType], cos_sin: Layout, kv_cache: Layout, num_heads: int, num_kv_heads: int,
          overlap: bool) -> BoundLaunch | None:
    """The launch for arrays of these layouts; None where there are no tokens. index_dtypes: of positions and slot_mapping."""
    check_arguments(qkv, index_dtypes, cos_sin, kv_cache, num_heads, num_kv_heads)
    tokens = qkv.shape[0]
    if not tokens:
        return None
    several = 4 if tokens >= MANY_TOKENS and num_heads % 4 == 0 else 1
    found = rotary_kernel(num_heads, num_kv_heads, kv_cache.shape[4], cos_sin.shape[1], kv_cache.shape[3], qkv.dtype, overlap,
                          several)
    return BoundLaunch(found, (tokens, -(-found.items // THREADS), 1), (qkv.strides[0],), overlap)


def check_arguments(qkv: Layout, index_dtypes: tuple[DType, DType], cos_sin: Layout, kv_cache: Layout, num_heads: int,
                    num_kv_heads: int) -> None:
    """Raises ShapeError when shapes or dtypes disagree. index_dtypes: of positions and slot_mapping."""
    dtypes = (*index_dtypes, cos_sin.dtype)
    if dtypes != (int32, int64, float32):
        raise ShapeError(f"positions, slot_mapping and cos_sin are {dtypes}; they must be int32, int64 and float32")
    rotary_dim = cos_sin.shape[1]
    _, two, kv_heads, _, head_dim = kv_cache.shape
    if two != 2 or kv_heads != num_kv_heads or kv_cache.dtype != qkv.dtype:
        raise ShapeError(f"kv_cache is {kv_cache.dtype} {kv_cache.shape}; it must be {qkv.dtype} [B, 2, {num_kv_heads}, P, D]")
    expected = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape[1] != expected or qkv.strides[1] != 1 or qkv.strides[0] % 8:
        raise ShapeError(f"qkv is {qkv.shape}, strides {qkv.strides}; it must be [T, {expected}]")
    if rotary_dim % 16 or head_dim % 8 or rotary_dim > head_dim:
        raise ShapeError(f"cos_sin has {rotary_dim} columns for heads of {head_dim}; it must be a multiple of 16, at most that")


def catalogue() -> Iterator[Kernel]:
    yield rotary_kernel(32, 8, 128, 128, 64, bfloat16)
    yield rotary_kernel(9, 3, 64, 64, 64, bfloat16)
    yield rotary_kernel(28, 4, 128, 64, 16, float16)
    yield rotary_kernel(32, 8, 128, 128, 64, bfloat16, True)
    yield rotary_kernel(32, 8, 128, 128, 64, bfloat16, True, 4)
