"""Before the KV cache takes what is left of a GPU's memory: compile what the model needs, and run the worst step.

The kernels of a step are found by going through the model with a recorder in the stream's place, so that a cold cache is
filled by all cores at once instead of kernel by kernel. The worst step (a full token budget, logits for every sequence) then
maps the workspace that steps will ever take, and what the pool has left is the KV cache's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from zhilight.config.engine import EngineConfig
from zhilight.config.model import ModelConfig
from zhilight.driver import dtype as dtypes
from zhilight.driver.compiler import Kernel, LaunchRecorder, compile_all
from zhilight.engine.graph_runner import padded_batches
from zhilight.engine.sampler import penalty_bytes
from zhilight.engine.scheduler import MAX_PROMPT_ROWS
from zhilight.errors import DeviceError
from zhilight.models.model import Model
from zhilight.ops.base import SamplingBatch, StepArrays
from zhilight.ops.cuda import CudaOps

log = logging.getLogger(__name__)

MARGIN_BYTES = 256 << 20
"""Left unmapped by the KV cache: for graphs, modules and further tensor maps."""
PREFILL_TOKENS = (1, *range(8, 65, 8), *(1 << power for power in range(7, 17)))
"""Steps whose kernels between them serve every number of tokens: the GEMMs for few tokens differ by eights."""


def warm_up(config: EngineConfig, model_config: ModelConfig, model: Model, ops: CudaOps) -> int:
    """Compile, run the worst step, and return the bytes that the KV cache may take."""
    cache = ops.kv_cache(model_config.num_layers, 1, model_config.num_kv_heads, config.block_size, model_config.head_dim)
    worst = _prefill(config.max_num_batched_tokens, config.max_num_seqs, MAX_PROMPT_ROWS)
    steps = [_decode(size) for size in padded_batches(config.max_num_seqs)]
    steps += [_prefill(count, 1) for count in PREFILL_TOKENS if count <= config.max_num_batched_tokens]
    _compile([*steps, worst], model, ops, cache)
    start = time.monotonic()
    _run(worst, model, ops, cache)
    ops.synchronize()
    for layer in cache:
        ops.pool.release(layer)
    log.info("worst step (%d tokens, %d sequences) ran in %.2f s", config.max_num_batched_tokens, config.max_num_seqs,
             time.monotonic() - start)
    return ops.pool.free_bytes - penalty_bytes(config.max_num_seqs, model_config.vocab_size) - MARGIN_BYTES


def _compile(steps: list[StepArrays], model: Model, ops: CudaOps, cache: list) -> None:
    """Bring the kernels of these steps into the disk cache, on all cores, and load them."""
    start = time.monotonic()
    with _recording(ops) as kernels:
        for step in steps:
            _run(step, model, ops, cache)
    capability = ops.runtime.capability
    missing = [kernel for kernel in kernels if not kernel.is_cached(capability)]
    if missing:
        failed = [result for result in compile_all(missing, capability) if result.error]
        if failed:
            raise DeviceError(f"{len(failed)} of {len(missing)} kernels do not compile here. `zhilight doctor` shows the "
                              f"toolchain. The first, {failed[0].name}: {failed[0].error}")
    for kernel in kernels:
        kernel.load()  # a module that is loaded between steps waits until the device has nothing to do
    log.info("%d kernels ready, %d of them compiled now, in %.2f s", len(kernels), len(missing), time.monotonic() - start)


@contextmanager
def _recording(ops: CudaOps) -> Iterator[dict[Kernel, None]]:
    recorder, stream = LaunchRecorder(), ops.runtime.stream
    ops.runtime.stream = recorder
    try:
        yield recorder.kernels
    finally:
        ops.runtime.stream = stream


def _run(arrays: StepArrays, model: Model, ops: CudaOps, cache: list) -> None:
    with ops.scope():
        logits = model.forward(ops.prepare_step(arrays), cache)
        rows = len(arrays.context_lens)
        logits = logits[:rows]
        ops.empty((rows, logits.strides[0]), dtypes.float32)  # the copy that penalties make beside log-probabilities
        for greedy in (True, False):
            with ops.scope():
                ops.sample(logits, _sampling(ops, rows, greedy))


def _sampling(ops: CudaOps, rows: int, greedy: bool) -> SamplingBatch:
    def array(value: float, dtype: dtypes.DType):
        target = ops.empty((rows,), dtype)
        ops.upload(target, np.full(rows, value, dtype.numpy))
        return target

    return SamplingBatch(array(0.0 if greedy else 0.8, dtypes.float32), array(50, dtypes.int32), array(0.9, dtypes.float32),
                         array(0.0, dtypes.float32), array(1, dtypes.uint64), array(1, dtypes.int64), all_greedy=greedy,
                         num_logprobs=0)


def _decode(count: int) -> StepArrays:
    ones = np.ones(count, np.int32)
    return StepArrays(0 * ones, 0 * ones, np.full(count, -1, np.int64), np.zeros((count, 1), np.int32), ones,
                      np.arange(count + 1, dtype=np.int32), np.arange(count, dtype=np.int32), count)


def _prefill(num_tokens: int, num_sequences: int, prompt_rows: int = 0) -> StepArrays:
    """`num_tokens` prompt tokens in equal parts, each of which wants logits, and `prompt_rows` more that do. All read block 0;
    nothing is written."""
    num_sequences = min(num_sequences, num_tokens)
    start = np.linspace(0, num_tokens, num_sequences + 1).astype(np.int32)
    lengths = np.diff(start)
    positions = (np.arange(num_tokens) - np.repeat(start[:-1], lengths)).astype(np.int32)
    width = int(lengths.max()) // 16 + 1
    return StepArrays(np.zeros(num_tokens, np.int32), positions, np.full(num_tokens, -1, np.int64),
                      np.zeros((num_sequences, width), np.int32), lengths.astype(np.int32), start,
                      np.concatenate((start[1:] - 1, np.arange(min(prompt_rows, num_tokens), dtype=np.int32))), 0)
