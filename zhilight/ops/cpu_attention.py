"""Paged attention with NumPy: decode in batches of sequences, prefill in tiles of queries, which all threads share.

queries, out : [T, Hq, D] float32;  kv_cache : [B, 2, Hkv, P, D]
Softmax is over float32 scores with the row's maximum subtracted.
"""

from __future__ import annotations

import numpy as np

from zhilight.ops.base import Step
from zhilight.ops.cpu_threads import Threads

_GATHERED = 1 << 20
"""Keys (and as many values) gathered at a time by decode, in elements: 4 MB, which stays in cache."""
_SCORES = 1 << 20
"""Scores of one prefill tile, in elements: 4 MB."""
_NEVER = np.float32(-np.inf)


def decode_attention(queries: np.ndarray, step: Step, kv_cache: np.ndarray, scale: float, window: int | None,
                     soft_cap: float | None, out: np.ndarray) -> None:
    """The last token of each of the first len(queries) sequences. Those of like length share one batched product."""
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    context_lens = step.host_context_lens[:len(queries)]
    out[context_lens == 0] = 0
    order = np.argsort(context_lens, kind="stable")
    order = order[context_lens[order] > 0]
    start = 0
    while start < order.size:
        end = start + 1
        while end < order.size:
            padded = (end + 1 - start) * int(context_lens[order[end]])
            wasted = padded - int(context_lens[order[start:end + 1]].sum())
            if padded * num_kv_heads * head_dim > _GATHERED or 4 * wasted > padded:
                break
            end += 1
        _decode_group(queries, step, order[start:end], kv_cache, scale, window, soft_cap, out)
        start = end


def _decode_group(queries: np.ndarray, step: Step, group: np.ndarray, kv_cache: np.ndarray, scale: float,
                  window: int | None, soft_cap: float | None, out: np.ndarray) -> None:
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    lens = step.host_context_lens[group]
    first_block = max(0, int(lens.min()) - window) // block_size if window else 0
    last_block = -(-int(lens.max()) // block_size)
    blocks = step.block_tables[group, first_block:last_block]                        # [S, W]
    scores_shape = (*blocks.shape, num_kv_heads, -1, block_size)

    grouped = queries[group].reshape(len(group), 1, num_kv_heads, -1, head_dim) * np.float32(scale)
    scores = np.matmul(grouped, kv_cache[blocks, 0].swapaxes(-1, -2))                # [S, W, Hkv, G, P]
    if soft_cap:
        scores = _cap(scores, soft_cap)
    positions = np.arange(first_block * block_size, last_block * block_size).reshape(1, -1, block_size)
    hidden = positions >= lens[:, None, None]
    if window:
        hidden |= positions < (lens - window)[:, None, None]
    np.copyto(scores, _NEVER, where=hidden[:, :, None, None, :])
    scores -= scores.max(axis=(1, 4), keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=(1, 4))[..., None]                                       # [S, Hkv, G, 1]
    weighted = np.matmul(scores.reshape(scores_shape), kv_cache[blocks, 1]).sum(axis=1)
    out[group] = (weighted / total).reshape(len(group), -1, head_dim)


def prefill_attention(queries: np.ndarray, step: Step, sequence: int, kv_cache: np.ndarray, scale: float,
                      window: int | None, soft_cap: float | None, out: np.ndarray, threads: Threads) -> None:
    """One sequence's queries, the last of its context, tile by tile: a tile meets no key after its last query."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    first_row, end_row = (int(row) for row in step.host_query_start[sequence:sequence + 2])
    context = int(step.host_context_lens[sequence])
    if context == 0 or first_row == end_row:
        out[first_row:end_row] = 0
        return
    first_position = context - (end_row - first_row)
    group = queries.shape[1] // num_kv_heads
    tile = max(1, _SCORES // (group * context))

    def attend(piece: tuple[int, int]) -> None:
        kv_head, row = piece
        heads = slice(kv_head * group, (kv_head + 1) * group)
        rows = min(tile, end_row - row)
        position = first_position + row - first_row                                  # of the tile's first query
        first_block = max(0, position - window + 1) // block_size if window else 0
        blocks = step.block_tables[sequence, first_block:-(-(position + rows) // block_size)]
        first_key, keys = first_block * block_size, position + rows - first_block * block_size
        query = queries[row:row + rows, heads].transpose(1, 0, 2) * np.float32(scale)
        key = kv_cache[blocks, 0, kv_head].reshape(-1, head_dim)[:keys]
        value = kv_cache[blocks, 1, kv_head].reshape(-1, head_dim)[:keys]
        scores = (query.reshape(-1, head_dim) @ key.T).reshape(group, rows, keys)
        if soft_cap:
            scores = _cap(scores, soft_cap)
        _mask_causal(scores, position - first_key, window)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1)[..., None]
        weighted = (scores.reshape(-1, keys) @ value).reshape(group, rows, head_dim)
        out[row:row + rows, heads] = (weighted / total).transpose(1, 0, 2)

    pieces = [(kv_head, row) for kv_head in range(num_kv_heads) for row in range(first_row, end_row, tile)]
    threads.run(attend, pieces)


def _mask_causal(scores: np.ndarray, first: int, window: int | None) -> None:
    """scores [G, rows, keys]; the query of row r stands at key first + r, the last row's at the last key."""
    _, rows, keys = scores.shape
    query, key = np.arange(first, first + rows)[:, None], np.arange(first + 1, keys)
    np.copyto(scores[:, :, first + 1:], _NEVER, where=key > query)
    if window and first + rows > window:
        key = np.arange(max(0, first + rows - window))
        np.copyto(scores[:, :, :key.size], _NEVER, where=key <= query - window)


def _cap(scores: np.ndarray, soft_cap: float) -> np.ndarray:
    scores /= np.float32(soft_cap)
    np.tanh(scores, out=scores)
    scores *= np.float32(soft_cap)
    return scores
