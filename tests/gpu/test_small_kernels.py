"""Norm, rotary with cache write, embedding, token feed and silu·mul against the CPU backend on the same rounded inputs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from zhilight.driver import dtype as dtypes
from zhilight.kernels import activation, embedding, norm, rotary
from zhilight.ops.cpu import CpuOps

BF16, FP16 = dtypes.bfloat16, dtypes.float16
TOLERANCE = {BF16: 4e-3, FP16: 6e-4}
OVERLAP = [False, True]


@pytest.fixture
def rng():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def rounded(rng, shape, dtype, scale=1.0):
    """Random float32 values that `dtype` holds exactly."""
    return (rng.standard_normal(shape) * scale).astype(dtype.numpy).astype(np.float32)


def close(got, want, dtype):
    """Relative distance of a downloaded tensor from float32 values; NaN never passes."""
    got = got.astype(np.float64)
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tokens,hidden", [(1, 576), (3, 4096), (257, 8), (5, 2304), (33, 3584), (7, 8192), (2, 16384),
                                           (1030, 4096), (1024, 2304)])
def test_norms(runtime, put, poisoned, stream, rng, tokens, hidden, dtype, overlap):
    if overlap and runtime.capability < (9, 0):
        pytest.skip("programmatic dependent launch needs capability 9.0")
    x, residual, weight = (rounded(rng, shape, dtype) for shape in ((tokens, hidden), (tokens, hidden), (hidden,)))
    out = poisoned((tokens, hidden), dtype)
    norm.rms_norm(runtime, put(x, dtype), put(weight, dtype), 1e-5, out, overlap)
    close(out.to_host(stream), CpuOps().rms_norm(x, weight, 1e-5), dtype)

    on_device, out = put(residual, dtype), poisoned((tokens, hidden), dtype)
    norm.add_rms_norm(runtime, put(x, dtype), on_device, put(weight, dtype), 1e-5, 0.25, out, overlap)
    want = CpuOps().add_rms_norm(x, residual, weight, 1e-5, 0.25)  # updates residual in place
    close(on_device.to_host(stream), residual, dtype)
    close(out.to_host(stream), want, dtype)


@pytest.mark.parametrize("heads,kv_heads,head_dim,rotary_dim,block", [
    (32, 8, 128, 128, 64), (9, 3, 64, 64, 16), (4, 4, 80, 80, 32), (28, 4, 128, 64, 128), (2, 1, 256, 256, 64),
    (3, 3, 96, 32, 16)])
@pytest.mark.parametrize("overlap", OVERLAP)
def test_rotary_and_cache(runtime, put, poisoned, stream, rng, heads, kv_heads, head_dim, rotary_dim, block, overlap):
    if overlap and runtime.capability < (9, 0):
        pytest.skip("programmatic dependent launch needs capability 9.0")
    tokens, blocks, dtype = 19, 11, BF16
    width = (heads + 2 * kv_heads) * head_dim
    qkv = rounded(rng, (tokens, width), dtype)
    cache = rounded(rng, (blocks, 2, kv_heads, block, head_dim), dtype)
    slots = rng.permutation(blocks * block)[:tokens].astype(np.int64)
    slots[4] = -1
    positions = rng.integers(0, 500, tokens).astype(np.int32)
    angles = rng.uniform(-3, 3, (500, rotary_dim // 2))
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)

    on_device, cache_device = put(qkv, dtype), put(cache, dtype)
    rotary.rotary_and_cache(runtime, on_device, put(positions), put(slots), put(table), cache_device, heads, kv_heads, overlap)
    step = SimpleNamespace(positions=positions, slot_mapping=slots)
    CpuOps().rotary_and_cache(qkv, step, table, cache, heads, kv_heads)
    close(on_device.to_host(stream)[:, : heads * head_dim], qkv[:, : heads * head_dim], dtype)
    close(cache_device.to_host(stream), cache, dtype)


def test_rotary_writes_beyond_two_billion_elements(runtime, pool, put, stream, rng):
    """The last block of a cache of 2^31 + elements: its address needs 64 bits."""
    heads, kv_heads, head_dim, block = 1, 1, 128, 64
    blocks = 2**31 // (2 * kv_heads * block * head_dim) + 2
    cache = pool.allocate("kv", (blocks, 2, kv_heads, block, head_dim), BF16)
    qkv = rounded(rng, (1, 3 * head_dim), BF16)
    table = np.concatenate((np.ones((1, 64)), np.zeros((1, 64))), axis=1).astype(np.float32)
    slot = np.array([blocks * block - 1], np.int64)
    rotary.rotary_and_cache(runtime, put(qkv, BF16), put(np.zeros(1, np.int32)), put(slot), put(table), cache, heads, kv_heads)
    last = cache[blocks - 1].to_host(stream).astype(np.float32)
    np.testing.assert_array_equal(last[0, 0, -1], qkv[0, head_dim : 2 * head_dim])
    np.testing.assert_array_equal(last[1, 0, -1], qkv[0, 2 * head_dim :])


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize("rows,hidden", [(1, 4096), (301, 576), (17, 8)])
def test_embedding(runtime, put, poisoned, stream, rng, rows, hidden, scale):
    table = rounded(rng, (1000, hidden), BF16)
    ids = rng.integers(0, 1000, rows).astype(np.int32)
    out = poisoned((rows, hidden), BF16)
    embedding.embedding(runtime, put(table, BF16), put(ids), out, scale)
    close(out.to_host(stream), table[ids] * np.float32(scale), BF16)


def test_feed_tokens(runtime, put, stream):
    tokens = put(np.arange(100, 110, dtype=np.int32))
    embedding.feed_tokens(runtime, tokens, put(np.array([3, -1, 7], np.int32)), put(np.array([5, 6], np.int32)),
                          put(np.array([1, 0, 0], np.int32)))
    assert tokens.to_host(stream).tolist() == [100, 101, 102, 6, 104, 105, 106, 5, 108, 109]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tokens,width", [(1, 28672), (77, 3072), (3, 8), (5, 37888)])
def test_silu_mul(runtime, put, poisoned, stream, rng, tokens, width, dtype):
    x = rounded(rng, (tokens, width), dtype, 4.0)
    out = poisoned((tokens, width // 2), dtype)
    activation.silu_mul(runtime, put(x, dtype), out)
    close(out.to_host(stream), CpuOps().silu_mul(x), dtype)
