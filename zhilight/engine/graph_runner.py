"""Decode steps as CUDA graphs: one replay instead of some hundreds of launches.

A step in which every sequence decodes one token is padded to the next captured batch size and replayed. The graph reads its
integers from a buffer of its own, which one copy fills; tokens that the host has not seen yet are fed on the device inside
the graph. A size is captured when it is first met (some 10 ms); `capture` does it ahead.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from zhilight.driver import dtype as dtypes
from zhilight.driver.graph import Graph
from zhilight.engine.runner import Runner
from zhilight.errors import DeviceError
from zhilight.kernels.embedding import feed_tokens
from zhilight.ops.base import Array, StepArrays
from zhilight.ops.cuda import CudaOps, PackedStep

log = logging.getLogger(__name__)

_NARROWEST = 32
"""Blocks of the narrowest block table; wider ones are powers of two, so that contexts may grow a while between captures."""


def padded_batch(count: int) -> int:
    """The captured batch size for `count` sequences: 1, 2, 4, 8, then in steps that waste at most an eighth or so."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 128 else 16 if count <= 256 else 32
    return -(-count // step) * step


class GraphRunner(Runner):
    """A Runner on CUDA whose decode steps are graphs, for up to `max_batch` sequences."""

    def __init__(self, model, ops: CudaOps, kv_cache: list[Array], sampler, max_batch: int):
        super().__init__(model, ops, kv_cache, sampler)
        self._max_batch = max_batch
        self._graphs: dict[tuple[int, int], _DecodeGraph] = {}

    def forward(self, arrays: StepArrays, sampled: Array | None) -> Array:
        count = arrays.num_decodes
        if count != len(arrays.context_lens) or count > self._max_batch or len(arrays.logit_rows) != count:
            return super().forward(arrays, sampled)
        width = max(_NARROWEST, 1 << (arrays.block_tables.shape[1] - 1).bit_length())
        return self._graph(padded_batch(count), width).run(arrays, sampled)[:count]

    def capture(self, counts: list[int], context_len: int) -> float:
        """Capture the sizes that `counts` sequences of up to `context_len` tokens need. Returns the seconds it took."""
        start = time.monotonic()
        block = self.kv_cache[0].shape[3]
        width = max(_NARROWEST, 1 << (-(-context_len // block) - 1).bit_length())
        with self.ops.scope():
            for size in sorted({padded_batch(count) for count in counts if count <= self._max_batch}):
                with self.ops.scope():
                    self._graph(size, width).record()
        return time.monotonic() - start

    def _graph(self, size: int, width: int) -> _DecodeGraph:
        graph = self._graphs.get((size, width))
        if graph is None:
            graph = self._graphs[size, width] = _DecodeGraph(self, size, width)
        return graph


class _DecodeGraph:
    """One batch size and block-table width."""

    def __init__(self, runner: GraphRunner, size: int, width: int):
        self._runner = runner
        self._ops: CudaOps = runner.ops
        self._size, self._width = size, width
        block = runner.kv_cache[0].shape[3]
        padding = np.zeros(size, np.int32)
        # What does not change: one row a sequence, all of which want logits. The rest is padding: no slot, no context.
        self._arrays = StepArrays(
            token_ids=padding.copy(), positions=padding.copy(), slot_mapping=np.full(size, -1, np.int64),
            block_tables=np.zeros((size, width), np.int32), context_lens=padding.copy(),
            query_start=np.arange(size + 1, dtype=np.int32), logit_rows=np.arange(size, dtype=np.int32), num_decodes=size,
            feed_rows=np.full(size, -1, np.int32), feed_sources=padding.copy())
        self._packed = PackedStep(self._arrays, max_context_len=width * block)
        self._memory = self._ops.pool.allocate("weights", (self._packed.nbytes,), dtypes.uint8)
        self._graph = None

    def run(self, arrays: StepArrays, sampled: Array | None) -> Array:
        """Logits [size, V] of a step, of which the first rows are its own."""
        self._fill(arrays)
        self._ops.staging.copy_parts(self._memory.address, self._packed.parts, self._packed.nbytes)
        if self._graph is None:
            self.record()
        taken = self._ops.empty((self._used,), dtypes.uint8)
        if taken.address != self._base:
            raise DeviceError(f"a graph captured with its workspace at {self._base:#x} was replayed at {taken.address:#x}; "
                              "a scope was left open.")
        self.replay()
        return self._logits

    def replay(self) -> None:
        """Queue the graph again over the integers that it has."""
        self._graph.replay(self._ops.stream)

    def record(self) -> None:
        """Run the step once, which loads kernels and maps memory, and then capture it at the same addresses."""
        with self._ops.scope():
            self._forward()
        with self._ops.scope():
            graph = Graph.capture(self._ops.stream, self._forward)
        self._graph = graph.instantiate()
        log.info("Captured a decode graph for %d sequences, contexts up to %d tokens, %d nodes", self._size,
                 self._packed.max_context_len, graph.num_nodes)
        graph.close()

    def _forward(self) -> None:
        ops = self._ops
        self._base = ops.empty((16,), dtypes.uint8).address
        step = self._packed.step(self._memory)
        feed_tokens(ops.runtime, step.token_ids, self._packed.view(self._memory, "feed_rows"), ops.sampled,
                    self._packed.view(self._memory, "feed_sources"), ops.overlap)
        self._logits = self._runner.model.forward(step, self._runner.kv_cache)
        self._used = self._logits.address + self._logits.shape[0] * self._logits.strides[0] * 4 - self._base

    def _fill(self, arrays: StepArrays) -> None:
        """Write a step into the padded arrays, which `_packed` copies from."""
        mine, count = self._arrays, len(arrays.context_lens)
        for name in ("token_ids", "positions", "context_lens"):
            getattr(mine, name)[:count] = getattr(arrays, name)
        mine.slot_mapping[:count] = arrays.slot_mapping
        mine.block_tables[:count, : arrays.block_tables.shape[1]] = arrays.block_tables
        mine.context_lens[count:] = 0
        mine.slot_mapping[count:] = -1
        mine.token_ids[count:] = 0
        mine.positions[count:] = 0
        mine.feed_rows[:] = -1
        fed = len(arrays.feed_rows)
        mine.feed_rows[:fed] = arrays.feed_rows
        mine.feed_sources[:fed] = arrays.feed_sources
