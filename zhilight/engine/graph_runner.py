"""Decode steps as CUDA graphs: one replay instead of some hundreds of launches.

A step in which every sequence decodes one token is padded to the next captured batch size and replayed. The graph reads its
integers from a buffer of its own, which one copy fills; tokens that the host has not seen yet are fed on the device inside
the graph. All sizes are captured at start for contexts up to 2048 tokens (some 20 ms each); those for longer contexts, and
everything with lazy_graphs, when they are first met.
"""

from __future__ import annotations

import logging

import numpy as np

from zhilight.driver import dtype as dtypes
from zhilight.driver.graph import Graph
from zhilight.engine.runner import Runner
from zhilight.engine.sampler import Sampler
from zhilight.errors import DeviceError
from zhilight.kernels.embedding import feed_tokens
from zhilight.models.model import Model
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


def padded_batches(most: int) -> list[int]:
    """The batch sizes that serve 1 to `most` sequences."""
    return sorted({padded_batch(count) for count in range(1, most + 1)})


class GraphRunner(Runner):
    """A Runner on CUDA whose decode steps are graphs, for up to `max_batch` sequences."""

    ops: CudaOps

    def __init__(self, model: Model, ops: CudaOps, kv_cache: list[Array], sampler: Sampler, max_batch: int):
        super().__init__(model, ops, kv_cache, sampler)
        self._max_batch = max_batch
        self.graphs: dict[tuple[int, int], DecodeGraph] = {}
        """By (batch size, blocks of its block tables)."""

    def forward(self, arrays: StepArrays, sampled: Array | None) -> Array:
        count = arrays.num_decodes
        if count != len(arrays.context_lens) or count > self._max_batch or len(arrays.logit_rows) != count:
            return super().forward(arrays, sampled)
        width = max(_NARROWEST, 1 << (arrays.block_tables.shape[1] - 1).bit_length())
        return self._graph(padded_batch(count), width).run(arrays)[:count]

    def capture(self, progress: bool = True) -> None:
        """Capture every batch size, for the narrowest block tables."""
        from tqdm import tqdm

        sizes = padded_batches(self._max_batch)[::-1]
        with self.ops.scope():
            # disable=None: silent where standard error is not a terminal
            for size in tqdm(sizes, "capturing decode graphs", unit="graph", disable=None if progress else True):
                with self.ops.scope():
                    self._graph(size, _NARROWEST).record()

    def _graph(self, size: int, width: int) -> DecodeGraph:
        graph = self.graphs.get((size, width))
        if graph is None:
            graph = self.graphs[size, width] = DecodeGraph(self, size, width)
        return graph


class DecodeGraph:
    """One batch size and block-table width."""

    def __init__(self, runner: GraphRunner, size: int, width: int):
        self._runner = runner
        self._ops: CudaOps = runner.ops
        self._size = size
        block = runner.kv_cache[0].shape[3]
        padding = np.zeros(size, np.int32)
        # What does not change: one row a sequence, all of which want logits. For the rest, until the first step: sequences of
        # one token that read block 0 and write nothing.
        self.arrays = StepArrays(
            token_ids=padding.copy(), positions=padding.copy(), slot_mapping=np.full(size, -1, np.int64),
            block_tables=np.zeros((size, width), np.int32), context_lens=padding + 1,
            query_start=np.arange(size + 1, dtype=np.int32), logit_rows=np.arange(size, dtype=np.int32), num_decodes=size,
            feed_rows=np.full(size, -1, np.int32), feed_sources=padding.copy())
        self._packed = PackedStep(self.arrays, max_context_len=width * block)
        self._memory = self._ops.pool.allocate("weights", (self._packed.nbytes,), dtypes.uint8)
        self._graph = None

    def run(self, arrays: StepArrays) -> Array:
        """Logits [size, V] of a step, of which the first rows are its own."""
        self._fill(arrays)
        if self._graph is None:
            self.record()
        else:
            self._upload()
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
        self._upload()
        with self._ops.scope():
            self._forward()
        with self._ops.scope():
            graph = Graph.capture(self._ops.stream, self._forward)
        self._graph = graph.instantiate()
        log.debug("Captured a decode graph for %d sequences, contexts up to %d tokens, %d nodes", self._size,
                  self._packed.max_context_len, graph.num_nodes)
        graph.close()

    def _upload(self) -> None:
        self._ops.staging.copy_parts(self._memory.address, self._packed.parts, self._packed.nbytes)

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
        mine, count = self.arrays, len(arrays.context_lens)
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
