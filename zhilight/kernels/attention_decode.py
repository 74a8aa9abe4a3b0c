"""Decode attention: one query token a sequence over the paged cache.

    out[s, h] = sum_j softmax_j(cap(scale * q[s, h] . k[j, h // G])) v[j, h // G],  j < context_lens[s]

Arrays: qkv [S, (Hq + 2 Hkv) * D] bf16 or fp16, q heads first, rows may be strided; kv_cache [B, 2, Hkv, P, D] contiguous;
block_tables [S, W], context_lens [S] int32 (0: a graph's padding row: zeros are written, no block is read); out [S, Hq * D].
G = Hq / Hkv is 1 to 16.

Bytes: K and V of every context once, 4 D Hkv sum(context_lens); there is no other floor. Method: flash decoding (Dao et al.
2023) with a plan that every block works out from context_lens, so that a captured graph's fixed grid is balanced at any
lengths. The tiles of 16 keys a warp of all (sequence, kv head) pairs are numbered; block i of n takes i T / n to (i + 1) T / n.
A pair that lies in one block is written at once; the parts of others go to scratch memory, and the block that arrives last
(a counter a pair) adds them up in the order of the keys, so that results do not depend on timing. A block begins with the
pair that it does not finish, so that the launch does not end with a merge.

Reached on one H200, 2026-12-01, 32 heads over 8, head size 128, us (GB/s of K + V), bench/kernels/attention_decode.py:
1 x 4096 11.3, 8 x 4096 42.4, 64 x 1024 72.6 (3698), 64 x 4096 260 (4127), 256 x 1024 264 (4071), 256 x 4096 1012 (4245, and the
card reads 4264). What was tried is in docs/kernels/attention.md.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from zhilight.driver.compiler import Capability, Kernel
from zhilight.driver.dtype import DType, bfloat16, float16
from zhilight.driver.launcher import BoundLaunch
from zhilight.driver.tensor import Layout
from zhilight.errors import ShapeError
from zhilight.kernels.attention_decode_kernel import MAX_SEQUENCES, attention_decode_kernel
from zhilight.kernels.attention_prefill import HEAD_DIMS, check_addresses, check_layouts
from zhilight.kernels.attention_tiles import LOG2_E
from zhilight.kernels.runtime import STEP_PLANS, Runtime

RING_BYTES = 144 << 10
"""Copies in flight an SM beyond which nothing is gained."""
SHARED_LIMITS = {(8, 0): 164 << 10, (8, 7): 164 << 10, (9, 0): 228 << 10, (10, 0): 228 << 10}
"""Bytes of shared memory an SM, by capability; 100 KB elsewhere. Of these each block costs 1 KB more than it asks for."""
FEW_PAIRS = 32
"""Below as many (sequence, kv head) pairs, one block of 8 warps an SM: half as many parts to add up as with two of 4."""


@lru_cache(maxsize=1 << 10)
def tiling(head_dim: int, group: int, pairs: int, shared_limit: int) -> tuple[int, int, int, int]:
    """(warps, stages, passes, blocks an SM) for a device with that much shared memory an SM (bytes)."""
    passes = next(p for p in (1, 2, 3, 4, 5, 6, 8) if head_dim % (8 * p) == 0 and group * head_dim <= 512 * p)
    for warps, blocks in ((4, 2), (8, 1), (4, 1), (2, 1)):
        fixed = warps * (group * (4 * head_dim // passes + 32) + 16 * 8) + 4 * MAX_SEQUENCES
        stage = warps * 2 * 16 * (2 * head_dim + 16)
        stages = min(4, (shared_limit // blocks - 1024 - fixed) // stage, max(2, RING_BYTES // blocks // stage))
        if stages >= 2 and (blocks == 1 or pairs >= FEW_PAIRS):
            break
    return warps, stages, passes, blocks


def attention_decode(runtime: Runtime, qkv: Any, kv_cache: Any, block_tables: Any, context_lens: Any, out: Any,
                     num_sequences: int, num_heads: int, num_kv_heads: int, scale: float, max_context_len: int,
                     window: int | None = None, soft_cap: float | None = None, overlap: bool = False,
                     shape: tuple[int, int, int, int] | None = None) -> None:
    """Attention of the first num_sequences rows, one query token each.

    max_context_len: bound of context_lens for the life of a captured graph; the grid depends on it, not on the lengths.
    shape: a result of `tiling`, for measurements. Raises ShapeError.
    """
    check_addresses(qkv, out)
    parts = _plan(qkv.layout, kv_cache.layout, block_tables.layout, context_lens.layout, out.layout, num_sequences, num_heads,
                  num_kv_heads, scale, max_context_len, window, soft_cap, overlap, shape, runtime.capability,
                  runtime.multiprocessors)
    for part in parts:
        part.launch(runtime.stream, qkv.address + part.qkv, kv_cache.address, block_tables.address + part.block_tables,
                    context_lens.address + part.context_lens, out.address + part.out, runtime.scratch(part.scratch_bytes),
                    runtime.counters(part.counters))


class Part(NamedTuple):
    """The launch of up to MAX_SEQUENCES sequences: where its part of each array begins, in bytes, and what it needs."""

    launch: BoundLaunch
    qkv: int
    block_tables: int
    context_lens: int
    out: int
    scratch_bytes: int
    counters: int


@lru_cache(maxsize=STEP_PLANS)
def _plan(qkv: Layout, kv_cache: Layout, block_tables: Layout, context_lens: Layout, out: Layout, num_sequences: int,
          num_heads: int, num_kv_heads: int, scale: float, max_context_len: int, window: int | None, soft_cap: float | None,
          overlap: bool, shape: tuple[int, int, int, int] | None, capability: Capability, multiprocessors: int) -> list[Part]:
    """The launches for arrays of these layouts."""
    head_dim, block_size = check_layouts(qkv, kv_cache, block_tables, out, num_heads, num_kv_heads, window, soft_cap)
    if num_sequences > min(qkv.shape[0], out.shape[0], block_tables.shape[0], context_lens.shape[0]):
        raise ShapeError(f"num_sequences is {num_sequences}; qkv has {qkv.shape[0]} rows, out {out.shape[0]}, block_tables "
                         f"{block_tables.shape[0]}, context_lens {context_lens.shape[0]}.")
    overlap = overlap and capability[0] >= 9
    group = num_heads // num_kv_heads
    warps, stages, passes, blocks = shape or tiling(head_dim, group, min(num_sequences, MAX_SEQUENCES) * num_kv_heads,
                                                    SHARED_LIMITS.get(capability[:2], 100 << 10))
    kernel = attention_decode_kernel(qkv.dtype, head_dim, block_size, group, window is not None, soft_cap is not None, overlap,
                                     warps, stages, passes, blocks)
    inner, outer = (scale / soft_cap, soft_cap) if soft_cap else (1.0, scale)
    parts = []
    for first in range(0, num_sequences, MAX_SEQUENCES):
        count = min(MAX_SEQUENCES, num_sequences - first)
        tiles = max(1, count * num_kv_heads * -(-max_context_len // (16 * warps)))
        grid = min(multiprocessors * blocks, tiles, (1 << 32) // tiles - 1)   # block * tiles is 32 bits
        numbers = (qkv.strides[0], out.strides[0], block_tables.strides[0], count, num_kv_heads, outer * LOG2_E, inner,
                   window or 0)
        launch = BoundLaunch(kernel, grid, numbers, overlap)
        parts.append(Part(launch, first * qkv.strides[0] * 2, first * block_tables.strides[0] * 4, first * 4,
                          first * out.strides[0] * 2, grid * 2 * (group * head_dim + 2 * group) * 4, count * num_kv_heads))
    return parts


def catalogue() -> Iterator[Kernel]:
    """Every head size, and each switch once."""
    for head_dim in HEAD_DIMS:
        yield _catalogued(bfloat16, head_dim, 64, 4, False, False)
    for block_size in (16, 32, 128):
        yield _catalogued(bfloat16, 128, block_size, 4, False, False)
    for group in (1, 7, 8, 16):
        yield _catalogued(bfloat16, 128, 64, group, False, False)
    yield _catalogued(float16, 128, 64, 4, False, False)
    yield _catalogued(bfloat16, 128, 64, 4, True, True)
    for pairs in (1, FEW_PAIRS):  # as on Hopper
        yield attention_decode_kernel(bfloat16, 128, 64, 4, False, False, False, *tiling(128, 4, pairs, 228 << 10))


def _catalogued(dtype: DType, head_dim: int, block_size: int, group: int, windowed: bool, capped: bool) -> Kernel:
    return attention_decode_kernel(dtype, head_dim, block_size, group, windowed, capped, False,
                                   *tiling(head_dim, group, FEW_PAIRS, 100 << 10))
