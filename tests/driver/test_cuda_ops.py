"""Steps planned by the CUDA backend on the fake driver: every launch is recorded, none is run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from zhilight.config.checkpoint import read_model_config
from zhilight.config.engine import EngineConfig
from zhilight.driver import dtype as dtypes
from zhilight.driver.compiler import Kernel, LaunchRecorder
from zhilight.driver.graph import Graph
from zhilight.driver.memory import MemoryPool
from zhilight.engine import warmup
from zhilight.engine.graph_runner import GraphRunner, padded_batches
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
    monkeypatch.setattr(Runtime, "_make_map", lambda self, *_: TENSOR_MAP_BYTES * (1 + len(self.tensor_maps)))
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


@pytest.fixture
def model(ops, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made = build_model(read_model_config(ModelSource("folder", tmp_path)))
    made.materialize(ops)
    return made


@pytest.fixture
def cache(ops):
    return ops.kv_cache(CONFIG["num_hidden_layers"], 40, 2, 64, 64)


def test_steps_of_any_size_need_few_tensor_maps(ops, model, cache):
    """A map is made for an address and a shape; a server that runs for weeks meets every number of tokens."""
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


def decode_step(count: int, blocks: int) -> StepArrays:
    ones = np.ones(count, np.int32)
    return StepArrays(7 * ones, 3 * ones, np.arange(count, dtype=np.int64), np.ones((count, blocks), np.int32), 4 * ones,
                      np.arange(count + 1, dtype=np.int32), np.arange(count, dtype=np.int32), count,
                      np.arange(count // 2, dtype=np.int32), np.arange(count // 2, dtype=np.int32))


def test_decode_graphs(ops, model, cache, monkeypatch):
    """All sizes are captured ahead; steps then replay them, at the addresses of the capture, whatever ran in between."""
    replays = []

    class Captured:
        num_nodes = 1

        def __init__(self, stream: object, work):
            work()

        def instantiate(self) -> SimpleNamespace:
            return SimpleNamespace(replay=lambda stream: replays.append(self))

        def close(self) -> None:
            pass

    monkeypatch.setattr(Graph, "capture", staticmethod(Captured))
    runner = GraphRunner(model, ops, cache, None, 20)
    runner.capture(progress=False)
    assert sorted(size for size, _ in runner.graphs) == padded_batches(20)
    rng = np.random.default_rng(2)
    for count in (1, 3, 20, 8, 17):
        with ops.scope():
            runner.forward(random_step(rng, 500), None)  # a step with prefill in between
        before = len(replays)
        with ops.scope():
            logits = runner.forward(decode_step(count, 2), ops.sampled)
            after = ops.empty((4, 4))
        assert logits.shape == (count, CONFIG["vocab_size"]) and len(replays) == before + 1
        assert after.address >= logits.address + 4 * logits.strides[0] * count  # sampling does not write over the logits
    assert len(runner.graphs) == len(padded_batches(20))  # nothing was captured again
    with ops.scope():
        runner.forward(decode_step(2, 33), ops.sampled)  # a context past the narrowest block tables
    assert (2, 64) in runner.graphs


def test_a_graphs_integers(ops, model, cache, monkeypatch):
    """What is not part of the step is padding: it writes no slot, reads no context and is fed nothing."""
    monkeypatch.setattr(Graph, "capture", staticmethod(
        lambda stream, work: (work(), SimpleNamespace(num_nodes=1, close=lambda: None, instantiate=lambda: SimpleNamespace(
            replay=lambda stream: None)))[1]))
    runner = GraphRunner(model, ops, cache, None, 16)
    with ops.scope():
        runner.forward(decode_step(16, 2), ops.sampled)
    with ops.scope():
        runner.forward(decode_step(13, 1), ops.sampled)
    (graph,) = runner.graphs.values()
    arrays = graph.arrays
    assert arrays.context_lens.tolist() == [4] * 13 + [0] * 3
    assert arrays.slot_mapping.tolist() == [*range(13), -1, -1, -1]
    assert arrays.feed_rows.tolist() == [*range(6)] + [-1] * 10


def test_warm_up_leaves_the_rest_to_the_kv_cache(ops, model, monkeypatch):
    """The kernels of every step size are known before the first runs, and the worst step has mapped its workspace."""
    asked = []
    monkeypatch.setattr(Kernel, "is_cached", lambda self, capability: False)
    monkeypatch.setattr(warmup, "compile_all", lambda kernels, capability: asked.extend(kernels) or [])
    loaded = set()
    monkeypatch.setattr(Kernel, "load", lambda self: loaded.add(self))
    config = EngineConfig("any", max_num_seqs=16, max_num_batched_tokens=512)
    monkeypatch.setattr(type(ops.device), "synchronize", lambda self: None)
    available = warmup.warm_up(config, model.config, model, ops)
    assert 0 < available < ops.pool.free_bytes
    known = set(asked)
    assert loaded == known
    ops.runtime.stream = LaunchRecorder()
    mapped = ops.pool.statistics()["workspace"].mapped
    rng = np.random.default_rng(4)
    cache = ops.kv_cache(CONFIG["num_hidden_layers"], 1, 2, config.block_size, 64)
    for most in [512] * 100 + [100] * 100:
        with ops.scope():
            step = random_step(rng, most)
            if len(step.context_lens) <= 16:
                model(ops.prepare_step(step), cache)
    assert ops.pool.statistics()["workspace"].mapped == mapped
    assert set(ops.runtime.stream.kernels) <= known  # nothing is left to compile while requests wait
