"""Rows of a table by index: token embedding, the rows that need logits, and tokens fed back from the sampler.

    embedding   out[i] = table[ids[i]] * scale          table [rows, hidden] bf16 or fp16, ids [n] int32, out [n, hidden]
    feed_tokens token_ids[rows[i]] = sampled[sources[i]]  all int32, one dimension

Grid     embedding: one block a row, 16 bytes a thread at a time; feed_tokens: one thread an entry
Traffic  embedding: 2 * n * hidden * 2 bytes
"""

from collections.abc import Iterator
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, bfloat16, int32
from zhilight.errors import ShapeError
from zhilight.kernels.ptx import (
    address,
    f32,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    load_once_v4,
    store_global_v4,
    u64,
)
from zhilight.kernels.runtime import Runtime
from zhilight.kernels.vector import WARP, pack8, unpack8

FEED_THREADS = 256


@kernel_factory
def embedding_kernel(hidden: int, dtype: DType, scaled: bool, overlap: bool = False) -> Kernel:
    vectors = hidden // 8
    threads = min(256, -(-vectors // (4 * WARP)) * WARP)   # four loads under way a thread
    rounds = -(-vectors // threads)
    expand, compress = unpack8(dtype), pack8(dtype)

    @kernel(threads=threads, max_registers=64, min_capability=(9, 0, "") if overlap else (8, 0, ""))
    def embedding(table: Pointer(dtype), ids: Pointer(int32), out: Pointer(dtype), row_stride: i64, scale: f32):
        row = i64(cuda.blockIdx.x)
        if overlap:
            grid_dependency_launch()
            grid_dependency_wait()
        source = address(table) + u64(i64(ids[row]) * row_stride) * u64(2)
        target = address(out) + u64(row * i64(hidden)) * u64(2)
        loaded = cuda.local.array((rounds, 4), types.uint32)
        for i in range(rounds):
            vector = i32(cuda.threadIdx.x) + i32(i * threads)
            if vector < i32(vectors):
                words = load_once_v4(source + u64(vector) * u64(16))
                for j in range(4):
                    loaded[i, j] = words[j]
        for i in range(rounds):
            vector = i32(cuda.threadIdx.x) + i32(i * threads)
            if vector < i32(vectors):
                words = (loaded[i, 0], loaded[i, 1], loaded[i, 2], loaded[i, 3])
                if scaled:
                    v = expand(words)
                    words = compress((v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale,
                                      v[4] * scale, v[5] * scale, v[6] * scale, v[7] * scale))
                store_global_v4(target + u64(vector) * u64(16), words[0], words[1], words[2], words[3])

    return embedding


@kernel_factory
def feed_tokens_kernel(overlap: bool = False) -> Kernel:
    @kernel(threads=FEED_THREADS, max_registers=32, min_capability=(9, 0, "") if overlap else (8, 0, ""))
    def feed_tokens(token_ids: Pointer(int32), rows: Pointer(int32), sampled: Pointer(int32), sources: Pointer(int32),
                    count: i32):
        i = i32(cuda.blockIdx.x) * i32(FEED_THREADS) + i32(cuda.threadIdx.x)
        if overlap:
            grid_dependency_launch()
            grid_dependency_wait()
        if i < count and rows[i] >= 0:
            token_ids[rows[i]] = sampled[sources[i]]

    return feed_tokens


def embedding(runtime: Runtime, table: Any, ids: Any, out: Any, scale: float = 1.0, overlap: bool = False) -> None:
    """See the module. Ids are trusted to be inside the table. Raises ShapeError when shapes or dtypes disagree."""
    hidden = table.shape[1]
    if hidden % 8 or table.strides[1] != 1 or table.strides[0] % 8:
        raise ShapeError(f"table is {table.shape}, strides {table.strides}; hidden and row stride must be multiples of 8")
    if out.shape != (ids.shape[0], hidden) or out.dtype != table.dtype or out.strides != (hidden, 1):
        raise ShapeError(f"out is {out.dtype} {out.shape}; it must be {table.dtype} [{ids.shape[0]}, {hidden}], contiguous")
    if ids.shape[0]:
        embedding_kernel(hidden, table.dtype, scale != 1.0, overlap).launch(
            ids.shape[0], table, ids, out, table.strides[0], scale, stream=runtime.stream, overlap=overlap)


def feed_tokens(runtime: Runtime, token_ids: Any, rows: Any, sampled: Any, sources: Any, overlap: bool = False) -> None:
    """See the module; a row of -1 feeds nothing."""
    count = rows.shape[0]
    if sources.shape != (count,):
        raise ShapeError(f"sources is {sources.shape}; it must be [{count}] as rows is")
    if count:
        feed_tokens_kernel(overlap).launch(-(-count // FEED_THREADS), token_ids, rows, sampled, sources, count,
                                           stream=runtime.stream, overlap=overlap)


def catalogue() -> Iterator[Kernel]:
    yield embedding_kernel(4096, bfloat16, False)
    yield embedding_kernel(2304, bfloat16, True)
    yield embedding_kernel(4096, bfloat16, False, True)
    yield feed_tokens_kernel()
    yield feed_tokens_kernel(True)
