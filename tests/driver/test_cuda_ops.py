"""Steps planned by the CUDA backend on the fake driver: every launch is recorded, none is run."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from zhilight.config.checkpoint import read_model_config
from zhilight.driver import dtype as dtypes
from zhilight.driver.compiler import LaunchRecorder
from zhilight.driver.memory import MemoryPool
from zhilight.kernels.runtime import TENSOR_MAP_BYTES, Runtime
from zhilight.models.registry import build_model
from zhilight.ops import cuda, staging
from zhilight.ops.base import StepArrays
from zhilight.weights.source import ModelSource

CONFIG = tiny.MODELS["llama31"] | {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1003, "max_position_embeddings": 2048}


class Done:
    """An event of a stream that does everything at once."""

    def record(self, stream: object) -> Done:
        return self

    def done(self) -> bool:
        return True


@pytest.fixture
def ops(fake, fake_device, monkeypatch):
    monkeypatch.setattr(cuda, "Stream", lambda: SimpleNamespace(handle=7, synchronize=lambda: None))
    monkeypatch.setattr(staging, "Event", Done)
    monkeypatch.setattr(Runtime, "_zero", lambda self, address, words: None)
    monkeypatch.setattr(Runtime, "_make_map", lambda self, *_: self._map_memory + len(self._maps) * TENSOR_MAP_BYTES)
    monkeypatch.setattr(type(fake), "cuMemcpyHtoDAsync", lambda self, *_: (0,), raising=False)
    pool = MemoryPool(fake_device, 1 << 30, virtual=False)
    made = cuda.CudaOps(fake_device, pool, dtypes.bfloat16, 64, CONFIG["vocab_size"])
    made.runtime.stream = LaunchRecorder()
    return made


def random_step(rng: np.random.Generator, most_tokens: int) -> StepArrays:
    tokens = int(rng.integers(1, most_tokens))
    sequences = int(rng.integers(1, min(64, tokens) + 1))
    start = np.linspace(0, tokens, sequences + 1).astype(np.int32)
    return StepArrays(np.zeros(tokens, np.int32), np.zeros(tokens, np.int32), np.full(tokens, -1, np.int64),
                      np.zeros((sequences, 40), np.int32), np.diff(start), start, start[1:] - 1, 0)


def test_steps_of_any_size_need_few_tensor_maps(ops, tmp_path):
    """A map is made for an address and a shape; a server that runs for weeks meets every number of tokens."""
    import json

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = build_model(read_model_config(ModelSource("folder", tmp_path)))
    model.materialize(ops)
    cache = ops.kv_cache(CONFIG["num_hidden_layers"], 1, 2, 64, 64)
    rng = np.random.default_rng(11)
    counts = []
    for _ in range(2):
        for _ in range(300):
            with ops.scope():
                model(ops.prepare_step(random_step(rng, 8192)), cache)
        counts.append(ops.runtime.num_tensor_maps)
    assert counts[1] < 1000, counts
    assert {kernel.call.factory for kernel in ops.runtime.stream.kernels} >= {
        "rms_norm_kernel", "rotary_kernel", "gemm_sm90_kernel", "embedding_kernel"}


def test_similar_sizes_share_workspace(ops):
    """Rows are rounded up by an eighth at most, and a tensor has the shape that was asked for."""
    for rows in (1, 2, 16, 17, 100, 1000, 8191):
        with ops.scope():
            first = ops.empty((rows, 8))
            second = ops.empty((rows, 8))
            assert first.shape == (rows, 8)
            taken = (second.address - first.address) // 16
            assert rows <= taken + 63 and taken <= rows * 9 / 8 + 64
