"""The mma.sync prefill attention's own Python function and assembly, thread by thread without a GPU, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import Emulator

from zhilight.driver.dtype import bfloat16
from zhilight.kernels import attention_prefill_sm80 as module
from zhilight.kernels.attention_tiles import LOG2_E

BF16 = bfloat16.numpy


@pytest.mark.parametrize("case", [
    {"contexts": [80], "queries": [70], "tiling": (2, 64, 4)},
    {"contexts": [97, 40], "queries": [33, 40], "tiling": (2, 64, 2), "block_size": 16, "heads": 2},
    {"contexts": [70, 33], "queries": [40, 1], "tiling": (1, 32, 2), "block_size": 32, "window": 20, "cap": 5.0},
    {"contexts": [129], "queries": [32], "tiling": (2, 64, 1), "head_dim": 128, "block_size": 128, "window": 50},
], ids=lambda case: "-".join(map(str, case["tiling"])))
def test_against_numpy(monkeypatch, case):
    contexts, queries, tiling = case["contexts"], case["queries"], case["tiling"]
    head_dim, block_size, heads = case.get("head_dim", 64), case.get("block_size", 64), case.get("heads", 1)
    window, cap, kv_heads = case.get("window"), case.get("cap"), 1
    emulator, rng = Emulator(), np.random.default_rng(sum(contexts))
    emulator.install(monkeypatch, module)

    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    qkv = (5 * rng.standard_normal((starts[-1], (heads + 2 * kv_heads) * head_dim))).astype(BF16)
    pages = [-(-context // block_size) for context in contexts]
    cache = np.full((sum(pages) + 1, 2, kv_heads, block_size, head_dim), np.nan, BF16)  # what no query sees must not matter
    tables = np.full((len(contexts), max(pages) + 1), sum(pages), np.int32)
    order, keys = list(rng.permutation(sum(pages))), []
    for index, context in enumerate(contexts):
        mine = [order.pop() for _ in range(pages[index])]
        tables[index, :pages[index]] = mine
        data = rng.standard_normal((2, context, kv_heads, head_dim)).astype(BF16)
        keys.append(data.astype(np.float32))
        for key in range(context):
            cache[mine[key // block_size], :, :, key % block_size] = data[:, key]
    out = np.full((starts[-1], heads * head_dim), 7, BF16)
    arrays = [emulator.tensor(a) for a in (qkv, cache, tables, np.array(contexts, np.int32), starts, out)]
    kernel = module.prefill_sm80_kernel(bfloat16, head_dim, block_size, window is not None, cap is not None, False, *tiling)
    tiles = sum(-(-count // (16 * tiling[0] * tiling[2])) for count in queries)
    scale = head_dim ** -0.5
    inner, outer = (scale / cap, cap) if cap else (1.0, scale)
    emulator.launch(kernel, tiles * heads, *arrays, qkv.shape[1], heads * head_dim, tables.shape[1], 0, len(contexts), heads,
                    kv_heads, outer * LOG2_E, inner, window or 0)

    got = emulator.array(arrays[-1]).astype(np.float32).reshape(-1, heads, head_dim)
    for index, (context, count) in enumerate(zip(contexts, queries, strict=True)):
        positions = np.arange(context - count, context)[:, None]
        seen = (np.arange(context) <= positions) & (np.arange(context) > positions - (window or context))
        for head in range(heads):
            q = qkv[starts[index]:starts[index + 1], head * head_dim:][:, :head_dim].astype(np.float32)
            s = scale * q @ keys[index][0, :, 0].T
            s = np.where(seen, cap * np.tanh(s / cap) if cap else s, -np.inf)
            weights = np.exp(s - s.max(1, keepdims=True))
            want = weights / weights.sum(1, keepdims=True) @ keys[index][1, :, 0]
            error = np.abs(got[starts[index]:starts[index + 1], head] - want).max()
            assert error < 0.03, f"sequence {index}, head {head}: error {error}"
