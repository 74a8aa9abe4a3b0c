"""Norm, rotary with cache write, embedding, token feed and silu·mul, thread by thread without a GPU, against the CPU backend on
the same rounded inputs. The host functions run too, so plans and grids are covered."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from emulation import Emulator

from zhilight.driver.dtype import DType, bfloat16, float16
from zhilight.kernels import activation, embedding, norm, rotary
from zhilight.ops.cpu import CpuOps

ROUNDING = {bfloat16: 2.0**-8, float16: 2.0**-11}
"""The largest relative error of rounding to nearest."""
BEFORE = 7
"""What outputs hold before: a stray write of what was never set is NaN, so NaN would hide it."""


@pytest.fixture
def emulator(monkeypatch) -> Emulator:
    emulator = Emulator()
    emulator.install(monkeypatch, activation, embedding, norm, rotary)
    return emulator


def rounded(shape: tuple[int, ...], dtype: DType, scale: float = 1.0) -> np.ndarray:
    """Random values of `dtype`, the same for the same shape."""
    return (np.random.default_rng(shape).standard_normal(shape) * scale).astype(dtype.numpy)


def padded(array: np.ndarray, columns: int) -> np.ndarray:
    """The array with NaN columns after its own."""
    out = np.full((array.shape[0], array.shape[1] + columns), np.nan, array.dtype)
    out[:, :array.shape[1]] = array
    return out


def assert_rounded(got: np.ndarray, want: np.ndarray, dtype: DType) -> None:
    """Each value is the float32 one rounded to `dtype`, give or take a few float32 roundings before."""
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=1.01 * ROUNDING[dtype], atol=1e-7)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit, so that NaN is equal to itself."""
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("tokens,hidden,dtype", [
    (3, 512, bfloat16),     # two warps, each thread a vector
    (2, 584, float16),      # 73 vectors for 96 threads
    (2, 8, float16),        # one vector, one warp: no reduction over the block
    (1, 8200, bfloat16),    # more vectors than a block has threads
], ids=str)
@pytest.mark.parametrize("add", [False, True], ids=["alone", "add"])
@pytest.mark.parametrize("many", [False, True], ids=["few rows", "many rows"])
def test_norms(emulator, monkeypatch, tokens, hidden, dtype, add, many):
    monkeypatch.setattr(norm, "MANY_ROWS", 1 if many else 1000)
    x, weight = rounded((tokens, hidden), dtype), rounded((hidden,), dtype)
    residual = rounded((tokens, hidden + 1), dtype, 2.0)[:, 1:].copy()
    given = emulator.tensor(padded(x, 8))[:, :hidden]
    out = emulator.tensor(np.full((tokens, hidden + 16), BEFORE, dtype.numpy))
    summed = emulator.tensor(residual)
    if add:
        norm.add_rms_norm(emulator.runtime, given, summed, emulator.tensor(weight), 0.25, 0.3, out[:, :hidden])
        want = residual.astype(np.float32) + x.astype(np.float32) * np.float32(0.3)
        assert_rounded(emulator.array(summed), want, dtype)
        x = emulator.array(summed)  # the norm is of what was stored
    else:
        norm.rms_norm(emulator.runtime, given, emulator.tensor(weight), 0.25, out[:, :hidden])
        assert_same(emulator.array(summed), residual)
    got = emulator.array(out)
    assert_rounded(got[:, :hidden], CpuOps().rms_norm(x.astype(np.float32), weight.astype(np.float32), 0.25), dtype)
    assert (got[:, hidden:] == BEFORE).all(), "wrote beyond the row"


@pytest.mark.parametrize("heads,kv_heads,head_dim,rotary_dim,dtype", [
    (4, 2, 64, 64, bfloat16), (8, 1, 48, 16, float16), (16, 2, 128, 128, bfloat16), (4, 3, 96, 32, bfloat16)], ids=str)
@pytest.mark.parametrize("heads_a_thread", [1, 4])
def test_rotary_and_cache(emulator, monkeypatch, heads, kv_heads, head_dim, rotary_dim, dtype, heads_a_thread):
    """The last case but one has more items than a block has threads. Exact: the CPU rounds in the same places."""
    monkeypatch.setattr(rotary, "MANY_TOKENS", 1 if heads_a_thread == 4 else 1000)
    rng, tokens, block = np.random.default_rng(heads), 5, 16
    width, rotated = (heads + 2 * kv_heads) * head_dim, heads * head_dim
    qkv, cache = rounded((tokens, width), dtype), rounded((3, 2, kv_heads, block, head_dim), dtype)
    slots = np.array([17, -1, 0, 47, -1], np.int64)
    positions = rng.integers(0, 50, tokens).astype(np.int32)
    angles = rng.uniform(-3, 3, (50, rotary_dim // 2))
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)

    given, cached = emulator.tensor(padded(qkv, 8)), emulator.tensor(cache)
    rotary.rotary_and_cache(emulator.runtime, given[:, :width], emulator.tensor(positions), emulator.tensor(slots),
                            emulator.tensor(table), cached, heads, kv_heads)
    want, want_cache = qkv.astype(np.float32), cache.astype(np.float32)
    step = SimpleNamespace(positions=positions, slot_mapping=slots)
    CpuOps().rotary_and_cache(want, step, table, want_cache, heads, kv_heads)
    qkv[:, :rotated] = want[:, :rotated].astype(dtype.numpy)  # k and v stay as they were in qkv
    assert_same(emulator.array(given), padded(qkv, 8))
    assert_same(emulator.array(cached), want_cache.astype(dtype.numpy))


@pytest.mark.parametrize("hidden,dtype", [(8, float16), (1032, bfloat16)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_embedding(emulator, hidden, dtype, scale):
    table, ids = rounded((9, hidden), dtype), np.array([8, 0, 3, 3], np.int32)
    out = emulator.tensor(np.full((5, hidden), BEFORE, dtype.numpy))
    embedding.embedding(emulator.runtime, emulator.tensor(padded(table, 8))[:, :hidden], emulator.tensor(ids), out[:4], scale)
    got = emulator.array(out)
    want = CpuOps().embedding(ids, table.astype(np.float32), scale)
    assert_same(got[:4], want.astype(dtype.numpy))
    assert (got[4] == BEFORE).all(), "wrote beyond the rows"


def test_feed_tokens(emulator):
    """More entries than a block has threads."""
    rng, count = np.random.default_rng(0), 300
    tokens, sampled = np.arange(1000, 1400, dtype=np.int32), np.arange(100, dtype=np.int32)
    rows, sources = rng.permutation(400)[:count].astype(np.int32), rng.integers(0, 100, count).astype(np.int32)
    rows[::7] = -1
    on_device = emulator.tensor(tokens)
    embedding.feed_tokens(emulator.runtime, on_device, emulator.tensor(rows), emulator.tensor(sampled),
                          emulator.tensor(sources))
    tokens[rows[rows >= 0]] = sampled[sources[rows >= 0]]
    assert_same(emulator.array(on_device), tokens)


@pytest.mark.parametrize("tokens,width,dtype", [(1, 2056, bfloat16), (3, 24, float16)], ids=str)
def test_silu_mul(emulator, tokens, width, dtype):
    x = rounded((tokens, width), dtype, 3.0)
    x[0, :4] = 100, 2, -100, 2  # exp overflows
    out = emulator.tensor(np.full((tokens + 1, width // 2), BEFORE, dtype.numpy))
    activation.silu_mul(emulator.runtime, emulator.tensor(padded(x, 8))[:, :width], out[:tokens])
    got = emulator.array(out)
    assert_rounded(got[:tokens], CpuOps().silu_mul(x.astype(np.float32)), dtype)
    assert (got[tokens] == BEFORE).all(), "wrote beyond the rows"
