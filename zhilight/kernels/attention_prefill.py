"""Prefill attention: a batch of prompt chunks of any lengths over the paged cache.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G]

A sequence's queries are the last tokens of its context, whose K and V are all in the cache (this step's included): the query
at position p sees keys max(0, p - window + 1) .. p. cap(s) = c * tanh(s / c), or s without a soft cap. G = Hq / Hkv.

Arrays: qkv [T, (Hq + 2 Hkv) * D] bf16 or fp16, rows may be strided, q heads first; kv_cache [B, 2, Hkv, P, D] contiguous, same
dtype; block_tables [S, W], context_lens [S] and query_start [S + 1] int32; out [T, Hq * D], rows may be strided.

Operations: 4 * D * Hq for each visible (query, key) pair; the bytes are far below. Two kernels: wgmma on Hopper
(attention_prefill_sm90.py), mma.sync elsewhere (attention_prefill_sm80.py).
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from zhilight.driver.compiler import Kernel
from zhilight.driver.dtype import DType, bfloat16, float16, int32
from zhilight.driver.launcher import BoundLaunch
from zhilight.driver.tensor import Layout
from zhilight.errors import ShapeError
from zhilight.kernels import attention_prefill_sm80 as sm80
from zhilight.kernels import attention_prefill_sm90 as sm90
from zhilight.kernels.attention_tiles import LOG2_E
from zhilight.kernels.runtime import PLANS, STEP_PLANS, MapForm, Runtime, map_form

HEAD_DIMS = tuple(sm80.TILES)
BLOCK_SIZES = (16, 32, 64, 128)


class Chunks:
    """The sequences of a step that prefill, as the host knows them: the grids' sizes. One a step, for all its layers.

    host_query_start [S + 1] and host_context_lens [S] are the host's copies of the device arrays; the sequences from `first`
    on are meant. Raises ShapeError when they disagree.
    """

    def __init__(self, host_query_start: np.ndarray, host_context_lens: np.ndarray, first: int = 0):
        if len(host_query_start) != len(host_context_lens) + 1:
            raise ShapeError(f"host_query_start has {len(host_query_start)} entries; {len(host_context_lens)} sequences need "
                             f"{len(host_context_lens) + 1}.")
        self.first = first
        self._lengths = np.diff(host_query_start[first:])
        self.count = len(self._lengths)
        self._tiles: dict[int, int] = {}
        if (self._lengths > host_context_lens[first:]).any():
            raise ShapeError("context_lens must count this step's tokens too: a sequence has more queries than context.")

    def tiles(self, rows: int) -> int:
        """Tiles of `rows` queries, none of two sequences."""
        found = self._tiles.get(rows)
        if found is None:
            found = self._tiles[rows] = int((-(-self._lengths // rows)).sum())
        return found


def attention_prefill(runtime: Runtime, qkv: Any, kv_cache: Any, block_tables: Any, context_lens: Any, query_start: Any,
                      out: Any, chunks: Chunks, num_heads: int, num_kv_heads: int, scale: float, window: int | None = None,
                      soft_cap: float | None = None, overlap: bool = False) -> None:
    """Attention of the sequences that `chunks` names. Raises ShapeError."""
    launch = launch_sm90 if runtime.capability[0] == 9 else launch_sm80
    launch(runtime, qkv, kv_cache, block_tables, context_lens, query_start, out, chunks, num_heads, num_kv_heads, scale, window,
           soft_cap, overlap)


def launch_sm90(runtime: Runtime, qkv: Any, kv_cache: Any, block_tables: Any, context_lens: Any, query_start: Any, out: Any,
                chunks: Chunks, num_heads: int, num_kv_heads: int, scale: float, window: int | None = None,
                soft_cap: float | None = None, overlap: bool = False, tiling: tuple[int, int, int] | None = None) -> None:
    """The wgmma kernel. tiling: an entry of attention_prefill_sm90.TILES, for measurements."""
    check_addresses(qkv, out)
    plan = _plan_sm90(qkv.layout, kv_cache.layout, block_tables.layout, context_lens.dtype, query_start.dtype, out.layout,
                      chunks, num_heads, num_kv_heads, scale, window, soft_cap, overlap, tiling, runtime.multiprocessors)
    if plan is not None:
        launch, kv_form = plan
        launch(runtime.stream, runtime.tensor_maps[kv_cache.address, kv_form], qkv.address, block_tables.address,
               context_lens.address, query_start.address, out.address, runtime.counters(1))


@lru_cache(maxsize=STEP_PLANS)
def _plan_sm90(qkv: Layout, kv_cache: Layout, block_tables: Layout, context_dtype: DType, query_dtype: DType, out: Layout,
               chunks: Chunks, num_heads: int, num_kv_heads: int, scale: float, window: int | None, soft_cap: float | None,
               overlap: bool, tiling: tuple[int, int, int] | None, multiprocessors: int) -> tuple[BoundLaunch, MapForm] | None:
    """The launch for arrays of these layouts, and the map of its cache as rows of one head's values of one token; None where
    no sequence has a query."""
    head_dim, block_size = check_layouts(qkv, kv_cache, block_tables, out, num_heads, num_kv_heads, window, soft_cap)
    _check_dtypes(context_dtype, query_dtype)
    tiling = tiling or sm90.TILES[head_dim]
    tickets = chunks.tiles(64 * tiling[0]) * num_heads
    if tickets == 0:
        return None
    kernel = sm90.prefill_sm90_kernel(kv_cache.dtype, head_dim, block_size, window is not None, soft_cap is not None, overlap,
                                      *tiling)
    inner, outer = (scale / soft_cap, soft_cap) if soft_cap else (1.0, scale)
    numbers = (qkv.strides[0], out.strides[0], block_tables.strides[0], chunks.first, chunks.count, num_heads, num_kv_heads,
               tickets, outer * LOG2_E, inner, window or 0)
    launch = BoundLaunch(kernel, min(multiprocessors, tickets), numbers, overlap)
    rows = prod(kv_cache.shape[:4])
    return launch, map_form(kv_cache.dtype, (rows, head_dim), (2 * head_dim,), (min(block_size, tiling[1]), 64))


def launch_sm80(runtime: Runtime, qkv: Any, kv_cache: Any, block_tables: Any, context_lens: Any, query_start: Any, out: Any,
                chunks: Chunks, num_heads: int, num_kv_heads: int, scale: float, window: int | None = None,
                soft_cap: float | None = None, overlap: bool = False, tiling: tuple[int, int, int] | None = None) -> None:
    """The mma.sync kernel, on any device. tiling: an entry of attention_prefill_sm80.TILES, for measurements."""
    head_dim, block_size = check_arguments(qkv, kv_cache, block_tables, out, num_heads, num_kv_heads, window, soft_cap)
    _check_dtypes(context_lens.dtype, query_start.dtype)
    tiling = tiling or sm80.tiling(head_dim, block_size, soft_cap is not None)
    tiles = chunks.tiles(16 * tiling[0] * tiling[2])
    if tiles == 0:
        return
    overlap = overlap and runtime.capability[0] >= 9
    kernel = sm80.prefill_sm80_kernel(qkv.dtype, head_dim, block_size, window is not None, soft_cap is not None, overlap,
                                      *tiling)
    inner, outer = (scale / soft_cap, soft_cap) if soft_cap else (1.0, scale)
    kernel.launch(tiles * num_heads, qkv.address, kv_cache.address, block_tables.address, context_lens.address,
                  query_start.address, out.address, qkv.strides[0], out.strides[0], block_tables.strides[0], chunks.first,
                  chunks.count, num_heads, num_kv_heads, outer * LOG2_E, inner, window or 0, stream=runtime.stream,
                  overlap=overlap)


def check_arguments(qkv: Any, kv_cache: Any, block_tables: Any, out: Any, num_heads: int, num_kv_heads: int,
                    window: int | None, soft_cap: float | None) -> tuple[int, int]:
    """(head size, block size) of the cache, after holding the arrays to the contract above. Raises ShapeError."""
    check_addresses(qkv, out)
    return check_layouts(qkv.layout, kv_cache.layout, block_tables.layout, out.layout, num_heads, num_kv_heads, window,
                         soft_cap)


def check_addresses(qkv: Any, out: Any) -> None:
    """Raises ShapeError: what `check_layouts` cannot see."""
    if (qkv.address | out.address) % 16:
        raise ShapeError(f"qkv and out must start at a multiple of 16 bytes; they are at {qkv.address:#x} and "
                         f"{out.address:#x}.")


def _check_dtypes(context_dtype: DType, query_dtype: DType) -> None:
    if context_dtype is not int32 or query_dtype is not int32:
        raise ShapeError(f"context_lens is {context_dtype} and query_start {query_dtype}; both must be int32.")


@lru_cache(maxsize=PLANS)
def check_layouts(qkv: Layout, kv_cache: Layout, block_tables: Layout, out: Layout, num_heads: int, num_kv_heads: int,
                  window: int | None, soft_cap: float | None) -> tuple[int, int]:
    """(head size, block size) of the cache, after holding the layouts to the contract above. Raises ShapeError."""
    if len(kv_cache.shape) != 5 or kv_cache.shape[1] != 2 or kv_cache.shape[2] != num_kv_heads:
        raise ShapeError(f"kv_cache is {list(kv_cache.shape)}; expected [blocks, 2, {num_kv_heads}, block size, head size].")
    _, _, _, block_size, head_dim = kv_cache.shape
    if head_dim not in HEAD_DIMS:
        raise ShapeError(f"kv_cache has head size {head_dim}; the attention kernels are built for {HEAD_DIMS}.")
    if block_size not in BLOCK_SIZES:
        raise ShapeError(f"kv_cache has block size {block_size}; the attention kernels are built for {BLOCK_SIZES}.")
    if qkv.dtype not in (bfloat16, float16) or kv_cache.dtype != qkv.dtype or out.dtype != qkv.dtype:
        raise ShapeError(f"qkv is {qkv.dtype}, kv_cache {kv_cache.dtype}, out {out.dtype}; all must be bfloat16, or all "
                         "float16.")
    if num_heads % num_kv_heads or num_heads // num_kv_heads > 16:
        raise ShapeError(f"num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}, at most 16 times it.")
    if kv_cache.strides[3:] != (head_dim, 1) or kv_cache.strides[0] != 2 * num_kv_heads * block_size * head_dim:
        raise ShapeError(f"kv_cache must be contiguous; its strides are {kv_cache.strides}.")
    width = num_heads * head_dim
    for name, array, least in (("qkv", qkv, width), ("out", out, width)):
        if len(array.shape) != 2 or array.shape[1] < least or array.strides[1] != 1:
            raise ShapeError(f"{name} is {list(array.shape)} with strides {array.strides}; expected rows of at least {least} "
                             "values.")
        if array.strides[0] % 8:
            raise ShapeError(f"{name} has rows {array.strides[0]} values apart; each must start at a multiple of 16 bytes.")
    if block_tables.dtype != int32 or block_tables.strides[1] != 1:
        raise ShapeError(f"block_tables must be int32 with contiguous rows, got {block_tables.dtype} with "
                         f"{block_tables.strides[1]} between neighbours of a row.")
    if window is not None and window < 1:
        raise ShapeError(f"window is {window}; it must be at least 1, or None.")
    if soft_cap is not None and soft_cap <= 0:
        raise ShapeError(f"soft_cap is {soft_cap}; it must be above 0, or None.")
    return head_dim, block_size


def catalogue() -> Iterator[Kernel]:
    """Every head size, and each switch once."""
    for head_dim in HEAD_DIMS:
        yield _catalogued_sm80(bfloat16, head_dim, 64)
    for block_size in (16, 32, 128):
        yield _catalogued_sm80(bfloat16, 128, block_size)
    yield _catalogued_sm80(float16, 128, 64)
    yield _catalogued_sm80(bfloat16, 128, 64, True, True)
    yield _catalogued_sm80(bfloat16, 128, 128, False, True)  # the tile of fewer keys
    for head_dim, tiling in sm90.TILES.items():
        yield sm90.prefill_sm90_kernel(bfloat16, head_dim, 64, False, False, False, *tiling)
    for block_size in (16, 32, 128):
        yield sm90.prefill_sm90_kernel(bfloat16, 128, block_size, False, False, False, *sm90.TILES[128])
    yield sm90.prefill_sm90_kernel(float16, 128, 64, False, False, False, *sm90.TILES[128])
    yield sm90.prefill_sm90_kernel(bfloat16, 128, 64, True, True, False, *sm90.TILES[128])


def _catalogued_sm80(dtype: DType, head_dim: int, block_size: int, windowed: bool = False, capped: bool = False) -> Kernel:
    return sm80.prefill_sm80_kernel(dtype, head_dim, block_size, windowed, capped, False,
                                    *sm80.tiling(head_dim, block_size, capped))
