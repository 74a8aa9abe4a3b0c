"""Rotation, cache writes and paged attention of the CPU backend against per-token float64 loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zhilight.errors import ShapeError
from zhilight.ops import cpu_attention
from zhilight.ops.base import Step, StepArrays
from zhilight.ops.cpu import CpuOps

NUM_BLOCKS = 40


def make_step(ops: CpuOps, rng: np.random.Generator, queries: list[int], contexts: list[int], block_size: int,
              num_decodes: int) -> Step:
    """Sequences with `queries` new tokens of `contexts` in all, in scattered blocks."""
    blocks = iter(rng.permutation(np.arange(1, NUM_BLOCKS)))
    width = max(1, max(-(-c // block_size) for c in contexts))
    tables = np.zeros((len(queries), width), np.int32)
    positions, slots = [], []
    for i, (new, context) in enumerate(zip(queries, contexts, strict=True)):
        for j in range(-(-context // block_size)):
            tables[i, j] = next(blocks)
        for position in range(context - new, context):
            if position < 0:      # a graph's padding: one token of an empty sequence
                positions.append(0)
                slots.append(-1)
                continue
            positions.append(position)
            slots.append(int(tables[i, position // block_size]) * block_size + position % block_size)
    return ops.prepare_step(StepArrays(
        token_ids=np.zeros(sum(queries), np.int32), positions=np.array(positions), slot_mapping=np.array(slots),
        block_tables=tables, context_lens=np.array(contexts), query_start=np.cumsum([0, *queries]),
        logit_rows=np.empty(0), num_decodes=num_decodes))


def reference(qkv: np.ndarray, step: Step, cache: np.ndarray, num_heads: int, scale: float, window: int | None,
              soft_cap: float | None) -> np.ndarray:
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    out = np.zeros((step.num_tokens, num_heads, head_dim))
    for sequence in range(step.num_sequences):
        begin, end = step.query_start[sequence:sequence + 2]
        context = step.context_lens[sequence]
        if context == 0:
            continue
        for row in range(begin, end):
            position = context - (end - row)
            visible = range(max(0, position - window + 1) if window else 0, position + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                where = [(step.block_tables[sequence, p // block_size], p % block_size) for p in visible]
                keys = np.array([cache[b, 0, kv_head, o] for b, o in where], np.float64)
                values = np.array([cache[b, 1, kv_head, o] for b, o in where], np.float64)
                scores = keys @ qkv[row, head * head_dim:(head + 1) * head_dim].astype(np.float64) * scale
                if soft_cap:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values / weights.sum()
    return out.reshape(step.num_tokens, -1)


CASES = {
    "decode": ([1, 1, 1, 1], [1, 33, 5, 64], 4),
    "decode with padding": ([1, 1, 1], [17, 0, 0], 3),
    "prefill": ([20], [20], 0),
    "chunk after a cached prefix": ([13, 5], [50, 5], 0),
    "mixed": ([1, 1, 9, 30], [40, 3, 25, 30], 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (8, None), (1, None), (None, 5.0)])
def test_attention(case, heads, kv_heads, window, soft_cap, monkeypatch):
    monkeypatch.setattr(cpu_attention, "_SCORES", 700)       # several query tiles
    monkeypatch.setattr(cpu_attention, "_GATHERED", 2000)    # several decode groups
    ops, rng = CpuOps(poison=True), np.random.default_rng(1)
    queries, contexts, decodes = CASES[case]
    step = make_step(ops, rng, queries, contexts, 16, decodes)
    cache = rng.standard_normal((NUM_BLOCKS, 2, kv_heads, 16, 12)).astype(np.float32)
    qkv = rng.standard_normal((step.num_tokens, (heads + 2 * kv_heads) * 12)).astype(np.float32) * 2
    out = ops.attention(qkv, step, cache, heads, kv_heads, 0.3, window, soft_cap)
    np.testing.assert_allclose(out, reference(qkv, step, cache, heads, 0.3, window, soft_cap), rtol=1e-4, atol=1e-5)


def test_padding_rows_are_zero():
    ops, rng = CpuOps(), np.random.default_rng(1)
    step = make_step(ops, rng, [1, 1], [5, 0], 16, 2)
    cache = rng.standard_normal((NUM_BLOCKS, 2, 1, 16, 8)).astype(np.float32)
    out = np.full((2, 16), np.nan, np.float32)
    ops.attention(rng.standard_normal((2, 32)).astype(np.float32), step, cache, 2, 1, 1.0, out=out)
    assert np.isfinite(out[0]).all() and not out[1].any()


@pytest.mark.parametrize("rotary_dim", [12, 8])
@pytest.mark.parametrize("block_size", [16, 64])
def test_rotary_and_cache(rotary_dim, block_size):
    ops, rng = CpuOps(), np.random.default_rng(2)
    heads, kv_heads, dim = 4, 2, 12
    step = make_step(ops, rng, [1, 6], [9, 20], block_size, 1)
    frequencies = 100.0 ** -(np.arange(rotary_dim // 2) / (rotary_dim // 2))
    angles = np.arange(64)[:, None] * frequencies
    table = np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)
    cache = np.zeros((NUM_BLOCKS, 2, kv_heads, block_size, dim), np.float32)
    qkv = rng.standard_normal((7, (heads + 2 * kv_heads) * dim)).astype(np.float32)
    before = qkv.reshape(7, -1, dim).astype(np.float64)
    ops.rotary_and_cache(qkv, step, table, cache, heads, kv_heads)

    expected = before.copy()
    for t in range(7):
        for h in range(heads + kv_heads):
            for i in range(rotary_dim // 2):
                angle = step.positions[t] * frequencies[i]
                a, b = before[t, h, i], before[t, h, i + rotary_dim // 2]
                expected[t, h, i] = a * math.cos(angle) - b * math.sin(angle)
                expected[t, h, i + rotary_dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    np.testing.assert_allclose(qkv.reshape(expected.shape), expected, atol=1e-5)
    written = np.zeros_like(cache)
    for t, slot in enumerate(step.slot_mapping):
        written[slot // block_size, 0, :, slot % block_size] = expected[t, heads:heads + kv_heads]
        written[slot // block_size, 1, :, slot % block_size] = expected[t, heads + kv_heads:]
    np.testing.assert_allclose(cache, written, atol=1e-5)


def test_slot_minus_one_writes_nothing():
    ops, rng = CpuOps(), np.random.default_rng(2)
    step = make_step(ops, rng, [1, 1], [3, 0], 16, 2)
    cache = np.zeros((NUM_BLOCKS, 2, 1, 16, 4), np.float32)
    ops.rotary_and_cache(np.ones((2, 12), np.float32), step, np.ones((8, 4), np.float32), cache, 1, 1)
    assert np.count_nonzero(cache[:, 1].any(axis=(1, 3))) == 1


def test_wrong_head_counts_are_refused():
    ops, rng = CpuOps(), np.random.default_rng(2)
    step = make_step(ops, rng, [1], [3], 16, 1)
    cache = np.zeros((NUM_BLOCKS, 2, 2, 16, 4), np.float32)
    with pytest.raises(ShapeError, match="qkv"):
        ops.attention(np.ones((1, 24), np.float32), step, cache, 4, 2, 1.0)
    with pytest.raises(ShapeError, match="num_kv_heads"):
        ops.attention(np.ones((1, 24), np.float32), step, cache, 4, 1, 1.0)


def test_positions_beyond_the_table_are_refused():
    ops, rng = CpuOps(), np.random.default_rng(2)
    step = make_step(ops, rng, [1], [9], 16, 1)
    cache = np.zeros((NUM_BLOCKS, 2, 1, 16, 4), np.float32)
    with pytest.raises(ShapeError, match="positions"):
        ops.rotary_and_cache(np.ones((1, 12), np.float32), step, np.ones((8, 4), np.float32), cache, 1, 1)
